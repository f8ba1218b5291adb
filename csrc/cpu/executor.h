// Runs the threads of one threadgroup as fibers on the calling OS thread.
#pragma once
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../core/bound.h"
#include "../msl/runtime/abi.h"
#include "counts.h"
#include "memory.h"
#include "shadow.h"
#include "source_lines.h"

namespace metalmm::cpu {

// What ends a thread's kernel from outside; its default is to do nothing, should one come late.
constexpr int kAbandonSignal = SIGURG;
void let_abandon_signal_in();  // to this thread, whatever it blocks
void hold_abandon_signal();    // where somebody else has taken its handler since

// Stacks of one worker, with a guard page under each and tops spread over cache sets: equally aligned tops make every
// lane's hot lines fall into the same few sets.
class Stacks {
 public:
  ~Stacks();
  void* top(uint32_t lane);  // reserved on first use
  bool hold(const void* address) const;
  // Whether an address is in the same stack as another.
  bool hold_together(const void* address, const void* other) const;
  // A lane has left in the middle of functions, which the address sanitizer never sees end.
  void let_go(uint32_t lane);

 private:
  static constexpr size_t kSize = 256 * 1024;
  static constexpr uint32_t kBlock = 64;
  void guard(uint8_t* block);
  std::vector<uint8_t*> blocks_;
  int64_t maps_ = 0;  // that its guard pages cost the process
};

// Of a device that goes on where it can: what was wrong.
struct Findings {
  std::mutex mutex;
  std::vector<std::pair<std::string, bool>> texts;  // for with_lines; whether it is sure
  std::set<std::pair<Code, Code>> known;
  void add(const std::string& text, bool is_sure = true) {
    std::lock_guard lock(mutex);
    texts.emplace_back(text, is_sure);
  }
  bool is_new(Code first, Code second) {
    std::lock_guard lock(mutex);
    return known.insert(std::minmax(first, second)).second;
  }
};

struct KernelCall {
  const abi::KernelInfo* info;
  uint8_t* const* buffers;
  const uint32_t* threadgroup_offsets;
  size_t threadgroup_bytes;
  abi::Uint3 grid, threadgroup;
  abi::Uint3 threads;     // not zero: of the grid, whose last threadgroups in each axis are then smaller
  bool lenient_barriers;  // threads that have returned count as having reached every barrier
  uint32_t order;         // not 0: simdgroups take turns in another order
  bool guards;            // what was written around threadgroup memory is an error
  bool debug;             // the kernel was compiled to ask before each access
  const Bound* bound;     // constants too
  size_t bound_count;
  Bound image;                         // of the kernel's own module, which it may read
  const std::atomic<bool>* abandoned;  // the signal ends a threadgroup where this is set
  // Of a debug call: whether what is not bound may be touched all the same, by a pointer in an argument buffer.
  std::function<bool(const uint8_t* begin, const uint8_t* end, abi::Access kind)> is_reachable;
  Shadow* shared;      // of the memory that threadgroups share; of a debug call
  Findings* findings;  // null: the first ends the dispatch
  Counts* counts;      // null: nothing is counted
};

// Faults of kernels on this thread, and on any, are errors from here on.
void catch_faults();

class Executor {
 public:
  struct State : abi::Context {
    Executor* executor;
  };
  Executor();
  // Empty: all is well. Otherwise what went wrong; the threadgroup is abandoned.
  std::string run(const KernelCall& call, abi::Uint3 position);
  static uint32_t take_number();                                    // that no threadgroup has had: User
  uint64_t take_barriers() { return std::exchange(barriers_, 0); }  // that threadgroups met at
  bool may_abandon(const void* stack_pointer) const;                // in a signal handler of its thread

 private:
  static uint32_t schedule(abi::Context* context);
  static void differs(abi::Context* context, abi::SimdWait wait);
  static void access(abi::Context* context, const void* at, abi::u64 size, abi::Access kind, const void* pc, const void* frame);
  static void skipped(abi::Context* context, uint32_t mask);
  static void out_of_bounds(abi::Context* context, abi::Site site, const char* type, abi::u64 index, bool is_signed);
  void begin_debug();
  // An access of the kernel's, whose code returns to pc, from the function whose frame that is.
  struct Asked {
    const uint8_t* at;
    size_t size;
    abi::Access kind;
    const void *pc, *frame;
  };
  bool allows(const Asked& asked, const void* frame);
  void count(Counts::Space space, const Asked& asked, uintptr_t at);
  bool looks_at(Shadow& shadow, bool is_shared, const Asked& asked);
  bool settles();         // false: what was pending is a race, and ends the threadgroup
  bool settles_at_end();  // of the time until all threads have met, or have returned
  bool tells(const Race& race, bool is_sure = true);
  std::string race_text(const Race& race) const;
  bool is_written(const uint8_t* at) const;
  Code callers(const void* pc, const void* frame) const;
  uint32_t number_of(const Code& code);
  void refuse(const Asked& asked);
  bool is_own(const uint8_t* begin, const uint8_t* end) const;
  [[noreturn]] void leave();
  uint32_t first_of(const abi::Simdgroup& group) const;
  uint32_t next_lane();
  uint32_t complete_divergent(abi::Simdgroup* group);
  uint32_t release_barrier();
  std::string describe_divergence() const;
  void start(const KernelCall& call, abi::Uint3 position);
  std::string threadgroup_damage() const;

  State state_{};
  Stacks stacks_;
  std::vector<abi::Lane> lanes_;
  std::vector<void*> tops_;
  std::unique_ptr<abi::Simdgroup[]> groups_;
  std::vector<uint8_t> memory_;
  std::shared_ptr<Buffer> apart_;  // the same in debug mode
  Shadow shadow_{false};
  Pending pending_;
  std::vector<Race> unset_;  // reads of what nobody had written: mistakes, unless a race shows that somebody does
  uint32_t number_ = 0;      // of the threadgroup: User
  uint32_t epoch_ = 0, epoch_device_ = 0;
  std::vector<Code> codes_{Code{}};  // by User::code; of 0 nothing is known
  std::unordered_map<Code, uint32_t, HashOfCode> numbers_;
  uint32_t group_count_ = 0;
  const KernelCall* call_ = nullptr;
  std::string error_;
  volatile sig_atomic_t busy_ = 0;  // composes a message; not to be left in the middle
  uint64_t barriers_ = 0;
};

std::string text_of(abi::Uint3 v);

// What a compiled module says of the kernel whose file this is; null: it is no such module. A module of several kernels has a file by the
// name of each, which is part of its symbol: python/metalmm/modules.py.
const abi::KernelInfo* kernel_in(void* module, const std::string& path);

// How a kernel finds the running thread's context: its place relative to the thread pointer, or this function.
long context_tls_offset();
abi::Context* current_context();

}  // namespace metalmm::cpu
