// What a thread that walks columns alone adds up of them, block by block.
#pragma once
#include <metal_stdlib>

#include "../include/columns.h"
#include "../include/prefetch.h"
#include "sixteen.h"

// For a device that runs one thread at a time, wide: a thread walks COLS columns, block by block, in loops that its compiler makes vectors
// of; that over the columns is left alone, for clang would otherwise mix what of several columns is alike.
template <bool WHOLE, class From, class T, int MATRICES, int ROWS, int COLS>
METAL_FUNC void add_blocks_of_columns(const device T* a, const thread Columns<MATRICES, COLS>& b, uint begin, uint whole,
                                      thread float4 (&sums)[ROWS][COLS]) {
  typedef typename From::Pack Pack;
  constexpr bool PAIRS = Pack::BITS == 4, LATE = Pack::SCALED && IsSmall<T>::VALUE;
  constexpr uint PIECES = 32 / Pack::COUNT;
  float total[COLS][16];
  Cursor first[COLS];
#pragma clang loop unroll(full)
  for (uint c = 0; c < COLS; c++) {
    first[c] = From::at(b.w[c % MATRICES], b.column[c], begin);
    for (uint i = 0; i < 16; i++) total[c][i] = 0.0f;
  }
  uint next = uint(From::at(b.w[0], 1, 0).values - From::at(b.w[0], 0, 0).values) *
              (COLS / MATRICES);  // bytes to the rows of the thread COLS further
  for (uint k = begin; k < whole; k += 32) {
    float row[2][16], x[2][16];
    sixteen<WHOLE>(a + k, row[0]);
    sixteen<WHOLE>(a + k + 16, row[1]);
    for (uint i = 0; i < 16; i++) {
      x[0][i] = PAIRS ? row[i / 8][2 * i % 16] : row[0][i];
      x[1][i] = PAIRS ? row[i / 8][2 * i % 16 + 1] : row[1][i];
    }
    for (uint c = 0; c < COLS; c++) {
      uint step = (k - begin) / 32 * PIECES;
      Cursor at = From::template moved<1>(b.w[c % MATRICES], first[c], begin, step);
      prefetch(at.values + next, 1);
      float y[2][16], part[16];
      From::template half_block<WHOLE>(at, 0, y[0]);
      From::template half_block<WHOLE>(at, 1, y[1]);
      float scale = From::scale(at);
      if (Pack::HAS_BIAS) {
        float bias = From::bias(at);
        for (uint i = 0; i < 16; i++) y[0][i] = metal::fma(scale, y[0][i], bias), y[1][i] = metal::fma(scale, y[1][i], bias);
      } else if (Pack::SCALED && !LATE) {
        for (uint i = 0; i < 16; i++) y[0][i] *= scale, y[1][i] *= scale;
      }
      for (uint i = 0; i < 16; i++) part[i] = metal::fma(x[1][i], y[1][i], x[0][i] * y[0][i]);
      for (uint i = 0; i < 16; i++) total[c][i] = LATE ? metal::fma(scale, part[i], total[c][i]) : total[c][i] + part[i];
    }
  }
#pragma clang loop unroll(full)
  for (uint c = 0; c < COLS; c++)
    for (uint i = 0; i < 4; i++) sums[0][c] += float4(total[c][4 * i], total[c][4 * i + 1], total[c][4 * i + 2], total[c][4 * i + 3]);
}
