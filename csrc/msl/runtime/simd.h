// Barriers and the simd_ and quad_ functions.
#pragma once
#ifdef __CUDACC__
#include "cuda/lanes.h"
#else
#include "fiber.h"
#endif
#include "library.h"

namespace metalmm::msl {

using abi::u32;

METALMM_INLINE u32 simd_lane() { return fiber::lane(); }
constexpr bool has(u32 mask, u32 lane) { return mask >> lane & 1; }

// Of a barrier. arg: what it orders, for debug mode to know.
struct Nothing {
#ifdef METALMM_DEBUG
  static constexpr bool uses_arg = true;
  template <class In, class Out> static void run(u32 mask, const In*, const u32* arg, Out*) {
    u32 orders = ~0u;
    for (u32 i = 0; i < abi::kSimdWidth; i++)
      if (mask >> i & 1) orders &= arg[i];
    abi::Context* c = fiber::context();
    c->group->orders = orders;
    if (mask != c->group->all && c->skipped) c->skipped(c, mask);
  }
#else
  static constexpr bool uses_arg = false;
  template <class In, class Out> static void run(u32, const In*, const u32*, Out*) {}
#endif
};

// out = in of the lane that arg names; an absent or inactive source gives the lane's own value.
struct Gather {
  static constexpr bool uses_arg = true;
  template <class T> static void run(u32 mask, const T* in, const u32* arg, T* out) {
    for (u32 i = 0; i < 32; i++)
      if (has(mask, i)) out[i] = in[has(mask, arg[i] & 31) ? arg[i] & 31 : i];
  }
};

// Of those of each run of Width lanes that are there.
template <u32 Width> struct First {
  static constexpr bool uses_arg = false;
  template <class T> static void run(u32 mask, const T* in, const u32*, T* out) {
    for (u32 i = 0, first = 0; i < 32; i++) {
      if (i % Width == 0) first = i;
      if (has(mask, i)) out[i] = in[first];
      else if (first == i) first++;
    }
  }
};

template <class T> struct Pair { T data, filling; };

struct Add { template <class T> static T apply(const T& a, const T& b) { return static_cast<T>(a + b); } template <class T> static T identity() { return static_cast<T>(0); } };
struct Multiply { template <class T> static T apply(const T& a, const T& b) { return static_cast<T>(a * b); } template <class T> static T identity() { return static_cast<T>(1); } };
struct Min { template <class T> static T apply(const T& a, const T& b) { return metal::min(a, b); } };
struct Max { template <class T> static T apply(const T& a, const T& b) { return metal::max(a, b); } };
template <class T> struct Bits { using type = T; };
template <> struct Bits<float> { using type = uint; };
template <> struct Bits<half> { using type = ushort; };
template <> struct Bits<bfloat> { using type = ushort; };
#define METALMM_BITWISE(Name, op)                                     \
  struct Name {                                                       \
    template <class T> static T apply(const T& a, const T& b) {       \
      using B = typename Bits<T>::type;                               \
      return as_type<T>(static_cast<B>(as_type<B>(a) op as_type<B>(b))); \
    }                                                                 \
  };
METALMM_BITWISE(And, &) METALMM_BITWISE(Or, |) METALMM_BITWISE(Xor, ^)
#undef METALMM_BITWISE

// A tree over the active lanes of each run of Width lanes; the same order whatever order the lanes came in.
template <class F, u32 Width> struct Reduce {
  static constexpr bool uses_arg = false;
  template <class T> static void run(u32 mask, const T* in, const u32*, T* out) {
    T tmp[32];
    bool full = mask == ~0u;
    if (full) {
      for (u32 i = 0; i < 32; i++) tmp[i] = in[i];
      for (u32 step = Width / 2; step; step /= 2)
        for (u32 base = 0; base < 32; base += Width)
          for (u32 i = 0; i < step; i++) tmp[base + i] = F::apply(tmp[base + i], tmp[base + i + step]);
    } else {
      for (u32 base = 0; base < 32; base += Width) {
        bool any = false;
        for (u32 i = base; i < base + Width; i++) {
          if (!has(mask, i)) continue;
          tmp[base] = any ? F::apply(tmp[base], in[i]) : in[i];
          any = true;
        }
      }
    }
    for (u32 i = 0; i < 32; i++)
      if (full || has(mask, i)) out[i] = tmp[i & ~(Width - 1)];
  }
};

template <class F, u32 Width, bool Inclusive> struct Scan {
  static constexpr bool uses_arg = false;
  template <class T> static void run(u32 mask, const T* in, const u32*, T* out) {
    T sum{};
    for (u32 i = 0; i < 32; i++) {
      if (i % Width == 0) sum = F::template identity<T>();
      if (!has(mask, i)) continue;
      T next = F::apply(sum, in[i]);
      out[i] = Inclusive ? next : sum;
      sum = next;
    }
  }
};

struct Ballot {
  static constexpr bool uses_arg = false;
  static void run(u32 mask, const u32* in, const u32*, u32* out) {
    u32 votes = 0;
    for (u32 i = 0; i < 32; i++) votes |= (has(mask, i) && in[i] ? 1u : 0u) << i;
    for (u32 i = 0; i < 32; i++)
      if (has(mask, i)) out[i] = votes;
  }
};

// shuffle_and_fill: lanes shifted out of a run of `modulo` come back from the filling.
template <int Direction> struct Fill {
  static constexpr bool uses_arg = true;
  template <class T> static void run(u32 mask, const Pair<T>* in, const u32* arg, T* out) {
    for (u32 i = 0; i < 32; i++) {
      if (!has(mask, i)) continue;
      int delta = static_cast<int>(arg[i] & 0xff), modulo = static_cast<int>(arg[i] >> 8);
      int base = static_cast<int>(i) / modulo * modulo, source = static_cast<int>(i) % modulo + Direction * delta;
      bool filled = source < 0 || source >= modulo;
      int lane = base + (filled ? source - Direction * modulo : source);
      out[i] = filled ? in[lane & 31].filling : in[lane & 31].data;
    }
  }
};

}  // namespace metalmm::msl

namespace metalmm::msl::library {
using metal::mem_flags;
using metal::thread_scope;

// Public kernels (MLX's gemv) let threads return before a barrier with mem_none; Apple's GPUs count simdgroups, not threads.
METALMM_INLINE void threadgroup_barrier(mem_flags flags, METALMM_SITE) {
  metalmm::fiber::threadgroup_barrier(static_cast<unsigned>(flags), METALMM_SITE_VALUE);
}
METALMM_INLINE void threadgroup_barrier(mem_flags flags, thread_scope, METALMM_SITE) { threadgroup_barrier(flags, site); }
// With nothing to order, nobody has to meet: a simdgroup runs in lockstep anyhow on the machines MSL describes.
METALMM_INLINE void simdgroup_barrier(mem_flags flags, METALMM_SITE) {
  if (flags != mem_flags::mem_none)
    metalmm::fiber::exchange<Nothing, char>(0, static_cast<unsigned>(flags), METALMM_SITE_VALUE);
  else
    metalmm::fiber::nothing_to_order();
}

template <class T, T All> class Vote {
 public:
  using vote_t = T;
  explicit constexpr Vote(vote_t v = 0) : votes_(v) {}
  explicit constexpr operator vote_t() const { return votes_; }
  bool all() const { return votes_ == All; }
  bool any() const { return votes_ != 0; }

 private:
  vote_t votes_;
};
using simd_vote = Vote<ulong, 0xffffffff>;
using quad_vote = Vote<ushort, 15>;

METALMM_INLINE uint ballot(bool b, METALMM_SITE) { return metalmm::fiber::exchange<Ballot, uint>(b, 0, METALMM_SITE_VALUE); }
METALMM_INLINE uint ballot_of_quad(bool b, METALMM_SITE) { return ballot(b, site) >> (simd_lane() & ~3u) & 15; }
METALMM_INLINE simd_vote simd_ballot(bool b, METALMM_SITE) { return simd_vote(ballot(b, site)); }
METALMM_INLINE quad_vote quad_ballot(bool b, METALMM_SITE) { return quad_vote(static_cast<ushort>(ballot_of_quad(b, site))); }
METALMM_INLINE simd_vote simd_active_threads_mask(METALMM_SITE) { return simd_ballot(true, site); }
METALMM_INLINE quad_vote quad_active_threads_mask(METALMM_SITE) { return quad_ballot(true, site); }
METALMM_INLINE bool quad_any(bool b, METALMM_SITE) { return ballot_of_quad(b, site) != 0; }
METALMM_INLINE bool quad_all(bool b, METALMM_SITE) { return ballot_of_quad(!b, site) == 0; }
METALMM_INLINE bool quad_is_first(METALMM_SITE) { return metalmm::fiber::exchange<First<4>, uint>(simd_lane(), 0, METALMM_SITE_VALUE) == simd_lane(); }
METALMM_INLINE bool quad_is_helper_thread() { return false; }
METALMM_INLINE bool simd_any(bool b, METALMM_SITE) { return simd_ballot(b, site).any(); }
METALMM_INLINE bool simd_all(bool b, METALMM_SITE) { return !simd_ballot(!b, site).any(); }
METALMM_INLINE bool simd_is_first(METALMM_SITE) { return metalmm::fiber::exchange<First<32>, uint>(simd_lane(), 0, METALMM_SITE_VALUE) == simd_lane(); }
METALMM_INLINE bool simd_is_helper_thread() { return false; }

#define METALMM_LANE_OP(Op, name, ARG, ...)                                                    \
  template <class A, class V = not_void<value_t<A>>>                                            \
  METALMM_INLINE V name(const A& data __VA_ARGS__, METALMM_SITE) {                              \
    uint lane = simd_lane();                                                                   \
    (void)lane;                                                                                \
    return metalmm::fiber::exchange<Op, V>(V(data), ARG, METALMM_SITE_VALUE);                   \
  }
#define METALMM_COMMA ,
METALMM_LANE_OP(Gather, simd_shuffle, source, METALMM_COMMA ushort source)
METALMM_LANE_OP(Gather, simd_broadcast, source, METALMM_COMMA ushort source)
METALMM_LANE_OP(Gather, simd_shuffle_xor, lane ^ mask, METALMM_COMMA ushort mask)
METALMM_LANE_OP(Gather, simd_shuffle_down, lane + delta < 32 ? lane + delta : lane, METALMM_COMMA ushort delta)
METALMM_LANE_OP(Gather, simd_shuffle_up, lane >= delta ? lane - delta : lane, METALMM_COMMA ushort delta)
METALMM_LANE_OP(Gather, simd_shuffle_rotate_down, (lane + delta) & 31, METALMM_COMMA ushort delta)
METALMM_LANE_OP(Gather, simd_shuffle_rotate_up, (lane - delta) & 31, METALMM_COMMA ushort delta)
METALMM_LANE_OP(First<32>, simd_broadcast_first, 0)
METALMM_LANE_OP(First<4>, quad_broadcast_first, 0)
METALMM_LANE_OP(Gather, quad_shuffle, (lane & ~3u) | (source & 3u), METALMM_COMMA ushort source)
METALMM_LANE_OP(Gather, quad_broadcast, (lane & ~3u) | (source & 3u), METALMM_COMMA ushort source)
METALMM_LANE_OP(Gather, quad_shuffle_xor, lane ^ (mask & 3u), METALMM_COMMA ushort mask)
METALMM_LANE_OP(Gather, quad_shuffle_down, (lane & 3) + delta < 4 ? lane + delta : lane, METALMM_COMMA ushort delta)
METALMM_LANE_OP(Gather, quad_shuffle_up, (lane & 3) >= delta ? lane - delta : lane, METALMM_COMMA ushort delta)
METALMM_LANE_OP(Gather, quad_shuffle_rotate_down, (lane & ~3u) | ((lane + delta) & 3), METALMM_COMMA ushort delta)
METALMM_LANE_OP(Gather, quad_shuffle_rotate_up, (lane & ~3u) | ((lane - delta) & 3), METALMM_COMMA ushort delta)
#define METALMM_REDUCTION(F, name)                         \
  METALMM_LANE_OP(METALMM_BARE(Reduce<F, 32>), simd_##name, 0) \
  METALMM_LANE_OP(METALMM_BARE(Reduce<F, 4>), quad_##name, 0)
METALMM_REDUCTION(Add, sum) METALMM_REDUCTION(Multiply, product) METALMM_REDUCTION(Min, min) METALMM_REDUCTION(Max, max)
METALMM_REDUCTION(And, and) METALMM_REDUCTION(Or, or) METALMM_REDUCTION(Xor, xor)
#define METALMM_PREFIX(F, Inclusive, name)                                       \
  METALMM_LANE_OP(METALMM_BARE(Scan<F, 32, Inclusive>), simd_prefix_##name, 0) \
  METALMM_LANE_OP(METALMM_BARE(Scan<F, 4, Inclusive>), quad_prefix_##name, 0)
METALMM_PREFIX(Add, true, inclusive_sum) METALMM_PREFIX(Add, false, exclusive_sum)
METALMM_PREFIX(Multiply, true, inclusive_product) METALMM_PREFIX(Multiply, false, exclusive_product)
#undef METALMM_PREFIX
#undef METALMM_REDUCTION
#undef METALMM_LANE_OP
#undef METALMM_COMMA

#define METALMM_FILL(name, direction, width)                                                           \
  template <class A, class B, class V = not_void<value_t<A>>>                                           \
  METALMM_INLINE V name(const A& data, const B& filling, ushort delta, ushort modulo = width, METALMM_SITE) { \
    Pair<V> pair{V(data), V(filling)};                                                                 \
    return metalmm::fiber::exchange<Fill<direction>, Pair<V>, V>(pair, delta | static_cast<uint>(modulo) << 8, METALMM_SITE_VALUE); \
  }
METALMM_FILL(simd_shuffle_and_fill_down, 1, 32)
METALMM_FILL(simd_shuffle_and_fill_up, -1, 32)
METALMM_FILL(quad_shuffle_and_fill_down, 1, 4)
METALMM_FILL(quad_shuffle_and_fill_up, -1, 4)
#undef METALMM_FILL

// Where an element of an 8 x 8 matrix is on Apple's GPUs: a lane holds two neighbours of one row.
METALMM_INLINE uint metal_row(uint lane) { return (lane / 4 & 4) + lane / 2 % 4; }
METALMM_INLINE uint metal_column(uint lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }

// What thread_elements() refers to. To Apple's compiler it is a vector of 64 elements, of which a lane has the first two: no vector of two
// can be assigned to it.
template <class T> struct alignas(2 * sizeof(T)) ThreadElements {
  T at[2];
  METALMM_INLINE T& operator[](uint i) { return at[METALMM_INSIDE(2, i)]; }
  METALMM_INLINE const T& operator[](uint i) const { return at[METALMM_INSIDE(2, i)]; }
};

}  // namespace metalmm::msl::library
#ifdef __CUDACC__
#include "cuda/group.h"
#include "cuda/matrix.h"
#else
#include "matrix.h"
#endif
namespace metalmm::msl::library {

// thread_elements() are in whatever order row() and column() say.
template <class T, int Cols, int Rows = Cols> METALMM_INLINE simdgroup_matrix<T, Cols, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Cols, Rows> m;
  m.thread_elements()[0] = m.thread_elements()[1] = value;
  return m;
}

template <class T, int Cols, int Rows = Cols> METALMM_INLINE simdgroup_matrix<T, Cols, Rows> make_diagonal_simdgroup_matrix(T value) {
  return simdgroup_matrix<T, Cols, Rows>(value);
}

template <class T, int C, int R, class U>
METALMM_INLINE void simdgroup_load(simdgroup_matrix<T, C, R>& d, const U* src, ulong elements_per_row = C, ulong2 origin = ulong2(0), bool transpose = false) {
  ulong row = d.row(), column = d.column();
  ulong step = transpose ? elements_per_row : 1;
  const U* p = src + origin.y * elements_per_row + origin.x + (transpose ? column * elements_per_row + row : row * elements_per_row + column);
  d.thread_elements()[0] = static_cast<T>(p[0]);
  d.thread_elements()[1] = static_cast<T>(p[step]);
}
template <class T, int C, int R, class U>
METALMM_INLINE void simdgroup_store(const simdgroup_matrix<T, C, R>& a, U* dst, ulong elements_per_row = C, ulong2 origin = ulong2(0), bool transpose = false) {
  ulong row = a.row(), column = a.column();
  ulong step = transpose ? elements_per_row : 1;
  U* p = dst + origin.y * elements_per_row + origin.x + (transpose ? column * elements_per_row + row : row * elements_per_row + column);
  p[0] = static_cast<U>(a.thread_elements()[0]);
  p[step] = static_cast<U>(a.thread_elements()[1]);
}

template <class D, class A, class B>
METALMM_INLINE void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b, METALMM_SITE) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)), site);
}
template <class T>
METALMM_INLINE simdgroup_matrix<T, 8, 8> operator*(const simdgroup_matrix<T, 8, 8>& a, const simdgroup_matrix<T, 8, 8>& b) {
  simdgroup_matrix<T, 8, 8> d;
  simdgroup_multiply(d, a, b);
  return d;
}
}  // namespace metalmm::msl::library

#define METALMM_SIMD_NAMES(X) X(make_diagonal_simdgroup_matrix) X(make_filled_simdgroup_matrix) X(quad_active_threads_mask) X(quad_all) X(quad_and) X(quad_any) \
  X(quad_ballot) X(quad_broadcast) X(quad_broadcast_first) X(quad_is_first) X(quad_is_helper_thread) X(quad_max) X(quad_min) X(quad_or) X(quad_prefix_exclusive_product) X(quad_prefix_exclusive_sum) \
  X(quad_prefix_inclusive_product) X(quad_prefix_inclusive_sum) X(quad_product) X(quad_shuffle) X(quad_shuffle_and_fill_down) X(quad_shuffle_and_fill_up) X(quad_shuffle_down) \
  X(quad_shuffle_rotate_down) X(quad_shuffle_rotate_up) X(quad_shuffle_up) X(quad_shuffle_xor) X(quad_sum) X(quad_vote) X(quad_xor) \
  X(simd_active_threads_mask) X(simd_all) X(simd_and) X(simd_any) X(simd_ballot) X(simd_broadcast) X(simd_broadcast_first) \
  X(simd_is_first) X(simd_is_helper_thread) X(simd_max) X(simd_min) X(simd_or) X(simd_prefix_exclusive_product) \
  X(simd_prefix_exclusive_sum) X(simd_prefix_inclusive_product) X(simd_prefix_inclusive_sum) X(simd_product) X(simd_shuffle) \
  X(simd_shuffle_and_fill_down) X(simd_shuffle_and_fill_up) X(simd_shuffle_down) X(simd_shuffle_rotate_down) X(simd_shuffle_rotate_up) \
  X(simd_shuffle_up) X(simd_shuffle_xor) X(simd_sum) X(simd_vote) X(simd_xor) X(simdgroup_barrier) X(simdgroup_load) X(simdgroup_matrix) \
  X(simdgroup_multiply) X(simdgroup_multiply_accumulate) X(simdgroup_store) X(threadgroup_barrier)
namespace metal {
METALMM_SIMD_NAMES(METALMM_EXPORT)
// ours: kernels/cuda
using metalmm::msl::library::mma_16x8x16, metalmm::msl::library::load_matrices, metalmm::msl::library::load_transposed;
using metalmm::msl::library::kept, metalmm::msl::library::copy_later, metalmm::msl::library::close_copies, metalmm::msl::library::wait_for_copies;
using metalmm::msl::library::pick_bytes, metalmm::msl::library::begin_next, metalmm::msl::library::show_group;
using metalmm::msl::library::multiply_group, metalmm::msl::library::wait_for_groups, metalmm::msl::library::take_sums, metalmm::msl::library::HAS_CLUSTERS, metalmm::msl::library::meet_cluster,
    metalmm::msl::library::in_cluster;
using metalmm::msl::library::HAS_TMA, metalmm::msl::library::begin_ready, metalmm::msl::library::expect_tiles,
    metalmm::msl::library::copy_tile, metalmm::msl::library::wait_for_tiles, metalmm::msl::library::take_registers,
    metalmm::msl::library::give_registers;
using TileMaps = metalmm::abi::TileMaps;
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

}  // namespace metal
