// What lanes that share a column add up of it, piece by piece.
#pragma once
#include <metal_stdlib>

#include "../cuda/tensor.h"
#include "lanes.h"
#include "wait.h"
#include "weights.h"

// The columns of a lane: column c is of matrix c % MATRICES.
template <int MATRICES, int COLS>
struct Columns {
  WeightsAt w[MATRICES];
  uint column[COLS];
};

struct LaneStep {
  uint k, lane, worker;  // the lane's number among those of its column, the thread's among those that stage A
  bool is_first;
};

// Adds DEPTH steps of LANES pieces, this lane's first at at.k + COUNT * at.lane. GUARDED: those that begin at `whole` or behind it count
// for nothing. Of several MATRICES each has its columns by turns. STAGED: A comes from threadgroup memory, where the threads of all sets
// that have this part of K put it while the weights are on their way. MMA: NVIDIA's tensor cores multiply.
template <bool GUARDED, class Storage, class Way, int MATRICES, int ROWS, class T>
METAL_FUNC void add_steps(RowsOfA<T> a, const thread Columns<MATRICES, Way::COLS>& b, LaneStep at, uint whole, threadgroup float4* staged,
                          thread float4 (&sums)[ROWS][Way::COLS], thread bool& exact) {
  typedef typename Storage::Pack Pack;
  constexpr uint COLS = Way::COLS, DEPTH = Way::DEPTH, COUNT = Pack::COUNT, STEP = COUNT * Way::LANES, WORKERS = Way::SETS * 32;
  constexpr uint EACH = COUNT / 8 / Pack::HALVES;  // eights with one scale
  constexpr bool SCALED = Pack::SCALED, LATE = SCALED && ROWS == 1 && IsSmall<T>::VALUE;
  static_assert(!Way::STAGED || ROWS == 1 || Way::MMA, "one row of A is staged");
  static_assert(!Way::MMA || (Way::STAGED && IsSmall<T>::VALUE && Way::LANES == 4),
                "for tensor cores A is staged, and four lanes share a column");
  uint k = at.k, worker = at.worker;
  uint own = k + COUNT * at.lane;
  typename Storage::Piece pieces[DEPTH][COLS];  // all in flight at once
#pragma clang loop unroll(full)
  for (uint c = 0; c < COLS; c++) {
    Cursor first = Storage::at(b.w[c % MATRICES], b.column[c], GUARDED ? metal::min(own, b.w[0].k - 1) : own);
#pragma clang loop unroll(full)
    for (uint d = 0; d < DEPTH; d++) {
      if (!GUARDED || own + STEP * d < whole)
        pieces[d][c] = Storage::load(Storage::template moved<Way::LANES>(b.w[c % MATRICES], first, own, d));
      else
        pieces[d][c] = Storage::nothing();
    }
  }
  if (at.is_first) wait_for_operands();
  if (Way::STAGED) {
    constexpr uint TURNS = (STEP * DEPTH - 1) / (8 * WORKERS) + 1;
    OctetBits<T> x[TURNS][ROWS];
#pragma clang loop unroll(full)
    for (uint j = 0; j < TURNS; j++) {
      uint i = 8 * (WORKERS * j + worker);
#pragma clang loop unroll(full)
      for (uint r = 0; r < ROWS; r++) {
        x[j][r] = bits_of(Octet<T>{metal::vec<T, 4>(T(0.0f)), metal::vec<T, 4>(T(0.0f))});
        if (i < STEP * DEPTH && (ROWS == 1 || r < a.count) && (!GUARDED || k + i < whole)) x[j][r] = load_bits(a.first + r * a.ld + k + i);
      }
    }
#pragma clang loop unroll(full)
    for (uint j = 0; j < TURNS; j++) {
      uint i = 8 * (WORKERS * j + worker);
      if (i >= STEP * DEPTH) continue;
      if (Way::MMA) {
        TensorCores<Way::MMA != 0>::template put<Pack::ID, Way::LANES * DEPTH>(staged, i, x[j]);
        continue;
      }
      Octet<T> eight = octet_of(x[j][0]);
      staged[staged_at(i)] = float4(eight.low);
      staged[staged_at(i) + 1] = float4(eight.high);
    }
    TensorCores<Way::MMA != 0>::template put_zeros<Way::LANES * DEPTH, ROWS>(staged, worker);
    meet<Way::SETS == 1>();
  } else if (Way::LANES > 1) {
    // Else a compiler that saves registers moves the loads behind the work on the first.
    metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
  if (Way::MMA) {
    TensorCores<Way::MMA != 0>::template add<Pack::ID>(pieces, staged, worker % 32, at.lane, low_pair<Pack::ID>(b.w[0].low_byte), sums);
    return;
  }
#pragma clang loop unroll(full)
  for (uint d = 0; d < DEPTH; d++) {
    bool there = !GUARDED || own + STEP * d < whole;
    float4 part[COLS];  // of one row: LATE, the scale is for all of them. Of more rows it costs less on the weights.
    Factors by[COLS];
#pragma clang loop unroll(full)
    for (uint i = 0; i < COUNT / 8; i++) {
#pragma clang loop unroll(full)
      for (uint c = 0; c < (i % EACH == 0 ? COLS : 0); c++) {
        part[c] = float4(0.0f);
        by[c] = Storage::factors(pieces[d][c], i / EACH, exact);
      }
      Eight y[COLS];
#pragma clang loop unroll(full)
      for (uint c = 0; c < COLS; c++) {
        y[c] = Storage::eight(pieces[d][c], by[c], i, b.w[0].low_byte);
        if (SCALED && !LATE) {
          y[c].low *= by[c].scale;
          y[c].high *= by[c].scale;
        }
      }
#pragma clang loop unroll(full)
      for (uint r = 0; r < ROWS; r++) {
        if (ROWS == 1 || r < a.count) {
          Eight x = {float4(0.0f), float4(0.0f)};
          if (Way::STAGED) {
            uint from = staged_at(COUNT * at.lane + STEP * d + 8 * i);
            x = {staged[from], staged[from + 1]};
          } else if (there) {
            Octet<T> loaded = load_octet(a.first + r * a.ld + own + STEP * d + 8 * i);
            x = {float4(loaded.low), float4(loaded.high)};
          }
#pragma clang loop unroll(full)
          for (uint c = 0; c < COLS; c++) {
            if (ROWS == 1) {
              part[c] = metal::fma(x.low, y[c].low, part[c]);
              part[c] = metal::fma(x.high, y[c].high, part[c]);
            } else {
              sums[r][c] = metal::fma(x.low, y[c].low, sums[r][c]);
              sums[r][c] = metal::fma(x.high, y[c].high, sums[r][c]);
            }
          }
        }
      }
#pragma clang loop unroll(full)
      for (uint c = 0; c < (ROWS == 1 && i % EACH == EACH - 1 ? COLS : 0); c++)
        sums[0][c] = LATE ? metal::fma(float4(by[c].scale), part[c], sums[0][c]) : sums[0][c] + part[c];
    }
  }
}

// Weights k, k + step and so on before `end`, wherever they stand.
template <class Storage, class T, int MATRICES, int ROWS, int COLS>
METAL_FUNC void add_one_by_one(RowsOfA<T> a, const thread Columns<MATRICES, COLS>& b, uint k, uint end, uint step,
                               thread float4 (&sums)[ROWS][COLS]) {
#pragma clang loop unroll(disable)
  for (; k < end; k += step) {
#pragma clang loop unroll(full)
    for (uint c = 0; c < COLS; c++) {
      float y = Storage::one(b.w[c % MATRICES], b.column[c], k);
#pragma clang loop unroll(full)
      for (uint r = 0; r < ROWS; r++)
        if (ROWS == 1 || r < a.count) sums[r][c].x = metal::fma(float(a.first[r * a.ld + k]), y, sums[r][c].x);  // alike in each row
    }
  }
}
