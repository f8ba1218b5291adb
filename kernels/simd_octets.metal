// B given as N x K rows (NT), few rows of A: simd_columns with 8 elements a load and all loads of a turn before their first use. A
// simdgroup owns COLS columns for all rows of A, its lanes share each column's K; SPLIT simdgroups share K where n alone gives too few.
//
// Per output, for m = 1: 2 * k bytes of B, once, in loads of 16 bytes (of 16-bit types), 512 contiguous bytes a simdgroup; 2 * k / COLS
// of A; COLS * DEPTH loads of 16 bytes in flight a lane; no threadgroup memory and no barrier, with SPLIT > 1 one for TG / 32 / SPLIT *
// COLS outputs. At k = 896 a row is 112 loads, 3.5 a lane: DEPTH = 4 has all of a row in flight at once. For Apple's GPUs: the bytes are
// those of simd_columns in half as many load instructions; 4 * COLS * DEPTH registers hold what is in flight, 32 for COLS = 2, DEPTH = 4,
// where simd_columns keeps 8 * COLS, this turn's and the next's. The CPU device runs lanes one after another and gains nothing.
#include <metal_stdlib>
using namespace metal;  // what follows names its types

#include "include/epilogue.h"
#include "include/lanes.h"
#include "include/octet.h"
#include "include/wait.h"

// TG / 32 / SPLIT sets of COLS columns in a threadgroup.
template <class T, int ROWS, int COLS, int SPLIT, int DEPTH, int TG>
[[kernel, max_total_threads_per_threadgroup(TG)]] void simd_octets(
    const device T* A [[buffer(0)]], const device T* B [[buffer(1)]], device T* D [[buffer(2)]], const device T* C [[buffer(3)]],
    const device T* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]], uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  typedef Lanes<32, COLS, SPLIT, DEPTH, TG> Way;
  threadgroup float partial[Way::JOINED][ROWS][COLS];
  uint set = simdgroup / SPLIT, share = simdgroup % SPLIT;
  uint first = (group.x * Way::SETS + set) * COLS, last = p.n - 1;
  uint row0 = group.y * ROWS, rows = min(uint(ROWS), p.m - row0);
  const device T* a = A + group.z * p.stride_a + row0 * p.lda;
  uint slice = slice_of<SPLIT, 256>(p.k), begin = min(share * slice, p.k), end = min(begin + slice, p.k);
  // Columns past the last read the last one, and are not stored: no test in the loop.
  const device T* b[COLS];
#pragma clang loop unroll(full)
  for (uint c = 0; c < COLS; c++) b[c] = B + group.z * p.stride_b + min(first + c, last) * p.ldb;

  float added = share == 0 && lane < COLS && first + lane <= last ? bias_of(bias, p, first + lane) : 0.0f;
  float4 sums[ROWS][COLS];
#pragma clang loop unroll(full)
  for (uint r = 0; r < ROWS; r++)
#pragma clang loop unroll(full)
    for (uint c = 0; c < COLS; c++) sums[r][c] = float4(0.0f);
  uint k = begin + lane;
  if (a_in_vectors(p, 8) && b_in_vectors(p, 8)) {
    uint whole = begin + (end - begin) / 8 * 8;
    for (uint at = begin + 8 * lane; at < whole; at += 256 * DEPTH) {
      Octet<T> y[DEPTH][COLS], x[DEPTH];  // all in flight at once; of A the first row
#pragma clang loop unroll(full)
      for (uint d = 0; d < DEPTH; d++) {
        uint from = at + 256 * d < whole ? at + 256 * d : at;  // past the end, what the lane has: not used below
#pragma clang loop unroll(full)
        for (uint c = 0; c < COLS; c++) y[d][c] = load_octet(b[c] + from);
      }
      if (at == begin + 8 * lane) wait_for_operands();
#pragma clang loop unroll(full)
      for (uint d = 0; d < DEPTH; d++) x[d] = load_octet(a + (at + 256 * d < whole ? at + 256 * d : at));
#pragma clang loop unroll(full)
      for (uint d = 0; d < DEPTH; d++) {
        if (at + 256 * d < whole) {
#pragma clang loop unroll(full)
          for (uint r = 0; r < ROWS; r++) {
            if (r < rows) {
              if (r > 0) x[d] = load_octet(a + r * p.lda + at + 256 * d);
#pragma clang loop unroll(full)
              for (uint c = 0; c < COLS; c++) add_products(sums[r][c], x[d], y[d][c]);
            }
          }
        }
      }
    }
    k = whole + lane;
  }
  wait_for_operands();
  for (; k < end; k += 32) {
#pragma clang loop unroll(full)
    for (uint c = 0; c < COLS; c++) {
      float y = float(b[c][k]);
#pragma clang loop unroll(full)
      for (uint r = 0; r < ROWS; r++)
        if (r < rows) sums[r][c].x += float(a[r * p.lda + k]) * y;
    }
  }
  float sum[ROWS][COLS];
#pragma clang loop unroll(full)
  for (uint r = 0; r < ROWS; r++)
#pragma clang loop unroll(full)
    for (uint c = 0; c < COLS; c++) {
      float4 s = sums[r][c];
      sum[r][c] = simd_sum((s.x + s.y) + (s.z + s.w));
    }
  if (!join_shares<Way>(partial, Thread{simdgroup, lane}, sum)) return;
#pragma clang loop unroll(full)
  for (uint r = 0; r < ROWS; r++) {
#pragma clang loop unroll(full)
    for (uint c = 0; c < COLS; c++)  // constant indices: the sums stay in registers; neighbouring lanes, neighbouring columns
      if (lane == c && first + c <= last && r < rows) store_sum(D, C, p, group.z, row0 + r, first + c, sum[r][c], added);
  }
}
