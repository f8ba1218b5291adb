// simdgroup_matrix on tensor cores. mma.m16n8k8 keeps rows of A and D over lanes as (lane / 4, 2 * (lane % 4)), Metal as row() and
// column() of ../matrix.h say: a permutation of lanes, made where it is needed.
#pragma once

namespace metalmm::msl::library {

template <class A> void multiply(float (&sum)[4], uint rows, uint columns);

template <class T, int Cols = 8, int Rows = Cols> struct simdgroup_matrix {
  static_assert(Cols == 8 && Rows == 8, "MSL has 8 x 8 simdgroup matrices only");
  using storage_type = ThreadElements<T>;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    for (uint i = 0; i < 2; i++) thread_elements()[i] = row() == column() + i ? diagonal : T(0);
  }
#ifdef METALMM_CONVERGED
  // A kernel of this package asks which elements a lane has (kernels/include/place.h): the tensor core's.
  storage_type& thread_elements() {
    settle();
    return elements_;
  }
  const storage_type& thread_elements() const { return const_cast<simdgroup_matrix*>(this)->thread_elements(); }
  storage_type fragment() const { return thread_elements(); }
  static METALMM_INLINE uint row() { return simd_lane() / 4; }
  static METALMM_INLINE uint column() { return simd_lane() % 4 * 2; }

  // Tensor cores cut off what they add: a sum of thousands would lose a bit at each step. So two products are added to each other there
  // and then, rounded, to the rest. The compiler knows how many there are: loops over them are unrolled, an even number of steps.
  template <class A> METALMM_INLINE void add_product(uint rows, uint columns) {
    multiply<A>(few_, rows, columns);
    if (++count_ == 2) settle();
  }

 private:
  METALMM_INLINE void settle() {
    if (count_ == 0) return;
    elements_[0] += few_[0], elements_[1] += few_[1];
    few_[0] = few_[1] = few_[2] = few_[3] = 0.0f;
    count_ = 0;
  }
  float few_[4] = {};
  uint count_ = 0;
#else
  // Another may know Metal's; it may keep a reference to them for longer than a product, and ask for them in lanes that have parted from others.
  storage_type& thread_elements() { return elements_; }
  const storage_type& thread_elements() const { return elements_; }
  storage_type fragment() const { return ordered(elements_, false); }
  void set_fragment(storage_type v) { elements_ = ordered(v, true); }
  static METALMM_INLINE uint row() { return metal_row(simd_lane()); }
  static METALMM_INLINE uint column() { return metal_column(simd_lane()); }

 private:
  static METALMM_INLINE storage_type ordered(storage_type elements, bool metal) {
    uint lane = simd_lane();
    uint row = metal ? metal_row(lane) : lane / 4, column = metal ? metal_column(lane) : lane % 4 * 2;
    uint source = metal ? row * 4 + column / 2 : (row & 4) * 4 + (column & 4) * 2 + (row & 3) * 2 + (column / 2 & 1);
    return metalmm::fiber::shuffle(metalmm::fiber::active(), elements, source);
  }
#endif
  storage_type elements_;
};

// sum += rows * columns, of half or bfloat. The last eight of mma's 16 rows of A are nobody's: whatever their register, a, holds, no other row
// depends on it.
template <class A> void multiply(float (&sum)[4], uint rows, uint columns) {
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(columns));  // a lane of mma's B holds two rows of a column
  if constexpr (is_same<A, half>::value)
    asm volatile("{ .reg .b32 a; mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, a}, {%5}, {%0, %1, %2, %3}; }"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(rows), "r"(columns));
  else
    asm volatile("{ .reg .b32 a; mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, a}, {%5}, {%0, %1, %2, %3}; }"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(rows), "r"(columns));
}

template <class D, class A, class B, class C>
METALMM_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b,
                                                  const simdgroup_matrix<C, 8, 8>& c, METALMM_SITE) {
  (void)site;
  ThreadElements<A> left = a.fragment();
  ThreadElements<B> right = b.fragment();
  [[maybe_unused]] uint rows, columns;
  if constexpr (is_same<A, B>::value && sizeof(A) == 2) {
    memcpy(&rows, &left, 4);
    memcpy(&columns, &right, 4);
#ifdef METALMM_CONVERGED
    static_assert(is_same<C, float>::value && is_same<D, float>::value, "sums of this package's kernels are of float");
    if (&d != &c) d = c;
    return d.template add_product<A>(rows, columns);
#endif
  }
  ThreadElements<C> sum = c.fragment();
  float x = static_cast<float>(sum[0]), y = static_cast<float>(sum[1]);
  if constexpr (is_same<A, B>::value && sizeof(A) == 2) {
    float product[4] = {};  // added here, for tensor cores cut off what they add
    multiply<A>(product, rows, columns);
    x += product[0], y += product[1];
  } else {  // tensor cores would round float to 11 bits
    uint mask = metalmm::fiber::active(), lane = simd_lane();
#pragma unroll
    for (uint k = 0; k < 8; k++) {
      float p = __shfl_sync(mask, static_cast<float>(left[k % 2]), static_cast<int>(lane / 4 * 4 + k / 2));
      x += p * __shfl_sync(mask, static_cast<float>(right[0]), static_cast<int>(4 * k + lane % 4));
      y += p * __shfl_sync(mask, static_cast<float>(right[1]), static_cast<int>(4 * k + lane % 4));
    }
  }
#ifdef METALMM_CONVERGED
  d.thread_elements() = {{static_cast<D>(x), static_cast<D>(y)}};
#else
  d.set_fragment({{static_cast<D>(x), static_cast<D>(y)}});
#endif
}

// What kernels/cuda has of tensor cores: mma.m16n8k16 of half or bfloat, sums in float, lanes as PTX says.
template <class T = half> METALMM_INLINE float4 mma_16x8x16(float4 sum, uint4 a, uint2 b) {
  float4 d;
#define METALMM_MMA(type)                                                                                                               \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};" \
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                                                                         \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(sum[0]), "f"(sum[1]), "f"(sum[2]), "f"(sum[3]))
  if constexpr (is_same<T, half>::value) METALMM_MMA("f16");
  else METALMM_MMA("bf16");
#undef METALMM_MMA
  return d;
}

// Four 8 x 8 matrices of 16-bit elements in threadgroup memory, as mma wants them: lane i brings the address of line i % 8 of matrix i / 8,
// which stands on 16 bytes. Transposed: a lane's two elements are of two lines.
METALMM_INLINE uint4 load_matrices(const void* line) {
  uint4 x;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(shared_address(line)) : "memory");
  return x;
}
METALMM_INLINE uint4 load_transposed(const void* line) {
  uint4 x;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(shared_address(line)) : "memory");
  return x;
}

// Of eight bytes those that the four lowest digits of `which` say, of sixteen each.
METALMM_INLINE uint pick_bytes(uint low, uint high, uint which) { return __byte_perm(low, high, which); }

// Sixteen bytes to threadgroup memory, on their way while the thread goes on; zeros, where they are not there. close_copies: those since the
// last one are a group. wait_for_copies: all but the last N groups of this thread are there.
METALMM_INLINE void copy_later(void* to, const void* from, bool there = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(shared_address(to)), "l"(from), "r"(there ? 16u : 0u)
               : "memory");
}
// x, of which the compiler forgets how it came about: else it works it out anew at each turn of a loop.
METALMM_INLINE uint kept(uint x) {
  asm volatile("" : "+r"(x));
  return x;
}
METALMM_INLINE void close_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }
template <uint N> METALMM_INLINE void wait_for_copies() { asm volatile("cp.async.wait_group %0;" : : "n"(N) : "memory"); }

// kernels/include/next.h says what for.
METALMM_INLINE void begin_next([[maybe_unused]] bool has_waited) {
#if __CUDA_ARCH__ >= 900
  u32 late = metalmm::fiber::word_of_launch<cuda::kLateAt>(), beside = metalmm::fiber::word_of_launch<cuda::kBesideAt>();
  if (!has_waited && late && !beside) return;
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace metalmm::msl::library
