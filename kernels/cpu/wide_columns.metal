// m = 1, B given as N x K rows (NT): a thread owns COLS neighbouring columns and reads their rows of B side by side, 32 neighbouring
// elements of each at a step, as 2x4s; A where it lies, converted once for all its columns.
//
// Per output: 2 * k bytes of B, once, and 2 * k / COLS of A, the same element for all lanes; 4 2x4 loads in flight a column (256
// bytes a thread at COLS = 4); no threadgroup memory and no barrier. Made for devices that run one thread at a time, wide: it is a
// stream of whole lines there. On a GPU lanes stand COLS rows apart, as in columns.metal with COLS times the rows a simdgroup, and n /
// COLS threads are few for n = 896: simd_columns is the better design there.
#include <metal_stdlib>
using namespace metal;  // what follows names its types

#include "../include/epilogue.h"
#include "../include/prefetch.h"

// By 2x4s: g++ takes vectors of 4 out of 8 floats faster than out of the 16 of a 4x4.
template <class T>
METAL_FUNC void load16(const device T* p, thread float2x4 (&x)[2]) {
  const device matrix<T, 2, 4>* halves = reinterpret_cast<const device matrix<T, 2, 4>*>(p);
  x[0] = float2x4(halves[0]);
  x[1] = float2x4(halves[1]);
}

template <int CHAINS, class T>
METAL_FUNC void add16(const thread float2x4 (&x)[2], const device T* b, thread float4 (&sum)[CHAINS]) {
  float2x4 y[2];
  load16(b, y);
#pragma clang loop unroll(full)
  for (uint i = 0; i < 4; i++) sum[i % CHAINS] = fma(x[i / 2][i % 2], y[i / 2][i % 2], sum[i % CHAINS]);
}

// The inner products of a with COLS rows of B, up to a multiple of 16; returns it. The next thread's rows are asked for on the way.
template <int COLS, class T>
METAL_FUNC uint dot_rows(const device T* a, const device T* b, uint ldb, uint count, thread float (&total)[COLS]) {
  constexpr uint CHAINS = COLS < 4 ? 4 : 2;  // of dependent FMAs; 8 or more in all hide their latency
  float4 sum[COLS][CHAINS];
  for (uint c = 0; c < COLS; c++)
    for (uint i = 0; i < CHAINS; i++) sum[c][i] = float4(0.0f);
  float2x4 x[2];
  uint k = 0;
  for (; k + 32 <= count; k += 32) {
    load16(a + k, x);
#pragma clang loop unroll(full)
    for (uint c = 0; c < COLS; c++) {
      prefetch(b + (c + COLS) * ldb + k, 1);
      add16<CHAINS>(x, b + c * ldb + k, sum[c]);
    }
    load16(a + k + 16, x);
#pragma clang loop unroll(full)
    for (uint c = 0; c < COLS; c++) add16<CHAINS>(x, b + c * ldb + k + 16, sum[c]);
  }
  if (k + 16 <= count) {
    load16(a + k, x);
#pragma clang loop unroll(full)
    for (uint c = 0; c < COLS; c++) add16<CHAINS>(x, b + c * ldb + k, sum[c]);
    k += 16;
  }
#pragma clang loop unroll(full)
  for (uint c = 0; c < COLS; c++) {
    float4 s = sum[c][0] + sum[c][1];
    if (CHAINS == 4) s += sum[c][CHAINS - 2] + sum[c][CHAINS - 1];
    total[c] = (s.x + s.y) + (s.z + s.w);
  }
  return k;
}

template <class T, int COLS, int TG>
[[kernel, max_total_threads_per_threadgroup(TG)]] void wide_columns(const device T* A [[buffer(0)]], const device T* B [[buffer(1)]],
                                                                    device T* D [[buffer(2)]], const device T* C [[buffer(3)]],
                                                                    const device T* bias [[buffer(4)]],
                                                                    constant MatmulParams& p [[buffer(5)]],
                                                                    uint3 group [[threadgroup_position_in_grid]],
                                                                    uint tid [[thread_index_in_threadgroup]]) {
  uint first = (group.x * TG + tid) * COLS;
  if (first >= p.n) return;  // no barrier follows
  const device T* a = A + group.z * p.stride_a;
  const device T* b = B + group.z * p.stride_b + first * p.ldb;
  bool whole = first + COLS <= p.n, vectors = a_in_vectors(p, 4) && b_in_vectors(p, 4);
  float total[COLS] = {};
  uint done = 0;
  if (vectors && whole) done = dot_rows<COLS>(a, b, p.ldb, p.k, total);
#pragma clang loop unroll(full)
  for (uint c = 0; c < COLS; c++) {
    if (first + c >= p.n) break;
    float one[1] = {total[c]};
    if (vectors && !whole) done = dot_rows<1>(a, b + c * p.ldb, p.ldb, p.k, one);
    for (uint k = done; k < p.k; k++) one[0] += float(a[k]) * float(b[c * p.ldb + k]);
    store_result(D, C, bias, p, group.z, 0, first + c, one[0]);
  }
}
