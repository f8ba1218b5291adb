// A kernel function as the executor calls it: arguments by attribute and type, one fiber after another.
#pragma once
#include "place.h"

namespace metalmm::msl {

using abi::ArgInfo;
using abi::Context;

// Threadgroup variables of a kernel get their places when its module is loaded, 16-byte aligned, one after another. Unit: which kernel
// of the module.
template <int Unit> inline u32 threadgroup_bytes;
template <int Unit> u32 reserve_threadgroup(u32 bytes) {
  u32 offset = threadgroup_bytes<Unit>;
  threadgroup_bytes<Unit> += (bytes + 15) & ~15u;
  return offset;
}
template <int Unit, int Id, class T> struct ThreadgroupSlot { static const u32 offset; };
template <int Unit, int Id, class T> const u32 ThreadgroupSlot<Unit, Id, T>::offset = reserve_threadgroup<Unit>(sizeof(T));

template <int Unit, int Id, class T> METALMM_INLINE T& threadgroup_variable() {
  return *reinterpret_cast<T*>(fiber::context()->threadgroup_memory + ThreadgroupSlot<Unit, Id, T>::offset);
}

METALMM_INLINE Place place_of(const Context* c) {
  return {c->lane, c->threads, c->group_threads, c->threadgroup_position, c->dispatch_threads, c->grid_threads, c->grid_groups};
}

template <class P> struct Argument {  // by value: a position
  static constexpr bool is_const = true;
  static constexpr u32 bytes = 0;
  static METALMM_INLINE P get(ArgSpec spec, const Context* c) { return Position<P>::from(position(spec.kind, place_of(c))); }
};
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
        {S[I].kind, S[I].index, S[I].enabled, Argument<P>::is_const,
         S[I].kind == ArgKind::threadgroup ? own_bytes<P> : Argument<P>::bytes}..., {}};
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

template <int Unit> u32 static_threadgroup_bytes() { return threadgroup_bytes<Unit>; }
inline void bind(long offset, Context* (*current)()) {
  fiber::tls_offset = offset;
  fiber::current_context = current;
}

template <int Unit, auto Fn, const ArgSpec* S> abi::KernelInfo describe(u32 max_threads) {
  using E = Entry<Fn, S>;
  return {abi::kVersion, max_threads, static_cast<u32>(E::signature::count), E::signature::template infos<S>(),
          &E::run, &static_threadgroup_bytes<Unit>, &bind};
}

}  // namespace metalmm::msl

#define METALMM_KERNEL_INLINE
// Several kernels of one translation unit (python/metalmm/modules.py) stand each in a namespace of its own, METALMM_SCOPE, and have a number
// and a symbol. A kernel alone stands in the global namespace.
#define METALMM_SCOPE
#define METALMM_UNIT 0
#define METALMM_SYMBOL metalmm_kernel
// What a lowered file ends with: how many threads its kernel was declared for, the kinds of its arguments, and the kernel, which may hold
// commas.
#define METALMM_KERNEL(threads, specs, ...)                                                          \
  extern "C" __attribute__((visibility("default"))) const ::metalmm::abi::KernelInfo METALMM_SYMBOL; \
  const ::metalmm::abi::KernelInfo METALMM_SYMBOL = ::metalmm::msl::describe<METALMM_UNIT, __VA_ARGS__, specs>(threads)
