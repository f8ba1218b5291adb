// What a lane has of TILES neighbouring products of 8 x 8 matrices, weights on the left: two rows of one column of each.
#pragma once
#include <metal_stdlib>

#include "epilogue.h"

struct Tiles {
  uint column, row, batch;  // where a lane's first result goes; those of the next tile are 8 columns further
  uint share, lane;         // of SPLIT simdgroups that share K

  METAL_FUNC bool has(constant MatmulParams& p, uint t, uint r = 0) const thread { return column + 8 * t < p.n && row + r < p.m; }

  // The bias of each tile's column, for one of those that share it.
  template <int TILES, class T>
  METAL_FUNC void load_bias(const device T* bias, constant MatmulParams& p, thread float (&added)[TILES]) const thread {
#pragma clang loop unroll(full)
    for (uint t = 0; t < TILES; t++) added[t] = share == 0 && has(p, t) ? bias_of(bias, p, column + 8 * t) : 0.0f;
  }

  template <int SPLIT, int TILES, class T>
  METAL_FUNC void store(thread float2 (&total)[TILES], const thread float (&added)[TILES], threadgroup float2 (&partial)[SPLIT][TILES][32],
                        device T* D, const device T* C, constant MatmulParams& p) const thread {
    if (SPLIT > 1) {
#pragma clang loop unroll(full)
      for (uint t = 0; t < TILES; t++) partial[share][t][lane] = total[t];
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      if (share != 0) return;
#pragma clang loop unroll(full)
      for (uint t = 0; t < TILES; t++) {
#pragma clang loop unroll(full)
        for (uint s = 1; s < SPLIT; s++) total[t] += partial[s][t][lane];
      }
    }
#pragma clang loop unroll(full)
    for (uint t = 0; t < TILES; t++) {
      if (has(p, t)) store_sum(D, C, p, batch, row, column + 8 * t, total[t].x, added[t]);
      if (has(p, t, 1)) store_sum(D, C, p, batch, row + 1, column + 8 * t, total[t].y, added[t]);
    }
  }
};
