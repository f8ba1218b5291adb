// Whole sums of columns: the lanes' and the simdgroups' that share their K.
#pragma once
#include <metal_stdlib>

#include "../cpu/blocks.h"
#include "columns.h"
#include "eighth.h"
#include "wait.h"
#include "weights.h"

// The threadgroup memory of `add_up`.
template <class Pack, class Way, int ROWS>
struct Shared {
  enum : uint {
    WINDOW = uint(Pack::COUNT) * uint(Way::LANES) * Way::DEPTH,
    STAGED = !Way::STAGED ? 1
    : Way::MMA            ? uint(StagedRows<uint(Way::LANES) * Way::DEPTH, ROWS>::SIZE)
                          : (WINDOW + 31) / 32 * PITCH
  };
  float4 staged[Way::STAGED ? Way::SPLIT : 1][STAGED];
  float partial[Way::JOINED][ROWS][Way::ACROSS * Way::COLS];
};

// The sums of this lane's columns, `first` and each 32 / LANES further, of each of MATRICES. False for simdgroups whose sums are with
// others'.
template <bool WIDE, class Storage, class Way, int MATRICES, int ROWS, class T>
METAL_FUNC bool add_up(RowsOfA<T> a, const thread WeightsAt (&w)[MATRICES], uint first, Thread me,
                       threadgroup Shared<typename Storage::Pack, Way, ROWS>& shared, thread float (&sum)[ROWS][Way::COLS]) {
  typedef typename Storage::Pack Pack;
  constexpr uint LANES = Way::LANES, COLS = Way::COLS, SPLIT = Way::SPLIT, ACROSS = Way::ACROSS;
  constexpr uint COUNT = Pack::COUNT, WINDOW = Shared<Pack, Way, ROWS>::WINDOW;
  static_assert(!Way::MMA || !WIDE, "a thread that walks columns alone has no tensor cores");
  uint of_k = w[0].k, share = me.simdgroup % SPLIT, at = me.lane % LANES;
  bool in_vectors = w[0].whole && w[MATRICES - 1].whole;  // of at most two
  // Of a K-quant shares begin on 256, without a test of K: so a compiler knows which blocks of a turn have one factor. Of others such code
  // takes up to 20% more time on NVIDIA's GPUs.
  constexpr bool IS_K = Pack::IS_K != 0;
  uint slice = slice_of<SPLIT, IS_K ? 256 : 32>(of_k), begin = IS_K ? share * slice : metal::min(share * slice, of_k);
  uint end = metal::min(begin + slice, of_k);
  if (IS_K) end = metal::max(begin, end);
  // Columns past the last read the last one, and are not stored: no test in the loop.
  Columns<MATRICES, Way::COLS> b;
#pragma clang loop unroll(full)
  for (uint i = 0; i < MATRICES; i++) b.w[i] = w[i];
#pragma clang loop unroll(full)
  for (uint c = 0; c < COLS; c++) b.column[c] = metal::min(first + c / MATRICES * ACROSS, w[0].n - 1);
  float4 sums[ROWS][COLS];
#pragma clang loop unroll(full)
  for (uint r = 0; r < ROWS; r++)
#pragma clang loop unroll(full)
    for (uint c = 0; c < COLS; c++) sums[r][c] = float4(0.0f);
  uint k = begin;
  if (WIDE) {  // device cpu alone
#ifdef __METALMM_CPU__
    uint whole = begin + (end - begin) / 32 * 32;
    wait_for_operands();
    if (in_vectors)
      add_blocks_of_rows<true, Storage>(a, b, begin, whole, sums);
    else
      add_blocks_of_rows<false, Storage>(a, b, begin, whole, sums);
    k = whole;
#endif
  } else if (in_vectors && (!Way::MMA || !Pack::HAS_BIAS || of_k >= 2 * SURE)) {
    uint whole = begin + (end - begin) / COUNT * COUNT;
    uint last = metal::min((SPLIT - 1) * slice, of_k), shortest = metal::min(slice, (of_k - last) / COUNT * COUNT);
    threadgroup float4* staged = shared.staged[Way::STAGED ? share : 0];
    uint worker = me.simdgroup / SPLIT * 32 + me.lane;
    // As many turns for all of a threadgroup, which meets in each where several sets of simdgroups stage A together.
    uint done = 0;
    bool exact = true;
    for (; done + WINDOW <= shortest; done += WINDOW) {
      if (Way::STAGED && done > 0) meet<Way::SETS == 1>();
      add_steps<false, Storage, Way>(a, b, LaneStep{k + done, at, worker, done == 0}, whole, staged, sums, exact);
    }
    for (; done < slice; done += WINDOW) {
      if (Way::STAGED && done > 0) meet<Way::SETS == 1>();
      add_steps<true, Storage, Way>(a, b, LaneStep{k + done, at, worker, done == 0}, whole, staged, sums, exact);
    }
    if (Way::MMA && Pack::HAS_BIAS) {
#pragma clang loop unroll(full)
      for (uint r = 0; r < ROWS; r++)
#pragma clang loop unroll(full)
        for (uint c = 0; c < COLS; c++) exact = exact && metal::isfinite(sums[r][c].x);
    }
    if ((Storage::SHIFTED || (Way::MMA && Pack::HAS_BIAS)) && !exact) {
#pragma clang loop unroll(full)
      for (uint r = 0; r < ROWS; r++)
#pragma clang loop unroll(full)
        for (uint c = 0; c < COLS; c++) sums[r][c] = float4(0.0f);
#pragma clang loop unroll(disable)
      for (uint i = begin + COUNT * at; i < whole; i += COUNT * LANES)
        add_one_by_one<Storage>(a, b, i, metal::min(i + COUNT, whole), 1, sums);
    }
    k = whole;
  }
  wait_for_operands();
  add_one_by_one<Storage>(a, b, k + at, end, LANES, sums);
#pragma clang loop unroll(full)
  for (uint r = 0; r < ROWS; r++) {
    if (WIDE && r >= a.count) break;  // a CPU's branches cost less than sums of nothing
#pragma clang loop unroll(full)
    for (uint c = 0; c < COLS; c++) {
      float4 s = sums[r][c];
      float total = (s.x + s.y) + (s.z + s.w);
#pragma clang loop unroll(full)
      for (uint step = LANES / 2; step > 0; step /= 2) total += metal::simd_shuffle_xor(total, step);
      sum[r][c] = total;
    }
  }
  return join_shares<Way>(shared.partial, me, sum);
}
