// Inner products of one row of B with a vector: in device memory, or in threadgroup memory as float.
#pragma once
#include <metal_stdlib>

// How the lanes of a simdgroup, which all need the same four elements of A, come to them.
enum ReadA {
  READ_EACH = 0,    // every lane reads threadgroup memory; the hardware broadcasts
  READ_ONCE = 1,    // one lane reads and broadcasts
  READ_PACKED = 2,  // every lane, as one packed vector
};

template <int READ>
METAL_FUNC float4 read_a(const threadgroup float* a) {
  if (READ == READ_ONCE) {
    float4 x = float4(0.0f);
    if (metal::simd_is_first()) x = float4(a[0], a[1], a[2], a[3]);
    return metal::simd_broadcast_first(x);
  }
  if (READ == READ_PACKED) return float4(*reinterpret_cast<const threadgroup metal::packed_float4*>(a));
  return float4(a[0], a[1], a[2], a[3]);
}

// Four independent chains hide the latency of dependent float32 FMAs, 11 cycles on Apple GPUs at low occupancy.
template <int UNROLL, class T, class Vector>
METAL_FUNC void dot_scalar(const device T* b, Vector a, uint begin, uint end, thread float4& sum) {
  uint i = begin;
  for (; i + UNROLL <= end; i += UNROLL) {
#pragma clang loop unroll(full)
    for (uint u = 0; u < UNROLL; u++) sum[u % 4] += float(a[i + u]) * float(b[i + u]);
  }
  for (; i < end; i++) sum[0] += float(a[i]) * float(b[i]);
}

// b + begin stands on a vector of 4: UNROLL loads before the first use.
template <int UNROLL, int READ, class T>
METAL_FUNC void dot_vec4(const device T* b, const threadgroup float* a, uint begin, uint end, thread float4 (&sum)[4]) {
  typedef metal::vec<T, 4> T4;
  constexpr uint STEP = 4 * UNROLL;
  uint i = begin;
  for (; i + STEP <= end; i += STEP) {
    T4 loaded[UNROLL];
#pragma clang loop unroll(full)
    for (uint u = 0; u < UNROLL; u++) loaded[u] = reinterpret_cast<const device T4*>(b + i)[u];
#pragma clang loop unroll(full)
    for (uint u = 0; u < UNROLL; u++) sum[u % 4] += read_a<READ>(a + i + 4 * u) * float4(loaded[u]);
  }
  for (; i + 4 <= end; i += 4) sum[0] += read_a<READ>(a + i) * float4(*reinterpret_cast<const device T4*>(b + i));
  for (; i < end; i++) sum[0][0] += a[i] * float(b[i]);
}

// `offset`: of b within its vector of 4, in elements. Scalars up to the first whole vector, scalars after the last. Rows of a
// simdgroup may differ in it, and then no lane reads A for another.
template <int UNROLL, class T>
METAL_FUNC void dot_aligning(const device T* b, const threadgroup float* a, uint count, uint offset, thread float4 (&sum)[4]) {
  uint head = metal::min((4 - offset % 4) % 4, count);
  for (uint i = 0; i < head; i++) sum[0][0] += a[i] * float(b[i]);
  dot_vec4<UNROLL, READ_EACH>(b, a, head, count, sum);
}
