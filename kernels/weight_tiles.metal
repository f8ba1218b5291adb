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

template <class T, class Storage, int ROWS, int TILES, int SPLIT, int DEPTH, int TG, bool MMA>
[[kernel, max_total_threads_per_threadgroup(TG)]] void weight_tiles(
    const device T* A [[buffer(0)]], const device uchar* values [[buffer(1)]], device T* D [[buffer(2)]], const device T* C [[buffer(3)]],
    const device T* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]], const device uchar* scales [[buffer(6)]],
    const device uchar* biases [[buffer(7)]], uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  constexpr int FORMAT = Storage::Pack::ID;
  typedef Eighth<FORMAT> Bits;
  constexpr uint SETS = TG / 32 / SPLIT, PER_BYTE = Storage::Pack::PER_BYTE;
  // A lane of MMA loads whole blocks, in fours. Of canonical ones a request has neighbours in memory anyway.
  constexpr bool IN_FOURS = MMA && DEPTH % 4 == 0 && !Storage::IS_CANONICAL;
  static_assert(TG / 32 % SPLIT == 0 && SETS > 0, "whole sets of SPLIT simdgroups");
  constexpr int BANDS = ROWS % 2 == 0 && TG * (2 * TILES + 1) * 8 <= 32 * 1024 ? 2 : 1;  // of `partial`, beside `numbers`
  threadgroup float2 partial[SETS][SPLIT][BANDS][TILES][32];
  threadgroup float numbers[TG / 32][64];
  WeightsAt b = {values, scales, biases, p.n, p.k, p.ldb, p.group_shift, p.low_byte};
  uint set = simdgroup / SPLIT, share = simdgroup % SPLIT;
  Place place = {lane / 4, lane % 4 * 2};  // of MMA, and of nobody else for certain
  if (!MMA) place = place_of(numbers[simdgroup], lane);
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
  uint slice = slice_of<SPLIT, MMA ? 128 : 32>(p.k), begin = min(share * slice, p.k), end = min(begin + slice, p.k);
  uint column[TILES];
  float2 total[ROWS][TILES];
  Tiles<BANDS> mine = {first + row, row0 + 2 * pair, group.z, share, lane};
  float added[TILES];
  mine.load_bias(bias, p, added);
#pragma clang loop unroll(full)
  for (uint t = 0; t < TILES; t++) {
    column[t] = min(first + 8 * t + row, last);
#pragma clang loop unroll(full)
    for (uint r = 0; r < ROWS; r++) total[r][t] = float2(0.0f);
  }
  bool whole = a_in_vectors(p, 8) && b_in_vectors(p, 16);  // 16 bytes
  uint k = begin;
  if (whole && k + 32 * DEPTH <= end) {
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
      y[t] = whole && left >= 8 ? Bits::load(c.values) : Bits::some(c.values, (left + PER_BYTE - 1) / PER_BYTE);
      by[t] = Terms<FORMAT>::of(Storage::By::load(c));
    }
    if (k == begin) wait_for_operands();
    at = k + 8 * brought, left = at < end ? end - at : 0;
    Octet<T> x0[ROWS];
#pragma clang loop unroll(full)
    for (uint r = 0; r < ROWS; r++) x0[r] = whole && left >= 8 ? load_octet(from0[r] + at) : load_some(from0[r] + at, left);
    Octet<T> x1 = whole && left >= 8 ? load_octet(from1 + at) : load_some(from1 + at, left);
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
  mine.store(total, added, partial[set], D, C, p);
}
