// Products of a simdgroup's rows of A and a block of weights: weight_tiles.metal.
#pragma once
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;  // what follows names its types

#include "../cuda/tensor.h"
#include "place.h"
#include "terms.h"
#include "weights.h"

// What a lane's two results take from K, begin to end, product by product.
template <class Storage, class T>
METAL_FUNC float2 one_by_one(WeightsAt b, uint column, const device T* a0, const device T* a1, uint begin, uint end) {
  float2 sum = float2(0.0f);
#pragma clang loop unroll(disable)
  for (uint k = begin; k < end; k++) sum += Storage::one(b, column, k) * float2(float(a0[k]), float(a1[k]));
  return sum;
}

// A lane's octet of each eighth row.
template <int ROWS, class T>
METAL_FUNC void load_rows(thread Octet<T> (&x)[ROWS], const device T* const thread (&from)[ROWS], uint at) {
#pragma clang loop unroll(full)
  for (uint r = 0; r < ROWS; r++) x[r] = load_octet(from[r] + at);
}

// A block of 32 of k, or of its halves the first. place: the lane's, which has of A the eighth row / 2, of the weights column / 2. MMA: x0
// is what cuda/tensor.h wants, of a row of A, and x1 nothing.
template <bool MMA, int FORMAT, int ROWS, int TILES, class T>
METAL_FUNC void multiply(thread float2 (&totals)[ROWS][TILES], const thread Eighth<FORMAT> (&y)[TILES],
                         const thread Terms<FORMAT> (&by)[TILES], const thread Octet<T> (&x0)[ROWS], Octet<T> x1, Place place, uint halves,
                         uint low) {
  constexpr bool HAS_BIAS = Packing<FORMAT>::HAS_BIAS;
  static_assert(MMA || ROWS == 1, "without tensor cores a simdgroup has eight rows of A");
  if (MMA) {
    TensorCores<MMA>::add_tiles(y, by, x0, place.column / 2, halves, low, totals);
    return;
  }
  bool second = place.row % 2 == 1;
  thread float2(&total)[TILES] = totals[0];
  vec<T, 4> own0 = Eighth<FORMAT>::own(x0[0], second), own1 = Eighth<FORMAT>::own(x1, second);
  simdgroup_matrix<T, 8, 8> ones = make_filled_simdgroup_matrix<T, 8, 8>(T(1.0f));
#pragma clang loop unroll(full)
  for (uint h = 0; h < Packing<FORMAT>::HALVES; h++) {
    if (h >= halves) break;
    bool is_other = Packing<FORMAT>::HALVES > 1 && place.row / 4 != h;
    simdgroup_float8x8 sum[TILES], all = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
#pragma clang loop unroll(full)
    for (uint t = 0; t < TILES; t++) sum[t] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
#pragma clang loop unroll(full)
    for (uint i = 0; i < 4; i++) {
      simdgroup_matrix<T, 8, 8> x;
      put(x, is_other ? vec<T, 2>(T(0.0f)) : vec<T, 2>(own0[i], own1[i]));
      if (HAS_BIAS) simdgroup_multiply_accumulate(all, ones, x, all);
#pragma clang loop unroll(full)
      for (uint t = 0; t < TILES; t++) {
        simdgroup_matrix<T, 8, 8> w;
        put(w, Integers<T>::pair(y[t].pair(i, low, by[t].high(place.column / 2), by[t].offset[h])));
        simdgroup_multiply_accumulate(sum[t], w, x, sum[t]);
      }
    }
    float2 block = float2(all.thread_elements()[0], all.thread_elements()[1]);
#pragma clang loop unroll(full)
    for (uint t = 0; t < TILES; t++) {
      total[t] = fma(float2(by[t].factor[h].scale), float2(sum[t].thread_elements()[0], sum[t].thread_elements()[1]), total[t]);
      if (HAS_BIAS) total[t] = fma(float2(by[t].factor[h].rest), block, total[t]);
    }
  }
}
