// Lanes of a simdgroup as those of a warp: what fiber.h is to the CPU device.
#pragma once
#include "arguments.h"

// A warp needs no name for the place where its lanes meet.
#define METALMM_SITE int site = 0
#define METALMM_SITE_VALUE site

namespace metalmm::msl {
// What an operation of simd.h does with what the lanes bring: see there. Here each is a few shuffles.
struct Nothing;
struct Gather;
template <abi::u32 Width> struct First;
struct Ballot;
template <class F, abi::u32 Width> struct Reduce;
template <class F, abi::u32 Width, bool Inclusive> struct Scan;
template <int Direction> struct Fill;
template <class T> struct Pair;
#ifdef METALMM_MASKS
extern __shared__ __align__(16) abi::u8 metalmm_threadgroup[];  // kernel.h
#endif
}  // namespace metalmm::msl

namespace metalmm::fiber {

using namespace metalmm::abi;

METALMM_INLINE u32 lane() { return threadIdx.x & 31; }

// A processor may bring lanes to a place one after another that the program has there together, where there are several ways to it. So
// each lane keeps which are with it, by the program's text (ControlFlow.masks), and an operation waits for those.
#ifdef METALMM_MASKS
METALMM_INLINE u32& together() {
  u32 bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  return reinterpret_cast<u32*>(msl::metalmm_threadgroup)[bytes / 4 - blockDim.x + threadIdx.x];
}
// Not inlined: lanes that leave from several places wait for each other at one.
static __noinline__ u32 vote(u32 mask, bool is) { return __ballot_sync(mask, is); }
// What lanes enter together. At its end those who go on behind it are together; where lanes may leave it for elsewhere they are asked.
template <bool PARTS> struct Scope {
  u32 before = together();
  bool stays = false;
  METALMM_INLINE ~Scope() { together() = PARTS ? vote(before, stays) : before; }
};
template <bool PARTS> struct Branch : Scope<PARTS> {
  bool is;
  explicit METALMM_INLINE Branch(bool c) : is(c) {
    u32 holds = __ballot_sync(this->before, c);
    together() = c ? holds : this->before & ~holds;
  }
};
// Of a loop's condition: those who go round once more.
METALMM_INLINE bool goes(bool c) {
  together() = __ballot_sync(together(), c);
  return c;
}
// Of who leaves at once, for elsewhere or the next turn: the others are together.
METALMM_INLINE bool leaves(bool c) {
  together() = __ballot_sync(together(), !c);
  return c;
}
// Of a switch: those who go to one place of it. Who comes from another case to theirs is not with them.
template <class T, class F> METALMM_INLINE T chosen(T value, F place) {
  together() = __match_any_sync(together(), place(value));
  return value;
}
inline constexpr bool kMasks = true;
METALMM_INLINE void begin_masks(bool runs) { together() = __ballot_sync(~0u, runs); }
#else
METALMM_INLINE u32 together() { return __activemask(); }
inline constexpr bool kMasks = false;
METALMM_INLINE void begin_masks(bool) {}
#endif

// The lanes that take part. A kernel of ours has all 32 at each operation but simd_is_first and simd_broadcast_first (the CPU's debug mode
// looks at that: ../fiber.h).
METALMM_INLINE u32 active() {
#ifdef METALMM_CONVERGED
  return ~0u;
#else
  return together();
#endif
}

template <class T, class F> METALMM_INLINE T by_words(const T& value, F f) {
  constexpr int words = (sizeof(T) + 3) / 4;
  u32 bits[words] = {};
  memcpy(bits, &value, sizeof(T));
#pragma unroll
  for (int i = 0; i < words; i++) bits[i] = f(bits[i]);
  T result;
  memcpy(&result, bits, sizeof(T));
  return result;
}
template <class T> METALMM_INLINE T shuffle(u32 mask, const T& value, u32 source) {
  return by_words(value, [=](u32 word) { return __shfl_sync(mask, word, static_cast<int>(source)); });
}

template <class Op> struct Exchange;

// out = in of the lane that arg names; an absent or inactive source gives the lane's own value.
template <> struct Exchange<msl::Gather> {
  template <class T> static METALMM_INLINE T run(u32 mask, const T& value, u32 source) {
    return shuffle(mask, value, mask >> (source & 31) & 1 ? source & 31 : lane());
  }
};
// Who asks for the first lane does not know which are there: in a kernel of ours as in any.
template <u32 Width> struct Exchange<msl::First<Width>> {
  template <class T> static METALMM_INLINE T run(u32, const T& value, u32) {
    u32 mask = together(), near = Width == 32 ? mask : mask & ((1u << Width % 32) - 1) << (lane() & ~(Width - 1));
    return shuffle(mask, value, static_cast<u32>(__ffs(static_cast<int>(near)) - 1));
  }
};
template <> struct Exchange<msl::Nothing> {
  template <class T> static METALMM_INLINE T run(u32 mask, const T& value, u32) {
    __syncwarp(mask);
    return value;
  }
};
template <> struct Exchange<msl::Ballot> {
  static METALMM_INLINE u32 run(u32 mask, u32 vote, u32) { return __ballot_sync(mask, vote); }
};
// Sums of all lanes come to the same in each: what is added is the same two numbers.
template <class F, u32 Width> struct Exchange<msl::Reduce<F, Width>> {
  template <class T> static METALMM_INLINE T run(u32 mask, const T& value, u32) {
    T sum = value;
    if (mask == ~0u) {
#pragma unroll
      for (u32 step = Width / 2; step; step /= 2) sum = F::apply(sum, by_words(sum, [=](u32 word) { return __shfl_xor_sync(~0u, word, static_cast<int>(step)); }));
      return sum;
    }
    u32 run = Width == 32 ? mask : mask >> (lane() & ~(Width - 1)) & ((1u << Width % 32) - 1), base = lane() & ~(Width - 1);
    bool any = false;
    for (u32 i = 0; i < 32; i++) {  // every active lane goes through the same shuffles
      if (!(mask >> i & 1)) continue;
      T theirs = shuffle(mask, value, i);
      if (i < base || i - base >= Width || !(run >> (i - base) & 1)) continue;
      sum = any ? F::apply(sum, theirs) : theirs;
      any = true;
    }
    return sum;
  }
};
template <class F, u32 Width, bool Inclusive> struct Exchange<msl::Scan<F, Width, Inclusive>> {
  template <class T> static METALMM_INLINE T run(u32 mask, const T& value, u32) {
    T sum{}, result{};
    for (u32 i = 0; i < 32; i++) {
      if (i % Width == 0) sum = F::template identity<T>();
      if (!(mask >> i & 1)) continue;
      T next = F::apply(sum, shuffle(mask, value, i));
      if (i == lane()) result = Inclusive ? next : sum;
      sum = next;
    }
    return result;
  }
};
template <int Direction> struct Exchange<msl::Fill<Direction>> {
  template <class T> static METALMM_INLINE auto run(u32 mask, const msl::Pair<T>& value, u32 arg) {
    int delta = static_cast<int>(arg & 0xff), modulo = static_cast<int>(arg >> 8), own = static_cast<int>(lane());
    int source = own % modulo + Direction * delta;
    bool filled = source < 0 || source >= modulo;
    u32 from = static_cast<u32>(own / modulo * modulo + (filled ? source - Direction * modulo : source)) & 31;
    T data = shuffle(mask, value.data, from), filling = shuffle(mask, value.filling, from);
    return filled ? filling : data;
  }
};

template <class Op, class In, class Out = In> METALMM_INLINE Out exchange(const In& value, u32 arg, int) {
  return Exchange<Op>::run(active(), value, arg);
}

// Lanes may skip a barrier that others of their simdgroup come to: Passes.joins. Apple's GPUs count simdgroups at a barrier. NVIDIA's
// barrier.sync waits for every lane that has not ended, so here one lane of each simdgroup counts. A simdgroup that ends is not waited for.
#ifdef METALMM_SKIPPED_BARRIERS
struct alignas(16) Barrier {
  u32 counts;     // simdgroups: in the upper half those that have not ended, in the lower those that wait
  u32 turn;       // changes when those that wait may go on
  u32 taken[32];  // of each simdgroup: whether lanes of it wait; others of its lanes, at another barrier, have their turn behind them

  static METALMM_INLINE Barrier& here() {
    __shared__ Barrier barrier;
    return barrier;
  }
  METALMM_INLINE u32 turn_now() { return *const_cast<volatile u32*>(&turn); }
  METALMM_INLINE void go_on() {
    atomicAnd(&counts, 0xffff0000u);
    __threadfence_block();
    atomicAdd(&turn, 1u);
  }
  METALMM_INLINE void open() {
    if (threadIdx.x == 0) counts = (blockDim.x + 31) / 32 << 16, turn = 0;
    if (lane() == 0) taken[threadIdx.x / 32] = 0;
    __syncthreads();
  }
  METALMM_INLINE void wait() {
    u32 mask = together();
    __syncwarp(mask);
    if (lane() == static_cast<u32>(__ffs(static_cast<int>(mask)) - 1)) {
      u32* mine = &taken[threadIdx.x / 32];
      while (atomicExch(mine, 1u)) __nanosleep(20);
      u32 before = turn_now();
      __threadfence_block();
      u32 seen = atomicAdd(&counts, 1u);
      if ((seen & 0xffff) + 1 == seen >> 16) go_on();
      while (turn_now() == before) __nanosleep(20);
      __threadfence_block();
      atomicExch(mine, 0u);
    }
    __syncwarp(mask);
  }
  METALMM_INLINE void end() {
    __syncwarp();
    if (lane() != 0) return;
    __threadfence_block();
    u32 seen = atomicSub(&counts, 0x10000u), waiting = seen & 0xffff;
    if (waiting && waiting == (seen >> 16) - 1) go_on();
  }
};
inline constexpr u32 kBarrierBytes = sizeof(Barrier);
static_assert(kBarrierBytes <= cuda::kMaxBarrier, "the host keeps so many free");
METALMM_INLINE void begin_barriers() { Barrier::here().open(); }
METALMM_INLINE void end_barriers() { Barrier::here().end(); }
METALMM_INLINE void threadgroup_barrier(bool, int) { Barrier::here().wait(); }
#else
inline constexpr u32 kBarrierBytes = 0;
METALMM_INLINE void begin_barriers() {}
METALMM_INLINE void end_barriers() {}
// Threads that have returned are not waited for, on Apple's GPUs as here. __syncthreads() is for warps whose lanes all come, or have gone.
METALMM_INLINE void threadgroup_barrier(bool, int) {
#ifdef METALMM_CONVERGED
  __syncthreads();
#else
  asm volatile("barrier.sync 0;" ::: "memory");
#endif
}
#endif

// Lanes of a simdgroup are together again behind a branch or a loop on Apple's GPUs; NVIDIA's need not be. Who enters such a statement
// waits at its end for all who entered it with them: Passes.joins.
struct Join {
  u32 mask = __activemask();
  METALMM_INLINE ~Join() { __syncwarp(mask); }
};

// Of LaunchHead, read where CUDA puts a kernel's parameters, since no function in between hands it down.
template <u32 At> METALMM_INLINE u32 word_of_launch() {
  u32 word;
  asm("ld.param.u32 %0, [metalmm_kernel_param_0+%1];" : "=r"(word) : "n"(At));
  return word;
}

struct Turns {  // ../fiber.h counts
  explicit METALMM_INLINE Turns(int = 0) {}
  METALMM_INLINE bool next() { return true; }
};

// simdgroup_barrier(mem_none): where a kernel of ours that reads weights first comes to the rest (kernels/include/wait.h; kernel.h).
METALMM_INLINE void nothing_to_order() {
#if defined(METALMM_EARLY) && __CUDA_ARCH__ >= 900
  if (word_of_launch<cuda::kEarlyAt>()) asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace metalmm::fiber
