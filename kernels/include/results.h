// How results of a threadgroup's tile leave: from sums in threadgroup memory.
#pragma once
#include <metal_stdlib>

#include "epilogue.h"
#include "lanes.h"
#include "octet.h"
#include "place.h"
#include "weights.h"

// What a threadgroup multiplies.
template <class T>
struct Task {
  const device T* a;
  WeightsAt w;
  uint row0, col0;  // of the tile: its first row and column
  Thread me;
  Place place;
  uint batch;
  constant void* maps;  // of ../cuda/tma.h, whose type no other device knows

  METAL_FUNC uint index() const thread { return me.simdgroup * 32 + me.lane; }
};

// The sum of one result. Where what tensor cores made is not good (QuantizedTile::is_good), products are added one by one.
template <bool TA, class B, class T>
METAL_FUNC float made_good(thread const Task<T>& task, constant MatmulParams& p, uint row, uint col, float sum) {
  if (B::Stored::is_good(p, sum)) return sum;
  sum = 0.0f;
  for (uint k = 0; k < p.k; k++) sum += B::Stored::one(task.w, col, k) * float(task.a[TA ? k * p.lda + row : row * p.lda + k]);
  return sum;
}

// COUNT neighbouring results of a row; sums: in threadgroup memory. Eight stand on 16 bytes and are stored at once.
template <bool TA, int COUNT, class B, class T>
METAL_FUNC void store_results(thread const Task<T>& task, Output<T> to, constant MatmulParams& p, uint batch, uint row, uint col,
                              const threadgroup float* sums) {
  bool good = true;
#pragma clang loop unroll(full)
  for (uint i = 0; i < COUNT; i++) good &= B::Stored::is_good(p, sums[i]);
  if (COUNT < 8 || !good) {
    for (uint i = 0; i < COUNT; i++)
      store_result(to.D, to.C, to.bias, p, batch, row, col + i, made_good<TA, B>(task, p, row, col + i, sums[i]));
    return;
  }
  Octet<T> x;
#pragma clang loop unroll(full)
  for (uint i = 0; i < 8; i++) {
    T y = T(result_of(to.C, p, batch, row, col + i, sums[i], bias_of(to.bias, p, col + i)));
    if (i < 4)
      x.low[i] = y;
    else
      x.high[i - 4] = y;
  }
  store_bits(to.D + (batch * p.stride_d + row * p.ldd + col), bits_of(x));
}
