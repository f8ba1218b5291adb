// How the threads of a threadgroup share columns of a product, and the K of each.
#pragma once
#include <metal_stdlib>

struct Thread {
  uint simdgroup, lane;  // in its threadgroup, in its simdgroup
};

// LANES lanes share a column's K and own COLS columns, 32 / LANES apart; SPLIT simdgroups share it once more; a lane has DEPTH pieces
// of each in flight. STAGED: A comes by way of threadgroup memory. MMA: NVIDIA's tensor cores multiply.
template <int L, int C, int S, int D, int TG, bool X = false, bool M = false>
struct Lanes {
  enum : uint {
    LANES = L,
    COLS = C,
    SPLIT = S,
    DEPTH = D,
    THREADS = TG,
    STAGED = X,
    MMA = M,
    ACROSS = 32 / L,             // columns that a simdgroup has at once
    SETS = TG / 32 / S,          // of SPLIT simdgroups
    COLUMNS = SETS * ACROSS * C  // of a threadgroup
  };
  static_assert(TG / 32 % S == 0 && TG / 32 / S > 0, "whole sets of SPLIT simdgroups");

  // This lane's first column of those that its threadgroup, the `index`th along n, has; of several MATRICES of each.
  template <int MATRICES = 1>
  static METAL_FUNC uint first_column(uint index, Thread me) {
    return (index * SETS + me.simdgroup / SPLIT) * (ACROSS * COLS / MATRICES) + me.lane / LANES;
  }
};

// How much of k each of SPLIT simdgroups has, in whole pieces of PIECE; all of it if there is one.
template <int SPLIT, int PIECE>
METAL_FUNC uint slice_of(uint k) {
  return SPLIT == 1 ? k : ((k + SPLIT - 1) / SPLIT + PIECE - 1) / PIECE * PIECE;
}

// Neighbouring rows of A, `ld` elements apart.
template <class T>
struct RowsOfA {
  const device T* first;
  uint ld, count;
};
