// m = 1, B given as N x K rows (NT): the threads of a threadgroup share each column's K. Every simdgroup takes a slice of K,
// its lanes stride through it (neighbouring lanes, neighbouring elements), simd_sum adds the lanes, threadgroup memory
// carries one partial sum a simdgroup and column, and the first simdgroup adds those up: one barrier for BN outputs.
#include <metal_stdlib>

#include "include/epilogue.h"
using namespace metal;

template <int BN, int TG>
[[kernel, max_total_threads_per_threadgroup(TG)]] void split_k(
    const device half* A [[buffer(0)]], const device half* B [[buffer(1)]], device half* D [[buffer(2)]],
    const device half* C [[buffer(3)]], const device half* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint SIMDGROUPS = TG / 32;
  threadgroup float4 partial[SIMDGROUPS][BN / 4];
  const device half* a = A + group.z * p.stride_a;
  const device half* b = B + group.z * p.stride_b;
  uint first = group.x * BN;
  uint slice = (p.k + SIMDGROUPS - 1) / SIMDGROUPS;
  uint begin = min(simdgroup * slice, p.k), end = min(begin + slice, p.k);

  float sum[BN] = {};
  if (first + BN <= p.n) {
    for (uint k = begin + lane; k < end; k += 32) {
      float x = float(a[k]);
      const device half* column = b + first * p.ldb + k;
#pragma clang loop unroll(full)
      for (uint c = 0; c < BN; c++) sum[c] += x * float(column[c * p.ldb]);
    }
  } else {
    for (uint k = begin + lane; k < end; k += 32) {
      float x = float(a[k]);
#pragma clang loop unroll(full)
      for (uint c = 0; c < BN; c++)
        if (first + c < p.n) sum[c] += x * float(b[(first + c) * p.ldb + k]);
    }
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
