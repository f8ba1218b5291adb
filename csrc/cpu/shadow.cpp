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
  writers_.clear();
}

bool Shadow::conflicts(const User& user, const User& self) const {
  if (!user.group || !is_current(user, self) || (user.is_atomic && self.is_atomic)) return false;
  auto came = [&](const Times& times, uint32_t simdgroup) {
    auto at = times.find({user.group, simdgroup});
    return at != times.end() && Time(user.epoch, simdgroup == kAll ? 0 : user.met) < at->second;
  };
  bool is_running = running_ == self.group;
  if (user.group != self.group) {
    if (!is_running) return true;
    if (user.is_atomic) return !known_.count({user.group, kAll});  // atomics of one place are in order themselves
    return !came(known_, kAll) && !came(known_, user.simdgroup());
  }
  if (user.thread == self.thread || user.epoch != self.epoch) return false;
  if (is_of(user, self)) return user.met == self.met;
  auto own = known_to_.find(self.simdgroup());
  return !is_running || own == known_to_.end() || !came(own->second, user.simdgroup());
}

void Shadow::meet_at(const User& self, const uint8_t* atomic) {
  if (running_ != self.group) {
    running_ = self.group;
    known_.clear(), known_to_.clear(), last_.clear();
    if (!is_shared_) used_.clear();
  }
  Times &there = used_[atomic], &own = known_to_[self.simdgroup()];
  Time now(self.epoch, self.met);
  for (auto it = there.lower_bound({self.group, 0}); it != there.end() && it->first.first == self.group; ++it)
    own[it->first] = std::max(own[it->first], it->second);
  auto [last, is_first] = last_.try_emplace({atomic, self.simdgroup()}, now);
  if (!is_first && last->second == now) return;
  last->second = now;
  known_[{self.group, kAll}] = {self.epoch, 0};
  known_[{self.group, self.simdgroup()}] = now;
  auto add = [](Times& to, const Times& from) {
    for (const auto& [whose, time] : from) to[whose] = std::max(to[whose], time);
  };
  add(known_, there);
  add(there, known_);
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

bool Shadow::has_written(const User& self, const uint8_t* at) const {
  auto it = writers_.find(at);
  return it != writers_.end() && it->second.group == self.group && it->second.threads.test(self.thread);
}

Race Shadow::use(const User& self, const uint8_t* at, size_t size, abi::Access kind, Pending& pending) {
  bool reads = metalmm::reads(kind), writes = metalmm::writes(kind);
  std::lock_guard lock(mutex_);
  if (self.is_atomic) meet_at(self, at);
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
      if (beside_writer && !(cell.writer.many && has_written(self, p))) found(p, cell.writer, true);
      if (!is_shared_ && (!writes || self.is_atomic) && cell.writer.group != self.group) unset++;
      // One of another threadgroup is kept before one of another simdgroup: a barrier may order that.
      bool is_kept = cell.another.group != self.group && cell.reader.group == self.group && is_current(cell.another, self);
      if (cell.reader.group && is_current(cell.reader, self) && !is_of(cell.reader, self) && !is_kept) cell.another = cell.reader;
      cell.reader = self;
    }
    if (!writes) continue;
    const User* reader = conflicts(cell.reader, self) ? &cell.reader : conflicts(cell.another, self) ? &cell.another : nullptr;
    if (beside_writer || reader) {
      if (pending.before.empty()) pending.race = {p, beside_writer ? cell.writer : *reader, self, beside_writer, true, false};
      pending.before.emplace_back(p, *p);
    }
    if (beside_writer) {
      Writers& writers = writers_[p];
      if (!cell.writer.many || writers.group != self.group) writers = {self.group, {}};
      if (cell.writer.group == self.group) writers.threads.set(cell.writer.thread);
      writers.threads.set(self.thread);
    }
    cell.writer = self;
    cell.writer.many = beside_writer;
  }
  if (unset == size) found(at, {}, false), race.is_unset = true;
  return race;
}

}  // namespace metalmm::cpu
