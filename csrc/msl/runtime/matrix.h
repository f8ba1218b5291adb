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

// Not inlined: a GEMM unrolls dozens of these. But who calls it switches: a `return` on another lane's stack, to another place than the
// last call came from, is one that a processor foresees wrongly, and that took a third of a GEMM's time.
METALMM_ONCE metalmm::abi::Lane* come_to_multiply(metalmm::abi::Site site) {
  auto* context = metalmm::fiber::context();
  return metalmm::fiber::come_to(context, context->group, context->lane & 31, &MultiplyAccumulate::all, site);
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
  auto* self = &context->lanes[context->lane];
  if (auto* to = come_to_multiply(METALMM_SITE_VALUE)) metalmm::fiber::switch_lane(self, to);
  const float* p = g->matrices[3] + at;
  d.thread_elements()[0] = static_cast<D>(p[0]);
  d.thread_elements()[1] = static_cast<D>(p[1]);
}

// What kernels/cuda has of NVIDIA's tensor cores, for a fake of its driver: mma.m16n8k16, sums in float. How they round
// is not written down; here they add eight products to a sum at once, cut off one bit below the largest's last, and cut off the result.
struct Mma {
  static constexpr uint kSums = 8;  // at once
  typedef float Floats __attribute__((vector_size(32)));
  typedef int Ints __attribute__((vector_size(32)));
  typedef double Doubles __attribute__((vector_size(64)));
  typedef long long Longs __attribute__((vector_size(64)));
  static METALMM_INLINE void absolute(Doubles& x) { x = reinterpret_cast<Doubles>(reinterpret_cast<Longs>(x) & 0x7fffffffffffffffll); }
  // Eight sums, to each of which its eight products are added.
  static METALMM_INLINE void add_cut_off(Floats& sum, const Floats (&products)[8]) {
    Doubles exact = __builtin_convertvector(sum, Doubles), most = exact, wide[8];
    absolute(most);
    for (uint i = 0; i < 8; i++) {
      wide[i] = __builtin_convertvector(products[i], Doubles);
      exact += wide[i];
      Doubles size = wide[i];
      absolute(size);
      most = size > most ? size : most;
    }
    Doubles power = reinterpret_cast<Doubles>(reinterpret_cast<Longs>(most) & 0x7ff0000000000000ll), unit = power * 0x1p-24, per_unit = 1.0 / unit;
    Doubles cut = __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(sum, Doubles) * per_unit, Ints), Doubles);
    for (const Doubles& x : wide) cut += __builtin_convertvector(__builtin_convertvector(x * per_unit, Ints), Doubles);
    cut *= unit;
    Floats nearest = __builtin_convertvector(cut, Floats);
    Doubles size = __builtin_convertvector(nearest, Doubles);
    absolute(size), absolute(cut);
    Floats cut_result = reinterpret_cast<Floats>(reinterpret_cast<Ints>(nearest) + __builtin_convertvector(size > cut, Ints));
    absolute(size = exact);
    sum = __builtin_convertvector((most < 0x1p128) & (most > 0.0) & (size < 0x1p128), Ints) ? cut_result : __builtin_convertvector(exact, Floats);
  }
  // Sums in the slots of their size; a lane's two words of A's first eight columns, of its last eight and of B in a matrix each.
  template <class T> static void all(metalmm::abi::Simdgroup* g, uint mask) {
    metalmm::fiber::check_whole(mask);
    float a[16][16];
    Floats b[16], sums[16];
    for (uint lane = 0; lane < 32; lane++) {
      uint row = lane / 4, column = lane % 4 * 2;
      for (uint half = 0; half < 2; half++)
        for (uint word = 0; word < 2; word++) {
          vec<T, 2> x = as_type<vec<T, 2>>(g->matrices[half][2 * lane + word]);
          for (uint i = 0; i < 2; i++) a[row + 8 * word][8 * half + column + i] = static_cast<float>(x[static_cast<int>(i)]);
        }
      for (uint half = 0; half < 2; half++) {
        vec<T, 2> y = as_type<vec<T, 2>>(g->matrices[2][2 * lane + half]);
        for (uint i = 0; i < 2; i++) b[8 * half + column + i][row] = static_cast<float>(y[static_cast<int>(i)]);
      }
      for (uint i = 0; i < 4; i++) sums[row + i / 2 * 8][column + i % 2] = metalmm::fiber::slots<float4>(g->in)[lane][static_cast<int>(i)];
    }
    for (uint row = 0; row < 16; row++)
      for (uint half = 0; half < 2; half++) {
        Floats products[8];
        for (uint k = 0; k < 8; k++) products[k] = a[row][8 * half + k] * b[8 * half + k];
        add_cut_off(sums[row], products);
      }
    for (uint i = 0; i < 4 * 32; i++) {
      uint lane = i / 4, element = i % 4;
      metalmm::fiber::slots<float4>(g->out)[lane][static_cast<int>(element)] = sums[lane / 4 + element / 2 * 8][lane % 4 * 2 + element % 2];
    }
  }
};
// What follows stands in for tensor cores, in tests alone: once in a module, and it may switch lanes itself.
template <class T = half> METALMM_ONCE float4 mma_16x8x16(float4 sum, uint4 a, uint2 b, METALMM_SITE) {
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
METALMM_ONCE uint4 load_matrices(const void* line, METALMM_SITE) {
  return metalmm::fiber::exchange<LoadMatrices<false>, ulong, uint4>(reinterpret_cast<ulong>(line), 0, METALMM_SITE_VALUE);
}
METALMM_ONCE uint4 load_transposed(const void* line, METALMM_SITE) {
  return metalmm::fiber::exchange<LoadMatrices<true>, ulong, uint4>(reinterpret_cast<ulong>(line), 0, METALMM_SITE_VALUE);
}

// At once: what a kernel forgets to wait for is not seen here.
METALMM_INLINE void copy_later(void* to, const void* from, bool there = true) {
  there ? __builtin_memcpy(to, from, 16) : __builtin_memset(to, 0, 16);
}
METALMM_ONCE uint pick_bytes(uint low, uint high, uint which) {
  ulong bytes = ulong(high) << 32 | low;
  uint picked = 0;
  for (uint i = 0; i < 4; i++) picked |= uint(bytes >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
  return picked;
}
METALMM_INLINE uint kept(uint x) { return x; }
METALMM_INLINE void close_copies() {}
METALMM_INLINE void show_group() {}
template <uint N> METALMM_INLINE void wait_for_groups() {}
template <int COUNT> METALMM_INLINE void take_sums(float (&)[COUNT]) {}
// As cuda/group.h says, at once. The fake of NVIDIA's driver has written what a map says: tests/fakes/fake_cuda.
constexpr bool HAS_TMA = true;
METALMM_INLINE void begin_ready(ulong* ready) { *ready = 0; }
METALMM_INLINE void expect_tiles(ulong* ready, uint bytes) {
  if (*ready != 0) __builtin_trap();
  *ready = bytes;
}
METALMM_ONCE void copy_tile(void* to, const abi::TileMap& map, uint x, uint y, uint z, ulong* ready) {
  const auto& of = reinterpret_cast<const abi::FakeTileMap&>(map);
  uint each = of.bytes, line = of.box[0] * each;
  for (uint row = 0; row < of.box[1]; row++)
    for (uint i = 0; i < line; i++) {
      ulong at = reinterpret_cast<ulong>(to) + row * line + i;
      bool there = x + i / each < of.size[0] && y + row < of.size[1] && z < of.size[2];
      ulong from = (x + i / each) * ulong(each) + i % each + (y + row) * of.pitch[0] + z * of.pitch[1];
      *reinterpret_cast<unsigned char*>(at ^ (at >> 7 & (line / 16 - 1)) << 4) = there ? of.data[from] : 0;
    }
  *ready -= of.box[1] * line;
}
METALMM_INLINE void wait_for_tiles(ulong*, uint) {}
template <uint N> METALMM_INLINE void take_registers() {}
template <uint N> METALMM_INLINE void give_registers() {}
constexpr bool HAS_CLUSTERS = false;
METALMM_INLINE void meet_cluster() {}
METALMM_INLINE vec<float, 4> in_cluster(const vec<float, 4>* x, uint) { return *x; }
// As cuda/group.h says. Where an element stands follows from its address, as there.
template <class T> float element_of(const T* lines, uint line, uint k) {
  ulong address = reinterpret_cast<ulong>(lines) + line * 128 + k * 2;
  return static_cast<float>(*reinterpret_cast<const T*>(address ^ (address >> 7 & 7) << 4));
}
// x: of K, a lane's two rows.
template <class T, int COUNT, int K> METALMM_ONCE void add_to_group(float (&sum)[COUNT], const float (&x)[2][K], const T* b) {
  static_assert(COUNT % Mma::kSums == 0, "sums are added by eights");
  uint lane = metalmm::fiber::lane();
  // Eight sums: two rows by two columns, and eight columns on the same again.
  for (uint e = 0; e < COUNT; e += Mma::kSums) {
    uint column = e / 4 * 8 + lane % 4 * 2;
    Mma::Floats sums, products[8];
    for (uint i = 0; i < 8; i++) sums[i] = sum[e + i];
    for (uint k = 0; k < K; k += 8) {
      for (uint i = 0; i < 8; i++) {
        float p = x[0][k + i], q = x[1][k + i], y[4];
        for (uint j = 0; j < 4; j++) y[j] = element_of(b, column + j / 2 * 8 + j % 2, k + i);
        products[i] = Mma::Floats{p, p, q, q, p, p, q, q} * Mma::Floats{y[0], y[1], y[0], y[1], y[2], y[3], y[2], y[3]};
      }
      Mma::add_cut_off(sums, products);
    }
    for (uint i = 0; i < 8; i++) sum[e + i] = sums[i];
  }
}
template <class T, int COUNT> METALMM_ONCE void multiply_group(float (&sum)[COUNT], const T* a, const T* b) {
  uint thread = metalmm::fiber::context()->lane % 128, row = thread / 32 * 16 + thread % 32 / 4;
  float x[2][64];
  for (uint i = 0; i < 128; i++) x[i / 64][i % 64] = element_of(a, row + i / 64 * 8, i % 64);
  add_to_group(sum, x, b);
}
template <bool ADDS, int TIMES, class T, int COUNT>
METALMM_ONCE void multiply_lines(float (&sum)[COUNT], const uint4* left, const T* b, METALMM_SITE) {
  float x[2][16 * TIMES];
  for (uint i = 0; i < 4 * TIMES; i++) {  // 16 of k come from four lanes; TIMES of them
    uint from = i % 4;
    uint4 words = metalmm::fiber::exchange<Gather, uint4>(left[i / 4], metalmm::fiber::lane() / 4 * 4 + from, METALMM_SITE_VALUE);
    for (int j = 0; j < 4; j++) {
      vec<T, 2> two = as_type<vec<T, 2>>(words[j]);
      uint k = i / 4 * 16 + static_cast<uint>(j) / 2 * 8 + from * 2;
      x[j % 2][k] = static_cast<float>(two.x), x[j % 2][k + 1] = static_cast<float>(two.y);
    }
  }
  for (float& s : sum) s = ADDS ? s : 0.0f;
  add_to_group(sum, x, b);
}
template <bool ADDS, class T, int COUNT> METALMM_ONCE void multiply_group(float (&sum)[COUNT], const uint4 (&left)[2], const T* b, METALMM_SITE) {
  multiply_lines<ADDS, 2>(sum, left, b, METALMM_SITE_VALUE);
}
template <bool ADDS, class T, int COUNT> METALMM_ONCE void multiply_group(float (&sum)[COUNT], const uint4& left, const T* b, METALMM_SITE) {
  multiply_lines<ADDS, 1>(sum, &left, b, METALMM_SITE_VALUE);
}
METALMM_INLINE void begin_next(bool) {}
template <uint N> METALMM_INLINE void wait_for_copies() {}

}  // namespace metalmm::msl::library
