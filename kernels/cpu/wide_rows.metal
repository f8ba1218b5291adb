// m = 1, B given as K x N (NN): a thread owns 16 * QUADS neighbouring columns and a slice of K; it reads 16 of them at a time, as
// a 4x4.
//
// Per output: 2 * k bytes of B, once, and 2 * k / (16 * QUADS) of A; 4 rows of QUADS 4x4s in flight a thread; one barrier for TG /
// SLICES * 16 * QUADS outputs. Made for devices that run one thread at a time, wide; the threads of a slice read TG / SLICES * QUADS * 32
// contiguous bytes of a row, so that a GPU uses whole lines too, a part at a time: there rows_nn, whose neighbouring lanes read
// neighbouring vectors of 4, should be better.
#include <metal_stdlib>
using namespace metal;  // what follows names its types

#include "../include/epilogue.h"
#include "../include/lanes.h"
#include "../include/prefetch.h"

template <class T>
METAL_FUNC float4x4 load16(const device T* p) {
  return float4x4(*reinterpret_cast<const device matrix<T, 4, 4>*>(p));
}

// BN = TG / SLICES * 16 * QUADS columns a threadgroup.
template <class T, int QUADS, int SLICES, int TG>
[[kernel, max_total_threads_per_threadgroup(TG)]] void wide_rows(const device T* A [[buffer(0)]], const device T* B [[buffer(1)]],
                                                                 device T* D [[buffer(2)]], const device T* C [[buffer(3)]],
                                                                 const device T* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]],
                                                                 uint3 group [[threadgroup_position_in_grid]],
                                                                 uint tid [[thread_index_in_threadgroup]]) {
  constexpr uint W = 16 * QUADS, LANES = TG / SLICES, BN = LANES * W;
  constexpr uint AHEAD = 8;  // rows
  threadgroup float4 partial[SLICES][BN / 4];
  uint slice = tid / LANES, local = tid % LANES * W, col = group.x * BN + local;
  const device T* a = A + group.z * p.stride_a;
  const device T* b = B + group.z * p.stride_b + col;
  uint depth = ((p.k + SLICES - 1) / SLICES + 3) / 4 * 4;  // whole vectors of 4 of A
  uint begin = min(slice * depth, p.k), end = min(begin + depth, p.k);

  float4x4 sum[QUADS][2];  // two chains along K
#pragma clang loop unroll(full)
  for (uint q = 0; q < QUADS; q++) sum[q][0] = sum[q][1] = float4x4(0.0f);
  if (col + W <= p.n && a_in_vectors(p, 4) && b_in_vectors(p, 4)) {
    uint k = begin;
    for (; k + 4 <= end; k += 4) {
      float4 x = float4(*reinterpret_cast<const device vec<T, 4>*>(a + k));
#pragma clang loop unroll(full)
      for (uint u = 0; u < 4; u++) {
        const device T* row = b + (k + u) * p.ldb;
        if (local == 0) prefetch(row + AHEAD * p.ldb, BN);  // for all threads of the slice
#pragma clang loop unroll(full)
        for (uint q = 0; q < QUADS; q++) sum[q][u % 2] = sum[q][u % 2] + load16(row + 16 * q) * x[u];
      }
    }
    for (; k < end; k++) {
#pragma clang loop unroll(full)
      for (uint q = 0; q < QUADS; q++) sum[q][0] = sum[q][0] + load16(b + k * p.ldb + 16 * q) * float(a[k]);
    }
  } else {
    for (uint k = begin; k < end; k++) {
      float x = float(a[k]);
#pragma clang loop unroll(full)
      for (uint i = 0; i < W; i++)
        if (col + i < p.n) sum[i / 16][0][i % 16 / 4][i % 4] += x * float(b[k * p.ldb + i]);
    }
  }
#pragma clang loop unroll(full)
  for (uint q = 0; q < QUADS; q++) {
    float4x4 s = sum[q][0] + sum[q][1];
#pragma clang loop unroll(full)
    for (uint i = 0; i < 4; i++) partial[slice][local / 4 + 4 * q + i] = s[i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint c = tid; c < BN / 4; c += TG) {
    float4 total = sum_of_parts<SLICES, BN / 4>(&partial[0][c]);
#pragma clang loop unroll(full)
    for (uint i = 0; i < 4; i++)
      if (group.x * BN + 4 * c + i < p.n) store_result(D, C, bias, p, group.z, 0, group.x * BN + 4 * c + i, total[i]);
  }
}
