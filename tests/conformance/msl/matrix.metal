// A simdgroup's matrices.
#include <metal_stdlib>
using namespace metal;

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
