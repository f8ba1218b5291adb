// B given as rows of quantized weights, operands of 16 bits, m from 2 on: the products of simd_tiles.metal, of integers that become half
// two at once, exactly and without a conversion (bfloat by one from there); the scale of a row and a block of 32 of k waits for the sum of
// its products.
//
// Where a weight is scale * q + bias, it is taken as include/eighth.h says of `zero_of`, with its bound.
//
// Per output: the bytes of its weights, once for all rows of A; DEPTH * TILES loads of 8 bytes (of 4 bits: 4) in flight a lane. Of integers
// on Apple's GPUs, where rates are one a cycle and lane: half of a mask, of an exclusive or and of a subtraction a weight and a quarter of
// a shift, where extracting and converting it is 5; for m = 1 weight_columns.metal, which is not bound by the products' latency, is faster.
//
// MMA: NVIDIA's tensor cores multiply 16 x 16 weights by 8 rows at once: a quarter of as many products as of 8 x 8. Then a simdgroup may
// have ROWS times eight rows of A, for which a weight is loaded and becomes a half once.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;  // what follows names its types

#include "include/lanes.h"
#include "include/next.h"
#include "include/place.h"
#include "include/tiles.h"
#include "include/wait.h"
#include "include/weight_products.h"

template <int ROWS, int TILES, int SPLIT, int TG, bool MMA>
struct Shared {
  enum : int { BANDS = ROWS % 2 == 0 && TG * (2 * TILES + 1) * 8 <= 32 * 1024 ? 2 : 1 };  // of `partial`, beside `numbers`
  float2 partial[SPLIT > 1 ? TG / 32 / SPLIT : 1][SPLIT][BANDS][TILES][32];
  float numbers[MMA ? 1 : TG / 32][64];
};

// What a threadgroup does. Of two MATRICES, which end in swiglu, it has the same columns, and each second simdgroup has the second's; p is
// of the first.
template <int MATRICES, class Storage, int ROWS, int TILES, int SPLIT, int DEPTH, int TG, bool MMA, class T>
METAL_FUNC void multiply_group(const device T* A, const thread WeightsAt* B, const device T* const thread* bias, device T* D,
                               const device T* C, constant MatmulParams& p, uint3 group, uint simdgroup, uint lane,
                               threadgroup Shared<ROWS, TILES, SPLIT, TG, MMA>& shared) {
  constexpr int FORMAT = Storage::Pack::ID;
  typedef Eighth<FORMAT> Bits;
  constexpr uint SETS = TG / 32 / SPLIT, PER_BYTE = Storage::Pack::PER_BYTE;
  // A lane of MMA loads whole blocks, in fours. Of canonical ones a request has neighbours in memory anyway.
  constexpr bool IN_FOURS = MMA && DEPTH % 4 == 0 && !Storage::IS_CANONICAL;
  static_assert(TG / 32 % SPLIT == 0 && SETS > 0 && SPLIT % MATRICES == 0, "whole sets of SPLIT simdgroups, for each matrix as many");
  constexpr int BANDS = Shared<ROWS, TILES, SPLIT, TG, MMA>::BANDS;
  uint set = simdgroup / SPLIT, share = simdgroup % SPLIT;
  WeightsAt b = MATRICES == 1 || share % 2 == 0 ? B[0] : B[MATRICES - 1];
  Place place = {lane / 4, lane % 4 * 2};  // of MMA, and of nobody else for certain
  if (!MMA) place = place_of(shared.numbers[simdgroup], lane);
  uint row = place.row, pair = place.column / 2, brought = MMA ? pair : row / 2, low = low_pair<FORMAT>(p.low_byte);
  uint first = (group.x * SETS + set) * 8 * TILES, last = p.n - 1, row0 = group.y * 8 * ROWS;
  const device T* a = A + group.z * p.stride_a;
  const device T* a0 = a + min(row0 + 2 * pair, p.m - 1) * p.lda;
  const device T* a1 = a + min(row0 + 2 * pair + 1, p.m - 1) * p.lda;
  const device T* from0[ROWS];
#pragma clang loop unroll(full)
  for (uint r = 0; r < ROWS; r++) from0[r] = MMA ? a + min(row0 + 8 * r + row, p.m - 1) * p.lda : a0;
  const device T* from1 = MMA ? from0[0] : a1;
  // Of MMA shares are of four blocks: what is left of a turn is loaded a block at a time. The same for any DEPTH, which changes no bits so.
  uint slice = slice_of<SPLIT / MATRICES, MMA ? 128 : 32>(p.k), begin = min(share / MATRICES * slice, p.k), end = min(begin + slice, p.k);
  uint column[TILES];
  float2 total[ROWS][TILES];
  Tiles<BANDS, MATRICES> mine = {first + row, row0 + 2 * pair, group.z, share, lane};
  float added[MATRICES * TILES];
  mine.load_bias(bias, p, added);
#pragma clang loop unroll(full)
  for (uint t = 0; t < TILES; t++) {
    column[t] = min(first + 8 * t + row, last);
#pragma clang loop unroll(full)
    for (uint r = 0; r < ROWS; r++) total[r][t] = float2(0.0f);
  }
  uint k = begin;
  if (b.whole && k + 32 * DEPTH <= end) {
    const device T* x1 = from1 + begin + 8 * brought;
    const device T* own[ROWS];
#pragma clang loop unroll(full)
    for (uint r = 0; r < ROWS; r++) own[r] = from0[r] + begin + 8 * brought;
    TurnWeights<Storage, TILES, DEPTH, IN_FOURS> weights_of;
    weights_of.start(b, column, k, pair);
    // Terms cost more than a shuffle where they have a bias, or are products.
    TurnScales<Storage, TILES, DEPTH, IN_FOURS || (MMA && (Storage::Pack::HAS_BIAS || Storage::Pack::IS_K))> scales_of;
    scales_of.start(b, first + row, k, lane);
    if (k + 128 * DEPTH > end) let_next_begin(false);
    wait_for_operands();
    simdgroup_barrier(mem_flags::mem_threadgroup);  // else a compiler that saves registers moves loads behind the first work
    for (; k + 64 * DEPTH <= end; k += 32 * DEPTH) {
      scales_of.template begin<true>(b, k);
      weights_of.begin(b);
#pragma clang loop unroll(full)
      for (uint d = 0; d < DEPTH; d++) {
        Octet<T> x0[ROWS];
        Bits y[TILES];
        Terms<FORMAT> by[TILES];
        load_rows(x0, own, 32 * d);
        weights_of.template take<true>(b, d, pair, y);
        scales_of.template take<true>(b, k, d, lane, by);
        multiply<MMA>(total, y, by, x0, load_octet(x1 + 32 * d), place, 2, low);
        weights_of.refill(b, d);
      }
      x1 += 32 * DEPTH;
#pragma clang loop unroll(full)
      for (uint r = 0; r < ROWS; r++) own[r] += 32 * DEPTH;
    }
    let_next_begin();
    scales_of.template begin<false>(b, k);
#pragma clang loop unroll(full)
    for (uint d = 0; d < DEPTH; d++) {
      Octet<T> x0[ROWS];
      Bits y[TILES];
      Terms<FORMAT> by[TILES];
      load_rows(x0, own, 32 * d);
      weights_of.template take<false>(b, d, pair, y);
      scales_of.template take<false>(b, k, d, lane, by);
      multiply<MMA>(total, y, by, x0, load_octet(x1 + 32 * d), place, 2, low);
    }
    k += 32 * DEPTH;
  } else {
    let_next_begin(false);
  }
  for (; k < end; k += 32) {
    Bits y[TILES];
    Terms<FORMAT> by[TILES];
    uint at = k + 8 * pair, left = at < end ? end - at : 0;
#pragma clang loop unroll(full)
    for (uint t = 0; t < TILES; t++) {
      Cursor c = Storage::at(b, column[t], k);
      c.values += Bits::BYTES * pair;
      y[t] = b.whole && left >= 8 ? Bits::load(c.values) : Bits::some(c.values, (left + PER_BYTE - 1) / PER_BYTE);
      by[t] = Terms<FORMAT>::of(Storage::By::load(c));
    }
    if (k == begin) wait_for_operands();
    at = k + 8 * brought, left = at < end ? end - at : 0;
    Octet<T> x0[ROWS];
#pragma clang loop unroll(full)
    for (uint r = 0; r < ROWS; r++) x0[r] = b.whole && left >= 8 ? load_octet(from0[r] + at) : load_some(from0[r] + at, left);
    Octet<T> x1 = b.whole && left >= 8 ? load_octet(from1 + at) : load_some(from1 + at, left);
    multiply<MMA>(total, y, by, x0, x1, place, end - k > 16 ? 2 : 1, low);
  }
  wait_for_operands();
  // Where a sum that waits for its scale overflows, or is not within the bound.
  if (Packing<FORMAT>::HAS_BIAS || !IsSmall<T>::VALUE) {
    bool sure = !Packing<FORMAT>::HAS_BIAS || p.k >= SURE;
#pragma clang loop unroll(full)
    for (uint r = 0; r < ROWS; r++) {
      const device T* a0 = a + min(row0 + 8 * r + 2 * pair, p.m - 1) * p.lda;
      const device T* a1 = a + min(row0 + 8 * r + 2 * pair + 1, p.m - 1) * p.lda;
#pragma clang loop unroll(full)
      for (uint t = 0; t < TILES; t++) {
        bool2 good = {sure && isfinite(total[r][t].x), sure && isfinite(total[r][t].y)};
        if (good.x && good.y) continue;
        float2 slowly = one_by_one<Storage>(b, column[t], a0, a1, begin, end);
        total[r][t] = float2(good.x ? total[r][t].x : slowly.x, good.y ? total[r][t].y : slowly.y);
      }
    }
  }
  mine.store(total, added, shared.partial[SPLIT > 1 ? set : 0], D, C, p);
}

// Whether rows of A begin on eight elements, and those of weights on 16 bytes.
METAL_FUNC bool in_vectors(constant MatmulParams& p) { return a_in_vectors(p, 8) && b_in_vectors(p, 16); }

template <class T, class Storage, int ROWS, int TILES, int SPLIT, int DEPTH, int TG, bool MMA>
[[kernel, max_total_threads_per_threadgroup(TG)]] void weight_tiles(
    const device T* A [[buffer(0)]], const device uchar* values [[buffer(1)]], device T* D [[buffer(2)]], const device T* C [[buffer(3)]],
    const device T* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]], const device uchar* scales [[buffer(6)]],
    const device uchar* biases [[buffer(7)]], uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup Shared<ROWS, TILES, SPLIT, TG, MMA> shared;
  WeightsAt b = {values, scales, biases, p.n, p.k, p.ldb, p.group_shift, p.low_byte, in_vectors(p)};
  multiply_group<1, Storage, ROWS, TILES, SPLIT, DEPTH, TG, MMA>(A, &b, &bias, D, C, p, group, simdgroup, lane, shared);
}

// Two or three matrices B of one A, as fused_tiles in simd_tiles.metal has them.
template <class T, class Storage, int ROWS, int TILES, int SPLIT, int DEPTH, int TG, bool MMA, bool SWIGLU>
[[kernel, max_total_threads_per_threadgroup(TG)]] void fused_weight_tiles(
    const device T* A [[buffer(0)]], const device uchar* values0 [[buffer(1)]], device T* D0 [[buffer(2)]],
    const device T* bias0 [[buffer(4)]], constant FusedParams& params [[buffer(5)]], const device uchar* scales0 [[buffer(6)]],
    const device uchar* biases0 [[buffer(7)]], const device uchar* values1 [[buffer(8)]], device T* D1 [[buffer(9)]],
    const device T* bias1 [[buffer(10)]], const device uchar* scales1 [[buffer(11)]], const device uchar* biases1 [[buffer(12)]],
    const device uchar* values2 [[buffer(13)]], device T* D2 [[buffer(14)]], const device T* bias2 [[buffer(15)]],
    const device uchar* scales2 [[buffer(16)]], const device uchar* biases2 [[buffer(17)]], uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  constexpr int MATRICES = SWIGLU ? 2 : 1;  // of a threadgroup
  threadgroup Shared<ROWS, TILES, SPLIT, TG, MMA> shared;
  uint i = SWIGLU ? 0 : matrix_of(group, params, TG / 32 / SPLIT * 8 * TILES);
  constant MatmulParams& p = params.of[i];
  constant MatmulParams& p1 = params.of[1];
  const WeightsAt b[2] = {{i == 0   ? values0
                           : i == 1 ? values1
                                    : values2,
                           i == 0   ? scales0
                           : i == 1 ? scales1
                                    : scales2,
                           i == 0   ? biases0
                           : i == 1 ? biases1
                                    : biases2,
                           p.n, p.k, p.ldb, p.group_shift, p.low_byte, in_vectors(p)},
                          {values1, scales1, biases1, p1.n, p1.k, p1.ldb, p1.group_shift, p1.low_byte, in_vectors(p1)}};
  const device T* bias[2] = {i == 0 ? bias0 : i == 1 ? bias1 : bias2, bias1};
  multiply_group<MATRICES, Storage, ROWS, TILES, SPLIT, DEPTH, TG, MMA>(A, b, bias,
                                                                        i == 0   ? D0
                                                                        : i == 1 ? D1
                                                                                 : D2,
                                                                        A, p, group, simdgroup, lane, shared);
}
