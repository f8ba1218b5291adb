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
    ACROSS = 32 / L,              // columns that a simdgroup has at once
    SETS = TG / 32 / S,           // of SPLIT simdgroups
    COLUMNS = SETS * ACROSS * C,  // of a threadgroup
    JOINED = S > 1 ? TG / 32 : 1  // simdgroups whose sums meet
  };
  static_assert(TG / 32 % S == 0 && TG / 32 / S > 0, "whole sets of SPLIT simdgroups");

  // This lane's first column of those that its threadgroup, the `index`th along n, has; of several MATRICES of each.
  template <int MATRICES = 1>
  static METAL_FUNC uint first_column(uint index, Thread me) {
    return (index * SETS + me.simdgroup / SPLIT) * (ACROSS * COLS / MATRICES) + me.lane / LANES;
  }
};

// Waits for those that have a part of threadgroup memory together: the thread's simdgroup, if that has it ALONE, or the whole threadgroup.
template <bool ALONE>
METAL_FUNC void meet() {
  if (ALONE)
    metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
  else
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
}

// How much of k each of SPLIT simdgroups has, in whole pieces of PIECE; all of it if there is one.
template <int SPLIT, int PIECE>
METAL_FUNC uint slice_of(uint k) {
  return SPLIT == 1 ? k : ((k + SPLIT - 1) / SPLIT + PIECE - 1) / PIECE * PIECE;
}

// Adds up PARTS of K, for one result or a vector of several. Parts are APART elements of F from each other.
template <int PARTS, int APART, class F>
METAL_FUNC F sum_of_parts(const threadgroup F* x) {
  F sum = x[0];
#pragma clang loop unroll(full)
  for (uint part = 1; part < PARTS; part++) {
    F other = x[part * APART];  // one load of a vector: `+=` binds a reference, and would load element by element
    sum += other;
  }
  return sum;
}

// Adds the sums of the SPLIT simdgroups that share K. False for those whose sums are with the first's. Of the lanes that share a column,
// as all of their sums are alike, each writes some.
template <class Way, int ROWS>
METAL_FUNC bool join_shares(threadgroup float (&partial)[Way::JOINED][ROWS][Way::ACROSS * Way::COLS], Thread me,
                            thread float (&sum)[ROWS][Way::COLS]) {
  constexpr uint LANES = Way::LANES, COLS = Way::COLS, SPLIT = Way::SPLIT, ACROSS = Way::ACROSS;
  if (SPLIT == 1) return true;
#pragma clang loop unroll(full)
  for (uint r = 0; r < ROWS; r++)
#pragma clang loop unroll(full)
    for (uint c = 0; c < COLS; c++)
      if (me.lane % LANES == c % LANES) partial[me.simdgroup][r][c * ACROSS + me.lane / LANES] = sum[r][c];
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  if (me.simdgroup % SPLIT != 0) return false;
#pragma clang loop unroll(full)
  for (uint r = 0; r < ROWS; r++)
#pragma clang loop unroll(full)
    for (uint c = 0; c < COLS; c++)
      sum[r][c] = sum_of_parts<SPLIT, ROWS * ACROSS * COLS>(&partial[me.simdgroup][r][c * ACROSS + me.lane / LANES]);
  return true;
}

// Neighbouring rows of A, `ld` elements apart.
template <class T>
struct RowsOfA {
  const device T* first;
  uint ld, count;
};
