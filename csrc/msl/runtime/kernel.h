// A kernel function as the executor calls it: arguments by attribute and type, one fiber after another.
#pragma once
#include "simd.h"

namespace metalmm::msl {

using abi::ArgInfo;
using abi::ArgKind;
using abi::ArgSpec;
using abi::Context;
using abi::Uint3;

// Threadgroup variables of this module get their places when it is loaded, 16-byte aligned, one after another.
inline u32 threadgroup_bytes;
inline u32 reserve_threadgroup(u32 bytes) {
  u32 offset = threadgroup_bytes;
  threadgroup_bytes += (bytes + 15) & ~15u;
  return offset;
}
template <int Id, class T> struct ThreadgroupSlot { static const u32 offset; };
template <int Id, class T> const u32 ThreadgroupSlot<Id, T>::offset = reserve_threadgroup(sizeof(T));

template <int Id, class T> METALMM_INLINE T& threadgroup_variable() {
  return *reinterpret_cast<T*>(fiber::context()->threadgroup_memory + ThreadgroupSlot<Id, T>::offset);
}

template <class P> struct Position {
  static P from(Uint3 v) { return static_cast<P>(v.x); }
};
template <class T> struct Position<vec<T, 2>> {
  static vec<T, 2> from(Uint3 v) { return vec<T, 2>(static_cast<T>(v.x), static_cast<T>(v.y)); }
};
template <class T> struct Position<vec<T, 3>> {
  static vec<T, 3> from(Uint3 v) { return vec<T, 3>(static_cast<T>(v.x), static_cast<T>(v.y), static_cast<T>(v.z)); }
};

METALMM_INLINE Uint3 position(ArgKind kind, const Context* c) {
  u32 lane = c->lane;
  Uint3 size = c->group_threads, group = c->threadgroup_position, full = c->dispatch_threads;
  Uint3 thread = {lane % size.x, lane / size.x % size.y, lane / (size.x * size.y)};
  switch (kind) {
    case ArgKind::thread_position_in_grid:
      return {group.x * full.x + thread.x, group.y * full.y + thread.y, group.z * full.z + thread.z};
    case ArgKind::thread_position_in_threadgroup: return thread;
    case ArgKind::threadgroup_position_in_grid: return group;
    case ArgKind::threads_per_threadgroup: return size;
    case ArgKind::threads_per_grid: return c->grid_threads;
    case ArgKind::threadgroups_per_grid: return c->grid_groups;
    case ArgKind::thread_index_in_threadgroup: return {lane, 0, 0};
    case ArgKind::thread_index_in_simdgroup: return {lane % 32, 0, 0};
    case ArgKind::simdgroup_index_in_threadgroup: return {lane / 32, 0, 0};
    case ArgKind::threads_per_simdgroup: return {32, 0, 0};
    case ArgKind::simdgroups_per_threadgroup: return {(c->threads + 31) / 32, 0, 0};
    case ArgKind::thread_index_in_quadgroup: return {lane % 4, 0, 0};
    case ArgKind::quadgroup_index_in_threadgroup: return {lane / 4, 0, 0};
    case ArgKind::quadgroups_per_threadgroup: return {(c->threads + 3) / 4, 0, 0};
    case ArgKind::dispatch_threads_per_threadgroup: return full;
    case ArgKind::dispatch_simdgroups_per_threadgroup: return {(full.x * full.y * full.z + 31) / 32, 0, 0};
    case ArgKind::dispatch_quadgroups_per_threadgroup: return {(full.x * full.y * full.z + 3) / 4, 0, 0};
    default: return {0, 0, 0};
  }
}

template <class P> struct Argument {  // by value: a position
  static constexpr bool is_const = true;
  static constexpr u32 bytes = 0;
  static METALMM_INLINE P get(ArgSpec spec, const Context* c) { return Position<P>::from(position(spec.kind, c)); }
};
template <class T> struct Element { static constexpr u32 bytes = sizeof(T); };
template <> struct Element<void> { static constexpr u32 bytes = 1; };
template <> struct Element<const void> { static constexpr u32 bytes = 1; };
template <class T> constexpr bool is_const_type = false;
template <class T> constexpr bool is_const_type<const T> = true;
template <class T> METALMM_INLINE T* address(ArgSpec spec, const Context* c) {
  if (spec.kind == ArgKind::threadgroup)
    return reinterpret_cast<T*>(c->threadgroup_memory + c->threadgroup_offsets[spec.index]);
  return reinterpret_cast<T*>(c->buffers[spec.index]);
}
template <class T> struct Argument<T*> {
  static constexpr bool is_const = is_const_type<T>;
  static constexpr u32 bytes = Element<T>::bytes;
  static METALMM_INLINE T* get(ArgSpec spec, const Context* c) { return address<T>(spec, c); }
};
template <class T> struct Argument<T&> {
  static constexpr bool is_const = is_const_type<T>;
  static constexpr u32 bytes = sizeof(T);
  static METALMM_INLINE T& get(ArgSpec spec, const Context* c) { return *address<T>(spec, c); }
};

template <int... I> struct Indices {};
template <int N, int... I> struct MakeIndices : MakeIndices<N - 1, N - 1, I...> {};
template <int... I> struct MakeIndices<0, I...> { using type = Indices<I...>; };

template <class P> constexpr bool is_memory = false;
template <class T> constexpr bool is_memory<T*> = true;
template <class T> constexpr bool is_memory<T&> = true;

template <class F> struct Signature;
template <class... P> struct Signature<void (*)(P...)> {
  using indices = typename MakeIndices<sizeof...(P)>::type;
  static constexpr int count = sizeof...(P);
  template <auto Fn, const ArgSpec* S, int... I> static METALMM_INLINE void call(const Context* c, Indices<I...>) {
    Fn(Argument<P>::get(S[I], c)...);
  }
  template <const ArgSpec* S> static const ArgInfo* infos() {
    return describe<S>(indices{});
  }
  template <const ArgSpec* S, int... I> static const ArgInfo* describe(Indices<I...>) {
    static_assert(((is_memory<P> == (S[I].kind == ArgKind::buffer || S[I].kind == ArgKind::threadgroup)) && ...),
                  "an argument with a buffer or threadgroup index is a pointer or a reference, and a position is neither");
    static const ArgInfo info[sizeof...(P) + 1] = {
        {S[I].kind, S[I].index, S[I].enabled, Argument<P>::is_const, Argument<P>::bytes}..., {}};
    return info;
  }
};

template <auto Fn, const ArgSpec* S> struct Entry {
  using signature = Signature<decltype(Fn)>;

  // A fresh fiber starts here, with c->lane the lane to run. A lane that returns hands its stack to the next lane that has
  // not started, so a kernel that never blocks runs as a plain loop.
  static void run() {
    Context* c = fiber::context();
    for (;;) {
      abi::Simdgroup* g = c->group;
      u32 lane = c->lane & 31;
      g->unstarted &= ~(1u << lane);
      signature::template call<Fn, S>(c, typename signature::indices{});
      g = c->group;
      u32 bit = 1u << (c->lane & 31);
      lane = c->lane & 31;
      g->live &= ~bit;
      g->ready &= ~bit;
      u32 next = g->ready ? g->base + fiber::next_in(g->ready, fiber::turn_after(lane)) : c->schedule(c);
      abi::Lane gone;
      if (next == abi::kNoLane) {
        fiber::switch_lane(&gone, &c->host);
      } else {
        c->lane = next;
        if (!(c->group->unstarted >> (next & 31) & 1)) fiber::switch_lane(&gone, &c->lanes[next]);
      }
    }
  }
};

inline u32 static_threadgroup_bytes() { return threadgroup_bytes; }
inline void bind(long offset, Context* (*current)()) {
  fiber::tls_offset = offset;
  fiber::current_context = current;
}

template <auto Fn, const ArgSpec* S> abi::KernelInfo describe(u32 max_threads) {
  using E = Entry<Fn, S>;
  return {abi::kVersion, max_threads, static_cast<u32>(E::signature::count), E::signature::template infos<S>(),
          &E::run, &static_threadgroup_bytes, &bind};
}

}  // namespace metalmm::msl

#define METALMM_KERNEL_INLINE
// What a lowered file ends with: how many threads its kernel was declared for, the kinds of its arguments, and the kernel, which may hold
// commas.
#define METALMM_KERNEL(threads, specs, ...)                                                          \
  extern "C" __attribute__((visibility("default"))) const ::metalmm::abi::KernelInfo metalmm_kernel; \
  const ::metalmm::abi::KernelInfo metalmm_kernel = ::metalmm::msl::describe<__VA_ARGS__, specs>(threads)
