// Any m, n, k and layout: threadgroup tiles of BM x BN, BK deep, multiplied as 8 x 8 simdgroup matrices by WM x WN simdgroups.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;  // what follows names its types

#include "include/epilogue.h"
#include "include/weights.h"

// BM x BN outputs of a threadgroup, BK of k at a time; WM x WN simdgroups.
template <int M, int N, int K, int M_SIMDGROUPS, int N_SIMDGROUPS>
struct Blocks {
  enum : uint {
    BM = M,
    BN = N,
    BK = K,
    WM = M_SIMDGROUPS,
    WN = N_SIMDGROUPS,
    TG = WM * WN * 32,
    PITCH_A = BK + 8,  // off the power of two: fewer bank conflicts
    PITCH_B = BN + 8,
    PITCH_D = BN + 4
  };
};

// A tile in threadgroup memory: PITCH elements from row to row.
template <int R, int C, int P>
struct TileOf {
  enum : uint { ROWS = R, COLS = C, PITCH = P };
};

// Fills it, with zeros beyond the matrix. TRANSPOSED: the matrix lies as columns x rows. WHOLE: the tile's lines in memory do not end in it
// and begin on a vector of 4, and K does not end in it. Of lines past the last the last one is taken: nobody stores what becomes of them.
template <class To, int TG, bool TRANSPOSED, bool WHOLE, class Tile, class T>
METAL_FUNC void load_tile(const device T* source, uint ld, uint row0, uint col0, uint rows, uint cols, threadgroup Tile* tile, uint tid) {
  constexpr uint COUNT = To::ROWS * To::COLS, PITCH = To::PITCH, W = WHOLE ? 4 : 1;
  constexpr uint LINE = (TRANSPOSED ? To::ROWS : To::COLS) / W;  // loads of a line: neighbours in memory, neighbouring threads
  uint lines = TRANSPOSED ? cols : rows, line0 = TRANSPOSED ? col0 : row0;
  uint length = TRANSPOSED ? rows : cols, along0 = TRANSPOSED ? row0 : col0;
  for (uint i = tid; i < COUNT / W; i += TG) {
    uint along = i % LINE * W, across = i / LINE;
    uint r = TRANSPOSED ? along : across, c = TRANSPOSED ? across : along;
    if (WHOLE) {
      const device T* line = source + min(line0 + across, lines - 1) * ld;
      vec<T, 4> v = *reinterpret_cast<const device vec<T, 4>*>(line + along0 + along);
#pragma clang loop unroll(full)
      for (uint j = 0; j < 4; j++) tile[TRANSPOSED ? (r + j) * PITCH + c : r * PITCH + c + j] = Tile(v[j]);
    } else {
      bool inside = line0 + across < lines && along0 + along < length;
      tile[r * PITCH + c] = Tile(inside ? source[(line0 + across) * ld + along0 + along] : T(0.0f));
    }
  }
}

// The tile of B from k0, col0 on.
template <class T, class S, bool TB>
struct DenseTile {
  typedef T Element;
  static METAL_FUNC bool is_whole(constant MatmulParams& p, uint col0) { return b_in_vectors(p, 4) && (TB || col0 + S::BN <= p.n); }
  template <bool WHOLE>
  static METAL_FUNC void load(WeightsAt w, uint k0, uint col0, threadgroup T* tile, uint tid) {
    const device T* b = reinterpret_cast<const device T*>(w.values);
    load_tile<TileOf<S::BK, S::BN, S::PITCH_B>, S::TG, TB, WHOLE>(b, w.ldb, k0, col0, w.k, w.n, tile, tid);
  }
};

// Of quantized weights in float, which holds scale * integer exactly; half would not. WHOLE: eight neighbours are one load.
template <class From, class S>
struct WeightTile {
  typedef float Element;
  static METAL_FUNC bool is_whole(constant MatmulParams& p, uint) { return b_in_vectors(p, 16); }
  template <bool WHOLE>
  static METAL_FUNC void load(WeightsAt w, uint k0, uint col0, threadgroup float* tile, uint tid) {
    constexpr uint BN = S::BN, BK = S::BK, TG = S::TG, PITCH = S::PITCH_B;
    for (uint i = tid; i < BK * BN / 8; i += TG) {
      uint along = i % (BK / 8) * 8, c = i / (BK / 8), k = k0 + along;
      float v[8] = {};
      if (WHOLE) {
        Eight x = From::scaled(w, min(col0 + c, w.n - 1), k);
#pragma clang loop unroll(full)
        for (uint j = 0; j < 4; j++) v[j] = x.low[j], v[j + 4] = x.high[j];
      } else if (col0 + c < w.n) {
#pragma clang loop unroll(full)
        for (uint j = 0; j < 8; j++)
          if (k + j < w.k) v[j] = From::one(w, col0 + c, k + j);
      }
#pragma clang loop unroll(full)
      for (uint j = 0; j < 8; j++) tile[(along + j) * PITCH + c] = v[j];
    }
  }
};

// Threadgroup memory of `multiply`.
template <class Tile, class S>
struct Shared {
  Tile a[S::BM * S::PITCH_A];
  Tile b[S::BK * S::PITCH_B];
  float d[S::BM * S::PITCH_D];
};

// What a threadgroup adds up.
template <class S>
struct Sums {
  enum : uint { TM = S::BM / S::WM / 8, TN = S::BN / S::WN / 8 };  // 8 x 8 tiles of a simdgroup
  simdgroup_float8x8 of[TM][TN];
};

// BK of k, from k0 on. WHOLE: both tiles are.
template <class TileB, class S, bool TA, bool WHOLE, class T>
METAL_FUNC void add_tile(const device T* a, WeightsAt w, constant MatmulParams& p, uint3 from, uint tid, uint simdgroup,
                         threadgroup Shared<typename TileB::Element, S>& shared, thread Sums<S>& sums) {
  typedef typename TileB::Element Tile;
  constexpr uint TM = Sums<S>::TM, TN = Sums<S>::TN, PITCH_A = S::PITCH_A, PITCH_B = S::PITCH_B;
  load_tile<TileOf<S::BM, S::BK, S::PITCH_A>, S::TG, TA, WHOLE>(a, p.lda, from.y, from.z, p.m, p.k, shared.a, tid);
  TileB::template load<WHOLE>(w, from.z, from.x, shared.b, tid);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const threadgroup Tile* of_a = shared.a + simdgroup / S::WN * TM * 8 * PITCH_A;
  const threadgroup Tile* of_b = shared.b + simdgroup % S::WN * TN * 8;
#pragma clang loop unroll(full)
  for (uint k = 0; k < S::BK; k += 8) {
    simdgroup_matrix<Tile, 8, 8> fa[TM], fb[TN];
#pragma clang loop unroll(full)
    for (uint i = 0; i < TM; i++) simdgroup_load(fa[i], of_a + 8 * i * PITCH_A + k, PITCH_A);
#pragma clang loop unroll(full)
    for (uint j = 0; j < TN; j++) simdgroup_load(fb[j], of_b + k * PITCH_B + 8 * j, PITCH_B);
#pragma clang loop unroll(full)
    for (uint i = 0; i < TM; i++)
#pragma clang loop unroll(full)
      for (uint j = 0; j < TN; j++) simdgroup_multiply_accumulate(sums.of[i][j], fa[i], fb[j], sums.of[i][j]);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

template <class TileB, class S, bool TA, class T>
METAL_FUNC void multiply(const device T* a, WeightsAt w, Output<T> to, constant MatmulParams& p, uint3 group, uint tid, uint simdgroup,
                         threadgroup Shared<typename TileB::Element, S>& shared) {
  constexpr uint BM = S::BM, BN = S::BN, BK = S::BK, WN = S::WN, TG = S::TG, PITCH_D = S::PITCH_D;
  constexpr uint TM = Sums<S>::TM, TN = Sums<S>::TN;
  uint row0 = group.y * BM, col0 = group.x * BN, k = 0;
  uint sm = simdgroup / WN * TM * 8, sn = simdgroup % WN * TN * 8;
  Sums<S> sums;
#pragma clang loop unroll(full)
  for (uint i = 0; i < TM; i++)
#pragma clang loop unroll(full)
    for (uint j = 0; j < TN; j++) sums.of[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  if (a_in_vectors(p, 4) && (!TA || row0 + BM <= p.m) && TileB::is_whole(p, col0))
    for (; k + BK <= p.k; k += BK) add_tile<TileB, S, TA, true>(a, w, p, uint3(col0, row0, k), tid, simdgroup, shared, sums);
  for (; k < p.k; k += BK) add_tile<TileB, S, TA, false>(a, w, p, uint3(col0, row0, k), tid, simdgroup, shared, sums);
  // By way of threadgroup memory: which elements of a simdgroup matrix a lane holds is not part of MSL.
#pragma clang loop unroll(full)
  for (uint i = 0; i < TM; i++)
#pragma clang loop unroll(full)
    for (uint j = 0; j < TN; j++) simdgroup_store(sums.of[i][j], shared.d + (sm + 8 * i) * PITCH_D + sn + 8 * j, PITCH_D);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = tid; i < BM * BN; i += TG) {
    uint r = i / BN, c = i % BN;
    if (row0 + r < p.m && col0 + c < p.n) store_result(to.D, to.C, to.bias, p, group.z, row0 + r, col0 + c, shared.d[r * PITCH_D + c]);
  }
}

template <class T, class S, bool TA, bool TB>
[[kernel, max_total_threads_per_threadgroup(int(S::TG))]] void gemm_simdgroup(
    const device T* A [[buffer(0)]], const device T* B [[buffer(1)]], device T* D [[buffer(2)]], const device T* C [[buffer(3)]],
    const device T* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]], uint3 group [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup Shared<T, S> shared;
  const device uchar* values = reinterpret_cast<const device uchar*>(B + group.z * p.stride_b);
  WeightsAt w = {values, values, values, p.n, p.k, p.ldb, 0, 0};
  multiply<DenseTile<T, S, TB>, S, TA>(A + group.z * p.stride_a, w, Output<T>{D, C, bias}, p, group, tid, simdgroup, shared);
}

template <class T, class From, class S, bool TA>
[[kernel, max_total_threads_per_threadgroup(int(S::TG))]] void gemm_weights(
    const device T* A [[buffer(0)]], const device uchar* values [[buffer(1)]], device T* D [[buffer(2)]], const device T* C [[buffer(3)]],
    const device T* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]], const device uchar* scales [[buffer(6)]],
    const device uchar* biases [[buffer(7)]], uint3 group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup Shared<float, S> shared;
  WeightsAt w = {values, scales, biases, p.n, p.k, p.ldb, p.group_shift, p.low_byte};
  multiply<WeightTile<From, S>, S, TA>(A + group.z * p.stride_a, w, Output<T>{D, C, bias}, p, group, tid, simdgroup, shared);
}
