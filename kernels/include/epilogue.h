// What every matmul kernel does with a finished sum: D = alpha * AB + beta * C + bias.
#pragma once
#include <metal_stdlib>

#include "params.h"

template <class T>
METAL_FUNC void store_result(device T* D, const device T* C, const device T* bias, constant MatmulParams& p, uint batch, uint row, uint col,
                             float ab) {
  float d = p.alpha * ab;
  if (p.has_c) d += p.beta * float(C[batch * p.stride_c + row * p.ldc + col]);
  if (p.has_bias) d += float(bias[col]);
  D[batch * p.stride_d + row * p.ldd + col] = T(d);
}
