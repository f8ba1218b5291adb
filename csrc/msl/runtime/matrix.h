// simdgroup_matrix on fibers; see cuda/matrix.h for tensor cores.
#pragma once

namespace metalmm::msl::library {

// 8 x 8 over 32 lanes, in the layout of Apple's GPUs: a lane holds two neighbours of one row.
template <class T, int Cols = 8, int Rows = Cols> struct simdgroup_matrix {
  static_assert(Cols == 8 && Rows == 8, "MSL has 8 x 8 simdgroup matrices only");
  using storage_type = vec<T, 2>;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    for (uint i = 0; i < 2; i++) thread_elements()[static_cast<int>(i)] = row() == column() + i ? diagonal : T(0);
  }
  storage_type& thread_elements() { return elements_; }
  const storage_type& thread_elements() const { return elements_; }
  static METALMM_INLINE uint row(uint lane = simd_lane()) { return metal_row(lane); }
  static METALMM_INLINE uint column(uint lane = simd_lane()) { return metal_column(lane); }

 private:
  storage_type elements_;
};

// Lanes write their elements into whole matrices, so that the last one multiplies rows as vectors. float accumulation.
struct MultiplyAccumulate {
  typedef float row8 __attribute__((vector_size(32)));
  static void all(metalmm::abi::Simdgroup* g, uint mask) {
    metalmm::fiber::check_whole(mask);
    const float* a = g->matrices[0];
    const row8* b = reinterpret_cast<const row8*>(g->matrices[1]);
    const row8* c = reinterpret_cast<const row8*>(g->matrices[2]);
    row8* d = reinterpret_cast<row8*>(g->matrices[3]);
    for (int i = 0; i < 8; i++) {
      row8 sum = c[i];
      for (int k = 0; k < 8; k++) sum += a[8 * i + k] * b[k];
      d[i] = sum;
    }
  }
};

// Not inlined: a GEMM unrolls dozens of these, and g++ takes a minute over as many switches in one function.
static __attribute__((noinline, unused)) void multiply_accumulate(metalmm::abi::Site site) {
  auto* context = metalmm::fiber::context();
  metalmm::fiber::meet(context, context->group, context->lane & 31, &MultiplyAccumulate::all, site);
}

template <class D, class A, class B, class C>
METALMM_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b,
                                                  const simdgroup_matrix<C, 8, 8>& c, METALMM_SITE) {
  auto* context = metalmm::fiber::context();
  auto* g = context->group;
  uint lane = context->lane & 31;
  uint at = 8 * d.row(lane) + d.column(lane);
  auto bring = [&](float* matrix, const auto& m) {
    float* p = matrix + at;
    p[0] = static_cast<float>(m.thread_elements()[0]);
    p[1] = static_cast<float>(m.thread_elements()[1]);
  };
  bring(g->matrices[0], a);
  bring(g->matrices[1], b);
  bring(g->matrices[2], c);
  multiply_accumulate(METALMM_SITE_VALUE);
  const float* p = g->matrices[3] + at;
  d.thread_elements() = vec<D, 2>(static_cast<D>(p[0]), static_cast<D>(p[1]));
}

// What kernels/include/tensor.h has of NVIDIA's tensor cores, for a fake of its driver: mma.m16n8k16 of half, sums in float.
struct Mma {
  static constexpr bool uses_arg = false;
  struct alignas(32) In {
    uint4 a;
    uint2 b;
  };
  static void run(uint, const In* in, const uint*, float4* out) {
    for (uint i = 0; i < 4 * 32; i++) {
      uint lane = i / 4, element = i % 4;
      const In *row = in + lane / 4 * 4, *column = in + (lane % 4 * 2 + element % 2) * 4;
      float sum = 0.0f;
      for (uint k = 0; k < 8; k++) {  // pairs
        half2 x = as_type<half2>(row[k % 4].a[static_cast<int>(element / 2 + k / 4 * 2)]), y = as_type<half2>(column[k % 4].b[static_cast<int>(k / 4)]);
        sum += static_cast<float>(x[0]) * static_cast<float>(y[0]) + static_cast<float>(x[1]) * static_cast<float>(y[1]);
      }
      out[lane][static_cast<int>(element)] = sum;
    }
  }
};
METALMM_INLINE float4 mma_16x8x16(float4 sum, uint4 a, uint2 b, METALMM_SITE) {
  return sum + metalmm::fiber::exchange<Mma, Mma::In, float4>(Mma::In{a, b}, 0, METALMM_SITE_VALUE);
}

}  // namespace metalmm::msl::library
