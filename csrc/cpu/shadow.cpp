#include "shadow.h"

#include <algorithm>

namespace metalmm::cpu {

namespace {

bool is_of(const User& a, const User& b) { return a.group == b.group && a.thread / abi::kSimdWidth == b.thread / abi::kSimdWidth; }

}  // namespace

Race Pending::settle() {
  auto changed = std::find_if(before.begin(), before.end(), [](const auto& byte) { return *byte.first != byte.second; });
  Race found = changed == before.end() ? Race{} : race;
  if (found.at) found.at = changed->first;
  before.clear();
  return found;
}

void Shadow::begin(uint32_t group) {
  first_ = group;
  used_.clear();
  known_.clear();
}

bool Shadow::conflicts(const User& user, const User& self) const {
  if (!user.group || !is_current(user, self) || (user.is_atomic && self.is_atomic)) return false;
  if (user.group != self.group) {
    auto it = known_.find(self.group);
    return it == known_.end() || !it->second.count(user.group);
  }
  if (user.thread == self.thread || user.epoch != self.epoch) return false;
  return !is_of(user, self) || user.met == self.met;
}

void Shadow::meet_at(uint32_t group, const uint8_t* atomic) {
  std::set<uint32_t>&known = known_[group], &there = used_[atomic];
  known.insert(there.begin(), there.end());
  there.insert(known.begin(), known.end());
  there.insert(group);
}

bool Shadow::is_set(uint32_t group, const uint8_t* at) {
  auto address = reinterpret_cast<uintptr_t>(at);
  std::lock_guard lock(mutex_);
  auto page = pages_.find(address / kPage);
  return page != pages_.end() && page->second[address % kPage].writer.group == group;
}

Race Shadow::use(const User& self, const uint8_t* at, size_t size, abi::Access kind, Pending& pending) {
  bool reads = kind != abi::Access::store, writes = kind != abi::Access::load;
  std::lock_guard lock(mutex_);
  if (kind == abi::Access::atomic && is_shared_) meet_at(self.group, at);
  Race race{nullptr, {}, self, false, writes, false};
  auto found = [&](const uint8_t* where, const User& first, bool first_wrote) {
    if (!race.at) race.at = where, race.first = first, race.first_wrote = first_wrote;
  };
  Cell* page = nullptr;
  size_t unset = 0;  // bytes: a copy of a structure takes its padding along, so that all must be
  for (const uint8_t* p = at; p < at + size; p++) {
    uintptr_t address = reinterpret_cast<uintptr_t>(p);
    if (!page || address % kPage == 0) {
      auto& kept = pages_[address / kPage];
      if (!kept) kept = std::make_unique<Cell[]>(kPage);
      page = kept.get();
    }
    Cell& cell = page[address % kPage];
    bool beside_writer = conflicts(cell.writer, self);
    if (reads) {
      if (beside_writer && !cell.writer.many) found(p, cell.writer, true);
      if (!is_shared_ && !writes && cell.writer.group != self.group) unset++;
      if (cell.reader.group && is_current(cell.reader, self) && !is_of(cell.reader, self)) cell.another = cell.reader;
      cell.reader = self;
    }
    if (!writes) continue;
    const User* reader = conflicts(cell.reader, self) ? &cell.reader : conflicts(cell.another, self) ? &cell.another : nullptr;
    if (beside_writer || reader) {
      if (pending.before.empty()) pending.race = {p, beside_writer ? cell.writer : *reader, self, beside_writer, true, false};
      pending.before.emplace_back(p, *p);
    }
    cell.writer = self;
    cell.writer.many = beside_writer;
  }
  if (unset == size) found(at, {}, false), race.is_unset = true;
  return race;
}

}  // namespace metalmm::cpu
