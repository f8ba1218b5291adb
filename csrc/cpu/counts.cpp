#include "counts.h"

#include <algorithm>
#include <set>
#include <tuple>

namespace metalmm::cpu {
namespace {

constexpr uintptr_t kLine = 128, kBanks = 32, kWord = 4;

}  // namespace

void Counts::add(Space space, uint32_t thread, const void* pc, uintptr_t at, size_t size, abi::Access kind) {
  Total& total = of_[space];
  total.read += reads(kind) ? size : 0;
  total.written += writes(kind) ? size : 0;
  atomics_ += is_atomic(kind);
  uint32_t turn = turns_[{thread, pc}]++;
  Access& access = open_[{reinterpret_cast<uintptr_t>(pc), thread / abi::kSimdWidth, turn}];
  access.space = space;
  access.lanes.emplace_back(at, size);
}

// Of device memory lines; of threadgroup memory as many words as the busiest bank has to give.
uint64_t Counts::parts_of(const Access& access) {
  uintptr_t each = access.space == kThreadgroup ? kWord : kLine;
  std::set<uintptr_t> parts;
  for (auto [at, size] : access.lanes)
    for (uintptr_t part = at / each; part <= (at + size - 1) / each; part++) parts.insert(part);
  if (access.space != kThreadgroup) return parts.size();
  uint64_t of_bank[kBanks] = {};
  for (uintptr_t word : parts) of_bank[word % kBanks]++;
  return *std::max_element(std::begin(of_bank), std::end(of_bank));
}

void Counts::end_threadgroup(uint64_t simdgroup_operations) {
  for (const auto& [key, access] : open_) {
    of_[access.space].accesses++;
    of_[access.space].parts += parts_of(access);
  }
  open_.clear();
  turns_.clear();
  simdgroup_operations_ += simdgroup_operations;
}

std::vector<std::pair<std::string, uint64_t>> Counts::all() const {
  std::vector<std::pair<std::string, uint64_t>> all;
  for (auto [space, name, parts] : {std::tuple(kDevice, "device", "lines"), std::tuple(kConstant, "constant", "lines"),
                                    std::tuple(kThreadgroup, "threadgroup", "turns")}) {
    const Total& total = of_[space];
    auto add = [&, name = std::string(name)](const char* what, uint64_t value) { all.emplace_back(name + "_" + what, value); };
    add("bytes_read", total.read), add("bytes_written", total.written), add("accesses", total.accesses), add(parts, total.parts);
  }
  all.emplace_back("atomics", atomics_);
  all.emplace_back("simdgroup_operations", simdgroup_operations_);
  return all;
}

}  // namespace metalmm::cpu
