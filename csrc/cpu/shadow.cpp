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

// Whether that holds of what atomics told this thread before its last barrier or fence.
template <class F>
bool Shadow::knows(const User& self, F what) const {
  return running_ == self.group && std::any_of(learned_.begin(), learned_.end(), [&](const auto& learned) {
           auto [simdgroup, then] = learned.first;
           bool is_behind = simdgroup == self.simdgroup() ? Time(self.epoch, self.met) > then : self.epoch > then.first;
           return is_behind && what(learned.second);
         });
}

bool Shadow::conflicts(const User& user, const User& self) const {
  if (!user.group || !is_current(user, self) || (user.is_atomic && self.is_atomic)) return false;
  auto came = [&](const Times& times, uint32_t simdgroup) {
    auto at = times.find({user.group, simdgroup});
    return at != times.end() && Time(user.epoch, simdgroup == kAll ? 0 : user.met) < at->second;
  };
  if (user.group != self.group)
    return !knows(self, [&](const Times& times) {
      if (user.is_atomic) return times.count({user.group, kAll}) != 0;  // atomics of one place are in order themselves
      return came(times, kAll) || came(times, user.simdgroup());
    });
  if (user.thread == self.thread || user.epoch != self.epoch) return false;
  if (is_of(user, self)) return user.met == self.met;
  return !knows(self, [&](const Times& times) { return came(times, user.simdgroup()); });
}

void Shadow::meet_at(const User& self, const uint8_t* atomic) {
  if (running_ != self.group) {
    running_ = self.group;
    known_.clear(), learned_.clear(), last_.clear();
    if (!is_shared_) used_.clear();
  }
  auto add = [](Times& to, auto begin, auto end) {
    for (; begin != end; ++begin) to[begin->first] = std::max(to[begin->first], begin->second);
  };
  Time now(self.epoch, self.met);
  Times &there = used_[atomic], &own = learned_[{self.simdgroup(), now}];
  add(own, there.lower_bound({self.group, 0}), there.upper_bound({self.group, kAll}));
  auto [last, is_first] = last_.try_emplace({atomic, self.simdgroup()}, now);
  if (!is_first && last->second == now) return;
  last->second = now;
  known_[{self.group, kAll}] = {self.epoch, 0};
  known_[{self.group, self.simdgroup()}] = now;
  for (Times* to : {&own, &known_}) add(*to, there.begin(), there.end());
  add(there, known_.begin(), known_.end());
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
