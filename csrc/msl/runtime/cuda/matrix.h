// simdgroup_matrix on tensor cores. mma.m16n8k8 keeps rows of A and D over lanes as (lane / 4, 2 * (lane % 4)), Metal as row() and
// column() of ../matrix.h say: a permutation of lanes, made where it is needed.
#pragma once

namespace metalmm::msl::library {

template <class T, int Cols = 8, int Rows = Cols> struct simdgroup_matrix {
  static_assert(Cols == 8 && Rows == 8, "MSL has 8 x 8 simdgroup matrices only");
  using storage_type = vec<T, 2>;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    for (uint i = 0; i < 2; i++) thread_elements()[static_cast<int>(i)] = row() == column() + i ? diagonal : T(0);
  }
  storage_type& thread_elements() { return elements_; }
  const storage_type& thread_elements() const { return elements_; }
#ifdef METALMM_CONVERGED
  // A kernel of this package asks which elements a lane has (kernels/include/place.h): the tensor core's.
  storage_type fragment() const { return elements_; }
  void set_fragment(storage_type v) { elements_ = v; }
  static METALMM_INLINE uint row() { return simd_lane() / 4; }
  static METALMM_INLINE uint column() { return simd_lane() % 4 * 2; }
#else
  // Another may know Metal's; it may keep a reference to them for longer than a product, and ask for them in lanes that have parted from others.
  storage_type fragment() const { return ordered(elements_, false); }
  void set_fragment(storage_type v) { elements_ = ordered(v, true); }
  static METALMM_INLINE uint row() { return metal_row(simd_lane()); }
  static METALMM_INLINE uint column() { return metal_column(simd_lane()); }
#endif

 private:
  static METALMM_INLINE storage_type ordered(storage_type elements, bool metal) {
    uint lane = simd_lane();
    uint row = metal ? metal_row(lane) : lane / 4, column = metal ? metal_column(lane) : lane % 4 * 2;
    uint source = metal ? row * 4 + column / 2 : (row & 4) * 4 + (column & 4) * 2 + (row & 3) * 2 + (column / 2 & 1);
    return metalmm::fiber::shuffle(metalmm::fiber::active(), elements, source);
  }
  storage_type elements_;

#ifdef METALMM_CONVERGED
 public:
  float rest[2] = {0.0f, 0.0f};  // of eight rows that a sum of mma has and no one reads: it adds in place
#endif
};

template <class D, class A, class B, class C>
METALMM_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b,
                                                  const simdgroup_matrix<C, 8, 8>& c, METALMM_SITE) {
  (void)site;
  vec<A, 2> left = a.fragment();
  vec<B, 2> right = b.fragment();
  vec<C, 2> sum = c.fragment();
  float x = static_cast<float>(sum[0]), y = static_cast<float>(sum[1]);
  if constexpr (is_same<A, B>::value && sizeof(A) == 2) {
    uint rows, columns;
    memcpy(&rows, &left, 4);
    memcpy(&columns, &right, 4);
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(columns));  // a lane of mma's B holds two rows of a column
    // The last eight of mma's 16 rows of A are nobody's: whatever their register, a, holds, no other row depends on it.
#ifdef METALMM_CONVERGED
    float(&rest)[2] = d.rest;
    rest[0] = c.rest[0], rest[1] = c.rest[1];
#else
    float rest[2] = {0.0f, 0.0f};
#endif
    if constexpr (is_same<A, half>::value)
      asm volatile("{ .reg .b32 a; mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, a}, {%5}, {%0, %1, %2, %3}; }"
                   : "+f"(x), "+f"(y), "+f"(rest[0]), "+f"(rest[1]) : "r"(rows), "r"(columns));
    else
      asm volatile("{ .reg .b32 a; mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, a}, {%5}, {%0, %1, %2, %3}; }"
                   : "+f"(x), "+f"(y), "+f"(rest[0]), "+f"(rest[1]) : "r"(rows), "r"(columns));
  } else {  // tensor cores would round float to 11 bits
    uint mask = metalmm::fiber::active(), lane = simd_lane();
#pragma unroll
    for (uint k = 0; k < 8; k++) {
      float p = __shfl_sync(mask, static_cast<float>(left[static_cast<int>(k % 2)]), static_cast<int>(lane / 4 * 4 + k / 2));
      x += p * __shfl_sync(mask, static_cast<float>(right[0]), static_cast<int>(4 * k + lane % 4));
      y += p * __shfl_sync(mask, static_cast<float>(right[1]), static_cast<int>(4 * k + lane % 4));
    }
  }
  d.set_fragment(vec<D, 2>(static_cast<D>(x), static_cast<D>(y)));
}

// What kernels/include/tensor.h has of tensor cores: mma.m16n8k16 of half, sums in float, lanes as PTX says.
METALMM_INLINE float4 mma_16x8x16(float4 sum, uint4 a, uint2 b) {
  float4 d;
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(sum[0]), "f"(sum[1]), "f"(sum[2]), "f"(sum[3]));
  return d;
}

}  // namespace metalmm::msl::library
