// What a debug device looks at before each access of a kernel.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <new>

#include "executor.h"
#include "source_lines.h"

namespace metalmm::cpu {
namespace {

std::atomic<uint32_t> next_number{1};

}  // namespace

uint32_t Executor::take_number() { return next_number.fetch_add(1, std::memory_order_relaxed); }

void Executor::begin_debug() {
  number_ = take_number();
  epoch_ = epoch_device_ = 0;
  pending_.before.clear();
  unset_.clear();
  for (uint32_t i = 0; i < group_count_; i++) groups_[i].orders = abi::kDevice | abi::kThreadgroup;
}

bool Executor::is_written(const uint8_t* at) const {
  return std::any_of(call_->bound, call_->bound + call_->bound_count,
                     [&](const Bound& b) { return b.is_written && at >= b.begin && at < b.end; });
}

// False: it races, or one that was pending did, and the threadgroup ends.
bool Executor::looks_at(Shadow& shadow, bool is_shared, const Asked& asked) {
  busy_ = 1;  // it may compose a message
  if (!settles()) return false;
  const abi::Simdgroup& g = *state_.group;
  User self;
  self.group = number_;
  self.epoch = is_shared ? epoch_device_ : epoch_;
  self.met = is_shared ? g.met_device : g.met;
  self.thread = static_cast<uint16_t>(state_.lane);
  self.is_atomic = is_atomic(asked.kind);
  self.code = number_of(callers(asked.pc, asked.frame));
  Fenced fenced = is_shared ? Fenced{g.fenced_device, g.fenced_widely} : Fenced{g.fenced, 0};
  Race race = shadow.use(self, fenced, asked.at, asked.size, asked.kind, pending_);
  if (race.is_unset && !self.is_atomic) {
    if (unset_.size() < 256) unset_.push_back(race);
  } else if (race.at && !tells(race)) {
    return false;
  }
  busy_ = 0;
  return true;
}

bool Executor::settles() {
  Race race = pending_.settle();
  return !race.at || tells(race);
}

bool Executor::settles_at_end() {
  if (!settles()) return false;
  for (const Race& race : std::exchange(unset_, {}))
    if (Shadow::Set set = shadow_.is_set(race.second, race.at); set != Shadow::Set::by_others && !tells(race, set == Shadow::Set::no))
      return false;
  return true;
}

// True: it was taken down, and the kernel goes on.
bool Executor::tells(const Race& race, bool is_sure) {
  if (!call_->findings) {
    if (!is_sure) return true;
    error_ = race_text(race);
    return false;
  }
  if (call_->findings->is_new(codes_[race.first.code], codes_[race.second.code]))
    call_->findings->add("threadgroup " + text_of(state_.threadgroup_position) + ": " + race_text(race), is_sure);
  return true;
}

// Few places of a kernel use memory, many times: a number stands for each.
uint32_t Executor::number_of(const Code& code) {
  auto [known, is_new] = numbers_.try_emplace(code, static_cast<uint32_t>(codes_.size()));
  if (is_new) codes_.push_back(code);
  return known->second;
}

// From the frame of the function that the compiler calls before an access.
Code Executor::callers(const void* pc, const void* frame) const {
  Code code{{pc}};
  auto* at = static_cast<const void* const*>(frame);
  const void* found[8] = {};
  size_t count = 0;
  for (;;) {
    auto* next = static_cast<const void* const*>(*at);
    if (next <= at || !stacks_.hold_together(next, at) || count == std::size(found)) break;
    at = next;
    auto* caller = static_cast<const uint8_t*>(at[1]);
    if (caller < call_->image.begin || caller >= call_->image.end) break;
    found[count++] = caller;
  }
  if (count) code.pc[1] = found[0], code.pc[3] = found[count - 1];
  if (count > 1) code.pc[2] = found[count - 2];
  return code;
}

std::string Executor::race_text(const Race& race) const {
  const uint8_t* block = state_.threadgroup_memory;
  bool is_shared = race.at < block || race.at >= block + call_->threadgroup_bytes;
  std::string where = is_shared ? place_of(race.at, call_->bound, call_->bound_count).substr(3)  // "at "
                                : "byte " + std::to_string(race.at - block) + " of the " + std::to_string(call_->threadgroup_bytes) +
                                      " bytes of threadgroup memory";
  auto thread = [&](const User& user) {
    return "thread " + std::to_string(user.thread) + (user.group == number_ ? "" : " of another threadgroup") + marked(codes_[user.code]);
  };
  if (race.is_unset) return thread(race.second) + " reads " + where + ", which no thread wrote";
  return "a race: " + thread(race.second) + (race.second_writes ? " writes " : " reads ") + where + ", which " + thread(race.first) +
         (race.first_wrote ? " wrote" : " read") + ", and " +
         (race.first.group != race.second.group ? "nothing orders threadgroups"
          : is_shared                           ? "no barrier that orders device memory stands between"
                                                : "no barrier that orders threadgroup memory stands between");
}

// What the runtime itself uses of the executor's memory: its code is the kernel's, and asks as the kernel does.
bool Executor::is_own(const uint8_t* begin, const uint8_t* end) const {
  auto is_in = [&](const void* block, size_t size) {
    return begin >= static_cast<const uint8_t*>(block) && end <= static_cast<const uint8_t*>(block) + size;
  };
  return is_in(groups_.get(), group_count_ * sizeof(abi::Simdgroup)) || is_in(&state_, sizeof(state_)) ||
         is_in(lanes_.data(), lanes_.size() * sizeof(abi::Lane)) || is_in(call_->buffers, kMaxBuffers * sizeof(uint8_t*)) ||
         is_in(call_->threadgroup_offsets, kMaxBuffers * sizeof(uint32_t));
}

bool Executor::allows(const Asked& asked, const void* frame) {
  auto [at, size, kind, pc, caller] = asked;
  const uint8_t *end = at + std::min<size_t>(size, ~reinterpret_cast<uintptr_t>(at)), *block = state_.threadgroup_memory;
  if (stacks_.hold_together(at, frame) && stacks_.hold_together(end - 1, frame)) return true;
  if (at >= block && end <= block + call_->threadgroup_bytes) {
    count(Counts::kThreadgroup, asked, at - block);
    return looks_at(shadow_, false, asked);
  }
  if (is_own(at, end)) return true;
  for (size_t i = 0; i < call_->bound_count; i++)
    if (at >= call_->bound[i].begin && end <= call_->bound[i].end) {
      count(call_->bound[i].is_bytes ? Counts::kConstant : Counts::kDevice, asked, (i << 48) + (at - call_->bound[i].begin));
      return !is_written(at) || looks_at(*call_->shared, true, asked);
    }
  if (!writes(kind) && at >= call_->image.begin && end <= call_->image.end) return true;
  busy_ = 1;
  if (call_->is_reachable && call_->is_reachable(at, end, kind)) {
    busy_ = 0;
    return true;
  }
  refuse(asked);
  return false;
}

// at: from the beginning of its memory, which stands on a page on a GPU.
void Executor::count(Counts::Space space, const Asked& asked, uintptr_t at) {
  if (!call_->counts) return;
  busy_ = 1;  // it takes memory
  call_->counts->add(space, state_.lane, asked.pc, at, asked.size, asked.kind);
  busy_ = 0;
}

void Executor::refuse(const Asked& asked) {
  constexpr ptrdiff_t kNear = 1 << 24;
  const uint8_t *block = state_.threadgroup_memory, *at = asked.at;
  std::string where = place_of(at, call_->bound, call_->bound_count), size_text = std::to_string(call_->threadgroup_bytes);
  if (call_->threadgroup_bytes && at - block < kNear && block - at < kNear && where.empty())
    where = "at byte " + std::to_string(at - block) + " of the " + size_text + " bytes of threadgroup memory";
  error_ = text_of_refusal(asked.kind, asked.size) + ", by thread " + std::to_string(state_.lane) + marked(callers(asked.pc, asked.frame)) +
           (where.empty() ? "" : ", " + where);
}

void Executor::access(abi::Context* context, const void* at, abi::u64 size, abi::Access kind, const void* pc, const void* frame) {
  Executor& self = *static_cast<State*>(context)->executor;
  try {
    if (self.allows({static_cast<const uint8_t*>(at), size, kind, pc, frame}, __builtin_frame_address(0))) return;
  } catch (const std::bad_alloc&) {  // nothing may pass the kernel's frames
    self.error_ = "out of memory";   // short enough to need none
  }
  self.leave();
}

// Lanes of the running simdgroup are at a barrier of it, and others are not.
void Executor::skipped(abi::Context* context, uint32_t mask) {
  Executor& self = *static_cast<State*>(context)->executor;
  const abi::Simdgroup& g = *context->group;
  uint32_t returned = g.all & ~g.live, elsewhere = g.live & ~mask;
  if (!elsewhere && (!returned || self.call_->lenient_barriers)) return;
  self.busy_ = 1;
  abi::Site site = (g.mixed ? g.wait[__builtin_ctz(mask)] : g.first).site;
  auto count = [](uint32_t lanes, const char* what) {
    return lanes ? ", " + std::to_string(__builtin_popcount(lanes)) + what : std::string();
  };
  self.error_ = "barrier divergence: of the " + std::to_string(__builtin_popcount(g.all)) + " threads of simdgroup " +
                std::to_string(g.base / abi::kSimdWidth) + count(mask, " wait at simdgroup_barrier (") + marked(site) + ")" +
                count(elsewhere, " are elsewhere") + count(returned, " have returned") +
                "; every thread of a simdgroup must reach the same barrier" +
                (elsewhere ? "" : " (Device(lenient_barriers=True) lets returned threads count)");
  self.leave();
}

void Executor::out_of_bounds(abi::Context* context, abi::Site site, const char* type, abi::u64 index, bool is_signed) {
  Executor& self = *static_cast<State*>(context)->executor;
  self.busy_ = 1;
  const char* alias = std::strstr(type, "(aka '");  // clang names a typedef of ours first
  std::string array = alias ? std::string(alias + 5, std::strlen(alias + 5) - 1) : type;
  self.error_ = "index " + (is_signed ? std::to_string(static_cast<int64_t>(index)) : std::to_string(index)) + " is outside of " + array +
                (site.file ? " at " + marked(site) : std::string()) + ", by thread " + std::to_string(context->lane);
  self.leave();
}

}  // namespace metalmm::cpu
