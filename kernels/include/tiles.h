// What a lane has of ROWS x TILES products of 8 x 8 matrices, weights on the left: two rows of one column of each.
#pragma once
#include <metal_stdlib>

#include "epilogue.h"
#include "lanes.h"

// BANDS: of eight rows, whose sums have room in threadgroup memory at once. Of two MATRICES, which end in swiglu, even shares have sums of
// the first and odd ones of the second.
template <int BANDS, int MATRICES = 1>
struct Tiles {
  uint column, row, batch;  // where a lane's first result goes; those of the next tile are 8 columns further
  uint share, lane;         // of SPLIT simdgroups that share K

  METAL_FUNC bool has(constant MatmulParams& p, uint t, uint r = 0) const thread { return column + 8 * t < p.n && row + r < p.m; }

  // The bias of each tile's column, of all MATRICES. Simdgroups from BANDS * TILES on store nothing, and need none.
  template <int COUNT, class T>
  METAL_FUNC void load_bias(const device T* const thread* bias, constant MatmulParams& p, thread float (&added)[COUNT]) const thread {
    constexpr uint TILES = COUNT / MATRICES;
#pragma clang loop unroll(full)
    for (uint t = 0; t < COUNT; t++)
      added[t] = share < BANDS * TILES && has(p, t % TILES) ? bias_of(bias[t / TILES], p, column + 8 * (t % TILES)) : 0.0f;
  }

  // Stores ROWS bands. Each of the SPLIT simdgroups adds up and stores some of the tiles.
  template <int ROWS, int SPLIT, int TILES, class T>
  METAL_FUNC void store(thread float2 (&total)[ROWS][TILES], const thread float (&added)[MATRICES * TILES],
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
        float2 sums[MATRICES];
#pragma clang loop unroll(full)
        for (uint i = 0; i < MATRICES; i++)
          sums[i] =
              SPLIT > 1 ? sum_of_parts<SPLIT / MATRICES, MATRICES * BANDS * TILES * 32>(&partial[i][r % BANDS][t][lane]) : total[r][t];
#pragma clang loop unroll(full)
        for (uint e = 0; e < 2; e++) {
          if (!has(p, t, 8 * r + e)) continue;
          uint at_row = row + 8 * r + e, at = column + 8 * t;
          if (MATRICES == 1)
            store_sum(D, C, p, batch, at_row, at, sums[0][e], added[t]);
          else
            store_swiglu(D, p, batch, at_row, at, sums[0][e] + added[t], sums[MATRICES - 1][e] + added[(MATRICES - 1) * TILES + t]);
        }
      }
    }
  }
};
