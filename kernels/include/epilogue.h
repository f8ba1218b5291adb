// What every matmul kernel does with a finished sum: D = alpha * AB + beta * C + bias, or swiglu of two.
#pragma once
#include <metal_stdlib>

#include "params.h"

// D, and what is added to it.
template <class T>
struct Output {
  device T* D;
  const device T* C;
  const device T* bias;
};

template <class T>
METAL_FUNC float bias_of(const device T* bias, constant MatmulParams& p, uint col) {
  return p.has_bias ? float(bias[col]) : 0.0f;
}
// added: bias_of the column, which can be read while the sum is not yet there.
template <class T>
METAL_FUNC float result_of(const device T* C, constant MatmulParams& p, uint batch, uint row, uint col, float ab, float added) {
  float d = p.alpha * ab;
  if (p.has_c) d += p.beta * float(C[batch * p.stride_c + row * p.ldc + col]);
  return p.has_bias ? d + added : d;
}
// The same of COUNT neighbours in a row, eight or four. One branch for C and one for the bias serve all: one for each slowed storing
// (docs/lab/cuda.md).
template <int COUNT, class T>
METAL_FUNC void results_of(thread metal::float4 (&y)[2], Output<T> to, constant MatmulParams& p, uint batch, uint row, uint col) {
#pragma clang loop unroll(full)
  for (uint i = 0; i < COUNT / 4; i++) y[i] *= p.alpha;
  if (p.has_c) {
    const device T* c = to.C + (batch * p.stride_c + row * p.ldc + col);
#pragma clang loop unroll(full)
    for (uint i = 0; i < COUNT; i++) y[i / 4][i % 4] += p.beta * float(c[i]);
  }
  if (p.has_bias) {
#pragma clang loop unroll(full)
    for (uint i = 0; i < COUNT; i++) y[i / 4][i % 4] += float(to.bias[col + i]);
  }
}
template <class T>
METAL_FUNC void store_sum(device T* D, const device T* C, constant MatmulParams& p, uint batch, uint row, uint col, float ab, float added) {
  D[batch * p.stride_d + row * p.ldd + col] = T(result_of(C, p, batch, row, col, ab, added));
}
template <class T>
METAL_FUNC void store_result(device T* D, const device T* C, const device T* bias, constant MatmulParams& p, uint batch, uint row, uint col,
                             float ab) {
  store_sum(D, C, p, batch, row, col, ab, bias_of(bias, p, col));
}
// silu(x) * y, of two sums with their bias.
template <class T>
METAL_FUNC void store_swiglu(device T* D, constant MatmulParams& p, uint batch, uint row, uint col, float x, float y) {
  D[batch * p.stride_d + row * p.ldd + col] = T(x / (1.0f + metal::precise::exp(-x)) * y);
}
