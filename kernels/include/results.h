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

// COUNT neighbouring results of a row; sums: in threadgroup memory, as sum_of_parts says. Eight, or four, are a vector, as their sums are.
template <bool TA, int COUNT, int PARTS, int APART, class B, class T>
METAL_FUNC void store_results(thread const Task<T>& task, Output<T> to, constant MatmulParams& p, uint batch, uint row, uint col,
                              const threadgroup float* sums) {
  bool good = true;
  metal::float4 y[2] = {metal::float4(0.0f), metal::float4(0.0f)};
#pragma clang loop unroll(full)
  for (uint i = 0; i < COUNT / 4; i++) {
    y[i] = sum_of_parts<PARTS, APART / 4>(reinterpret_cast<const threadgroup metal::float4*>(sums) + i);
#pragma clang loop unroll(full)
    for (uint j = 0; j < 4; j++) good &= B::Stored::is_good(p, y[i][j]);
  }
  if (COUNT == 1 || !good) {
    for (uint i = 0; i < COUNT; i++)
      store_result(to.D, to.C, to.bias, p, batch, row, col + i,
                   made_good<TA, B>(task, p, row, col + i, sum_of_parts<PARTS, APART>(sums + i)));
    return;
  }
  results_of<COUNT>(y, to, p, batch, row, col);
  Octet<T> x;
#pragma clang loop unroll(full)
  for (uint i = 0; i < 4; i++) x.low[i] = T(y[0][i]), x.high[i] = T(y[1][i]);
  device T* d = to.D + (batch * p.stride_d + row * p.ldd + col);
  if (COUNT == 8)
    store_bits(d, bits_of(x));
  else
    *reinterpret_cast<device metal::vec<T, 4>*>(d) = x.low;
}
