// B given as K x N (NN), few rows of A: a thread owns W neighbouring columns for all rows and a slice of K; the threads of one slice
// read whole rows of B side by side. Every byte of B is loaded once.
//
// For m = 1, per output: 2 * k bytes of B; A from the cache, the same element for all lanes; 8 rows of W halves in flight a thread; one
// barrier for TG / SLICES * W outputs. Apple's GPUs should like it: 32 lanes of W = 4 read 256 contiguous bytes of a row, and SLICES times
// as many threads as columns / W fill the cores at n = 1152, where one thread a column would be 9 simdgroups of 128 columns.
#include <metal_stdlib>
using namespace metal;  // what follows names its types

#include "include/epilogue.h"
#include "include/prefetch.h"

// vectors: p stands on a vector of 4.
template <int W, class T>
METAL_FUNC void load_row(const device T* p, uint count, bool vectors, thread float (&v)[W]) {
  if (vectors && W % 4 == 0 && count >= W) {
    for (uint q = 0; q < W / 4; q++) {
      float4 x = float4(reinterpret_cast<const device vec<T, 4>*>(p)[q]);
      for (uint i = 0; i < 4; i++) v[4 * q + i] = x[i];
    }
  } else {
    for (uint i = 0; i < W; i++) v[i] = i < count ? float(p[i]) : 0.0f;
  }
}

// BN = TG / SLICES * W columns a threadgroup.
template <class T, int ROWS, int W, int SLICES, int TG>
[[kernel, max_total_threads_per_threadgroup(TG)]] void rows_nn(const device T* A [[buffer(0)]], const device T* B [[buffer(1)]],
                                                               device T* D [[buffer(2)]], const device T* C [[buffer(3)]],
                                                               const device T* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]],
                                                               uint3 group [[threadgroup_position_in_grid]],
                                                               uint tid [[thread_index_in_threadgroup]]) {
  constexpr uint LANES = TG / SLICES;  // threads of a slice
  constexpr uint AHEAD = 8;
  threadgroup float partial[SLICES][ROWS][LANES * W];
  uint slice = tid / LANES, local = tid % LANES * W, col = group.x * LANES * W + local;
  uint width = col < p.n ? p.n - col : 0;
  uint row0 = group.y * ROWS, rows = min(uint(ROWS), p.m - row0);
  const device T* a = A + group.z * p.stride_a + row0 * p.lda;
  const device T* b = B + group.z * p.stride_b + col;
  uint depth = (p.k + SLICES - 1) / SLICES;
  uint begin = min(slice * depth, p.k), end = min(begin + depth, p.k);
  bool vectors = b_in_vectors(p, 4);

  float sum[ROWS][W] = {};
  if (width > 0) {
    uint k = begin;
    for (; k + 8 <= end; k += 8) {
      float v[8][W];
#pragma clang loop unroll(full)
      for (uint u = 0; u < 8; u++) {
        if (k + u + AHEAD < end) prefetch(b + (k + u + AHEAD) * p.ldb, 1);
        load_row(b + (k + u) * p.ldb, width, vectors, v[u]);
      }
#pragma clang loop unroll(full)
      for (uint u = 0; u < 8; u++) {
#pragma clang loop unroll(full)
        for (uint r = 0; r < ROWS; r++) {
          if (r >= rows) break;
          float x = float(a[r * p.lda + k + u]);
          for (uint i = 0; i < W; i++) sum[r][i] += x * v[u][i];
        }
      }
    }
    for (; k < end; k++) {
      float v[W];
      load_row(b + k * p.ldb, width, vectors, v);
#pragma clang loop unroll(full)
      for (uint r = 0; r < ROWS; r++) {
        if (r >= rows) break;
        float x = float(a[r * p.lda + k]);
        for (uint i = 0; i < W; i++) sum[r][i] += x * v[i];
      }
    }
  }
#pragma clang loop unroll(full)
  for (uint r = 0; r < ROWS; r++) {
    if (r >= rows) break;
    for (uint i = 0; i < W; i++) partial[slice][r][local + i] = sum[r][i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = tid; i < rows * LANES * W; i += TG) {
    uint r = i / (LANES * W), c = i % (LANES * W);
    float total = partial[0][r][c];
    for (uint s = 1; s < SLICES; s++) total += partial[s][r][c];
    if (group.x * LANES * W + c < p.n) store_result(D, C, bias, p, group.z, row0 + r, group.x * LANES * W + c, total);
  }
}
