// gemv_nt, gemv_nt_mma and gemv_nt_thread: B given as rows of weights, dense or quantized, few rows of A. LANES lanes share a column's K, a
// block of 32 weights (dense: 8) each at a time, and own COLS columns. SPLIT simdgroups share K where n alone gives too few.
//
// `Storage` is how B is stored (Weights in include/weights.h), `Way` how threads share it (Lanes in include/lanes.h). WIDE: for the CPU, a
// thread walks its columns alone (cpu/blocks.h).
//
// One output of gemv_nt/l4_d7_tg64, q8_0, k = 896: its four lanes load seven blocks of 32 each, all before the first use and before they
// wait for A. Of a block, integers become floats, 32 multiply-adds give its sum, which is scaled once. The lanes' four sums meet by
// shuffles, and one lane stores.
//
// Per output, for m = 1: the bytes of its weights, once (k, and k / 16 of scales, in q8_0; k / 2 and k / 16 in q4_0), 2 * k / COLS of A
// from the cache; COLS * DEPTH blocks in flight a lane, of 32 bytes or 16. At k = 896 a row is 28 blocks, 7 each of 4 lanes (dense: 112
// loads, 7 each of 16): no lane is idle and DEPTH = 7 has all of a row in flight. Canonical blocks lie column by column. On Apple's GPUs
// it should be bound by memory, q4_0 nearly by both (docs/lab/apple_points.md).
#include <metal_stdlib>
using namespace metal;  // what follows names its types

#include "include/column_sums.h"
#include "include/epilogue.h"

// Whether rows of A and B begin on eight elements, of a thread that walks alone on four, of quantized weights on 16 bytes.
template <bool WIDE, class Storage>
METAL_FUNC bool in_vectors(constant MatmulParams& p) {
  return a_in_vectors(p, WIDE ? 4 : 8) && b_in_vectors(p, Storage::Pack::ID != DENSE ? 16 : WIDE ? 4 : 8);
}

// What a threadgroup does.
template <bool WIDE, class Storage, class Way, int ROWS, class T>
METAL_FUNC void multiply(const device T* A, WeightsAt w, Output<T> to, constant MatmulParams& p, uint3 group, Thread me,
                         threadgroup Shared<typename Storage::Pack, Way, ROWS>& shared) {
  constexpr uint LANES = Way::LANES, COLS = Way::COLS, ACROSS = Way::ACROSS;
  uint row0 = group.y * ROWS, rows = min(uint(ROWS), p.m - row0), first = Way::first_column(group.x, me);
  if (WIDE && first >= p.n) return;  // no barrier follows
  float sum[ROWS][COLS], added[COLS];
#pragma clang loop unroll(full)
  for (uint c = 0; c < COLS; c++) {
    uint column = first + c * ACROSS;
    bool is_own = me.simdgroup % Way::SPLIT == 0 && me.lane % LANES == c % LANES && column < p.n;
    added[c] = is_own ? bias_of(to.bias, p, column) : 0.0f;
  }
  const WeightsAt only[1] = {w};
  RowsOfA<T> a = {A + group.z * p.stride_a + row0 * p.lda, p.lda, rows};
  if (!add_up<WIDE, Storage, Way>(a, only, first, me, shared, sum)) return;
#pragma clang loop unroll(full)
  for (uint r = 0; r < ROWS; r++) {
    if (WIDE && r >= rows) break;
#pragma clang loop unroll(full)
    for (uint c = 0; c < COLS; c++) {  // constant indices: the sums stay in registers
      uint column = first + c * ACROSS;
      if (me.lane % LANES == c % LANES && column < p.n && r < rows)
        store_sum(to.D, to.C, p, group.z, row0 + r, column, sum[r][c], added[c]);
    }
  }
}

// silu(A B0 + bias0) * (A B1 + bias1): a lane has its columns of both matrices by turns.
template <bool WIDE, class Storage, class Way, int ROWS, class T>
METAL_FUNC void multiply_swiglu(const device T* A, const thread WeightsAt (&w)[2], Output<T> to, const device T* bias1,
                                constant MatmulParams& p, uint3 group, Thread me,
                                threadgroup Shared<typename Storage::Pack, Way, ROWS>& shared) {
  constexpr uint LANES = Way::LANES, COLS = Way::COLS, ACROSS = Way::ACROSS;
  uint row0 = group.y * ROWS, rows = min(uint(ROWS), p.m - row0), first = Way::template first_column<2>(group.x, me);
  if (WIDE && first >= p.n) return;
  float sum[ROWS][COLS], added[COLS];
#pragma clang loop unroll(full)
  for (uint c = 0; c < COLS; c++)
    added[c] = p.has_bias ? float((c % 2 == 0 ? to.bias : bias1)[min(first + c / 2 * ACROSS, p.n - 1)]) : 0.0f;
  RowsOfA<T> a = {A + group.z * p.stride_a + row0 * p.lda, p.lda, rows};
  if (!add_up<WIDE, Storage, Way>(a, w, first, me, shared, sum)) return;
#pragma clang loop unroll(full)
  for (uint r = 0; r < ROWS; r++) {
#pragma clang loop unroll(full)
    for (uint c = 0; c < COLS; c += 2) {
      uint column = first + c / 2 * ACROSS;
      if (me.lane % LANES == c / 2 % LANES && column < p.n && r < rows)
        store_swiglu(to.D, p, group.z, row0 + r, column, sum[r][c] + added[c], sum[r][c + 1] + added[c + 1]);
    }
  }
}

template <class T, class Storage, class Way, int ROWS, bool WIDE>
[[kernel, max_total_threads_per_threadgroup(int(Way::THREADS))]] void weight_columns(
    const device T* A [[buffer(0)]], const device uchar* values [[buffer(1)]], device T* D [[buffer(2)]], const device T* C [[buffer(3)]],
    const device T* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]], const device uchar* scales [[buffer(6)]],
    const device uchar* biases [[buffer(7)]], uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup Shared<typename Storage::Pack, Way, ROWS> shared;
  WeightsAt w = {values, scales, biases, p.n, p.k, p.ldb, p.group_shift, p.low_byte, in_vectors<WIDE, Storage>(p)};
  multiply<WIDE, Storage, Way>(A, w, Output<T>{D, C, bias}, p, group, Thread{simdgroup, lane}, shared);
}

template <class T, class Way, int ROWS, bool WIDE>
[[kernel, max_total_threads_per_threadgroup(int(Way::THREADS))]] void dense_columns(
    const device T* A [[buffer(0)]], const device T* B [[buffer(1)]], device T* D [[buffer(2)]], const device T* C [[buffer(3)]],
    const device T* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]], uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  typedef Weights<T, DENSE, false> Storage;
  threadgroup Shared<typename Storage::Pack, Way, ROWS> shared;
  const device uchar* values = reinterpret_cast<const device uchar*>(B + group.z * p.stride_b);
  WeightsAt w = {values, values, values, p.n, p.k, p.ldb, 0, p.low_byte, in_vectors<WIDE, Storage>(p)};
  multiply<WIDE, Storage, Way>(A, w, Output<T>{D, C, bias}, p, group, Thread{simdgroup, lane}, shared);
}

// Two or three matrices B of one A. Threadgroups along n are those of the first, then the second's, then the third's; of SWIGLU each has
// the same columns of two.
template <class T, class Storage, class Way, int ROWS, bool WIDE, bool SWIGLU>
[[kernel, max_total_threads_per_threadgroup(int(Way::THREADS))]] void fused_columns(
    const device T* A [[buffer(0)]], const device uchar* values0 [[buffer(1)]], device T* D0 [[buffer(2)]],
    const device T* bias0 [[buffer(4)]], constant FusedParams& params [[buffer(5)]], const device uchar* scales0 [[buffer(6)]],
    const device uchar* biases0 [[buffer(7)]], const device uchar* values1 [[buffer(8)]], device T* D1 [[buffer(9)]],
    const device T* bias1 [[buffer(10)]], const device uchar* scales1 [[buffer(11)]], const device uchar* biases1 [[buffer(12)]],
    const device uchar* values2 [[buffer(13)]], device T* D2 [[buffer(14)]], const device T* bias2 [[buffer(15)]],
    const device uchar* scales2 [[buffer(16)]], const device uchar* biases2 [[buffer(17)]], uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  constexpr int OWN = SWIGLU ? 2 * Way::COLS : Way::COLS;  // of swiglu a lane has its columns of both
  typedef Lanes<Way::LANES, OWN, Way::SPLIT, Way::DEPTH, Way::THREADS, Way::STAGED != 0, Way::MMA != 0> Own;
  threadgroup Shared<typename Storage::Pack, Own, ROWS> shared;
  constant MatmulParams& p0 = params.of[0];
  constant MatmulParams& p1 = params.of[1];
  Thread me = {simdgroup, lane};
  if (SWIGLU) {
    const WeightsAt w[2] = {{values0, scales0, biases0, p0.n, p0.k, p0.ldb, p0.group_shift, p0.low_byte, in_vectors<WIDE, Storage>(p0)},
                            {values1, scales1, biases1, p1.n, p1.k, p1.ldb, p1.group_shift, p1.low_byte, in_vectors<WIDE, Storage>(p1)}};
    multiply_swiglu<WIDE, Storage, Own>(A, w, Output<T>{D0, A, bias0}, bias1, p0, group, me, shared);
    return;
  }
  uint i = matrix_of(group, params, Way::COLUMNS);
  constant MatmulParams& p = params.of[i];
  // A in place of C, which a fused call has not: has_c is 0.
  // clang-format off
  WeightsAt w = {i == 0 ? values0 : i == 1 ? values1 : values2, i == 0 ? scales0 : i == 1 ? scales1 : scales2,
                 i == 0 ? biases0 : i == 1 ? biases1 : biases2, p.n, p.k, p.ldb, p.group_shift, p.low_byte, in_vectors<WIDE, Storage>(p)};
  Output<T> to = {i == 0 ? D0 : i == 1 ? D1 : D2, A, i == 0 ? bias0 : i == 1 ? bias1 : bias2};
  // clang-format on
  multiply<WIDE, Storage, Own>(A, w, to, p, group, me, shared);
}

// The matrices of `experts` lie one behind another, as rows. Row i of D is a row of A by the matrix that ids[i] says; `each` rows of D have
// one row of A. NaN where there is no such matrix.
template <class T, class Storage, class Way, bool WIDE>
[[kernel, max_total_threads_per_threadgroup(int(Way::THREADS))]] void gathered_columns(
    const device T* A [[buffer(0)]], const device uchar* values [[buffer(1)]], device T* D [[buffer(2)]],
    const device int* ids [[buffer(3)]], constant MatmulParams& p [[buffer(5)]], const device uchar* scales [[buffer(6)]],
    const device uchar* biases [[buffer(7)]], constant uint& experts [[buffer(8)]], constant uint& each [[buffer(9)]],
    uint3 group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup Shared<typename Storage::Pack, Way, 1> shared;
  wait_for_operands();  // ids may have just been made
  uint row = group.y, expert = uint(ids[row]);
  if (expert >= experts) {
    uint begin = group.x * Way::COLUMNS, end = min(begin + Way::COLUMNS, p.n);
    for (uint c = begin + simdgroup * 32 + lane; c < end; c += Way::THREADS) D[row * p.ldd + c] = T(as_type<float>(0x7fc00000u));
    return;
  }
  Output<T> to = {D + row * p.ldd, A, A};
  WeightsAt w = {values, scales, biases, p.n, p.k, p.ldb, p.group_shift, p.low_byte, in_vectors<WIDE, Storage>(p)};
  multiply<WIDE, Storage, Way>(A + row / each * p.lda, Storage::behind(w, expert * p.n), to, p, uint3(group.x, 0, 0),
                               Thread{simdgroup, lane}, shared);
}
