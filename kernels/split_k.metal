// m = 1, B given as N x K rows (NT): the threads of a threadgroup share each column's K. Every simdgroup takes a slice of K,
// its lanes stride through it (neighbouring lanes, neighbouring elements: vectors of 4 where rows are aligned), simd_sum adds the lanes,
// threadgroup memory carries one partial sum a simdgroup and column, and the first simdgroup adds those up: one barrier for BN outputs.
#include <metal_stdlib>
using namespace metal;  // what follows names its types

#include "include/epilogue.h"

template <class T, int BN, int TG>
[[kernel, max_total_threads_per_threadgroup(TG)]] void split_k(const device T* A [[buffer(0)]], const device T* B [[buffer(1)]],
                                                               device T* D [[buffer(2)]], const device T* C [[buffer(3)]],
                                                               const device T* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]],
                                                               uint3 group [[threadgroup_position_in_grid]],
                                                               uint simdgroup [[simdgroup_index_in_threadgroup]],
                                                               uint lane [[thread_index_in_simdgroup]]) {
  static_assert(TG % 32 == 0 && BN % 4 == 0 && BN <= 32, "whole simdgroups, vectors of 4 columns, a lane for each");
  constexpr uint SIMDGROUPS = TG / 32;
  threadgroup float4 partial[SIMDGROUPS][BN / 4];
  const device T* a = A + group.z * p.stride_a;
  const device T* b = B + group.z * p.stride_b;
  uint first = group.x * BN, columns = min(uint(BN), p.n - first);
  uint slice = ((p.k + SIMDGROUPS - 1) / SIMDGROUPS + 3) / 4 * 4;  // whole vectors of 4
  uint begin = min(simdgroup * slice, p.k), end = min(begin + slice, p.k);
  bool aligned = (p.vec_offset_a | p.vec_offset_b | p.stride_a | p.stride_b | p.ldb) % 4 == 0;

  float sum[BN] = {};
  uint k = begin + (aligned ? 4 * lane : lane);
  if (aligned) {
    for (; k + 4 <= end; k += 128) {
      float4 x = float4(*reinterpret_cast<const device vec<T, 4>*>(a + k));
      const device T* column = b + first * p.ldb + k;
#pragma clang loop unroll(full)
      for (uint c = 0; c < BN; c++) {
        if (c >= columns) break;
        float4 y = x * float4(*reinterpret_cast<const device vec<T, 4>*>(column + c * p.ldb));
        sum[c] += (y.x + y.y) + (y.z + y.w);
      }
    }
    if (k < end) end = min(end, k + 4);  // the one lane with a last, partial vector
  }
  for (; k < end; k += aligned ? 1 : 32) {
    float x = float(a[k]);
#pragma clang loop unroll(full)
    for (uint c = 0; c < BN; c++)
      if (c < columns) sum[c] += x * float(b[(first + c) * p.ldb + k]);
  }
#pragma clang loop unroll(full)
  for (uint g = 0; g < BN / 4; g++) {
    float4 total = simd_sum(float4(sum[4 * g], sum[4 * g + 1], sum[4 * g + 2], sum[4 * g + 3]));
    if (lane == 0) partial[simdgroup][g] = total;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup == 0 && lane < BN && first + lane < p.n) {
    float total = 0.0f;
    for (uint s = 0; s < SIMDGROUPS; s++) total += partial[s][lane / 4][lane % 4];
    store_result(D, C, bias, p, group.z, 0, first + lane, total);
  }
}
