#include "shadow.h"

#include <algorithm>

namespace metalmm::cpu {

namespace {

bool is_of(const User& a, const User& b) { return a.group == b.group && a.simdgroup() == b.simdgroup(); }

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
  writers_.clear();
}

bool Shadow::conflicts(const User& user, const User& self) const {
  if (!user.group || !is_current(user, self) || (user.is_atomic && self.is_atomic)) return false;
  if (user.group != self.group) {
    auto it = known_.find(self.group);
    if (it == known_.end()) return true;
    auto came = [&, &times = it->second](uint32_t simdgroup) {
      auto at = times.find({user.group, simdgroup});
      return at != times.end() && Time(user.epoch, simdgroup == kAll ? 0 : user.met) < at->second;
    };
    return !came(kAll) && !came(user.simdgroup());
  }
  if (user.thread == self.thread || user.epoch != self.epoch) return false;
  return !is_of(user, self) || user.met == self.met;
}

void Shadow::meet_at(const User& self, const uint8_t* atomic) {
  Times &known = known_[self.group], &there = used_[atomic];
  known[{self.group, kAll}] = {self.epoch, 0};
  known[{self.group, self.simdgroup()}] = {self.epoch, self.met};
  auto add = [](Times& to, const Times& from) {
    for (const auto& [whose, time] : from) to[whose] = std::max(to[whose], time);
  };
  add(known, there);
  add(there, known);
}

Shadow::Set Shadow::is_set(const User& self, const uint8_t* at) {
  auto address = reinterpret_cast<uintptr_t>(at);
  std::lock_guard lock(mutex_);
  auto page = pages_.find(address / kPage);
  if (page == pages_.end()) return Set::no;
  const User& writer = page->second[address % kPage].writer;
  if (writer.group != self.group) return Set::no;
  return writer.many || writer.thread != self.thread ? Set::by_others : Set::by_itself;
}

Race Shadow::use(const User& self, const uint8_t* at, size_t size, abi::Access kind, Pending& pending) {
  bool reads = kind != abi::Access::store, writes = kind != abi::Access::load;
  std::lock_guard lock(mutex_);
  if (kind == abi::Access::atomic && is_shared_) meet_at(self, at);
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
      if (beside_writer && !(cell.writer.many && writers_[p].count({self.group, self.thread}))) found(p, cell.writer, true);
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
    if (beside_writer) {
      std::set<Whose>& writers = writers_[p];
      if (!cell.writer.many) writers = {{cell.writer.group, cell.writer.thread}};
      writers.insert({self.group, self.thread});
    }
    cell.writer = self;
    cell.writer.many = beside_writer;
  }
  if (unset == size) found(at, {}, false), race.is_unset = true;
  return race;
}

}  // namespace metalmm::cpu
