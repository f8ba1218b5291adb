// Products of four simdgroups together, as NVIDIA's GPUs of compute capability 9.0 have them.
#pragma once
#include "../include/products.h"

#ifdef __METALMM_CUDA__
// Of a lane's two rows in each sixteen, that of the first eight or of the last.
template <int PITCH, int TN>
METAL_FUNC void put_rows(thread metal::float4 (&of)[TN], bool last, threadgroup float* rows, uint lane) {
#pragma clang loop unroll(full)
  for (uint j = 0; j < TN; j++)
    *reinterpret_cast<threadgroup metal::float2*>(rows + lane / 4 * PITCH + 8 * j + lane % 4 * 2) = last ? of[j].zw : of[j].xy;
}

// Sums of 64 rows by 8 * TN. Products of a step, 64 of k, go on while the next step's tiles come. Tensor cores add half of K, eight steps
// at most, to few. Then few is added to of, in float. A product may lose one bit below the last of the largest (products.h). That is K / 2
// of the bound's K + 1 parts.
template <class T, int TN>
struct Products<T, 2, TN, TOGETHER> {
  metal::float4 of[TN];
  float few[4 * TN];
  uint steps;  // in few

  METAL_FUNC void clear() thread {
    steps = 0;
#pragma clang loop unroll(full)
    for (uint j = 0; j < TN; j++) of[j] = metal::float4(0.0f);
#pragma clang loop unroll(full)
    for (uint i = 0; i < 4 * TN; i++) few[i] = 0.0f;
  }
  template <class Step>
  METAL_FUNC void add(const threadgroup T* a, const threadgroup T* b, uint2 from, Place, uint, WeightsAt w) thread {
    a += from.x / 64 * 64 * Step::K;  // the group's first row: its four simdgroups say the same
    metal::multiply_group(few, a, b);
    metal::wait_for_groups<1>();
    if (++steps >= metal::min(w.k / SURE, 8u)) settle();
  }
  METAL_FUNC void settle() thread {
    metal::wait_for_groups<0>();
    metal::take_sums(few);
    steps = 0;
#pragma clang loop unroll(full)
    for (uint i = 0; i < 4 * TN; i++) of[i / 4][i % 4] += few[i], few[i] = 0.0f;
  }
  template <int PITCH>
  METAL_FUNC void put(uint i, threadgroup float* rows, uint lane) thread {
    put_rows<PITCH>(of, i % 2, rows, lane);
  }
};
#endif
