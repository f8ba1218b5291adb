// m = 1, B given as N x K rows (NT): one thread owns one or two output columns and reads its rows of B along K.
#include <metal_stdlib>
using namespace metal;  // what follows names its types

#include "include/dot.h"
#include "include/epilogue.h"
#include "include/prefetch.h"

// In float16, per output: 2 * k bytes of B, once, and 2 * k / BN of A; UNROLL loads of 4 elements in flight a thread; k / BK + 1
// barriers for BN outputs.
//
// A passes through threadgroup memory a tile of BK at a time, in two buffers, so that one barrier a tile is enough: the
// next tile loads while this one is used. A column beyond TG belongs to a second accumulator of the same thread.
template <class T, int BN, int BK, int TG, bool VEC, int UNROLL, int READ>
[[kernel, max_total_threads_per_threadgroup(TG)]] void columns(const device T* A [[buffer(0)]], const device T* B [[buffer(1)]],
                                                               device T* D [[buffer(2)]], const device T* C [[buffer(3)]],
                                                               const device T* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]],
                                                               uint3 group [[threadgroup_position_in_grid]],
                                                               uint tid [[thread_index_in_threadgroup]]) {
  constexpr uint COLS = (BN + TG - 1) / TG;
  threadgroup float tile[2][BK];
  const device T* a = A + group.z * p.stride_a;
  const device T* b = B + group.z * p.stride_b;
  uint offset = p.vec_offset_b + group.z * p.stride_b;
  float4 sum[COLS][4];
  for (uint c = 0; c < COLS; c++)
    for (uint i = 0; i < 4; i++) sum[c][i] = float4(0.0f);

  for (uint c = tid; c < BN && group.x * BN + c < p.n; c += TG) prefetch(b + (group.x * BN + c) * p.ldb, BK);
  for (uint i = tid; i < BK; i += TG) tile[0][i] = i < p.k ? float(a[i]) : 0.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint k0 = 0, t = 0; k0 < p.k; k0 += BK, t ^= 1) {
    uint next = k0 + BK;
    if (next < p.k)
      for (uint i = tid; i < BK; i += TG) tile[t ^ 1][i] = next + i < p.k ? float(a[next + i]) : 0.0f;
    uint count = min(uint(BK), p.k - k0);
#pragma clang loop unroll(full)
    for (uint c = 0; c < COLS; c++) {
      uint local = tid + c * TG, col = group.x * BN + local;
      if (local >= BN || col >= p.n) continue;
      uint at = col * p.ldb + k0;
      if (next < p.k) prefetch(b + at + BK, BK);
      if constexpr (!VEC) {
        dot_scalar<UNROLL>(b + at, static_cast<const threadgroup float*>(tile[t]), 0, count, sum[c][0]);
      } else if ((offset + at) % 4 == 0 && count == BK) {
        dot_vec4<UNROLL, READ>(b + at, tile[t], 0, BK, sum[c]);  // a constant trip count
      } else if ((offset + at) % 4 == 0 && READ != READ_ONCE) {
        dot_vec4<UNROLL, READ>(b + at, tile[t], 0, count, sum[c]);
      } else {
        dot_aligning<UNROLL>(b + at, tile[t], count, offset + at, sum[c]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
#pragma clang loop unroll(full)
  for (uint c = 0; c < COLS; c++) {
    uint local = tid + c * TG, col = group.x * BN + local;
    if (local >= BN || col >= p.n) continue;
    float4 s = (sum[c][0] + sum[c][1]) + (sum[c][2] + sum[c][3]);
    store_result(D, C, bias, p, group.z, 0, col, (s.x + s.y) + (s.z + s.w));
  }
}

// B staged too, a BK x BN slice, k-major so that neighbouring threads read neighbouring columns. A slice of 128 x 128 takes
// all 32 KB in float16, so A is read where it lies.
template <class T, int BN, int BK, int TG>
[[kernel, max_total_threads_per_threadgroup(TG)]] void columns_bt(const device T* A [[buffer(0)]], const device T* B [[buffer(1)]],
                                                                  device T* D [[buffer(2)]], const device T* C [[buffer(3)]],
                                                                  const device T* bias [[buffer(4)]],
                                                                  constant MatmulParams& p [[buffer(5)]],
                                                                  uint3 group [[threadgroup_position_in_grid]],
                                                                  uint tid [[thread_index_in_threadgroup]]) {
  constexpr uint COLS = (BN + TG - 1) / TG;
  threadgroup T slice[BK * BN];
  const device T* a = A + group.z * p.stride_a;
  const device T* b = B + group.z * p.stride_b;
  uint first = group.x * BN;
  float sum[COLS][2] = {};
  for (uint k0 = 0; k0 < p.k; k0 += BK) {
    for (uint i = tid; i < BK * BN; i += TG) {
      uint c = i / BK, k = i % BK;
      bool inside = first + c < p.n && k0 + k < p.k;
      slice[k * BN + c] = inside ? b[(first + c) * p.ldb + k0 + k] : T(0.0f);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint count = min(uint(BK), p.k - k0);
#pragma clang loop unroll(full)
    for (uint c = 0; c < COLS; c++) {
      uint local = tid + c * TG;
      if (local >= BN) continue;
      uint k = 0;
      for (; k + 2 <= count; k += 2) {
        sum[c][0] += float(a[k0 + k]) * float(slice[k * BN + local]);
        sum[c][1] += float(a[k0 + k + 1]) * float(slice[(k + 1) * BN + local]);
      }
      if (k < count) sum[c][0] += float(a[k0 + k]) * float(slice[k * BN + local]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
#pragma clang loop unroll(full)
  for (uint c = 0; c < COLS; c++) {
    uint local = tid + c * TG;
    if (local < BN && first + local < p.n) store_result(D, C, bias, p, group.z, 0, first + local, sum[c][0] + sum[c][1]);
  }
}

// A and B where they lie: no threadgroup memory, no barrier, for shapes whose whole work is the launch. BN = 0: all columns.
template <class T, int BN, int TG, int UNROLL>
[[kernel, max_total_threads_per_threadgroup(TG)]] void columns_direct(const device T* A [[buffer(0)]], const device T* B [[buffer(1)]],
                                                                      device T* D [[buffer(2)]], const device T* C [[buffer(3)]],
                                                                      const device T* bias [[buffer(4)]],
                                                                      constant MatmulParams& p [[buffer(5)]],
                                                                      uint3 group [[threadgroup_position_in_grid]],
                                                                      uint tid [[thread_index_in_threadgroup]]) {
  const device T* a = A + group.z * p.stride_a;
  const device T* b = B + group.z * p.stride_b;
  uint end = BN == 0 ? p.n : min((group.x + 1) * BN, p.n);
  for (uint col = group.x * BN + tid; col < end; col += TG) {
    float4 sum = float4(0.0f);
    dot_scalar<UNROLL>(b + col * p.ldb, a, 0, p.k, sum);
    store_result(D, C, bias, p, group.z, 0, col, (sum.x + sum.y) + (sum.z + sum.w));
  }
}
