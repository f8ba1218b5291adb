// A kernel function as CUDA launches it: positions from the launch, memory and numbers from the block of arguments.
#pragma once
#include "../simd.h"
#include "arguments.h"

namespace metalmm::msl {

using abi::ArgKind;
using abi::ArgSpec;
using abi::u64;
using abi::u8;
using abi::Uint3;
using cuda::LaunchHead;

template <int Id, class T>
METALMM_INLINE T& threadgroup_variable() {
  __shared__ alignas(16) T variable;
  return variable;
}
extern __shared__ __align__(16) abi::u8 metalmm_threadgroup[];

METALMM_INLINE u32 smaller(u32 a, u32 b) { return a < b ? a : b; }

// Where a thread stands. A launch is of threads in a row; those beyond an odd threadgroup have left.
struct Place {
  Uint3 group, size;
  const LaunchHead& head;
};
METALMM_INLINE Uint3 group_position(const LaunchHead& head) {
  return {blockIdx.x + head.origin.x, blockIdx.y + head.origin.y, blockIdx.z + head.origin.z};
}
METALMM_INLINE Uint3 group_size(const LaunchHead& head, Uint3 g) {
  if (head.threads.x == 0) return head.group;
  return {smaller(head.group.x, head.threads.x - g.x * head.group.x), smaller(head.group.y, head.threads.y - g.y * head.group.y),
          smaller(head.group.z, head.threads.z - g.z * head.group.z)};
}
METALMM_INLINE Uint3 position(ArgKind kind, const Place& place) {
  u32 lane = threadIdx.x;
  Uint3 size = place.size, group = place.group, full = place.head.group;
  u32 count = size.x * size.y * size.z;
  Uint3 thread = {lane % size.x, lane / size.x % size.y, lane / (size.x * size.y)};
  switch (kind) {
    case ArgKind::thread_position_in_grid:
      return {group.x * full.x + thread.x, group.y * full.y + thread.y, group.z * full.z + thread.z};
    case ArgKind::thread_position_in_threadgroup:
      return thread;
    case ArgKind::threadgroup_position_in_grid:
      return group;
    case ArgKind::threads_per_threadgroup:
      return size;
    case ArgKind::threads_per_grid: {
      Uint3 threads = place.head.threads, groups = place.head.groups;
      return threads.x ? threads : Uint3{groups.x * full.x, groups.y * full.y, groups.z * full.z};
    }
    case ArgKind::threadgroups_per_grid:
      return place.head.groups;
    case ArgKind::thread_index_in_threadgroup:
      return {lane, 0, 0};
    case ArgKind::thread_index_in_simdgroup:
      return {lane % 32, 0, 0};
    case ArgKind::simdgroup_index_in_threadgroup:
      return {lane / 32, 0, 0};
    case ArgKind::threads_per_simdgroup:
      return {32, 0, 0};
    case ArgKind::simdgroups_per_threadgroup:
      return {(count + 31) / 32, 0, 0};
    case ArgKind::thread_index_in_quadgroup:
      return {lane % 4, 0, 0};
    case ArgKind::quadgroup_index_in_threadgroup:
      return {lane / 4, 0, 0};
    case ArgKind::quadgroups_per_threadgroup:
      return {(count + 3) / 4, 0, 0};
    case ArgKind::dispatch_threads_per_threadgroup:
      return full;
    case ArgKind::dispatch_simdgroups_per_threadgroup:
      return {(full.x * full.y * full.z + 31) / 32, 0, 0};
    case ArgKind::dispatch_quadgroups_per_threadgroup:
      return {(full.x * full.y * full.z + 3) / 4, 0, 0};
    default:
      return {0, 0, 0};
  }
}

template <class P>
struct PositionAs {
  static METALMM_INLINE P from(Uint3 v) { return static_cast<P>(v.x); }
};
template <class T>
struct PositionAs<vec<T, 2>> {
  static METALMM_INLINE vec<T, 2> from(Uint3 v) { return vec<T, 2>(static_cast<T>(v.x), static_cast<T>(v.y)); }
};
template <class T>
struct PositionAs<vec<T, 3>> {
  static METALMM_INLINE vec<T, 3> from(Uint3 v) { return vec<T, 3>(static_cast<T>(v.x), static_cast<T>(v.y), static_cast<T>(v.z)); }
};

// A conditional's arm where the other is of type Other: a half beside a float is one.
template <class T>
struct bare {
  using type = T;
};
template <class T>
struct bare<T&> {
  using type = T;
};
template <class T>
struct bare<T&&> {
  using type = T;
};
template <class T>
struct bare<const T&> {
  using type = T;
};
template <class Other, class A>
METALMM_INLINE constexpr decltype(auto) arm(A&& a) {
  using T = typename bare<A>::type;
  using O = typename bare<Other>::type;
  if constexpr ((is_same<T, half>::value || is_same<T, bfloat>::value || is_same<T, float>::value) && is_float<O>::value &&
                !is_same<T, O>::value)
    return static_cast<float>(a);
  else if constexpr (is_scalar<T>::value && !is_float<T>::value && is_same<O, half>::value)  // an integer beside a half is a half
    return half(a);
  else
    return static_cast<A&&>(a);
}

template <class T>
constexpr bool is_const_type = false;
template <class T>
constexpr bool is_const_type<const T> = true;
template <class T>
struct Element {
  static constexpr u32 bytes = sizeof(T);
};
template <>
struct Element<void> {
  static constexpr u32 bytes = 1;
};
template <>
struct Element<const void> {
  static constexpr u32 bytes = 1;
};

// What a parameter's type says of it. `number`: a reference to what may travel in the block itself.
template <class P>
struct Argument {
  static constexpr bool is_memory = false, is_const = true, number = false;
  static constexpr u32 bytes = 0;
};
template <class T>
struct Argument<T*> {
  static constexpr bool is_memory = true, is_const = is_const_type<T>, number = false;
  static constexpr u32 bytes = Element<T>::bytes;
};
template <class T>
struct Argument<T&> {
  static constexpr bool is_memory = true, is_const = is_const_type<T>, number = is_const_type<T> && sizeof(T) <= 1024;
  static constexpr u32 bytes = sizeof(T);
};

#ifdef METALMM_STOPS
extern "C" __device__ volatile u32 metalmm_stop;
__device__ volatile u32 metalmm_stop = 0;
// A loop of a constexpr function is asked by the compiler, too.
METALMM_INLINE constexpr bool goes_on() { return __builtin_is_constant_evaluated() || !metalmm_stop; }
#endif

// What the kernel is called with.
template <class P>
struct Fetched {
  static METALMM_INLINE P get(const ArgSpec& spec, const cuda::ArgumentRow&, const u8*, const Place& place) {
    return PositionAs<P>::from(position(spec.kind, place));
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
  template <const ArgSpec* S>
  static constexpr cuda::KernelTable table(u32 max_threads) {
    cuda::KernelTable t{};
    t.version = cuda::kArgumentsVersion;
    t.max_threads = max_threads;
    t.count = count;
#ifdef METALMM_STOPS
    t.stop = 1;
#endif
    constexpr bool is_memory[] = {Argument<P>::is_memory..., false}, is_const[] = {Argument<P>::is_const..., false},
                   number[] = {Argument<P>::number..., false};
    constexpr u32 bytes[] = {Argument<P>::bytes..., 0};
    u32 at = sizeof(LaunchHead) + 8 * count, inlined = 0;
    for (u32 i = 0; i < count; i++) {
      bool device = S[i].kind == ArgKind::buffer;
      cuda::ArgumentRow& row = t.rows[i];
      row.kind = static_cast<u32>(S[i].kind);
      row.index = S[i].index;
      row.enabled = S[i].enabled;
      row.is_const = is_const[i];
      row.bytes = bytes[i];
      row.word = sizeof(LaunchHead) + 8 * i;
      if (device && number[i] && inlined + bytes[i] + 16 <= cuda::kMaxInline) {
        at = (at + 15) / 16 * 16;
        row.inlined = at;
        at += bytes[i];
        inlined += (bytes[i] + 15) / 16 * 16;
#ifdef METALMM_NUMBERS_INLINE  // of a matmul's kernel: its parameters are never a buffer
        row.only_inlined = 1;
#endif
      }
    }
    t.size = (at + 15) / 16 * 16;
    (void)is_memory;
    return t;
  }
};

template <int... I>
struct Indices {};
template <int N, int... I>
struct MakeIndices : MakeIndices<N - 1, N - 1, I...> {};
template <int... I>
struct MakeIndices<0, I...> {
  using type = Indices<I...>;
};

// A launch may begin before the one before it is through (programmatic dependent launch). Until that is, nothing is read or written, or
// all of it where the host saw that nothing is shared; then the end waits, so that whoever waits for this one waits for all before it.
// The host compares with what came since the last launch that waits; so that one lets another run beside it only once all before it is
// through (late): it would else begin while this one still waits for those.
// What the next one will read comes nearer meanwhile: to the second-level cache, where every write arrives, too, so that it is only ever
// sooner there.
METALMM_INLINE void begin_launch(const LaunchHead& head) {
#if __CUDA_ARCH__ >= 900
  bool waits_first = head.late && !head.beside;
  if (!waits_first) asm volatile("griddepcontrol.launch_dependents;");
  u32 group = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  if (threadIdx.x == 0 && group < head.ahead_groups)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(head.ahead + static_cast<u64>(group) * head.ahead_bytes),
                 "r"(head.ahead_bytes));
  if (!head.beside) asm volatile("griddepcontrol.wait;" ::: "memory");
  if (waits_first) asm volatile("griddepcontrol.launch_dependents;");
#endif
}
METALMM_INLINE void end_launch(const LaunchHead& head) {
#if __CUDA_ARCH__ >= 900
  if (head.beside) asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

template <u32 Size>
struct alignas(16) Block {
  u8 bytes[Size];
};

template <auto Fn, const ArgSpec* S, const cuda::KernelTable* T, class F = decltype(Fn)>
struct Entry;
template <auto Fn, const ArgSpec* S, const cuda::KernelTable* T, class... P>
struct Entry<Fn, S, T, void (*)(P...)> {
  static_assert(sizeof...(P) <= cuda::kMaxArguments, "too many arguments");
  template <int... I>
  static METALMM_INLINE void call(const u8* block, const Place& place, Indices<I...>) {
    static_assert(((Argument<P>::is_memory == (S[I].kind == ArgKind::buffer || S[I].kind == ArgKind::threadgroup)) && ...),
                  "an argument with a buffer or threadgroup index is a pointer or a reference, and a position is neither");
    Fn(Fetched<P>::get(S[I], T->rows[I], block, place)...);
  }
  static METALMM_INLINE void run(const u8* block) {
    const LaunchHead& head = *reinterpret_cast<const LaunchHead*>(block);
    begin_launch(head);
    Uint3 group = group_position(head), size = group_size(head, group);
    if (!head.threads.x || threadIdx.x < size.x * size.y * size.z)
      call(block, Place{group, size, head}, typename MakeIndices<sizeof...(P)>::type{});
    end_launch(head);
  }
};

}  // namespace metalmm::msl

#define METALMM_KERNEL_INLINE METALMM_INLINE
#define METALMM_KERNEL(threads, specs, ...)                                                                                             \
  static constexpr ::metalmm::cuda::KernelTable metalmm_rows = ::metalmm::msl::Signature<metalmm_function_type>::table<specs>(threads); \
  extern "C" __constant__::metalmm::cuda::KernelTable metalmm_table;                                                                    \
  __constant__::metalmm::cuda::KernelTable metalmm_table = metalmm_rows;                                                                \
  extern "C" __global__ void __launch_bounds__((threads) ? (threads) : 1024)                                                            \
      metalmm_kernel(const __grid_constant__::metalmm::msl::Block<metalmm_rows.size> block) {                                           \
    ::metalmm::msl::Entry<__VA_ARGS__, specs, &metalmm_rows>::run(block.bytes);                                                         \
  }
