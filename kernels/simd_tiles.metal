// B given as N x K rows (NT), few rows of A, eight at a time: products of 8 x 8 simdgroup matrices, rows of B on the left and of A,
// transposed, on the right, so that all rows of A cost what one does. A simdgroup owns 8 * TILES columns; SPLIT simdgroups share K.
//
// Which k stands where in a product is free, as long as both sides agree: a lane's 8 neighbouring elements of its row of B serve it for
// four products, one load of 16 bytes where loading a matrix would be four of 4. Per output: 2 * k / m bytes of B, once; DEPTH * TILES
// loads of 16 bytes always in flight a lane; of A two loads a lane and 32 of k, from the cache, for TILES columns. Apple's GPUs multiply
// such matrices at the rate of their FMA pipes: m = 8 costs what 8 rows cost there, in a fraction of the instructions of simd_columns.
//
// Four lanes read a row. Of 16-bit types and with an even DEPTH a lane's two loads are neighbours, so that the first touches the whole line
// of 128 bytes; with 64 bytes of two places an H200 was 2.4% slower at 4 x 151936 x 896. On Apple's GPUs neither was measured.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;  // what follows names its types

#include "include/lanes.h"
#include "include/next.h"
#include "include/octet.h"
#include "include/place.h"
#include "include/tiles.h"
#include "include/wait.h"

template <class T>
METAL_FUNC vec<T, 2> pair_of(Octet<T> x, uint i) {
  return i == 0 ? x.low.xy : i == 1 ? x.low.zw : i == 2 ? x.high.xy : x.high.zw;
}
// Elements 2i + odd of two octets.
template <class T>
METAL_FUNC vec<T, 2> across(Octet<T> x, Octet<T> y, uint i, bool odd) {
  vec<T, 2> p = pair_of(x, i), q = pair_of(y, i);
  return odd ? vec<T, 2>(p.y, q.y) : vec<T, 2>(p.x, q.x);
}

// 32 of k.
template <int TILES, class T>
METAL_FUNC void multiply(thread simdgroup_matrix<float, 8, 8> (&sum)[TILES], const thread OctetBits<T> (&bits)[TILES], Octet<T> x0,
                         Octet<T> x1, bool odd) {
  Octet<T> y[TILES];
#pragma clang loop unroll(full)
  for (uint t = 0; t < TILES; t++) y[t] = octet_of(bits[t]);
#pragma clang loop unroll(full)
  for (uint i = 0; i < 4; i++) {
    simdgroup_matrix<T, 8, 8> x;
    put(x, across(x0, x1, i, odd));
#pragma clang loop unroll(full)
    for (uint t = 0; t < TILES; t++) {
      simdgroup_matrix<T, 8, 8> w;
      put(w, pair_of(y[t], i));
      simdgroup_multiply_accumulate(sum[t], w, x, sum[t]);
    }
  }
}

// Offset of a lane's dth load in a window, from its first element.
template <bool PAIRS>
METAL_FUNC uint offset_of_load(uint d) {
  return PAIRS ? d / 2 * 64 + d % 2 * 8 : 32 * d;
}

template <int TILES, int SPLIT, int TG>
struct Shared {
  float2 partial[SPLIT > 1 ? TG / 32 / SPLIT : 1][SPLIT][1][TILES][32];
  float places[TG / 32][64];
};

// What a threadgroup does. Of two MATRICES, which end in swiglu, it has the same columns, and each second simdgroup has the second's.
template <int MATRICES, int TILES, int SPLIT, int DEPTH, int TG, class T>
METAL_FUNC void multiply_group(const device T* A, const device T* const thread* B, const device T* const thread* bias, device T* D,
                               const device T* C, constant MatmulParams* params, uint3 group, uint simdgroup, uint lane,
                               threadgroup Shared<TILES, SPLIT, TG>& shared) {
  constexpr bool PAIRS = DEPTH % 2 == 0 && sizeof(T) == 2;
  constexpr uint SETS = TG / 32 / SPLIT, EACH = PAIRS ? 16 : 8;  // neighbours of a lane
  static_assert(TG / 32 % SPLIT == 0 && SETS > 0 && SPLIT % MATRICES == 0, "whole sets of SPLIT simdgroups, for each matrix as many");
  uint set = simdgroup / SPLIT, share = simdgroup % SPLIT;
  constant MatmulParams& p = *params;
  bool has_first = MATRICES == 1 || share % 2 == 0;
  constant MatmulParams& p_of_b = params[has_first ? 0 : 1];
  const device T* from_b = (has_first ? B[0] : B[MATRICES - 1]) + group.z * p_of_b.stride_b;
  Place place = place_of(shared.places[simdgroup], lane);
  uint row = place.row, pair = place.column / 2;
  uint first = (group.x * SETS + set) * 8 * TILES, last = p.n - 1, row0 = group.y * 8;
  const device T* a = A + group.z * p.stride_a;
  const device T* a0 = a + min(row0 + 2 * pair, p.m - 1) * p.lda;
  const device T* a1 = a + min(row0 + 2 * pair + 1, p.m - 1) * p.lda;
  const device T* b[TILES];
#pragma clang loop unroll(full)
  for (uint t = 0; t < TILES; t++) b[t] = from_b + min(first + 8 * t + row, last) * p_of_b.ldb;
  uint slice = slice_of<SPLIT / MATRICES, 32>(p.k), begin = min(share / MATRICES * slice, p.k), end = min(begin + slice, p.k);

  Tiles<1, MATRICES> mine = {first + row, row0 + 2 * pair, group.z, share, lane};
  float added[MATRICES * TILES];
  mine.load_bias(bias, p, added);
  simdgroup_matrix<float, 8, 8> sum[TILES];
#pragma clang loop unroll(full)
  for (uint t = 0; t < TILES; t++) sum[t] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  bool octets = a_in_vectors(p, 8) && b_in_vectors(p_of_b, 8);
  uint k = begin;
  if (octets && k + 32 * DEPTH <= end) {
    const device T* x0 = a0 + begin + EACH * (row / 2);
    const device T* x1 = a1 + begin + EACH * (row / 2);
    const device T* from[TILES];
#pragma clang loop unroll(full)
    for (uint t = 0; t < TILES; t++) from[t] = b[t] + begin + EACH * pair;
    OctetBits<T> y[DEPTH][TILES];
#pragma clang loop unroll(full)
    for (uint d = 0; d < DEPTH; d++) {
#pragma clang loop unroll(full)
      for (uint t = 0; t < TILES; t++) y[d][t] = load_bits(from[t] + offset_of_load<PAIRS>(d));
    }
    if (k + 128 * DEPTH > end) let_next_begin(false);
    wait_for_operands();
    simdgroup_barrier(mem_flags::mem_threadgroup);  // else a compiler that saves registers moves loads behind the first work
    // What is used up makes room for what is DEPTH further: always as much in flight.
    for (; k + 64 * DEPTH <= end; k += 32 * DEPTH) {
#pragma clang loop unroll(full)
      for (uint t = 0; t < TILES; t++) from[t] += 32 * DEPTH;
#pragma clang loop unroll(full)
      for (uint d = 0; d < DEPTH; d++) {
        multiply(sum, y[d], load_octet(x0 + offset_of_load<PAIRS>(d)), load_octet(x1 + offset_of_load<PAIRS>(d)), row % 2 == 1);
#pragma clang loop unroll(full)
        for (uint t = 0; t < TILES; t++) y[d][t] = load_bits(from[t] + offset_of_load<PAIRS>(d));
      }
      x0 += 32 * DEPTH, x1 += 32 * DEPTH;
    }
    let_next_begin();
#pragma clang loop unroll(full)
    for (uint d = 0; d < DEPTH; d++)
      multiply(sum, y[d], load_octet(x0 + offset_of_load<PAIRS>(d)), load_octet(x1 + offset_of_load<PAIRS>(d)), row % 2 == 1);
    k += 32 * DEPTH;
  } else {
    let_next_begin(false);
  }
  for (; k < end; k += 32) {
    OctetBits<T> y[TILES];
    uint at = k + 8 * pair, left = at < end ? end - at : 0;
#pragma clang loop unroll(full)
    for (uint t = 0; t < TILES; t++) y[t] = octets && left >= 8 ? load_bits(b[t] + at) : bits_of(load_some(b[t] + at, left));
    if (k == begin) wait_for_operands();
    at = k + 8 * (row / 2), left = at < end ? end - at : 0;
    Octet<T> x0 = octets && left >= 8 ? load_octet(a0 + at) : load_some(a0 + at, left);
    Octet<T> x1 = octets && left >= 8 ? load_octet(a1 + at) : load_some(a1 + at, left);
    multiply(sum, y, x0, x1, row % 2 == 1);
  }
  float2 total[1][TILES];
#pragma clang loop unroll(full)
  for (uint t = 0; t < TILES; t++) total[0][t] = float2(sum[t].thread_elements()[0], sum[t].thread_elements()[1]);
  wait_for_operands();
  mine.store(total, added, shared.partial[SPLIT > 1 ? set : 0], D, C, p);
}

template <class T, int TILES, int SPLIT, int DEPTH, int TG>
[[kernel, max_total_threads_per_threadgroup(TG)]] void simd_tiles(
    const device T* A [[buffer(0)]], const device T* B [[buffer(1)]], device T* D [[buffer(2)]], const device T* C [[buffer(3)]],
    const device T* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]], uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup Shared<TILES, SPLIT, TG> shared;
  multiply_group<1, TILES, SPLIT, DEPTH, TG>(A, &B, &bias, D, C, &p, group, simdgroup, lane, shared);
}

// Two or three matrices B of one A. Threadgroups along n are those of the first, then the second's, then the third's; of SWIGLU each has
// the same columns of two. A stands in for C, which a fused call has not: has_c is 0.
template <class T, int TILES, int SPLIT, int DEPTH, int TG, bool SWIGLU>
[[kernel, max_total_threads_per_threadgroup(TG)]] void fused_tiles(
    const device T* A [[buffer(0)]], const device T* B0 [[buffer(1)]], device T* D0 [[buffer(2)]], const device T* bias0 [[buffer(4)]],
    constant FusedParams& params [[buffer(5)]], const device T* B1 [[buffer(8)]], device T* D1 [[buffer(9)]],
    const device T* bias1 [[buffer(10)]], const device T* B2 [[buffer(13)]], device T* D2 [[buffer(14)]],
    const device T* bias2 [[buffer(15)]], uint3 group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int MATRICES = SWIGLU ? 2 : 1;  // of a threadgroup
  threadgroup Shared<TILES, SPLIT, TG> shared;
  uint i = SWIGLU ? 0 : matrix_of(group, params, TG / 32 / SPLIT * 8 * TILES);
  const device T* b[2] = {i == 0 ? B0 : i == 1 ? B1 : B2, B1};
  const device T* bias[2] = {i == 0 ? bias0 : i == 1 ? bias1 : bias2, bias1};
  multiply_group<MATRICES, TILES, SPLIT, DEPTH, TG>(A, b, bias,
                                                    i == 0   ? D0
                                                    : i == 1 ? D1
                                                             : D2,
                                                    A, &params.of[i], group, simdgroup, lane, shared);
}
