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

// Which sizes are whole tiles, and whether rows of A and B begin on a vector: bool, for they become template arguments. Edges are
// compiled in only where the call has them.
template <bool IN_M, bool IN_N, bool IN_K, bool VECTORS>
struct Edges {
  enum : bool { M = IN_M, N = IN_N, K = IN_K, VEC = VECTORS };
};

// A tile in threadgroup memory: PITCH elements from row to row.
template <int R, int C, int P>
struct TileOf {
  enum : uint { ROWS = R, COLS = C, PITCH = P };
};

// Fills it, with zeros beyond the matrix. TRANSPOSED: the matrix lies as columns x rows. WHOLE_*: the tile cannot leave the matrix that
// way. VEC: rows of the matrix begin on a vector of 4, so that 4 neighbours are one load.
template <class To, int TG, bool TRANSPOSED, bool WHOLE_ROWS, bool WHOLE_COLS, bool VEC, class Tile, class T>
METAL_FUNC void load_tile(const device T* source, uint ld, uint row0, uint col0, uint rows, uint cols, threadgroup Tile* tile, uint tid) {
  constexpr uint ROWS = To::ROWS, COLS = To::COLS, PITCH = To::PITCH;
  constexpr uint W = VEC && (TRANSPOSED ? WHOLE_ROWS : WHOLE_COLS) ? 4 : 1;
  constexpr uint LINE = (TRANSPOSED ? ROWS : COLS) / W;  // loads of a line: neighbours in memory, neighbouring threads
  for (uint i = tid; i < ROWS * COLS / W; i += TG) {
    uint along = i % LINE * W, across = i / LINE;
    uint r = TRANSPOSED ? along : across, c = TRANSPOSED ? across : along;
    bool inside = (WHOLE_ROWS || row0 + r < rows) && (WHOLE_COLS || col0 + c < cols);
    const device T* from = source + (TRANSPOSED ? (col0 + c) * ld + row0 + r : (row0 + r) * ld + col0 + c);
    if (W == 4) {
      vec<T, 4> v = inside ? *reinterpret_cast<const device vec<T, 4>*>(from) : vec<T, 4>(T(0.0f));
#pragma clang loop unroll(full)
      for (uint j = 0; j < 4; j++) tile[TRANSPOSED ? (r + j) * PITCH + c : r * PITCH + c + j] = Tile(v[j]);
    } else {
      tile[r * PITCH + c] = Tile(inside ? *from : T(0.0f));
    }
  }
}

// The tile of B from k0, col0 on.
template <class T, class S, bool TB, class E>
struct DenseTile {
  typedef T Element;
  static METAL_FUNC void load(WeightsAt w, uint k0, uint col0, threadgroup T* tile, uint tid) {
    const device T* b = reinterpret_cast<const device T*>(w.values);
    load_tile<TileOf<S::BK, S::BN, S::PITCH_B>, S::TG, TB, E::K, E::N, E::VEC>(b, w.ldb, k0, col0, w.k, w.n, tile, tid);
  }
};

// Of quantized weights in float, which holds scale * integer exactly; half would not. VEC: eight neighbours are one load.
template <class From, class S, class E>
struct WeightTile {
  typedef float Element;
  static METAL_FUNC void load(WeightsAt w, uint k0, uint col0, threadgroup float* tile, uint tid) {
    constexpr uint BN = S::BN, BK = S::BK, TG = S::TG, PITCH = S::PITCH_B;
    constexpr bool VEC = E::VEC, WHOLE_N = E::N, WHOLE_K = E::K;
    for (uint i = tid; i < BK * BN / 8; i += TG) {
      uint along = i % (BK / 8) * 8, c = i / (BK / 8), k = k0 + along;
      bool inside = WHOLE_N || col0 + c < w.n;
      float v[8] = {};
      if (VEC && inside && (WHOLE_K || k + 8 <= w.k)) {
        Eight x = From::scaled(w, col0 + c, k);
#pragma clang loop unroll(full)
        for (uint j = 0; j < 4; j++) v[j] = x.low[j], v[j + 4] = x.high[j];
      } else if (inside) {
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

template <class TileB, class S, bool TA, class E, class T>
METAL_FUNC void multiply(const device T* a, WeightsAt w, Output<T> to, constant MatmulParams& p, uint3 group, uint tid, uint simdgroup,
                         threadgroup Shared<typename TileB::Element, S>& shared) {
  typedef typename TileB::Element Tile;
  constexpr uint BM = S::BM, BN = S::BN, BK = S::BK, WM = S::WM, WN = S::WN, TG = S::TG;
  constexpr uint PITCH_A = S::PITCH_A, PITCH_B = S::PITCH_B, PITCH_D = S::PITCH_D;
  constexpr uint TM = BM / WM / 8, TN = BN / WN / 8;  // 8 x 8 tiles of a simdgroup
  uint row0 = group.y * BM, col0 = group.x * BN;
  uint sm = simdgroup / WN * TM * 8, sn = simdgroup % WN * TN * 8;

  simdgroup_float8x8 sum[TM][TN];
#pragma clang loop unroll(full)
  for (uint i = 0; i < TM; i++)
#pragma clang loop unroll(full)
    for (uint j = 0; j < TN; j++) sum[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (uint k0 = 0; k0 < p.k; k0 += BK) {
    load_tile<TileOf<S::BM, S::BK, S::PITCH_A>, S::TG, TA, E::M, E::K, E::VEC>(a, p.lda, row0, k0, p.m, p.k, shared.a, tid);
    TileB::load(w, k0, col0, shared.b, tid);
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma clang loop unroll(full)
    for (uint k = 0; k < BK; k += 8) {
      simdgroup_matrix<Tile, 8, 8> fa[TM], fb[TN];
#pragma clang loop unroll(full)
      for (uint i = 0; i < TM; i++) simdgroup_load(fa[i], shared.a + (sm + 8 * i) * PITCH_A + k, PITCH_A);
#pragma clang loop unroll(full)
      for (uint j = 0; j < TN; j++) simdgroup_load(fb[j], shared.b + k * PITCH_B + sn + 8 * j, PITCH_B);
#pragma clang loop unroll(full)
      for (uint i = 0; i < TM; i++)
#pragma clang loop unroll(full)
        for (uint j = 0; j < TN; j++) simdgroup_multiply_accumulate(sum[i][j], fa[i], fb[j], sum[i][j]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  // By way of threadgroup memory: which elements of a simdgroup matrix a lane holds is not part of MSL.
#pragma clang loop unroll(full)
  for (uint i = 0; i < TM; i++)
#pragma clang loop unroll(full)
    for (uint j = 0; j < TN; j++) simdgroup_store(sum[i][j], shared.d + (sm + 8 * i) * PITCH_D + sn + 8 * j, PITCH_D);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = tid; i < BM * BN; i += TG) {
    uint r = i / BN, c = i % BN;
    if ((E::M || row0 + r < p.m) && (E::N || col0 + c < p.n))
      store_result(to.D, to.C, to.bias, p, group.z, row0 + r, col0 + c, shared.d[r * PITCH_D + c]);
  }
}

template <class T, class S, bool TA, bool TB, class E>
[[kernel, max_total_threads_per_threadgroup(int(S::TG))]] void gemm_simdgroup(
    const device T* A [[buffer(0)]], const device T* B [[buffer(1)]], device T* D [[buffer(2)]], const device T* C [[buffer(3)]],
    const device T* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]], uint3 group [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup Shared<T, S> shared;
  const device uchar* values = reinterpret_cast<const device uchar*>(B + group.z * p.stride_b);
  WeightsAt w = {values, values, values, p.n, p.k, p.ldb, 0, 0};
  multiply<DenseTile<T, S, TB, E>, S, TA, E>(A + group.z * p.stride_a, w, Output<T>{D, C, bias}, p, group, tid, simdgroup, shared);
}

template <class T, class From, class S, bool TA, class E>
[[kernel, max_total_threads_per_threadgroup(int(S::TG))]] void gemm_weights(
    const device T* A [[buffer(0)]], const device uchar* values [[buffer(1)]], device T* D [[buffer(2)]], const device T* C [[buffer(3)]],
    const device T* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]], const device uchar* scales [[buffer(6)]],
    const device uchar* biases [[buffer(7)]], uint3 group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup Shared<float, S> shared;
  WeightsAt w = {values, scales, biases, p.n, p.k, p.ldb, p.group_shift, p.low_byte};
  multiply<WeightTile<From, S, E>, S, TA, E>(A + group.z * p.stride_a, w, Output<T>{D, C, bias}, p, group, tid, simdgroup, shared);
}
