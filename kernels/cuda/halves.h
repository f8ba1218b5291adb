// Weights with a bias as sums of two numbers of type half, by A in half: for tensor cores of compute capability 9.0 (groups.h). Tensor
// cores multiply twice as much so. But no product waits for a factor, and nobody needs the sums of A's rows.
#pragma once
#include "../include/terms.h"
#include "groups.h"

#ifdef __METALMM_CUDA__
// A weight is scale * (q - zero) + rest. Unlike zero_of's, zero may lie beyond the integers' ends: so rest is half a scale at most, or the
// bias where the scale is 0. `big` is the weight rounded to half; of a K-quant, what the upper parts of scale and rest give. `small` is
// what is left. Scales and biases are multiples of 2^-24, half's smallest, and so is all that is made of them: no small number is too
// small. Both together are within 2 parts in 2^24 of an affine weight. Of a K-quant they are within 18: `small` is up to 2^-10 of it, and
// rounded thrice.
//
// Half has 1024 + zero exactly up to a zero of 1024; 900 leaves room for the quotient's error. Beyond it the scale is made a NaN. A scale
// past half's largest number is infinite. Weights are NaN in both cases, and is_good says so.
//
// Factor's floats are the bits of two halves: a number, and of K-quants what half leaves of it.
template <int FORMAT>
struct TermsInTwo : Terms<FORMAT> {
  template <class By>
  static METAL_FUNC TermsInTwo of(By by) {
    TermsInTwo x;
#pragma clang loop unroll(full)
    for (uint h = 0; h < Packing<FORMAT>::HALVES; h++) {
      float scale = by.scale(h), bias = by.bias(h), quotient = scale == 0.0f ? 0.0f : metal::fast::divide(-bias, scale);
      float nearest = quotient + ROUNDER - ROUNDER, rest = metal::fma(scale, nearest, bias);
      if (!(metal::fabs(quotient) <= 900.0f)) scale = as_type<float>(0x7fc00000u);
      x.factor[h] = {in_two(scale), in_two(rest)};
      x.offset[h] = metal::half2(half(-1024.0f - nearest), half((Packing<FORMAT>::BITS == 8 ? -1024.0f : -64.0f) - nearest));
    }
    x.bits = upper_bits(by);
    return x;
  }

 private:
  static METAL_FUNC float in_two(float x) {
    half upper = half(x),
         left = Packing<FORMAT>::IS_K ? half(x - float(upper)) : half(0.0f);  // an affine scale is a half, and so is its rest
    return as_type<float>(metal::half2(upper, left));
  }
};

// Four simdgroups multiply 64 columns of B in registers, of a simdgroup 16, by 8 * TM rows of A. Products of 32 of k go on while the other
// 32 of a step are unpacked. Tensor cores add a quarter of K to each other, at most eight steps. With two products for each k these are
// K / 2 at most. Each may lose one part of the bound's K + 1 (products.h). Where K is below 512 they add one step, 128 products. The first
// 32 are of `small`, and lose nothing: 96 and a K-quant's 18 are within the 129 of K = SURE.
template <class T, int TM, int TN>
struct Products<T, TM, TN, TURNED_IN_TWO> {
  static_assert(TN == 2, "16 columns are a simdgroup's part of a product");

  METAL_FUNC void clear() thread {
    sums.clear();
#pragma clang loop unroll(full)  // `unpack` names these before they have anything
    for (uint i = 0; i < 8; i++) left[i / 4][i / 2 % 2][i % 2] = metal::uint4(0);
  }
  template <class Step>
  METAL_FUNC void begin(const threadgroup T* a, threadgroup T* b, uint3 from, uint lane, WeightsAt w) thread {
    static_assert(Step::K == 64, "two blocks of 32 of k");
    a += from.x * Step::K;
#pragma clang loop unroll(full)
    for (uint block = 0; block < 2; block++) {
      metal::wait_for_groups<2>();  // both products of the block before go on; what multiplied this one's registers is through
      unpack<Step>(block, b, from, lane, w.low_byte);
      metal::multiply_group<true>(sums.few, left[block][1], a + 32 * block);  // small ones first: while sums are small they lose nothing
      metal::multiply_group<true>(sums.few, left[block][0], a + 32 * block);
    }
  }
  template <class Step>
  METAL_FUNC void add(const threadgroup T*, const threadgroup T*, uint3, Place, uint, WeightsAt w) thread {
    sums.end_step(w.k / (2 * SURE));
  }
  template <class Step>
  METAL_FUNC void settle(uint3, uint, WeightsAt) thread {
    sums.take();
  }
  template <int PITCH>
  METAL_FUNC void put(uint i, threadgroup float* rows, uint lane) thread {
    put_columns<PITCH>(sums.of[i], rows, lane);
  }

 private:
  SumsOfSteps<4 * TM> sums;
  metal::uint4 left[2][2][2];  // of each block of 32 of k `big` and `small`, two times 16 of k

  template <class Step>
  METAL_FUNC void unpack(uint block, const threadgroup T* b, uint3 from, uint lane, uint low) thread {
    constexpr uint FACTORS = 32 / Step::EACH;
#pragma clang loop unroll(full)
    for (uint i = 0; i < 16; i++) {  // else the compiler gives these registers away while they are multiplied
      thread uint& own = left[block][i / 8][i / 4 % 2][i % 4];
      own = metal::kept(own);
    }
    metal::uint4 big[2], small[2];
#pragma clang loop unroll(full)
    for (uint other = 0; other < 2; other++) {  // columns eight apart
      metal::uint4 whole = Step::B::eight_columns(b, 32 * block, from.y, 8 * other, lane, low);
#pragma clang loop unroll(full)
      for (uint i = 0; i < 4; i++) {
        Factor f = *factor_of_lane<Step>(b, block * FACTORS + i / 2 % FACTORS, from.y + 8 * other, lane);
        metal::half2 x = as_type<metal::half2>(whole[i]), scales = as_type<metal::half2>(f.scale), rests = as_type<metal::half2>(f.rest);
        metal::half2 scale = scales.xx, rest = rests.xx, scale_left = scales.yy, rest_left = rests.yy;
        metal::half2 near = metal::fma(x, scale, rest), off = rest - metal::fma(x, -scale, near);
        if (Step::B::Stored::Pack::IS_K) off = metal::fma(x, scale_left, off) + rest_left;
        big[other][i] = as_type<uint>(near), small[other][i] = as_type<uint>(off);
      }
    }
    put_left(left[block][0], big[0], big[1]);
    put_left(left[block][1], small[0], small[1]);
  }
};
#endif
