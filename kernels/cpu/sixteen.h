// For devices that run one thread at a time, wide: sixteen neighbours as float, in arrays that plain loops go over, of which the compiler
// makes vectors. They come by way of a matrix, which the CPU device converts eight or sixteen in an instruction; of a loop over halves g++
// 12 makes as many conversions.
#pragma once
#include <metal_stdlib>

// WHOLE: p stands on a vector of 4.
template <bool WHOLE, class T>
METAL_FUNC void sixteen(const device T* p, thread float (&x)[16]) {
  if (WHOLE) {
    metal::float4x4 values = metal::float4x4(*reinterpret_cast<const device metal::matrix<T, 4, 4>*>(p));
    for (uint i = 0; i < 16; i++) x[i] = values[i / 4][i % 4];
  } else {
    for (uint i = 0; i < 16; i++) x[i] = float(p[i]);
  }
}
