// simdgroup_matrix on fibers; see cuda/matrix.h for tensor cores.
#pragma once

namespace metalmm::msl::library {

// 8 x 8 over 32 lanes, in the layout of Apple's GPUs: a lane holds two neighbours of one row.
template <class T, int Cols = 8, int Rows = Cols> struct simdgroup_matrix {
  static_assert(Cols == 8 && Rows == 8, "MSL has 8 x 8 simdgroup matrices only");
  using storage_type = ThreadElements<T>;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    for (uint i = 0; i < 2; i++) thread_elements()[i] = row() == column() + i ? diagonal : T(0);
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
  d.thread_elements()[0] = static_cast<D>(p[0]);
  d.thread_elements()[1] = static_cast<D>(p[1]);
}

// What kernels/cuda has of NVIDIA's tensor cores, for a fake of its driver: mma.m16n8k16, sums in float. How they round
// is not written down; here they add eight products to a sum at once, cut off one bit below the largest's last, and cut off the result.
struct Mma {
  static float cut_off_sum(float sum, const float (&products)[8]) {
    double exact = sum, most = __builtin_fabs(exact);
    for (float p : products) {
      exact += p;
      most = __builtin_fmax(most, __builtin_fabs(static_cast<double>(p)));
    }
    if (!(most < 0x1p128) || most == 0.0 || !(__builtin_fabs(exact) < 0x1p128)) return static_cast<float>(exact);
    unsigned long long bits;
    __builtin_memcpy(&bits, &most, 8);
    bits &= 0x7ff0000000000000ull;
    double unit;
    __builtin_memcpy(&unit, &bits, 8);
    unit *= 0x1p-24;
    double cut = static_cast<double>(static_cast<long long>(sum / unit));
    for (float p : products) cut += static_cast<double>(static_cast<long long>(p / unit));
    cut *= unit;
    float nearest = static_cast<float>(cut);
    uint word;
    __builtin_memcpy(&word, &nearest, 4);
    if (__builtin_fabs(static_cast<double>(nearest)) > __builtin_fabs(cut)) word--;
    __builtin_memcpy(&nearest, &word, 4);
    return nearest;
  }
  // Sums in the slots of their size; a lane's two words of A's first eight columns, of its last eight and of B in a matrix each.
  template <class T> static void all(metalmm::abi::Simdgroup* g, uint mask) {
    metalmm::fiber::check_whole(mask);
    for (uint i = 0; i < 4 * 32; i++) {
      uint lane = i / 4, element = i % 4, row = lane / 4 * 4, column = (lane % 4 * 2 + element % 2) * 4;
      float sum = metalmm::fiber::slots<float4>(g->in)[lane][static_cast<int>(element)];
      for (uint half = 0; half < 2; half++) {
        float products[8];
        for (uint k = 0; k < 4; k++) {  // pairs
          vec<T, 2> x = as_type<vec<T, 2>>(g->matrices[half][2 * (row + k) + element / 2]), y = as_type<vec<T, 2>>(g->matrices[2][2 * (column + k) + half]);
          for (int i = 0; i < 2; i++) products[2 * k + static_cast<uint>(i)] = static_cast<float>(x[i]) * static_cast<float>(y[i]);
        }
        sum = cut_off_sum(sum, products);
      }
      metalmm::fiber::slots<float4>(g->out)[lane][static_cast<int>(element)] = sum;
    }
  }
};
// Not inlined, as above: a kernel has dozens.
template <class T = half> __attribute__((noinline, unused)) static float4 mma_16x8x16(float4 sum, uint4 a, uint2 b, METALMM_SITE) {
  auto* context = metalmm::fiber::context();
  auto* g = context->group;
  uint lane = context->lane & 31;
  metalmm::fiber::slots<float4>(g->in)[lane] = sum;
  const uint2 words[] = {a.xy, a.zw, b};
  for (uint i = 0; i < 3; i++)
    for (uint j = 0; j < 2; j++) g->matrices[i][2 * lane + j] = as_type<float>(words[i][static_cast<int>(j)]);
  metalmm::fiber::meet(context, g, lane, &Mma::all<T>, METALMM_SITE_VALUE);
  return metalmm::fiber::slots<float4>(g->out)[lane];
}

// Four matrices of 16-bit elements: lane i brings where line i % 8 of matrix i / 8 is.
template <bool Transposed> struct LoadMatrices {
  static constexpr bool uses_arg = false;
  static void run(uint, const ulong* lines, const uint*, uint4* out) {
    for (uint i = 0; i < 4 * 32; i++) {
      uint lane = i / 4, matrix = i % 4, first = lane / 4, second = lane % 4 * 2;
      ushort word[2];
      for (uint j = 0; j < 2; j++) {
        uint line = Transposed ? second + j : first, element = Transposed ? first : second + j;
        word[j] = reinterpret_cast<const ushort*>(lines[8 * matrix + line])[element];
      }
      __builtin_memcpy(reinterpret_cast<char*>(out + lane) + 4 * matrix, word, 4);
    }
  }
};
METALMM_INLINE uint4 load_matrices(const void* line, METALMM_SITE) {
  return metalmm::fiber::exchange<LoadMatrices<false>, ulong, uint4>(reinterpret_cast<ulong>(line), 0, METALMM_SITE_VALUE);
}
METALMM_INLINE uint4 load_transposed(const void* line, METALMM_SITE) {
  return metalmm::fiber::exchange<LoadMatrices<true>, ulong, uint4>(reinterpret_cast<ulong>(line), 0, METALMM_SITE_VALUE);
}

// At once: what a kernel forgets to wait for is not seen here.
METALMM_INLINE void copy_later(void* to, const void* from) { __builtin_memcpy(to, from, 16); }
METALMM_INLINE uint pick_bytes(uint low, uint high, uint which) {
  ulong bytes = ulong(high) << 32 | low;
  uint picked = 0;
  for (uint i = 0; i < 4; i++) picked |= uint(bytes >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
  return picked;
}
METALMM_INLINE void close_copies() {}
METALMM_INLINE void show_group() {}
template <uint N> METALMM_INLINE void wait_for_groups() {}
template <int COUNT> METALMM_INLINE void take_sums(float (&)[COUNT]) {}
// As cuda/group.h says. Where an element stands follows from its address, as there.
template <class T, int COUNT> __attribute__((noinline, unused)) static void multiply_group(float (&sum)[COUNT], const T* a, const T* b) {
  uint thread = metalmm::fiber::context()->lane % 128, lane = thread % 32;
  auto at = [](const T* lines, uint line, uint k) {
    ulong address = reinterpret_cast<ulong>(lines) + line * 128 + k * 2;
    return static_cast<float>(*reinterpret_cast<const T*>(address ^ (address >> 7 & 7) << 4));
  };
  for (uint e = 0; e < COUNT; e++) {
    uint row = thread / 32 * 16 + lane / 4 + e % 4 / 2 * 8, column = e / 4 * 8 + lane % 4 * 2 + e % 2;
    for (uint k = 0; k < 64; k += 8) {
      float products[8];
      for (uint i = 0; i < 8; i++) products[i] = at(a, row, k + i) * at(b, column, k + i);
      sum[e] = Mma::cut_off_sum(sum[e], products);
    }
  }
}
METALMM_INLINE void begin_next(bool) {}
template <uint N> METALMM_INLINE void wait_for_copies() {}

}  // namespace metalmm::msl::library
