#include "shadow.h"

#include <algorithm>
#include <utility>

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

void Atomics::add(Times& to, Times::const_iterator begin, Times::const_iterator end) {
  for (; begin != end; ++begin) to[begin->first] = std::max(to[begin->first], begin->second);
}

// What was heard before the thread's last barrier or fence is known from here on.
void Atomics::come_to(const User& self, uint32_t fenced) {
  if (group_ != self.group) {
    if (!is_shared_) told_.clear();
    known_.clear(), heard_.clear(), last_.clear();
  } else if (epoch_ != self.epoch) {
    Times& all = known_[kAll];
    for (auto& [simdgroup, times] : known_)
      if (simdgroup != kAll) add(all, times.begin(), times.end()), times.clear();
    for (auto& [when, times] : heard_) add(all, times.begin(), times.end());
    heard_.clear();
  }
  group_ = self.group, epoch_ = self.epoch;
  auto first = heard_.lower_bound({self.simdgroup(), 0}), last = heard_.lower_bound({self.simdgroup(), fenced});
  for (auto it = first; it != last; ++it) add(known_[self.simdgroup()], it->second.begin(), it->second.end());
  heard_.erase(first, last);
}

void Atomics::use(const User& self, uint32_t fenced, const uint8_t* atomic) {
  come_to(self, fenced);
  Time now(self.epoch, self.met);
  Times &told = told_[atomic], &heard = heard_[{self.simdgroup(), self.met}];
  add(heard, told.lower_bound({self.group, 0}), told.upper_bound({self.group, kAll}));  // simdgroups take turns
  auto [last, is_first] = last_.try_emplace({atomic, self.simdgroup()}, now);
  if (!is_first && std::exchange(last->second, now) == now) return;
  add(heard, told.begin(), told.end());
  Times own{{{self.group, kAll}, {self.epoch, 0}}, {{self.group, self.simdgroup()}, {self.epoch, fenced}}};
  for (const Times* times : {&own, &known_[kAll], &known_[self.simdgroup()]}) add(told, times->begin(), times->end());
}

// Of another threadgroup's atomics it is enough to have heard of it: those of one place are in order themselves.
bool Atomics::know(const User& self, uint32_t fenced, const User& user) {
  if (group_ != self.group) return false;
  come_to(self, fenced);
  auto say = [&](const Times& times) {
    auto came = [&](uint32_t simdgroup) {
      auto at = times.find({user.group, simdgroup});
      return at != times.end() && Time(user.epoch, simdgroup == kAll ? 0 : user.met) < at->second;
    };
    return (user.is_atomic && user.group != self.group && times.count({user.group, kAll})) || came(kAll) || came(user.simdgroup());
  };
  return say(known_[kAll]) || say(known_[self.simdgroup()]);
}

void Shadow::begin(uint32_t group) {
  first_ = group;
  among_threadgroups_.begin();
  writers_.clear();
}

bool Shadow::conflicts(const User& user, const User& self, const Fenced& fenced) {
  if (!user.group || !is_current(user, self) || (user.is_atomic && self.is_atomic)) return false;
  if (user.group != self.group) return !among_threadgroups_.know(self, fenced.device, user);
  if (user.thread == self.thread || user.epoch != self.epoch) return false;
  if (is_of(user, self)) return user.met == self.met;
  return !among_simdgroups_.know(self, fenced.threadgroup, user);
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

Race Shadow::use(const User& self, const Fenced& fenced, const uint8_t* at, size_t size, abi::Access kind, Pending& pending) {
  bool reads = metalmm::reads(kind), writes = metalmm::writes(kind);
  std::lock_guard lock(mutex_);
  if (self.is_atomic) {
    among_simdgroups_.use(self, fenced.threadgroup, at);
    if (is_shared_) among_threadgroups_.use(self, fenced.device, at);
  }
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
    bool beside_writer = conflicts(cell.writer, self, fenced);
    if (reads) {
      if (beside_writer && !(cell.writer.many && has_written(self, p))) found(p, cell.writer, true);
      if (!is_shared_ && (!writes || self.is_atomic) && cell.writer.group != self.group) unset++;
      // One of another threadgroup is kept before one of another simdgroup: a barrier may order that.
      bool is_kept = cell.another.group != self.group && cell.reader.group == self.group && is_current(cell.another, self);
      if (cell.reader.group && is_current(cell.reader, self) && !is_of(cell.reader, self) && !is_kept) cell.another = cell.reader;
      cell.reader = self;
    }
    if (!writes) continue;
    const User* reader = conflicts(cell.reader, self, fenced)    ? &cell.reader
                         : conflicts(cell.another, self, fenced) ? &cell.another
                                                                 : nullptr;
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
