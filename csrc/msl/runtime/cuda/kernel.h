// A kernel function as CUDA launches it: positions from the launch, memory and numbers from the block of arguments.
#pragma once
#include "../place.h"
#include "arguments.h"

namespace metalmm::msl {

using abi::u64;
using abi::u8;
using cuda::LaunchHead;

template <int Unit, int Id, class T>
METALMM_INLINE T& threadgroup_variable() {
  __shared__ alignas(16) T variable;
  return variable;
}
#ifdef METALMM_CONVERGED  // group.h says why
extern __shared__ __align__(1024) abi::u8 metalmm_threadgroup[];
#else
extern __shared__ __align__(16) abi::u8 metalmm_threadgroup[];
#endif

METALMM_INLINE u32 smaller(u32 a, u32 b) { return a < b ? a : b; }

// Whether the grid counts threads. A matmul's counts threadgroups, all of them whole: a test that its compiler cannot see through would
// leave all of the kernel in a branch, where each load costs two instructions more.
METALMM_INLINE bool counts_threads([[maybe_unused]] const LaunchHead& head) {
#ifdef METALMM_MATMUL
  return false;
#else
  return head.threads.x != 0;
#endif
}

// A launch is of threads in a row; those beyond an odd threadgroup have left.
METALMM_INLINE Uint3 group_position(const LaunchHead& head) {
  return {blockIdx.x + head.origin.x, blockIdx.y + head.origin.y, blockIdx.z + head.origin.z};
}
METALMM_INLINE Uint3 group_size(const LaunchHead& head, Uint3 g) {
  if (!counts_threads(head)) return head.group;
  return {smaller(head.group.x, head.threads.x - g.x * head.group.x), smaller(head.group.y, head.threads.y - g.y * head.group.y),
          smaller(head.group.z, head.threads.z - g.z * head.group.z)};
}
METALMM_INLINE Place place_of(const LaunchHead& head) {
  Uint3 group = group_position(head), size = group_size(head, group), full = head.group, groups = head.groups;
  Uint3 threads = counts_threads(head) ? head.threads : Uint3{groups.x * full.x, groups.y * full.y, groups.z * full.z};
  return {threadIdx.x, size.x * size.y * size.z, size, group, full, threads, groups};
}

// An argument where the compiler cannot choose between functions.
template <class A>
METALMM_INLINE constexpr decltype(auto) promoted(A&& a) {
  if constexpr (is_same<metal::decay_t<A>, half>::value)
    return static_cast<float>(a);
  else
    return static_cast<A&&>(a);
}

// What a parameter's type says of it. `number`: where a reference to what may travel in the block itself begins, at a multiple; else 0.
template <class P>
struct Argument {
  static constexpr bool is_memory = false, is_const = true;
  static constexpr u32 bytes = 0, number = 0;
};
template <class T>
struct Argument<T*> {
  static constexpr bool is_memory = true, is_const = is_const_type<T>;
  static constexpr u32 bytes = Element<T>::bytes, number = 0;
};
template <class T>
struct Argument<T&> {
  static constexpr bool is_memory = true, is_const = is_const_type<T>;
  static constexpr u32 bytes = sizeof(T), number = is_const && bytes <= 1024 ? (alignof(T) > 16 ? alignof(T) : 16) : 0;
};

// How many threadgroups share the memory that a kernel takes as a T&: T::METALMM_CLUSTER, where it has that.
template <class P, class = void> constexpr u32 cluster_of = 1;
template <class T> constexpr u32 cluster_of<T&, decltype(void(T::METALMM_CLUSTER))> = T::METALMM_CLUSTER;
// And how many of its threadgroups a core must have registers for: T::METALMM_BESIDE; 0 says nothing.
template <class T, class = void> constexpr u32 beside_of = 0;
template <class T> constexpr u32 beside_of<T&, decltype(void(T::METALMM_BESIDE))> = T::METALMM_BESIDE;

#ifdef METALMM_STOPS
extern "C" __device__ volatile u32 metalmm_stop;
__device__ volatile u32 metalmm_stop = 0;
// A loop of a constexpr function is asked by the compiler, too.
METALMM_INLINE constexpr bool goes_on() { return __builtin_is_constant_evaluated() || !metalmm_stop; }
#endif

#ifdef METALMM_WATCHED  // python/metalmm/ptx.py looks at it before each access to memory
extern "C" __device__ cuda::Watch metalmm_watch;
__device__ cuda::Watch metalmm_watch = {};
#endif

// What the kernel is called with.
template <class P>
struct Fetched {
  static METALMM_INLINE P get(const ArgSpec& spec, const cuda::ArgumentRow&, const u8*, const Place& place) {
    return Position<P>::from(position(spec.kind, place));
  }
};
template <class T>
METALMM_INLINE T* address(const ArgSpec& spec, const cuda::ArgumentRow& row, const u8* block) {
  unsigned long long word = *reinterpret_cast<const unsigned long long*>(block + row.word);
  if (spec.kind == ArgKind::threadgroup) return reinterpret_cast<T*>(metalmm_threadgroup + static_cast<u32>(word));
  return reinterpret_cast<T*>(word);
}
template <class T>
struct Fetched<T*> {
  static METALMM_INLINE T* get(const ArgSpec& spec, const cuda::ArgumentRow& row, const u8* block, const Place&) {
    return address<T>(spec, row, block);
  }
};
template <class T>
struct Fetched<T&> {
  static METALMM_INLINE T& get(const ArgSpec& spec, const cuda::ArgumentRow& row, const u8* block, const Place&) {
    return *address<T>(spec, row, block);
  }
};
template <class T>
struct Fetched<const T&> {
  static METALMM_INLINE const T& get(const ArgSpec& spec, const cuda::ArgumentRow& row, const u8* block, const Place&) {
    if (row.only_inlined) return *reinterpret_cast<const T*>(block + row.inlined);
    const T* memory = address<const T>(spec, row, block);
    return row.inlined && !memory ? *reinterpret_cast<const T*>(block + row.inlined) : *memory;
  }
};

template <class F>
struct Signature;
template <class... P>
struct Signature<void (*)(P...)> {
  static constexpr u32 count = sizeof...(P);
  static_assert(count <= cuda::kMaxArguments, "a kernel of the CUDA device takes up to 64 arguments");
  static constexpr u32 beside = (0 + ... + beside_of<P>);
  template <const ArgSpec* S>
  static constexpr cuda::KernelTable table(u32 max_threads) {
    cuda::KernelTable t{};
    t.version = cuda::kArgumentsVersion;
    t.max_threads = max_threads;
    t.count = count;
    t.barrier = fiber::kBarrierBytes;
    t.masks = fiber::kMasks;
    t.cluster = 1;
    ((t.cluster = cluster_of<P> > t.cluster ? cluster_of<P> : t.cluster), ...);
#ifdef METALMM_STOPS
    t.stop = 1;
#endif
#ifdef METALMM_EARLY
    t.early = 1;
#endif
#ifdef METALMM_WATCHED
    t.watched = 1;
#endif
    constexpr bool is_const[] = {Argument<P>::is_const..., false};
    constexpr u32 bytes[] = {Argument<P>::bytes..., 0}, number[] = {Argument<P>::number..., 0}, own[] = {own_bytes<P>..., 0};
    u32 at = sizeof(LaunchHead) + 8 * count, inlined = 0;
    for (u32 i = 0; i < count; i++) {
      bool device = S[i].kind == ArgKind::buffer;
      cuda::ArgumentRow& row = t.rows[i];
      row.kind = static_cast<u32>(S[i].kind);
      row.index = S[i].index;
      row.enabled = S[i].enabled;
      row.is_const = is_const[i];
      row.bytes = S[i].kind == ArgKind::threadgroup ? own[i] : bytes[i];
      row.word = sizeof(LaunchHead) + 8 * i;
      u32 each = number[i];
      if (device && each && inlined + bytes[i] + each <= cuda::kMaxInline) {
        at = (at + each - 1) / each * each;
        row.inlined = at;
        at += bytes[i];
        inlined += (bytes[i] + each - 1) / each * each;
#ifdef METALMM_MATMUL  // whose parameters are never a buffer
        row.only_inlined = 1;
#endif
      }
    }
    t.size = (at + 15) / 16 * 16;
    return t;
  }
};

// A launch may begin before the one before it is through (programmatic dependent launch). Until that is, nothing is read or written; or
// weights are read (early: lanes.h waits, where the kernel says); or all of it where the host saw that nothing is shared, and then the end
// waits, so that whoever waits for this one waits for all before it.
// The host compares with what came since the last launch that waits; so that one lets another run beside it only once all before it is
// through (late): it would else begin while this one still waits for those.
// What the next one will read comes nearer meanwhile: to the second-level cache, where every write arrives, too, so that it is only ever
// sooner there.
METALMM_INLINE void begin_launch(const LaunchHead& head) {
#if __CUDA_ARCH__ >= 900
#ifdef METALMM_LETS_NEXT  // the kernel says when: kernels/include/next.h
  bool waits_first = false, lets_next = false;
#else
  bool waits_first = head.late && !head.beside, lets_next = !waits_first;
#endif
  if (lets_next) asm volatile("griddepcontrol.launch_dependents;");
  u32 group = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  if (threadIdx.x == 0 && group < head.ahead_groups)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(head.ahead + static_cast<u64>(group) * head.ahead_bytes),
                 "r"(head.ahead_bytes));
  if (!head.beside && !head.early) asm volatile("griddepcontrol.wait;" ::: "memory");
  if (waits_first) asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// A copy waits for its map, the first time for long: it is asked for before the launch waits.
template <class P>
METALMM_INLINE void ask_for_maps(const cuda::ArgumentRow&, const u8*) {}
#if __CUDA_ARCH__ >= 900 && !defined METALMM_WATCHED
template <>
METALMM_INLINE void ask_for_maps<const abi::TileMaps&>(const cuda::ArgumentRow& row, const u8* block) {
  auto& maps = *reinterpret_cast<const abi::TileMaps*>(block + row.inlined);
  if (threadIdx.x == 0 && maps.there) asm volatile("prefetch.tensormap [%0]; prefetch.tensormap [%1];" ::"l"(&maps.a), "l"(&maps.b));
}
#endif
METALMM_INLINE void end_launch(const LaunchHead& head) {
#if __CUDA_ARCH__ >= 900
  if (head.beside) asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

template <u32 Size>
struct alignas(cuda::kBlockAt) Block {
  u8 bytes[Size];
};

template <auto Fn, const ArgSpec* S, const cuda::KernelTable* T, class F = decltype(Fn)>
struct Entry;
template <auto Fn, const ArgSpec* S, const cuda::KernelTable* T, class... P>
struct Entry<Fn, S, T, void (*)(P...)> {
  template <int... I>
  static METALMM_INLINE void call(const u8* block, const Place& place, Indices<I...>) {
    static_assert(((Argument<P>::is_memory == (S[I].kind == ArgKind::buffer || S[I].kind == ArgKind::threadgroup)) && ...),
                  "an argument with a buffer or threadgroup index is a pointer or a reference, and a position is neither");
    Fn(Fetched<P>::get(S[I], T->rows[I], block, place)...);
  }
  template <int... I>
  static METALMM_INLINE void ask([[maybe_unused]] const u8* block, Indices<I...>) {
    (ask_for_maps<P>(T->rows[I], block), ...);
  }
  static METALMM_INLINE void run(const u8* block) {
    const LaunchHead& head = *reinterpret_cast<const LaunchHead*>(block);
    ask(block, typename MakeIndices<sizeof...(P)>::type{});
    begin_launch(head);
    Place place = place_of(head);
    bool runs = !counts_threads(head) || place.lane < place.threads;
    fiber::begin_barriers();
    fiber::begin_masks(runs);
    if (runs) call(block, place, typename MakeIndices<sizeof...(P)>::type{});
    fiber::end_barriers();
    end_launch(head);
  }
};

}  // namespace metalmm::msl

#define METALMM_KERNEL_INLINE METALMM_INLINE
#define METALMM_SCOPE
#define METALMM_UNIT 0
#define METALMM_KERNEL(threads, specs, ...)                                                                                             \
  static constexpr ::metalmm::cuda::KernelTable metalmm_rows = ::metalmm::msl::Signature<metalmm_function_type>::table<specs>(threads); \
  extern "C" __constant__ ::metalmm::cuda::KernelTable metalmm_table;                                                                    \
  __constant__ ::metalmm::cuda::KernelTable metalmm_table = metalmm_rows;                                                                \
  extern "C" __global__ void __launch_bounds__((threads) ? (threads) : 1024, ::metalmm::msl::Signature<metalmm_function_type>::beside)      \
      metalmm_kernel(const __grid_constant__ ::metalmm::msl::Block<metalmm_rows.size> block) {                                           \
    ::metalmm::msl::Entry<__VA_ARGS__, specs, &metalmm_rows>::run(block.bytes);                                                         \
  }
