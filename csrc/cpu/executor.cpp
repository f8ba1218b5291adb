#include "executor.h"

#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>
#if defined(__linux__)
#include <ucontext.h>  // macOS has it for those alone who ask for an older POSIX
#endif

#if __has_include(<sanitizer/asan_interface.h>)
#include <sanitizer/asan_interface.h>  // nothing, where the sanitizer is not
#else
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <mutex>
#include <new>

#include "../core/device.h"
#include "../msl/runtime/fiber.h"
#include "source_lines.h"
#include "waits.h"

namespace metalmm::cpu {
namespace {

#if defined(__linux__)
thread_local abi::Context* running __attribute__((tls_model("initial-exec"))) = nullptr;
#else
thread_local abi::Context* running = nullptr;
#endif

// The widest vector an ABI may pass on the stack is 64 bytes; a call leaves the pointer 8 below that on x86-64.
constexpr size_t kCallAlignment = 64;
#if defined(__x86_64__)
constexpr size_t kReturnAddress = 8;
#else
constexpr size_t kReturnAddress = 0;
#endif

// On its own, so that the compiler keeps nothing in registers around the switch but what it reloads.
__attribute__((noinline)) void enter(abi::Context* context) { fiber::switch_lane(&context->host, &context->lanes[context->lane]); }

// Faults of a kernel (a wild pointer, a stack that overflows, an integer division by zero, which MSL does not define, a trap) end
// its threadgroup with an error, not the process: the handler goes on where the executor called the first lane. So does the signal
// that ends a kernel from outside. Signals from elsewhere go to whoever had them before.
struct Fault {
  int number;
  struct sigaction before;
};
Fault faults[] = {{SIGSEGV, {}}, {SIGBUS, {}}, {SIGFPE, {}}, {SIGILL, {}}, {SIGTRAP, {}}, {kAbandonSignal, {}}};
thread_local volatile sig_atomic_t fault_number = 0;  // volatile: no call that the compiler sees leads to the handler
thread_local volatile sig_atomic_t fault_code = 0;
thread_local const void* volatile fault_address = nullptr;

// Where the machine's state of an interrupted thread has its stack, frame and instruction pointers.
#if defined(__linux__) && defined(__x86_64__)
void* stack_pointer(ucontext_t* c) { return reinterpret_cast<void*>(c->uc_mcontext.gregs[REG_RSP]); }
void go_to(ucontext_t* c, const abi::Lane& host) {
  c->uc_mcontext.gregs[REG_RSP] = reinterpret_cast<greg_t>(host.sp);
  c->uc_mcontext.gregs[REG_RBP] = reinterpret_cast<greg_t>(host.fp);
  c->uc_mcontext.gregs[REG_RIP] = reinterpret_cast<greg_t>(host.ip);
}
#elif defined(__linux__) && defined(__aarch64__)
void* stack_pointer(ucontext_t* c) { return reinterpret_cast<void*>(c->uc_mcontext.sp); }
void go_to(ucontext_t* c, const abi::Lane& host) {
  c->uc_mcontext.sp = reinterpret_cast<uint64_t>(host.sp);
  c->uc_mcontext.regs[29] = reinterpret_cast<uint64_t>(host.fp);
  c->uc_mcontext.pc = reinterpret_cast<uint64_t>(host.ip);
}
#elif defined(__APPLE__) && defined(__x86_64__)
void* stack_pointer(ucontext_t* c) { return reinterpret_cast<void*>(c->uc_mcontext->__ss.__rsp); }
void go_to(ucontext_t* c, const abi::Lane& host) {
  c->uc_mcontext->__ss.__rsp = reinterpret_cast<uint64_t>(host.sp);
  c->uc_mcontext->__ss.__rbp = reinterpret_cast<uint64_t>(host.fp);
  c->uc_mcontext->__ss.__rip = reinterpret_cast<uint64_t>(host.ip);
}
#elif defined(__APPLE__) && defined(__aarch64__)
void* stack_pointer(ucontext_t* c) { return reinterpret_cast<void*>(__darwin_arm_thread_state64_get_sp(c->uc_mcontext->__ss)); }
void go_to(ucontext_t* c, const abi::Lane& host) {  // plain stores: Python and this extension are arm64, not arm64e
  __darwin_arm_thread_state64_set_sp(c->uc_mcontext->__ss, host.sp);
  __darwin_arm_thread_state64_set_fp(c->uc_mcontext->__ss, host.fp);
  c->uc_mcontext->__ss.__pc = reinterpret_cast<uint64_t>(host.ip);
}
#else
#error "metalmm: the CPU device knows Linux and macOS on x86-64 and aarch64"
#endif

bool leave_kernel(int number, const siginfo_t* info, ucontext_t* context) {
  if (!running) return false;
  if (number == kAbandonSignal && !static_cast<Executor::State*>(running)->executor->may_abandon(stack_pointer(context))) return false;
  go_to(context, running->host);
  fault_number = number;
  fault_code = info->si_code;
  fault_address = info->si_addr;
  return true;
}

// Of what the processor raised, and not kill(). On Darwin si_code does not tell (xnu makes it of the signal's number); that a kernel runs
// on this thread does.
bool is_raised([[maybe_unused]] const siginfo_t* info) {
#if defined(__APPLE__)
  return running != nullptr;
#else
  return info->si_code > 0;
#endif
}

void on_fault(int number, siginfo_t* info, void* context) {
  bool is_fault = number == kAbandonSignal || is_raised(info);
  if (is_fault && leave_kernel(number, info, static_cast<ucontext_t*>(context))) return;
  for (const Fault& f : faults) {
    if (f.number != number) continue;
    if (f.before.sa_flags & SA_SIGINFO) {
      f.before.sa_sigaction(number, info, context);
    } else if (f.before.sa_handler != SIG_DFL && f.before.sa_handler != SIG_IGN) {
      f.before.sa_handler(number);
    } else if (number != kAbandonSignal) {
      signal(number, SIG_DFL);  // the instruction runs again and ends the process
      if (!is_fault) raise(number);
    }
  }
}

void take_signal(Fault& f) {
  struct sigaction action = {};
  action.sa_sigaction = &on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  sigaction(f.number, &action, &f.before);
}

}  // namespace

void catch_faults() {
  static std::once_flag once;
  std::call_once(once, [] {
    for (Fault& f : faults) take_signal(f);
  });
  // A stack that has overflowed cannot hold the handler's frame.
  struct AlternateStack {
    std::unique_ptr<uint8_t[]> memory;
    AlternateStack() {
      stack_t old = {};
      if (sigaltstack(nullptr, &old) == 0 && !(old.ss_flags & SS_DISABLE)) return;
      constexpr size_t kSize = 64 * 1024;
      memory.reset(new uint8_t[kSize]);
      stack_t stack = {};
      stack.ss_sp = memory.get();
      stack.ss_size = kSize;
      sigaltstack(&stack, nullptr);
    }
    ~AlternateStack() {
      stack_t off = {};
      off.ss_flags = SS_DISABLE;
      if (memory) sigaltstack(&off, nullptr);
    }
  };
  thread_local AlternateStack stack;
  (void)stack;
}

namespace {

std::string fault_text(const KernelCall& call) {
  switch (fault_number) {
    case kAbandonSignal:
      return "stopped";
    case SIGFPE:
      return "an integer division by zero, or of the least integer by -1";
    case SIGILL:
    case SIGTRAP:
      return "it trapped (__builtin_trap, an assertion, or code that can never be reached)";
  }
#if defined(__linux__) && defined(__x86_64__)
  // The processor gives no address for these.
  if (fault_number == SIGSEGV && fault_code == SI_KERNEL)
    return "a vector load or store that is not aligned, or an address that no memory can have";
#endif
#if !defined(__APPLE__)  // where a page without access is that, too
  if (fault_number == SIGBUS && fault_code == BUS_ADRALN) return "a load or store that is not aligned";
#endif
  char address[32];
  std::snprintf(address, sizeof(address), "%p", fault_address);
  std::string where = place_of(static_cast<const uint8_t*>(fault_address), call.bound, call.bound_count);
  return std::string("a memory access at ") + address + (where.empty() ? "" : ", " + where) +
         ", outside what is bound (or a stack deeper than 256 KB)";
}

// What the process may have in mappings, less what it needs elsewhere.
int64_t map_budget() {
  static const int64_t budget = [] {
    long most = 65530;
    if (FILE* file = std::fopen("/proc/sys/vm/max_map_count", "re")) {
      if (std::fscanf(file, "%ld", &most) != 1) most = 65530;
      std::fclose(file);
    }
    return static_cast<int64_t>(most / 4);
  }();
  return budget;
}
std::atomic<int64_t> maps_of_stacks{0};

}  // namespace

std::string text_of(abi::Uint3 v) { return "(" + std::to_string(v.x) + ", " + std::to_string(v.y) + ", " + std::to_string(v.z) + ")"; }

void let_abandon_signal_in() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, kAbandonSignal);
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
}

void hold_abandon_signal() {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  struct sigaction now = {};
  sigaction(kAbandonSignal, nullptr, &now);
  if (!(now.sa_flags & SA_SIGINFO) || now.sa_sigaction != &on_fault) take_signal(faults[std::size(faults) - 1]);
}

const abi::KernelInfo* kernel_in(void* module, const std::string& path) {
  const void* found = dlsym(module, "metalmm_kernel");
  if (!found) {
    std::string file = path.substr(path.rfind('/') + 1);
    found = dlsym(module, ("metalmm_kernel_" + file.substr(0, file.rfind('.'))).c_str());
  }
  return static_cast<const abi::KernelInfo*>(found);
}

long context_tls_offset() {
#if defined(__linux__)
  return reinterpret_cast<char*>(&running) - static_cast<char*>(__builtin_thread_pointer());
#else
  return 0;
#endif
}

abi::Context* current_context() { return running; }

Stacks::~Stacks() {
  for (uint8_t* block : blocks_) munmap(block, kBlock * kSize);
  maps_of_stacks -= maps_;
}

// A page that is not there under each stack. Where the system can only make it by splitting a mapping, two a stack, the stacks
// of 64 threads would take all that a process may have: past a share of those, and where the system refuses, a stack goes without.
void Stacks::guard(uint8_t* block) {
  [[maybe_unused]] constexpr int kGuardInstall = 102;  // MADV_GUARD_INSTALL, Linux 6.13: no mapping of its own
  auto page = static_cast<size_t>(getpagesize());
  for (uint32_t i = 0; i < kBlock; i++) {
    uint8_t* bottom = block + i * kSize;
#if defined(__linux__)
    if (madvise(bottom, page, kGuardInstall) == 0) continue;
#endif
    if ((maps_of_stacks += 2) > map_budget() || mprotect(bottom, page, PROT_NONE) != 0) {
      maps_of_stacks -= 2;
      return;
    }
    maps_ += 2;
  }
}

void* Stacks::top(uint32_t lane) {
  while (blocks_.size() <= lane / kBlock) {
    blocks_.reserve(blocks_.size() + 1);
    void* block = mmap(nullptr, kBlock * kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (block == MAP_FAILED) throw std::bad_alloc();
    blocks_.push_back(static_cast<uint8_t*>(block));
    guard(blocks_.back());
  }
  size_t color = lane * 5 % 64 * 64;  // 5: coprime to the 64 sets of an L1 way, and apart by more than one line
  uint8_t* end = blocks_[lane / kBlock] + (lane % kBlock + 1) * kSize;
  return end - color - kCallAlignment - kReturnAddress;
}

void Stacks::let_go([[maybe_unused]] uint32_t lane) { ASAN_UNPOISON_MEMORY_REGION(blocks_[lane / kBlock] + lane % kBlock * kSize, kSize); }

bool Stacks::hold(const void* address) const {
  for (const uint8_t* block : blocks_)
    if (address >= block && address < block + kBlock * kSize) return true;
  return false;
}

bool Stacks::hold_together(const void* address, const void* other) const {
  auto at = reinterpret_cast<uintptr_t>(address), of = reinterpret_cast<uintptr_t>(other);
  for (const uint8_t* block : blocks_) {
    auto begin = reinterpret_cast<uintptr_t>(block), end = begin + kBlock * kSize;
    if (of >= begin && of < end) return at >= begin && at < end && (at - begin) / kSize == (of - begin) / kSize;
  }
  return false;
}

namespace {
constexpr size_t kThreadgroupZone = 64;         // of poison on either side, a cache line
constexpr size_t kThreadgroupAlignment = 1024;  // as wgmma wants it: csrc/msl/runtime/cuda/group.h
}  // namespace

Executor::Executor() : groups_(new abi::Simdgroup[abi::kMaxGroups]) {
  std::memset(static_cast<void*>(groups_.get()), 0, abi::kMaxGroups * sizeof(abi::Simdgroup));
  state_.executor = this;
  state_.schedule = &Executor::schedule;
  state_.differs = &Executor::differs;
  state_.groups = groups_.get();
}

void Executor::start(const KernelCall& call, abi::Uint3 position) {
  call_ = &call;
  error_.clear();
  abi::Uint3 full = call.threadgroup, size = full, grid = call.threads;
  if (grid.x)
    size = {std::min(full.x, grid.x - position.x * full.x), std::min(full.y, grid.y - position.y * full.y),
            std::min(full.z, grid.z - position.z * full.z)};
  else
    grid = {call.grid.x * full.x, call.grid.y * full.y, call.grid.z * full.z};
  uint32_t threads = size.x * size.y * size.z;
  for (uint32_t i = static_cast<uint32_t>(tops_.size()); i < threads; i++) tops_.push_back(stacks_.top(i));
  lanes_.resize(std::max<size_t>(lanes_.size(), threads));
  void* entry = reinterpret_cast<void*>(call.info->run);
  for (uint32_t i = 0; i < threads; i++) lanes_[i] = {tops_[i], nullptr, entry, nullptr};
  group_count_ = (threads + abi::kSimdWidth - 1) / abi::kSimdWidth;
  for (uint32_t i = 0; i < group_count_; i++) {
    abi::Simdgroup& g = groups_[i];
    uint32_t left = threads - i * abi::kSimdWidth;
    g.all = left >= abi::kSimdWidth ? ~0u : (1u << left) - 1;
    g.ready = g.live = g.unstarted = g.all;
    g.simd_wait = g.tg_wait = g.mixed = g.operations = 0;
    g.base = i * abi::kSimdWidth;
  }
  // NaN in every format: what a kernel reads before writing it, or just past the end, shows in its result.
  size_t room = call.threadgroup_bytes + 2 * kThreadgroupZone + kThreadgroupAlignment;
  if (call.debug) {  // far from what the runtime may use
    if (!apart_ || apart_->size() < room) apart_ = new_guarded_buffer(room, 0);
  } else {
    memory_.resize(std::max(memory_.size(), room));
  }
  uint8_t* memory = call.debug ? apart_->host() : memory_.data();
  uint8_t* inside = memory + kThreadgroupZone;
  state_.threadgroup_memory = inside + (-reinterpret_cast<uintptr_t>(inside) % kThreadgroupAlignment);
  uint8_t *block = state_.threadgroup_memory, *end = block + call.threadgroup_bytes;
  // Another pattern in some runs of those that are compared: what was never set then shows in bits.
  std::memset(block, call.findings && call.order >> 31 ? 0 : 0xff, call.threadgroup_bytes + kThreadgroupZone);
  state_.access = call.debug ? &Executor::access : nullptr;
  state_.out_of_bounds = call.debug ? &Executor::out_of_bounds : nullptr;
  state_.skipped = call.debug ? &Executor::skipped : nullptr;
  if (call.debug) begin_debug();
  if (call.guards) poison(block - kThreadgroupZone, block), poison(end, end + kThreadgroupZone);
  state_.threads = threads;
  state_.group = &groups_[call.order % group_count_];
  state_.lane = first_of(*state_.group);
  state_.lanes = lanes_.data();
  state_.groups_ready = group_count_ == 32 ? ~0u : (1u << group_count_) - 1;
  state_.barrier_mixed = state_.barrier_strict = 0;
  state_.barrier_orders = ~0u;
  state_.barrier_site = {};
  state_.buffers = call.buffers;
  state_.threadgroup_offsets = call.threadgroup_offsets;
  state_.threadgroup_position = position;
  state_.grid_groups = call.grid;
  state_.group_threads = size;
  state_.dispatch_threads = full;
  state_.grid_threads = grid;
}

// Only while it is on a lane's stack, so that the way back is known, and runs the kernel's own code, which holds no lock.
bool Executor::may_abandon(const void* stack_pointer) const { return !busy_ && *call_->abandoned && stacks_.hold(stack_pointer); }

std::string Executor::threadgroup_damage() const {
  const uint8_t *block = state_.threadgroup_memory, *end = block + call_->threadgroup_bytes;
  if (const uint8_t* p = first_broken(end, end + kThreadgroupZone))
    return "threadgroup memory was written past its end, at byte " + std::to_string(p - block) + " of " + std::to_string(end - block);
  if (const uint8_t* p = first_broken(block - kThreadgroupZone, block))
    return "threadgroup memory was written up to " + std::to_string(block - p) + " bytes before its beginning";
  return {};
}

std::string Executor::run(const KernelCall& call, abi::Uint3 position) {
  catch_faults();
  start(call, position);
  abi::Context* outer = running;
  fault_number = 0;
  running = &state_;
  enter(&state_);
  running = outer;
  stacks_.let_go(state_.lane);
  busy_ = 0;
  if (fault_number) error_ = fault_text(call);
  if (error_.empty() && call.debug) settles_at_end();
  if (call.counts) {
    uint64_t operations = 0;
    for (uint32_t i = 0; i < group_count_; i++) operations += groups_[i].operations;
    call.counts->end_threadgroup(operations);
  }
  if (error_.empty() && call.guards) error_ = threadgroup_damage();
  if (error_.empty()) return {};
  error_ = "threadgroup " + text_of(position) + ": " + error_;
  if (call.findings && fault_number != kAbandonSignal) call.findings->add(error_);  // of that one the device says why
  return with_lines(error_);
}

// The lane is not gone back to.
void Executor::leave() {
  abi::Lane gone;
  fiber::switch_lane(&gone, &state_.host);
  __builtin_unreachable();
}

uint32_t Executor::schedule(abi::Context* context) { return static_cast<State*>(context)->executor->next_lane(); }

uint32_t Executor::first_of(const abi::Simdgroup& group) const {
  return group.base +
         (call_->order ? fiber::next_in(group.ready, call_->order >> 16 & 31) : static_cast<uint32_t>(__builtin_ctz(group.ready)));
}

// The current simdgroup has no lane that can run: find one elsewhere, or let those that wait go on.
uint32_t Executor::next_lane() {
  abi::Simdgroup* g = state_.group;
  if (g->simd_wait) return complete_divergent(g);
  state_.groups_ready &= ~(1u << (g->base / abi::kSimdWidth));
  if (!state_.groups_ready) return release_barrier();
  uint32_t after = g->base / abi::kSimdWidth;
  if (call_->order) after = (after * 7 + call_->order) % 32;
  state_.group = &groups_[fiber::next_in(state_.groups_ready, after)];
  return first_of(*state_.group);
}

// Lanes diverge: from here on each has its own record; those that wait already stand where the first one does.
void Executor::differs(abi::Context* c, abi::SimdWait wait) {
  auto record = [](abi::Simdgroup& g, uint32_t lanes, const abi::SimdWait& where) {
    for (uint32_t i = 0; i < abi::kSimdWidth; i++)
      if (lanes >> i & 1) g.wait[i] = where;
  };
  abi::Simdgroup& group = *c->group;
  if (wait.complete) {
    if (!group.mixed && is_same(group.first, wait)) return;
    if (!group.mixed) record(group, group.simd_wait, group.first);
    group.mixed = 1;
  } else {
    uint32_t count = (c->threads + abi::kSimdWidth - 1) / abi::kSimdWidth;
    for (uint32_t i = 0; i < count && !c->barrier_mixed; i++)
      record(c->groups[i], c->groups[i].tg_wait, {c->barrier_site, nullptr, nullptr});
    c->barrier_mixed = 1;
  }
  record(group, 1u << (c->lane % abi::kSimdWidth), wait);
}

// Some lanes wait at a simdgroup operation, the others elsewhere, or they have returned: as on a GPU, those at the
// operation that comes first in the program do it among themselves.
uint32_t Executor::complete_divergent(abi::Simdgroup* g) {
  if (!g->mixed) {
    uint32_t mask = g->simd_wait;
    g->first.complete(g, mask);
    abi::has_met(g);
    g->simd_wait = 0;
    g->ready |= mask;
    return g->base + static_cast<uint32_t>(__builtin_ctz(mask));
  }
  uint32_t first = static_cast<uint32_t>(__builtin_ctz(g->simd_wait));
  for (uint32_t i = first; i < abi::kSimdWidth; i++)
    if (g->simd_wait >> i & 1 && comes_before(g->wait[i], g->wait[first])) first = i;
  uint32_t mask = 0;
  for (uint32_t i = 0; i < abi::kSimdWidth; i++)
    if (g->simd_wait >> i & 1 && is_same(g->wait[i], g->wait[first])) mask |= 1u << i;
  g->wait[first].complete(g, mask);
  abi::has_met(g);
  g->simd_wait &= ~mask;
  g->ready |= mask;
  g->mixed = g->simd_wait != 0;
  return g->base + static_cast<uint32_t>(__builtin_ctz(mask));
}

uint32_t Executor::release_barrier() {
  uint32_t waiting = 0, returned = 0;
  for (uint32_t i = 0; i < group_count_; i++) {
    waiting |= groups_[i].tg_wait;
    returned |= groups_[i].all & ~groups_[i].live;
  }
  if (!waiting) return abi::kNoLane;  // all have returned
  if (state_.barrier_mixed || (returned && state_.barrier_strict && !call_->lenient_barriers)) {
    busy_ = 1;
    error_ = describe_divergence();
    return abi::kNoLane;
  }
  barriers_++;
  if (call_->debug) {
    busy_ = 1;  // it may compose a message
    if (!settles_at_end()) return abi::kNoLane;
    busy_ = 0;
  }
  epoch_ += state_.barrier_orders / abi::kThreadgroup % 2;
  epoch_device_ += state_.barrier_orders % 2;
  state_.barrier_orders = ~0u;
  uint32_t self = state_.lane, first = abi::kNoLane;
  bool self_waits = false;
  for (uint32_t i = 0; i < group_count_; i++) {
    abi::Simdgroup& g = groups_[i];
    g.ready = g.tg_wait;
    g.tg_wait = 0;
    if (!g.ready) continue;
    state_.groups_ready |= 1u << i;
    if (first == abi::kNoLane) first = g.base + static_cast<uint32_t>(__builtin_ctz(g.ready));
    self_waits |= self / abi::kSimdWidth == i && (g.ready >> (self % abi::kSimdWidth) & 1);
  }
  state_.barrier_site = {};
  state_.barrier_strict = 0;
  uint32_t next = self_waits ? self : first;
  state_.group = &groups_[next / abi::kSimdWidth];
  return next;
}

std::string Executor::describe_divergence() const {
  uint32_t returned = 0;
  std::vector<std::pair<abi::Site, uint32_t>> sites;
  for (uint32_t i = 0; i < state_.threads; i++) {
    const abi::Simdgroup& g = groups_[i / abi::kSimdWidth];
    uint32_t lane = i % abi::kSimdWidth;
    if (!(g.live >> lane & 1)) {
      returned++;
      continue;
    }
    abi::Site site = state_.barrier_mixed ? g.wait[lane].site : state_.barrier_site;
    auto it = std::find_if(sites.begin(), sites.end(), [&](auto& s) { return s.first == site; });
    if (it == sites.end()) it = sites.insert(sites.end(), {site, 0});
    it->second++;
  }
  std::string message = "barrier divergence: of " + std::to_string(state_.threads) + " threads, ";
  for (size_t i = 0; i < sites.size(); i++)
    message += (i ? ", " : "") + std::to_string(sites[i].second) + " wait at threadgroup_barrier (" + marked(sites[i].first) + ")";
  if (returned) message += ", " + std::to_string(returned) + " have returned";
  return message + "; every thread of a threadgroup must reach the same barrier" +
         (returned && !state_.barrier_mixed ? " (Device(lenient_barriers=True) lets returned threads count)" : "");
}

}  // namespace metalmm::cpu
