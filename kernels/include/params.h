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
};

#ifndef __METAL_VERSION__
static_assert(sizeof(MatmulParams) == 18 * 4, "the kernels and the host must see one layout");
}  // namespace metalmm
#endif
