// m, n and k up to 65535 and any layout, by Metal 4's tensor operations, which an M5's GPU has in hardware: a threadgroup owns BM x BN of
// the output.
// clang-format off: the last is empty without what those before it define
#include <metal_stdlib>
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
// clang-format on

#include "include/epilogue.h"

// A matrix in memory from a tile on, as far as it reaches: extents are columns first. Addresses are counted here, in 64 bits, for `slice`
// counts in 32 (llama.cpp #28748).
template <class T>
METAL_FUNC auto rest_of(const device T* first, uint columns, uint rows, uint ld) {
  typedef metal::dextents<int, 2> Extents;
  return metal::tensor<device T, Extents, metal::tensor_inline>((device T*)first, Extents(int(columns), int(rows)),
                                                                metal::array<int, 2>{1, int(ld)});
}

// For rows that are further apart than tensors' may be: llama.cpp #27064 tells of distances from 2^16 on that fail.
template <class T>
METAL_FUNC float one_by_one(const device T* a, ulong step_a, const device T* b, ulong step_b, uint k) {
  float sum = 0.0f;
#pragma clang loop unroll(disable)
  for (uint i = 0; i < k; i++) sum += float(a[i * step_a]) * float(b[i * step_b]);
  return sum;
}

template <class T, int BM, int BN, int TG, bool TA, bool TB>
[[kernel, max_total_threads_per_threadgroup(TG)]] void gemm_tensor(const device T* A [[buffer(0)]], const device T* B [[buffer(1)]],
                                                                   device T* D [[buffer(2)]], const device T* C [[buffer(3)]],
                                                                   const device T* bias [[buffer(4)]],
                                                                   constant MatmulParams& p [[buffer(5)]],
                                                                   uint3 group [[threadgroup_position_in_grid]]) {
  using namespace mpp::tensor_ops;
  uint row = group.y * BM, col = group.x * BN, rows = p.m - row, columns = p.n - col;
  const device T* from_a = A + ulong(group.z) * p.stride_a + (TA ? ulong(row) : ulong(row) * p.lda);
  const device T* from_b = B + ulong(group.z) * p.stride_b + (TB ? ulong(col) * p.ldb : ulong(col));
  auto a = rest_of(from_a, TA ? rows : p.k, TA ? p.k : rows, p.lda);
  auto b = rest_of(from_b, TB ? p.k : columns, TB ? columns : p.k, p.ldb);
  // K is the operands' own: of one that is fixed, what lies behind the last would count.
  constexpr auto product = matmul2d_descriptor(BM, BN, int(metal::dynamic_extent), TA, TB, false, matmul2d_descriptor::mode::multiply);
  matmul2d<product, metal::execution_simdgroups<TG / 32>> op;
  auto sums = op.template get_destination_cooperative_tensor<decltype(a), decltype(b), float>();
  bool is_far = metal::max(p.lda, p.ldb) >= 65536;
  if (!is_far) op.run(a, b, sums);
#pragma clang loop unroll(full)
  for (ushort i = 0; i < sums.get_capacity(); i++) {
    if (!sums.is_valid_element(i)) continue;
    auto at = sums.get_multidimensional_index(i);  // column, row
    if (uint(at[0]) >= columns || uint(at[1]) >= rows) continue;
    const device T* own_a = from_a + ulong(at[1]) * (TA ? 1 : p.lda);
    const device T* own_b = from_b + ulong(at[0]) * (TB ? p.ldb : 1);
    float sum = is_far ? one_by_one(own_a, TA ? p.lda : 1, own_b, TB ? 1 : p.ldb, p.k) : sums[i];
    store_result(D, C, bias, p, group.z, row + at[1], col + at[0], sum);
  }
}
