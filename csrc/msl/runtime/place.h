// Where a thread stands, and what the types of a kernel's parameters say, whatever runs it.
#pragma once
#include "simd.h"

namespace metalmm::msl {

using abi::ArgKind;
using abi::ArgSpec;
using abi::Uint3;

struct Place {
  u32 lane, threads;         // in the threadgroup: this one's index, and how many there are
  Uint3 size, group, full;   // of this threadgroup, its position, and of all but those at the edges of the grid
  Uint3 grid_threads, grid_groups;
};

METALMM_INLINE Uint3 position(ArgKind kind, const Place& p) {
  u32 lane = p.lane;
  Uint3 size = p.size, group = p.group, full = p.full;
  Uint3 thread = {lane % size.x, lane / size.x % size.y, lane / (size.x * size.y)};
  switch (kind) {
    case ArgKind::thread_position_in_grid:
      return {group.x * full.x + thread.x, group.y * full.y + thread.y, group.z * full.z + thread.z};
    case ArgKind::thread_position_in_threadgroup: return thread;
    case ArgKind::threadgroup_position_in_grid: return group;
    case ArgKind::threads_per_threadgroup: return size;
    case ArgKind::threads_per_grid: return p.grid_threads;
    case ArgKind::threadgroups_per_grid: return p.grid_groups;
    case ArgKind::thread_index_in_threadgroup: return {lane, 0, 0};
    case ArgKind::thread_index_in_simdgroup: return {lane % 32, 0, 0};
    case ArgKind::simdgroup_index_in_threadgroup: return {lane / 32, 0, 0};
    case ArgKind::threads_per_simdgroup: return {32, 0, 0};
    case ArgKind::simdgroups_per_threadgroup: return {(p.threads + 31) / 32, 0, 0};
    case ArgKind::thread_index_in_quadgroup: return {lane % 4, 0, 0};
    case ArgKind::quadgroup_index_in_threadgroup: return {lane / 4, 0, 0};
    case ArgKind::quadgroups_per_threadgroup: return {(p.threads + 3) / 4, 0, 0};
    case ArgKind::dispatch_threads_per_threadgroup: return full;
    case ArgKind::dispatch_simdgroups_per_threadgroup: return {(full.x * full.y * full.z + 31) / 32, 0, 0};
    case ArgKind::dispatch_quadgroups_per_threadgroup: return {(full.x * full.y * full.z + 3) / 4, 0, 0};
    default: return {0, 0, 0};
  }
}

template <class P> struct Position {
  static METALMM_INLINE P from(Uint3 v) { return static_cast<P>(v.x); }
};
template <class T> struct Position<vec<T, 2>> {
  static METALMM_INLINE vec<T, 2> from(Uint3 v) { return vec<T, 2>(static_cast<T>(v.x), static_cast<T>(v.y)); }
};
template <class T> struct Position<vec<T, 3>> {
  static METALMM_INLINE vec<T, 3> from(Uint3 v) { return vec<T, 3>(static_cast<T>(v.x), static_cast<T>(v.y), static_cast<T>(v.z)); }
};

template <class T> struct Element { static constexpr u32 bytes = sizeof(T); };
template <> struct Element<void> { static constexpr u32 bytes = 1; };
template <> struct Element<const void> { static constexpr u32 bytes = 1; };
// Of a parameter of type P: what a piece of threadgroup memory takes, if its type says it.
template <class P> constexpr u32 own_bytes = 0;
template <class T> constexpr u32 own_bytes<T&> = sizeof(T);
template <class T> constexpr bool is_const_type = false;
template <class T> constexpr bool is_const_type<const T> = true;

// What Passes.indexed_conditionals puts around an expression.
namespace unmet {
template <class T> METALMM_INLINE constexpr T&& same(T&& x) { return static_cast<T&&>(x); }
}  // namespace unmet

template <int... I> struct Indices {};
template <int N, int... I> struct MakeIndices : MakeIndices<N - 1, N - 1, I...> {};
template <int... I> struct MakeIndices<0, I...> { using type = Indices<I...>; };

}  // namespace metalmm::msl
