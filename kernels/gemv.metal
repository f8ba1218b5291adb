// Matrix times vector with B given as K x N (NN).
#include <metal_stdlib>
using namespace metal;  // what follows names its types

#include "include/epilogue.h"

// W neighbouring elements, as one load where the address allows.
template <int W, class T>
METAL_FUNC void load(const device T* p, bool aligned, uint count, thread float (&v)[W]) {
  if (W == 4 && aligned) {
    float4 x = float4(*reinterpret_cast<const device vec<T, 4>*>(p));
    for (int i = 0; i < W; i++) v[i] = x[i];
  } else if (W == 2 && aligned) {
    float2 x = float2(*reinterpret_cast<const device vec<T, 2>*>(p));
    for (int i = 0; i < W; i++) v[i] = x[i];
  } else {
    for (int i = 0; i < W; i++) v[i] = uint(i) < count ? float(p[i]) : 0.0f;
  }
}

// m = 1. A threadgroup owns BN columns; its threads stride over them, W neighbours at a time. STAGE elements of A at a time
// pass through threadgroup memory; 0: A is read where it lies, all threads the same element.
template <class T, int BN, int TG, int W, int STAGE>
[[kernel, max_total_threads_per_threadgroup(TG)]] void gemv(const device T* A [[buffer(0)]], const device T* B [[buffer(1)]],
                                                            device T* D [[buffer(2)]], const device T* C [[buffer(3)]],
                                                            const device T* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]],
                                                            uint3 group [[threadgroup_position_in_grid]],
                                                            uint tid [[thread_index_in_threadgroup]]) {
  constexpr uint STEPS = BN / (TG * W);
  constexpr uint DEPTH = STAGE > 0 ? STAGE : 1;
  threadgroup float staged[DEPTH];
  const device T* a = A + group.z * p.stride_a;
  const device T* b = B + group.z * p.stride_b;
  bool aligned = (p.ldb % W) == 0 && (p.vec_offset_b + group.z * p.stride_b) % W == 0;
  float sum[STEPS][2][W] = {};  // two chains along K

  uint tile = STAGE > 0 ? uint(STAGE) : p.k;
  for (uint k0 = 0; k0 < p.k; k0 += tile) {
    uint count = min(tile, p.k - k0);
    if (STAGE > 0) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (uint i = tid; i < count; i += TG) staged[i] = float(a[k0 + i]);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
#pragma clang loop unroll(full)
    for (uint s = 0; s < STEPS; s++) {
      uint col = group.x * BN + (s * TG + tid) * W;
      if (col >= p.n) continue;
      const device T* row = b + k0 * p.ldb + col;
      uint width = p.n - col;
      bool whole = aligned && width >= W;
      uint k = 0;
      for (; k + 8 <= count; k += 8) {
#pragma clang loop unroll(full)
        for (uint u = 0; u < 8; u++) {
          float x = STAGE > 0 ? staged[k + u] : float(a[k0 + k + u]);
          float v[W];
          load<W>(row + (k + u) * p.ldb, whole, width, v);
          for (int i = 0; i < W; i++) sum[s][u % 2][i] += x * v[i];
        }
      }
      for (; k < count; k++) {
        float x = STAGE > 0 ? staged[k] : float(a[k0 + k]);
        float v[W];
        load<W>(row + k * p.ldb, whole, width, v);
        for (int i = 0; i < W; i++) sum[s][0][i] += x * v[i];
      }
    }
  }
#pragma clang loop unroll(full)
  for (uint s = 0; s < STEPS; s++) {
    uint col = group.x * BN + (s * TG + tid) * W;
    for (uint i = 0; i < W; i++)
      if (col + i < p.n) store_result(D, C, bias, p, group.z, 0, col + i, sum[s][0][i] + sum[s][1][i]);
  }
}

// A few columns, any number of rows: a simdgroup owns a row of A, its lanes stride along K and keep a sum for each column.
template <class T, int TG>
[[kernel, max_total_threads_per_threadgroup(TG)]] void gemv_smalln(
    const device T* A [[buffer(0)]], const device T* B [[buffer(1)]], device T* D [[buffer(2)]], const device T* C [[buffer(3)]],
    const device T* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]], uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint MAX_N = 16;
  uint row = group.y * (TG / 32) + simdgroup;
  if (row >= p.m) return;  // a whole simdgroup; no barrier follows
  const device T* a = A + group.z * p.stride_a + row * p.lda;
  const device T* b = B + group.z * p.stride_b;
  float4 sum[MAX_N / 4];
  for (uint g = 0; g < MAX_N / 4; g++) sum[g] = float4(0.0f);
  for (uint k = lane; k < p.k; k += 32) {
    float x = float(a[k]);
#pragma clang loop unroll(full)
    for (uint c = 0; c < MAX_N; c++)  // constant indices keep the sums in registers
      if (c < p.n) sum[c / 4][c % 4] += x * float(b[k * p.ldb + c]);
  }
#pragma clang loop unroll(full)
  for (uint g = 0; g < MAX_N / 4; g++) {
    if (4 * g >= p.n) break;
    float4 total = simd_sum(sum[g]);
    if (lane < 4 && 4 * g + lane < p.n) store_result(D, C, bias, p, group.z, row, 4 * g + lane, total[lane]);
  }
}
