// The arguments of every matmul kernel at buffer index 5; csrc/core compiles this file too.
#pragma once

#ifdef __METAL_VERSION__
#include <metal_stdlib>
#else
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

#ifdef __METAL_VERSION__
// Whether rows of A, or of B, begin on a vector of that many elements; of quantized weights, bytes.
METAL_FUNC bool a_in_vectors(constant MatmulParams& p, uint size) { return (p.lda | p.stride_a | p.vec_offset_a) % size == 0; }
METAL_FUNC bool b_in_vectors(constant MatmulParams& p, uint size) { return (p.ldb | p.stride_b | p.vec_offset_b) % size == 0; }
// Which matrix of a fused call this threadgroup has. group.x becomes its index among those of that matrix. columns: of a threadgroup.
METAL_FUNC uint matrix_of(thread metal::uint3& group, constant FusedParams& params, uint columns) {
  uint groups0 = (params.of[0].n - 1) / columns + 1, groups1 = (params.of[1].n - 1) / columns + 1;
  uint i = group.x < groups0 ? 0 : group.x < groups0 + groups1 ? 1 : 2;
  group.x -= i == 0 ? 0 : i == 1 ? groups0 : groups0 + groups1;
  return i;
}
#else
static_assert(sizeof(MatmulParams) == 20 * 4, "the kernels and the host must see one layout");
}  // namespace metalmm
#endif
