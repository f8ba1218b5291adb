// Inner products of one row of B with a vector that lies in threadgroup memory as float.
#pragma once
#include <metal_stdlib>

// Four independent chains hide the latency of dependent float32 FMAs, 11 cycles on Apple GPUs at low occupancy.
template <int UNROLL>
METAL_FUNC void dot_scalar(const device half* b, const threadgroup float* a, uint begin, uint end, thread float4& sum) {
  uint i = begin;
  for (; i + UNROLL <= end; i += UNROLL) {
#pragma clang loop unroll(full)
    for (uint u = 0; u < UNROLL; u++) sum[u % 4] += a[i + u] * float(b[i + u]);
  }
  for (; i < end; i++) sum[0] += a[i] * float(b[i]);
}

template <int UNROLL>
METAL_FUNC void dot_half4(const device half* b, const threadgroup float* a, uint begin, uint end, thread float4 (&sum)[4]) {
  uint i = begin;
  for (; i + 4 * UNROLL <= end; i += 4 * UNROLL) {
    const device half4* v = reinterpret_cast<const device half4*>(b + i);
    half4 loaded[UNROLL];  // all in flight before the first use
#pragma clang loop unroll(full)
    for (uint u = 0; u < UNROLL; u++) loaded[u] = v[u];
#pragma clang loop unroll(full)
    for (uint u = 0; u < UNROLL; u++) {
      const threadgroup float* x = a + i + 4 * u;
      sum[u % 4] += float4(x[0], x[1], x[2], x[3]) * float4(loaded[u]);
    }
  }
  for (; i + 4 <= end; i += 4) {
    const threadgroup float* x = a + i;
    sum[0] += float4(x[0], x[1], x[2], x[3]) * float4(*reinterpret_cast<const device half4*>(b + i));
  }
  for (; i < end; i++) sum[0][0] += a[i] * float(b[i]);
}

// `phase`: where b stands within 8 bytes, in elements. Scalars up to the first aligned half4, scalars after the last.
template <int UNROLL>
METAL_FUNC void dot_aligning(const device half* b, const threadgroup float* a, uint count, uint phase, thread float4 (&sum)[4]) {
  uint head = metal::min((4 - phase % 4) % 4, count);
  for (uint i = 0; i < head; i++) sum[0][0] += a[i] * float(b[i]);
  dot_half4<UNROLL>(b, a, head, count, sum);
}
