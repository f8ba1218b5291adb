// Operations across the lanes of a simdgroup and of a quad.
#include <metal_stdlib>
using namespace metal;

kernel void reductions(device const float* x, device float* y, constant uint& n, uint i [[thread_position_in_grid]]) {
  float v = x[i];
  y[0 * n + i] = simd_sum(v);
  y[1 * n + i] = simd_max(v);
  y[2 * n + i] = simd_min(v);
  y[3 * n + i] = simd_prefix_inclusive_sum(v);
  y[4 * n + i] = simd_prefix_exclusive_sum(v);
  y[5 * n + i] = quad_sum(v);
  y[6 * n + i] = quad_max(v);
  y[7 * n + i] = simd_sum(float4(v, 1.0f, v, 2.0f)).y + simd_product(v > 0 ? 1.0f : 0.5f) * 0;
}

kernel void shuffles(device const float* x, device float* y, constant uint& n, uint i [[thread_position_in_grid]],
                     ushort lane [[thread_index_in_simdgroup]]) {
  float v = x[i];
  y[0 * n + i] = simd_shuffle(v, lane ^ 5);
  y[1 * n + i] = simd_shuffle_xor(v, 9);
  y[2 * n + i] = simd_shuffle_down(v, 3);
  y[3 * n + i] = simd_shuffle_up(v, 3);
  y[4 * n + i] = simd_shuffle_rotate_down(v, 5);
  y[5 * n + i] = simd_broadcast(v, 17);
  y[6 * n + i] = simd_broadcast_first(v);
  y[7 * n + i] = quad_shuffle_xor(v, 1);
  y[8 * n + i] = quad_broadcast(v, 2);
  y[9 * n + i] = simd_shuffle_and_fill_down(v, -1.0f, 4);
  y[10 * n + i] = simd_shuffle_and_fill_up(v, -1.0f, 4);
}

kernel void votes(device const uint* x, device uint* y, constant uint& n, uint i [[thread_position_in_grid]]) {
  bool b = x[i] != 0;
  y[0 * n + i] = uint(simd_vote::vote_t(simd_ballot(b)));
  y[1 * n + i] = simd_any(b);
  y[2 * n + i] = simd_all(b);
  y[3 * n + i] = simd_is_first();
  y[4 * n + i] = uint(ulong(simd_active_threads_mask()));
  y[5 * n + i] = simd_and(x[i]) + simd_or(x[i]) * 4 + simd_xor(x[i]) * 16;
}

// Two operations on one line, taken by different lanes; some lanes have returned.
kernel void divergent(device float* y, uint i [[thread_index_in_simdgroup]], uint t [[thread_position_in_grid]]) {
  if (i >= 30) return;
  float v = float(i);
  y[t] = i < 10 ? simd_sum(v) : simd_max(v);
  for (uint k = 0; k < i % 3; k++) y[t] += 100.0f * simd_sum(1.0f);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  y[t] += 10000.0f * simd_sum(1.0f);
}

kernel void matrix(device const half* a, device const half* b, device float* c, device float* elements,
                   uint lane [[thread_index_in_simdgroup]]) {
  simdgroup_half8x8 fa, fb;
  simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.5f);
  simdgroup_load(fa, a, 16, ulong2(4, 1));
  simdgroup_load(fb, b, 8, ulong2(0, 0), true);
  for (int i = 0; i < 3; i++) simdgroup_multiply_accumulate(sum, fa, fb, sum);
  simdgroup_store(sum, c, 8);
  simdgroup_float8x8 identity(1.0f), product;
  simdgroup_multiply(product, identity, sum);
  simdgroup_store(product, c + 64, 8, ulong2(0, 0), true);
  elements[2 * lane] = fa.thread_elements()[0];
  elements[2 * lane + 1] = fa.thread_elements()[1];
}
