// B given as rows of weights, dense or quantized, few rows of A: LANES lanes share a column's K, a block of 32 weights (dense: 8) a step,
// and own COLS columns, 32 / LANES apart; a simdgroup so many times LANES / 32 fewer columns. SPLIT simdgroups share K where n alone gives
// too few.
//
// Per output, for m = 1: the bytes of its weights, once (k, and k / 16 of scales, in q8_0; k / 2 and k / 16 in q4_0), 2 * k / COLS of A
// from the cache; COLS * DEPTH blocks in flight a lane, of 32 bytes or 16. At k = 896 a row is 28 blocks, 7 each of 4 lanes (dense: 112
// loads, 7 each of 16): no lane is idle and DEPTH = 7 has all of a row in flight. Canonical blocks lie column by column. For Apple's GPUs,
// where rates are one a cycle and lane: an integer costs a mask, an exclusive or, a subtraction and a multiply-add (4, against 1 and 4 for
// extracting and converting it, and the multiply-add), 1 / 8 more a piece for shifts and scales; 9728 x 896 in q8_0 are 9.3 MB, 0.065 ms at
// the 142 GB/s that the seeds' machine sustained, and 8.7 million of them are 0.03 ms of a GPU of 10 cores (1280 lanes at 1.3 GHz): it
// should be bound by memory, q4_0 nearly by both.
#include <metal_stdlib>
using namespace metal;  // what follows names its types

#include "include/epilogue.h"
#include "include/prefetch.h"
#include "include/tensor.h"
#include "include/wait.h"
#include "include/weights.h"

// Adds DEPTH steps of LANES pieces, this lane's first at k + COUNT * lane. GUARDED: those that begin at `whole` or behind it count for
// nothing. Of several MATRICES each has its columns by turns. STAGED: A comes from threadgroup memory, where WORKERS threads put it while
// the weights are on their way. MMA: NVIDIA's tensor cores multiply.
template <class T, class From, int FORMAT, int MATRICES, int ROWS, int LANES, int COLS, int DEPTH, uint WORKERS, bool STAGED, bool MMA,
          bool GUARDED>
METAL_FUNC void add_steps(const device T* a, uint lda, const thread WeightsAt (&w)[MATRICES], const thread uint (&column)[COLS], uint rows,
                          uint k, uint whole, uint lane, bool is_first, threadgroup float4* staged, uint worker,
                          thread float4 (&sums)[ROWS][COLS], thread bool& exact) {
  constexpr uint COUNT = Packing<FORMAT>::COUNT, STEP = COUNT * LANES;
  constexpr bool SCALED = Packing<FORMAT>::SCALED, LATE = SCALED && ROWS == 1 && IsSmall<T>::VALUE;
  static_assert(!STAGED || ROWS == 1, "one row of A is staged");
  static_assert(!MMA || (STAGED && IsSmall<T>::VALUE && LANES == 4), "for tensor cores A is staged, and four lanes share a column");
  uint own = k + COUNT * lane;
  typename From::Piece pieces[DEPTH][COLS];  // all in flight at once
#pragma clang loop unroll(full)
  for (uint c = 0; c < COLS; c++) {
    Cursor first = From::at(w[c % MATRICES], column[c], GUARDED ? min(own, w[0].k - 1) : own);
#pragma clang loop unroll(full)
    for (uint d = 0; d < DEPTH; d++) {
      if (!GUARDED || own + STEP * d < whole)
        pieces[d][c] = From::load(From::template moved<LANES>(w[c % MATRICES], first, own, d));
      else
        pieces[d][c] = From::nothing();
    }
  }
  if (is_first) wait_for_operands();
  if (STAGED) {
    constexpr uint TURNS = (STEP * DEPTH - 1) / (8 * WORKERS) + 1;
    OctetBits<T> x[TURNS];
#pragma clang loop unroll(full)
    for (uint j = 0; j < TURNS; j++) {
      uint i = 8 * (WORKERS * j + worker);
      x[j] = bits_of(Octet<T>{vec<T, 4>(T(0.0f)), vec<T, 4>(T(0.0f))});
      if (i < STEP * DEPTH && (!GUARDED || k + i < whole)) x[j] = load_bits(a + k + i);
    }
#pragma clang loop unroll(full)
    for (uint j = 0; j < TURNS; j++) {
      uint i = 8 * (WORKERS * j + worker);
      if (i >= STEP * DEPTH) continue;
      if (MMA) {
        TensorCores<MMA>::template put<FORMAT>(staged, i, x[j]);
        continue;
      }
      Octet<T> eight = octet_of(x[j]);
      staged[staged_at(i)] = float4(eight.low);
      staged[staged_at(i) + 1] = float4(eight.high);
    }
    TensorCores<MMA>::put_zeros(staged, LANES * DEPTH, worker);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  } else if (LANES > 1) {
    simdgroup_barrier(mem_flags::mem_threadgroup);  // else a compiler that saves registers moves the loads behind the work on the first
  }
  if (MMA) {
    TensorCores<MMA>::template add<FORMAT>(pieces, staged, worker % 32, lane, low_pair<FORMAT>(w[0].low_byte), sums[0]);
    return;
  }
#pragma clang loop unroll(full)
  for (uint d = 0; d < DEPTH; d++) {
    bool there = !GUARDED || own + STEP * d < whole;
    float4 part[COLS];  // of one row: LATE, the scale is for all of a piece. Of more rows it costs less on the weights.
    Factors by[COLS];
#pragma clang loop unroll(full)
    for (uint c = 0; c < COLS; c++) {
      part[c] = float4(0.0f);
      by[c] = From::factors(pieces[d][c], exact);
    }
#pragma clang loop unroll(full)
    for (uint i = 0; i < COUNT / 8; i++) {
      Eight y[COLS];
#pragma clang loop unroll(full)
      for (uint c = 0; c < COLS; c++) {
        y[c] = From::eight(pieces[d][c], by[c], i, w[0].low_byte);
        if (SCALED && !LATE) {
          y[c].low *= by[c].scale;
          y[c].high *= by[c].scale;
        }
      }
#pragma clang loop unroll(full)
      for (uint r = 0; r < ROWS; r++) {
        if (ROWS == 1 || r < rows) {
          Eight x = {float4(0.0f), float4(0.0f)};
          if (STAGED) {
            uint from = staged_at(COUNT * lane + STEP * d + 8 * i);
            x = {staged[from], staged[from + 1]};
          } else if (there) {
            Octet<T> loaded = load_octet(a + r * lda + own + STEP * d + 8 * i);
            x = {float4(loaded.low), float4(loaded.high)};
          }
#pragma clang loop unroll(full)
          for (uint c = 0; c < COLS; c++) {
            if (ROWS == 1) {
              part[c] = fma(x.low, y[c].low, part[c]);
              part[c] = fma(x.high, y[c].high, part[c]);
            } else {
              sums[r][c] = fma(x.low, y[c].low, sums[r][c]);
              sums[r][c] = fma(x.high, y[c].high, sums[r][c]);
            }
          }
        }
      }
    }
    if (ROWS == 1) {
#pragma clang loop unroll(full)
      for (uint c = 0; c < COLS; c++) sums[0][c] = LATE ? fma(float4(by[c].scale), part[c], sums[0][c]) : sums[0][c] + part[c];
    }
  }
}

// Weights k, k + step and so on before `end`, wherever they stand.
template <class From, class T, int MATRICES, int ROWS, int COLS>
METAL_FUNC void add_one_by_one(const device T* a, uint lda, const thread WeightsAt (&w)[MATRICES], const thread uint (&column)[COLS],
                               uint rows, uint k, uint end, uint step, thread float4 (&sums)[ROWS][COLS]) {
#pragma clang loop unroll(disable)
  for (; k < end; k += step) {
#pragma clang loop unroll(full)
    for (uint c = 0; c < COLS; c++) {
      float y = From::one(w[c % MATRICES], column[c], k);
#pragma clang loop unroll(full)
      for (uint r = 0; r < ROWS; r++)
        if (ROWS == 1 || r < rows) sums[r][c].x += float(a[r * lda + k]) * y;
    }
  }
}

// Threadgroup memory of `multiply`.
template <int FORMAT, int ROWS, int LANES, int COLS, int SPLIT, int DEPTH, int TG, bool STAGED>
struct Shared {
  float4 staged[STAGED ? SPLIT : 1][STAGED ? (Packing<FORMAT>::COUNT * LANES * DEPTH + 31) / 32 * PITCH : 1];
  float partial[SPLIT > 1 ? TG / 32 : 1][ROWS][32 / LANES * COLS];
};

// For a device that runs one thread at a time, wide: a thread walks COLS columns, block by block, in loops that its compiler makes vectors
// of; that over the columns is left alone, for clang would otherwise mix what of several columns is alike.
template <class T, class From, int FORMAT, bool CANONICAL, int MATRICES, int ROWS, int COLS, bool WHOLE>
METAL_FUNC void add_blocks(const device T* a, const thread WeightsAt (&w)[MATRICES], const thread uint (&column)[COLS], uint begin,
                           uint whole, thread float4 (&sums)[ROWS][COLS]) {
  constexpr bool PAIRS = Packing<FORMAT>::BITS == 4, LATE = Packing<FORMAT>::SCALED && IsSmall<T>::VALUE;
  constexpr uint PIECES = 32 / Packing<FORMAT>::COUNT;
  float total[COLS][16];
  Cursor first[COLS];
#pragma clang loop unroll(full)
  for (uint c = 0; c < COLS; c++) {
    first[c] = From::at(w[c % MATRICES], column[c], begin);
    for (uint i = 0; i < 16; i++) total[c][i] = 0.0f;
  }
  uint next =
      uint(From::at(w[0], 1, 0).values - From::at(w[0], 0, 0).values) * (COLS / MATRICES);  // bytes to the rows of the thread COLS further
  for (uint k = begin; k < whole; k += 32) {
    float row[2][16], x[2][16];
    sixteen<WHOLE>(a + k, row[0]);
    sixteen<WHOLE>(a + k + 16, row[1]);
    for (uint i = 0; i < 16; i++) {
      x[0][i] = PAIRS ? row[i / 8][2 * i % 16] : row[0][i];
      x[1][i] = PAIRS ? row[i / 8][2 * i % 16 + 1] : row[1][i];
    }
    for (uint c = 0; c < COLS; c++) {
      uint step = (k - begin) / 32 * PIECES;
      Cursor at = From::template moved<1>(w[c % MATRICES], first[c], begin, step);
      prefetch(at.values + next, 1);
      float y[2][16], part[16];
      From::template half_block<WHOLE>(at, 0, y[0]);
      From::template half_block<WHOLE>(at, 1, y[1]);
      float scale = From::scale(at);
      if (Packing<FORMAT>::HAS_BIAS) {
        float bias = From::bias(at);
        for (uint i = 0; i < 16; i++) y[0][i] = fma(scale, y[0][i], bias), y[1][i] = fma(scale, y[1][i], bias);
      } else if (Packing<FORMAT>::SCALED && !LATE) {
        for (uint i = 0; i < 16; i++) y[0][i] *= scale, y[1][i] *= scale;
      }
      for (uint i = 0; i < 16; i++) part[i] = fma(x[1][i], y[1][i], x[0][i] * y[0][i]);
      for (uint i = 0; i < 16; i++) total[c][i] = LATE ? fma(scale, part[i], total[c][i]) : total[c][i] + part[i];
    }
  }
#pragma clang loop unroll(full)
  for (uint c = 0; c < COLS; c++)
    for (uint i = 0; i < 4; i++) sums[0][c] += float4(total[c][4 * i], total[c][4 * i + 1], total[c][4 * i + 2], total[c][4 * i + 3]);
}

// The sums of this lane's columns, `first` and each 32 / LANES further, of each of MATRICES; a threadgroup has TG / 32 / SPLIT sets of 32 /
// LANES * COLS. False for simdgroups whose sums are with others'. WHOLE: rows of A and of the weights begin on 16 bytes.
template <class T, int FORMAT, bool CANONICAL, bool WIDE, int MATRICES, int ROWS, int LANES, int COLS, int SPLIT, int DEPTH, int TG,
          bool STAGED, bool MMA, bool WHOLE>
METAL_FUNC bool add_up(const device T* a, const thread WeightsAt (&w)[MATRICES], constant MatmulParams& p, uint rows, uint first,
                       uint simdgroup, uint lane, threadgroup Shared<FORMAT, ROWS, LANES, COLS, SPLIT, DEPTH, TG, STAGED>& shared,
                       thread float (&sum)[ROWS][COLS]) {
  typedef Weights<T, FORMAT, CANONICAL> From;
  constexpr uint SETS = TG / 32 / SPLIT, ACROSS = 32 / LANES, COUNT = Packing<FORMAT>::COUNT, WINDOW = COUNT * LANES * DEPTH;
  static_assert(TG / 32 % SPLIT == 0 && SETS > 0, "whole sets of SPLIT simdgroups");
  static_assert(!MMA || !WIDE, "a thread that walks columns alone has no tensor cores");
  uint share = simdgroup % SPLIT, at = lane % LANES;
  uint slice = SPLIT == 1 ? p.k : ((p.k + SPLIT - 1) / SPLIT + 31) / 32 * 32;
  uint begin = min(share * slice, p.k), end = min(begin + slice, p.k);
  // Columns past the last read the last one, and are not stored: no test in the loop.
  uint column[COLS];
#pragma clang loop unroll(full)
  for (uint c = 0; c < COLS; c++) column[c] = min(first + c / MATRICES * ACROSS, w[0].n - 1);
  float4 sums[ROWS][COLS];
#pragma clang loop unroll(full)
  for (uint r = 0; r < ROWS; r++)
#pragma clang loop unroll(full)
    for (uint c = 0; c < COLS; c++) sums[r][c] = float4(0.0f);
  uint k = begin;
  if (WIDE) {
    uint whole = begin + (end - begin) / 32 * 32;
    wait_for_operands();
    add_blocks<T, From, FORMAT, CANONICAL, MATRICES, ROWS, COLS, WHOLE>(a, w, column, begin, whole, sums);
    k = whole;
  } else if (WHOLE && (!MMA || !Packing<FORMAT>::HAS_BIAS || p.k >= 2 * SURE)) {
    uint whole = begin + (end - begin) / COUNT * COUNT;
    uint last = min((SPLIT - 1) * slice, p.k), shortest = min(slice, (p.k - last) / COUNT * COUNT);
    threadgroup float4* staged = shared.staged[STAGED ? share : 0];
    uint worker = simdgroup / SPLIT * 32 + lane;
    // As many turns for all of a threadgroup, which meets in each where A is staged.
    uint done = 0;
    bool exact = true;
    for (; done + WINDOW <= shortest; done += WINDOW) {
      if (STAGED && done > 0) threadgroup_barrier(mem_flags::mem_threadgroup);
      add_steps<T, From, FORMAT, MATRICES, ROWS, LANES, COLS, DEPTH, SETS * 32, STAGED, MMA, false>(
          a, p.lda, w, column, rows, k + done, whole, at, done == 0, staged, worker, sums, exact);
    }
    for (; done < slice; done += WINDOW) {
      if (STAGED && done > 0) threadgroup_barrier(mem_flags::mem_threadgroup);
      add_steps<T, From, FORMAT, MATRICES, ROWS, LANES, COLS, DEPTH, SETS * 32, STAGED, MMA, true>(
          a, p.lda, w, column, rows, k + done, whole, at, done == 0, staged, worker, sums, exact);
    }
    if (MMA && Packing<FORMAT>::HAS_BIAS) {
#pragma clang loop unroll(full)
      for (uint c = 0; c < COLS; c++) exact = exact && isfinite(sums[0][c].x);
    }
    if (From::SHIFTED && !exact) {
#pragma clang loop unroll(full)
      for (uint r = 0; r < ROWS; r++)
#pragma clang loop unroll(full)
        for (uint c = 0; c < COLS; c++) sums[r][c] = float4(0.0f);
#pragma clang loop unroll(disable)
      for (uint i = begin + COUNT * at; i < whole; i += COUNT * LANES)
        add_one_by_one<From>(a, p.lda, w, column, rows, i, min(i + COUNT, whole), 1, sums);
    }
    k = whole;
  }
  wait_for_operands();
  add_one_by_one<From>(a, p.lda, w, column, rows, k + at, end, LANES, sums);
#pragma clang loop unroll(full)
  for (uint r = 0; r < ROWS; r++)
#pragma clang loop unroll(full)
    for (uint c = 0; c < COLS; c++) {
      float4 s = sums[r][c];
      float total = (s.x + s.y) + (s.z + s.w);
#pragma clang loop unroll(full)
      for (uint step = LANES / 2; step > 0; step /= 2) total += simd_shuffle_xor(total, step);
      sum[r][c] = total;
    }
  if (SPLIT > 1) {
#pragma clang loop unroll(full)
    for (uint r = 0; r < ROWS; r++)
#pragma clang loop unroll(full)
      for (uint c = 0; c < COLS; c++)
        if (at == c % LANES) shared.partial[simdgroup][r][c * ACROSS + lane / LANES] = sum[r][c];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (share != 0) return false;
#pragma clang loop unroll(full)
    for (uint r = 0; r < ROWS; r++)
#pragma clang loop unroll(full)
      for (uint c = 0; c < COLS; c++) {
        sum[r][c] = shared.partial[simdgroup][r][c * ACROSS + lane / LANES];
#pragma clang loop unroll(full)
        for (uint s = 1; s < SPLIT; s++) sum[r][c] += shared.partial[simdgroup + s][r][c * ACROSS + lane / LANES];
      }
  }
  return true;
}

// Columns of a threadgroup, and this lane's first of those that its threadgroup, the `index`th along n, has.
template <int LANES, int COLS, int SPLIT, int TG>
METAL_FUNC uint first_column(uint index, uint simdgroup, uint lane) {
  return (index * (TG / 32 / SPLIT) + simdgroup / SPLIT) * (32 / LANES * COLS) + lane / LANES;
}

// What a threadgroup does.
template <class T, int FORMAT, bool CANONICAL, bool WIDE, int ROWS, int LANES, int COLS, int SPLIT, int DEPTH, int TG, bool STAGED,
          bool MMA, bool WHOLE>
METAL_FUNC void multiply(const device T* A, WeightsAt w, device T* D, const device T* C, const device T* bias, constant MatmulParams& p,
                         uint3 group, uint simdgroup, uint lane,
                         threadgroup Shared<FORMAT, ROWS, LANES, COLS, SPLIT, DEPTH, TG, STAGED>& shared) {
  uint row0 = group.y * ROWS, rows = min(uint(ROWS), p.m - row0), first = first_column<LANES, COLS, SPLIT, TG>(group.x, simdgroup, lane);
  float sum[ROWS][COLS], added[COLS];
#pragma clang loop unroll(full)
  for (uint c = 0; c < COLS; c++) {
    uint column = first + c * (32 / LANES);
    added[c] = simdgroup % SPLIT == 0 && lane % LANES == c % LANES && column < p.n ? bias_of(bias, p, column) : 0.0f;
  }
  const WeightsAt only[1] = {w};
  if (!add_up<T, FORMAT, CANONICAL, WIDE, 1, ROWS, LANES, COLS, SPLIT, DEPTH, TG, STAGED, MMA, WHOLE>(
          A + group.z * p.stride_a + row0 * p.lda, only, p, rows, first, simdgroup, lane, shared, sum))
    return;
#pragma clang loop unroll(full)
  for (uint r = 0; r < ROWS; r++) {
#pragma clang loop unroll(full)
    for (uint c = 0; c < COLS; c++) {  // constant indices: the sums stay in registers
      uint column = first + c * (32 / LANES);
      if (lane % LANES == c % LANES && column < p.n && r < rows) store_sum(D, C, p, group.z, row0 + r, column, sum[r][c], added[c]);
    }
  }
}

template <class T, int FORMAT, bool CANONICAL, bool WIDE, int ROWS, int LANES, int COLS, int SPLIT, int DEPTH, int TG, bool STAGED,
          bool MMA, bool WHOLE>
[[kernel, max_total_threads_per_threadgroup(TG)]] void weight_columns(
    const device T* A [[buffer(0)]], const device uchar* values [[buffer(1)]], device T* D [[buffer(2)]], const device T* C [[buffer(3)]],
    const device T* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]], const device uchar* scales [[buffer(6)]],
    const device uchar* biases [[buffer(7)]], uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup Shared<FORMAT, ROWS, LANES, COLS, SPLIT, DEPTH, TG, STAGED> shared;
  WeightsAt w = {values, scales, biases, p.n, p.k, p.ldb, p.group_shift, p.low_byte};
  multiply<T, FORMAT, CANONICAL, WIDE, ROWS, LANES, COLS, SPLIT, DEPTH, TG, STAGED, MMA, WHOLE>(A, w, D, C, bias, p, group, simdgroup, lane,
                                                                                                shared);
}

template <class T, int ROWS, int LANES, int COLS, int SPLIT, int DEPTH, int TG, bool STAGED, bool WHOLE>
[[kernel, max_total_threads_per_threadgroup(TG)]] void dense_columns(
    const device T* A [[buffer(0)]], const device T* B [[buffer(1)]], device T* D [[buffer(2)]], const device T* C [[buffer(3)]],
    const device T* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]], uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup Shared<DENSE, ROWS, LANES, COLS, SPLIT, DEPTH, TG, STAGED> shared;
  const device uchar* values = reinterpret_cast<const device uchar*>(B + group.z * p.stride_b);
  WeightsAt w = {values, values, values, p.n, p.k, p.ldb, 0, p.low_byte};
  multiply<T, DENSE, false, false, ROWS, LANES, COLS, SPLIT, DEPTH, TG, STAGED, false, WHOLE>(A, w, D, C, bias, p, group, simdgroup, lane,
                                                                                              shared);
}

// Two or three matrices B of one A. Threadgroups along n are those of the first, then the second's, then the third's. SWIGLU: each has the
// same columns of two, and the result is silu(A B0 + bias0) * (A B1 + bias1).
template <class T, int FORMAT, bool CANONICAL, bool WIDE, bool SWIGLU, int ROWS, int LANES, int COLS, int SPLIT, int DEPTH, int TG,
          bool STAGED, bool MMA, bool WHOLE>
[[kernel, max_total_threads_per_threadgroup(TG)]] void fused_columns(
    const device T* A [[buffer(0)]], const device uchar* values0 [[buffer(1)]], device T* D0 [[buffer(2)]],
    const device T* bias0 [[buffer(4)]], constant FusedParams& params [[buffer(5)]], const device uchar* scales0 [[buffer(6)]],
    const device uchar* biases0 [[buffer(7)]], const device uchar* values1 [[buffer(8)]], device T* D1 [[buffer(9)]],
    const device T* bias1 [[buffer(10)]], const device uchar* scales1 [[buffer(11)]], const device uchar* biases1 [[buffer(12)]],
    const device uchar* values2 [[buffer(13)]], device T* D2 [[buffer(14)]], const device T* bias2 [[buffer(15)]],
    const device uchar* scales2 [[buffer(16)]], const device uchar* biases2 [[buffer(17)]], uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint COLUMNS = TG / 32 / SPLIT * (32 / LANES * COLS);
  constexpr int OWN = SWIGLU ? 2 * COLS : COLS;  // of swiglu a lane has its columns of both
  threadgroup Shared<FORMAT, ROWS, LANES, OWN, SPLIT, DEPTH, TG, STAGED> shared;
  constant MatmulParams& p0 = params.of[0];
  if (SWIGLU) {
    constant MatmulParams& p1 = params.of[1];
    const WeightsAt w[2] = {{values0, scales0, biases0, p0.n, p0.k, p0.ldb, p0.group_shift, p0.low_byte},
                            {values1, scales1, biases1, p1.n, p1.k, p1.ldb, p1.group_shift, p1.low_byte}};
    uint row0 = group.y * ROWS, rows = min(uint(ROWS), p0.m - row0), first = first_column<LANES, COLS, SPLIT, TG>(group.x, simdgroup, lane);
    float sum[ROWS][OWN], added[OWN];
#pragma clang loop unroll(full)
    for (uint c = 0; c < OWN; c++)
      added[c] = p0.has_bias ? float((c % 2 == 0 ? bias0 : bias1)[min(first + c / 2 * (32 / LANES), p0.n - 1)]) : 0.0f;
    if (!add_up<T, FORMAT, CANONICAL, WIDE, 2, ROWS, LANES, OWN, SPLIT, DEPTH, TG, STAGED, MMA, WHOLE>(
            A + group.z * p0.stride_a + row0 * p0.lda, w, p0, rows, first, simdgroup, lane, shared, sum))
      return;
#pragma clang loop unroll(full)
    for (uint r = 0; r < ROWS; r++) {
#pragma clang loop unroll(full)
      for (uint c = 0; c < OWN; c += 2) {
        uint column = first + c / 2 * (32 / LANES);
        if (lane % LANES == c / 2 % LANES && column < p0.n && r < rows) {
          float x = sum[r][c] + added[c], y = sum[r][c + 1] + added[c + 1];
          D0[group.z * p0.stride_d + (row0 + r) * p0.ldd + column] = T(x / (1.0f + precise::exp(-x)) * y);
        }
      }
    }
    return;
  }
  uint groups0 = (p0.n - 1) / COLUMNS + 1, groups1 = (params.of[1].n - 1) / COLUMNS + 1;
  uint i = group.x < groups0 ? 0 : group.x < groups0 + groups1 ? 1 : 2;
  group.x -= i == 0 ? 0 : i == 1 ? groups0 : groups0 + groups1;
  constant MatmulParams& p = params.of[i];
  WeightsAt w = {i == 0   ? values0
                 : i == 1 ? values1
                          : values2,
                 i == 0   ? scales0
                 : i == 1 ? scales1
                          : scales2,
                 i == 0   ? biases0
                 : i == 1 ? biases1
                          : biases2,
                 p.n,
                 p.k,
                 p.ldb,
                 p.group_shift,
                 p.low_byte};
  multiply<T, FORMAT, CANONICAL, WIDE, ROWS, LANES, OWN, SPLIT, DEPTH, TG, STAGED, MMA, WHOLE>(A, w,
                                                                                               i == 0   ? D0
                                                                                               : i == 1 ? D1
                                                                                                        : D2,
                                                                                               A,
                                                                                               i == 0   ? bias0
                                                                                               : i == 1 ? bias1
                                                                                                        : bias2,
                                                                                               p, group, simdgroup, lane, shared);
}
