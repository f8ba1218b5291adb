// What a thread that walks columns alone adds up of them, block by block.
#pragma once
#include <metal_stdlib>

#include "../include/columns.h"
#include "../include/prefetch.h"
#include "sixteen.h"

#ifdef __METALMM_CPU__
// For a device that runs one thread at a time, wide: a thread walks COLS columns, block by block, with ROWS rows of A. Registers
// hold 16 sums. With more it takes PART columns at a time, and 256 of k of A become floats once for all parts. Rows that A has not are its
// last once more. LATE: a scale is for a block's sum, not for each weight, if the type allows that.
template <bool WHOLE, bool IS_LATE, class Storage, class T, int MATRICES, int ROWS, int COLS>
METAL_FUNC void add_blocks_of_columns(RowsOfA<T> a, const thread Columns<MATRICES, COLS>& b, uint begin, uint whole,
                                      thread float4 (&sums)[ROWS][COLS]) {
  typedef typename Storage::Pack Pack;
  constexpr bool PAIRS = Pack::BITS == 4, LATE = IS_LATE && Pack::SCALED && Pack::HALVES == 1 && IsSmall<T>::VALUE;
  constexpr uint PIECES = 32 / Pack::COUNT, PART = ROWS * COLS <= 16 || COLS % (16 / ROWS) != 0 ? COLS : 16 / ROWS,
                 BLOCKS = PART == COLS ? 1 : 8;
  Sixteen total[COLS / PART][ROWS][PART], x[ROWS][BLOCKS][2];
  Cursor first[COLS];
#pragma clang loop unroll(full)
  for (uint r = 0; r < ROWS; r++)
#pragma clang loop unroll(full)
    for (uint c = 0; c < COLS; c++) total[c / PART][r][c % PART] = all_sixteen(0.0f);
#pragma clang loop unroll(full)
  for (uint c = 0; c < COLS; c++) first[c] = Storage::at(b.w[c % MATRICES], b.column[c], begin);
  uint next = uint(Storage::at(b.w[0], 1, 0).values - Storage::at(b.w[0], 0, 0).values) *
              (COLS / MATRICES);  // bytes to the rows of the thread COLS further
  for (uint k = begin; k < whole; k += 32 * BLOCKS) {
    uint blocks = BLOCKS == 1 ? 1 : metal::min(uint(BLOCKS), (whole - k) / 32), step = (k - begin) / 32;
#pragma clang loop unroll(full)
    for (uint r = 0; r < ROWS; r++) {
      const device T* of_a = a.first + (ROWS == 1 ? 0 : metal::min(r, a.count - 1)) * a.ld + k;
      for (uint j = 0; j < blocks; j++) {
        Sixteen low = sixteen<WHOLE>(of_a + 32 * j), high = sixteen<WHOLE>(of_a + 32 * j + 16);
        x[r][j][0] = low, x[r][j][1] = high;
        if (PAIRS) x[r][j][0] = every_other<0>(low, high), x[r][j][1] = every_other<1>(low, high);
      }
    }
    for (uint c0 = 0; c0 < COLS; c0 += PART) {
      thread Sixteen(&own)[ROWS][PART] = total[c0 / PART];
      for (uint j = 0; j < blocks; j++) {
#pragma clang loop unroll(full)
        for (uint c = 0; c < PART; c++) {
          Cursor at = Storage::template moved<1>(b.w[c % MATRICES], first[c0 + c], begin, (step + j) * PIECES);
          prefetch(at.values + next, 1);
          Sixteen y[2] = {Storage::template half_block<WHOLE>(at, 0), Storage::template half_block<WHOLE>(at, 1)};
          Sixteen scale = all_sixteen(1.0f);
          if (Pack::HAS_BIAS || Pack::SCALED) Storage::template scale<LATE>(at, y, scale);
#pragma clang loop unroll(full)
          for (uint r = 0; r < ROWS; r++) {
            Sixteen part = LATE ? all_sixteen(0.0f) : Sixteen(own[r][c]);
            part = multiply_add(x[r][j][1], y[1], multiply_add(x[r][j][0], y[0], part));
            if (LATE) part = multiply_add(scale, part, own[r][c]);
            own[r][c] = part;
          }
        }
      }
    }
  }
#pragma clang loop unroll(full)
  for (uint r = 0; r < ROWS; r++)
#pragma clang loop unroll(full)
    for (uint c = 0; c < COLS; c++) {
      Sixteen t = total[c / PART][r][c % PART];
#pragma clang loop unroll(full)
      for (uint i = 0; i < 16; i += 4) sums[r][c] += float4(t[i], t[i + 1], t[i + 2], t[i + 3]);
    }
}
// The same of as many rows as A has: ROWS, of eight four, or one. A row's sums round alike in each.
template <bool WHOLE, class Storage, class T, int MATRICES, int ROWS, int COLS>
METAL_FUNC void add_blocks_of_rows(RowsOfA<T> a, const thread Columns<MATRICES, COLS>& b, uint begin, uint whole,
                                   thread float4 (&sums)[ROWS][COLS]) {
  constexpr int FEWER = ROWS == 8 ? 4 : 1;
  if (ROWS == 1 || a.count > FEWER) {
    add_blocks_of_columns<WHOLE, ROWS == 1, Storage>(a, b, begin, whole, sums);
    return;
  }
  float4 few[FEWER][COLS];
  for (uint r = 0; r < uint(FEWER); r++)
    for (uint c = 0; c < COLS; c++) few[r][c] = float4(0.0f);
  if (FEWER > 1)
    add_blocks_of_rows<WHOLE, Storage>(a, b, begin, whole, few);
  else
    add_blocks_of_columns<WHOLE, false, Storage>(a, b, begin, whole, few);
  for (uint r = 0; r < uint(FEWER); r++)
    for (uint c = 0; c < COLS; c++) sums[r][c] = few[r][c];
}
#endif
