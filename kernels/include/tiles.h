// What a lane has of ROWS x TILES products of 8 x 8 matrices, weights on the left: two rows of one column of each.
#pragma once
#include <metal_stdlib>

#include "epilogue.h"
#include "lanes.h"

// BANDS: of eight rows, whose sums have room in threadgroup memory at once.
template <int BANDS>
struct Tiles {
  uint column, row, batch;  // where a lane's first result goes; those of the next tile are 8 columns further
  uint share, lane;         // of SPLIT simdgroups that share K

  METAL_FUNC bool has(constant MatmulParams& p, uint t, uint r = 0) const thread { return column + 8 * t < p.n && row + r < p.m; }

  // The bias of each tile's column. Simdgroups from BANDS * TILES on store nothing, and need none.
  template <int TILES, class T>
  METAL_FUNC void load_bias(const device T* bias, constant MatmulParams& p, thread float (&added)[TILES]) const thread {
#pragma clang loop unroll(full)
    for (uint t = 0; t < TILES; t++) added[t] = share < BANDS * TILES && has(p, t) ? bias_of(bias, p, column + 8 * t) : 0.0f;
  }

  // Stores ROWS bands. Each of the SPLIT simdgroups adds up and stores some of the tiles.
  template <int ROWS, int SPLIT, int TILES, class T>
  METAL_FUNC void store(thread float2 (&total)[ROWS][TILES], const thread float (&added)[TILES],
                        threadgroup float2 (&partial)[SPLIT][BANDS][TILES][32], device T* D, const device T* C,
                        constant MatmulParams& p) const thread {
#pragma clang loop unroll(full)
    for (uint r = 0; r < ROWS; r++) {
      if (SPLIT > 1 && r % BANDS == 0) {
        if (r > 0) metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
#pragma clang loop unroll(full)
        for (uint i = 0; i < BANDS; i++)
#pragma clang loop unroll(full)
          for (uint t = 0; t < TILES; t++) partial[share][i][t][lane] = total[r + i][t];
        metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      }
#pragma clang loop unroll(full)
      for (uint t = 0; t < TILES; t++) {
        if ((r % BANDS * TILES + t) % SPLIT != share) continue;
        float2 sum = SPLIT > 1 ? sum_of_parts<SPLIT, BANDS * TILES * 32>(&partial[0][r % BANDS][t][lane]) : total[r][t];
        if (has(p, t, 8 * r)) store_sum(D, C, p, batch, row + 8 * r, column + 8 * t, sum.x, added[t]);
        if (has(p, t, 8 * r + 1)) store_sum(D, C, p, batch, row + 8 * r + 1, column + 8 * t, sum.y, added[t]);
      }
    }
  }
};
