// gemv_nt_vec4: B given as N x K rows (NT), few rows of A. A simdgroup owns COLS columns for all rows. Its lanes share each column's K, 8
// neighbouring elements a lane, which two loads of four bring. So every byte of B is loaded once, and of float16 the pair is 512
// neighbours.
//
// For m = 1, per output: 2 * k bytes of B and 2 * k / COLS of A. A lane has 4 * COLS loads of 4 elements in flight, this step's and the
// next's. There is no threadgroup memory and no barrier; with SPLIT > 1 there is one barrier for TG / 32 / SPLIT * COLS outputs. Bias,
// alpha and beta cost one test each an output, uniform over the grid. Apple's GPUs should like it: the kernel is a stream of whole 128-byte
// lines, and many independent loads a lane hide their latency. n / COLS simdgroups fill the cores also where n = 896. (One thread a column,
// 128 a threadgroup, is 7 threadgroups there, and most cores idle.) SPLIT simdgroups share K where n alone gives too few (k = 4864). A
// batch is one dispatch: batch 14 with n = 64 are 14 * 64 / COLS simdgroups.
#include <metal_stdlib>
using namespace metal;  // what follows names its types

#include "include/epilogue.h"
#include "include/lanes.h"
#include "include/octet.h"
#include "include/prefetch.h"

// p stands on a vector of 4.
template <class T>
METAL_FUNC Octet<T> load_two_fours(const device T* p) {
  const device vec<T, 4>* v = reinterpret_cast<const device vec<T, 4>*>(p);
  return {v[0], v[1]};
}

template <class T>
METAL_FUNC float dot8(Octet<T> x, Octet<T> y) {
  float4 s = float4(x.low) * float4(y.low) + float4(x.high) * float4(y.high);
  return (s.x + s.y) + (s.z + s.w);
}

// TG / 32 / SPLIT sets of COLS columns in a threadgroup.
template <class T, int ROWS, int COLS, int SPLIT, int TG>
[[kernel, max_total_threads_per_threadgroup(TG)]] void simd_columns(
    const device T* A [[buffer(0)]], const device T* B [[buffer(1)]], device T* D [[buffer(2)]], const device T* C [[buffer(3)]],
    const device T* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]], uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  typedef Lanes<32, COLS, SPLIT, 1, TG> Way;
  threadgroup float partial[Way::JOINED][ROWS][COLS];
  uint set = simdgroup / SPLIT, share = simdgroup % SPLIT;
  uint first = (group.x * Way::SETS + set) * COLS;
  uint columns = first < p.n ? min(uint(COLS), p.n - first) : 0;
  uint row0 = group.y * ROWS, rows = min(uint(ROWS), p.m - row0);
  const device T* a = A + group.z * p.stride_a + row0 * p.lda;
  const device T* b = B + group.z * p.stride_b + first * p.ldb;
  uint slice = slice_of<SPLIT, 256>(p.k), begin = min(share * slice, p.k), end = min(begin + slice, p.k);

  float sum[ROWS][COLS] = {};
  uint k = begin;
  if (columns == COLS && a_in_vectors(p, 4) && b_in_vectors(p, 4)) {
    uint at = begin + 8 * lane;
    Octet<T> now[COLS];
    if (at + 8 <= end)
      for (uint c = 0; c < COLS; c++) now[c] = load_two_fours(b + c * p.ldb + at);
    for (; at + 8 <= end; at += 256) {
      Octet<T> next[COLS];
      bool more = at + 264 <= end;
#pragma clang loop unroll(full)
      for (uint c = 0; c < COLS; c++) {
        if (more) next[c] = load_two_fours(b + c * p.ldb + at + 256);
      }
#pragma clang loop unroll(full)
      for (uint r = 0; r < ROWS; r++) {
        if (r >= rows) break;
        Octet<T> x = load_two_fours(a + r * p.lda + at);
#pragma clang loop unroll(full)
        for (uint c = 0; c < COLS; c++) sum[r][c] += dot8(x, now[c]);
      }
#pragma clang loop unroll(full)
      for (uint c = 0; c < COLS; c++) now[c] = next[c];
    }
    k = begin + (end - begin) / 8 * 8;  // what is left is less than a lane's 8
  }
  for (k += lane; k < end; k += 32) {
#pragma clang loop unroll(full)
    for (uint c = 0; c < COLS; c++) {
      if (c >= columns) break;
      float y = float(b[c * p.ldb + k]);
#pragma clang loop unroll(full)
      for (uint r = 0; r < ROWS; r++)
        if (r < rows) sum[r][c] += float(a[r * p.lda + k]) * y;
    }
  }
#pragma clang loop unroll(full)
  for (uint r = 0; r < ROWS; r++) {
    if (r >= rows) break;
#pragma clang loop unroll(full)
    for (uint c = 0; c < COLS; c++) sum[r][c] = simd_sum(sum[r][c]);
  }
  if (!join_shares<Way>(partial, Thread{simdgroup, lane}, sum)) return;
#pragma clang loop unroll(full)
  for (uint r = 0; r < ROWS; r++) {
#pragma clang loop unroll(full)
    for (uint c = 0; c < COLS; c++)  // constant indices: the sums stay in registers; neighbouring lanes, neighbouring columns
      if (lane == c && c < columns && r < rows) store_result(D, C, bias, p, group.z, row0 + r, first + c, sum[r][c]);
  }
}
