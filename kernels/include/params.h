// The arguments of every matmul kernel at buffer index 5; csrc/core compiles this file too.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
namespace metalmm {
using uint = std::uint32_t;
#endif

// D[b] = alpha * op(A[b]) op(B[b]) + beta * C[b] + bias. Row-major; strides and leading dimensions count elements.
struct MatmulParams {
  uint m, n, k, batch;
  uint lda, ldb, ldc, ldd;
  uint stride_a, stride_b, stride_c, stride_d;  // between matrices of a batch; 0: shared
  float alpha, beta;
  uint has_bias, has_c;
  uint vec_offset_a, vec_offset_b;  // of the first element within its vector of 8, in elements: where loads of 4 and 8 are aligned
  // Of quantized weights, whose ldb and vec_offset_b are bytes: 2^group_shift along K share a scale; 0xff.
  uint group_shift, low_byte;
};

// Of a fused kernel: one for each B.
struct FusedParams {
  MatmulParams of[3];
};

#ifndef __METAL_VERSION__
static_assert(sizeof(MatmulParams) == 20 * 4, "the kernels and the host must see one layout");
}  // namespace metalmm
#endif
