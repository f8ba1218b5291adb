// Eight quantized weights as half, two at once and without a conversion.
#pragma once
#include <metal_stdlib>

#include "octet.h"
#include "weights.h"

// A lane's eight weights of a block of 32 of k; of 5 and 6 bits the lowest four, beside which `pair` wants the others.
template <int FORMAT>
struct Eighth {
  enum : uint { WORDS = Packing<FORMAT>::BITS / 4, BYTES = 4 * WORDS };
  uint word[WORDS];

  static METAL_FUNC Eighth load(const device uchar* p) {
    Eighth x;
    if (WORDS == 2) {
      metal::uint2 both = *reinterpret_cast<const device metal::uint2*>(p);
      x.word[0] = both.x, x.word[WORDS - 1] = both.y;
    } else {
      x.word[0] = *reinterpret_cast<const device uint*>(p);
    }
    return x;
  }
  // The first `bytes`, wherever they stand, and zeros.
  static METAL_FUNC Eighth some(const device uchar* p, uint bytes) {
    Eighth x;
#pragma clang loop unroll(full)
    for (uint i = 0; i < WORDS; i++) {
      x.word[i] = 0;
#pragma clang loop unroll(full)
      for (uint j = 0; j < 4; j++)
        if (4 * i + j < bytes) x.word[i] |= uint(p[4 * i + j]) << 8 * j;
    }
    return x;
  }
  // The ith of four pairs: of bytes 0 and 2, 1 and 3, 4 and 6, 5 and 7; of halves of bytes i and i + 4; with what `offset_of` says added.
  // low: two that are 0xff, or 0xf, from the host (packing.h says why). high: as `high_of` says.
  METAL_FUNC metal::half2 pair(uint i, uint low, uint high, metal::half2 offset) const {
    constexpr uint SIGNS = Packing<FORMAT>::SIGNED ? 0x00800080u : 0;
    if (Packing<FORMAT>::IS_FLOAT) return halves_of_floats<FORMAT>(two_floats(i));
    if (Packing<FORMAT>::BITS == 8) {
      uint bits = word[i / 2 % WORDS];
      return as_type<metal::half2>(((i % 2 ? bits >> 8 : bits) & low) ^ (0x64006400u | SIGNS)) + offset.xx;
    }
    // "Or" and "exclusive or" by turns, which no compiler puts in another order: each has three operands in one of NVIDIA's instructions.
    uint bits = i / 2 ? word[0] >> 8 : word[0], more = 0;
    if (Packing<FORMAT>::HIGH > 0) more = (i / 2 ? high >> 4 : high << 4) & Packing<FORMAT>::HIGH_MASK * 0x00100010u << i % 2 * 4;
    if (i % 2) return metal::fma(as_type<metal::half2>(((bits & low << 4) | 0x64006400u) ^ more), metal::half2(half(0.0625f)), offset.yy);
    return as_type<metal::half2>(((bits & low) | 0x64006400u) ^ more) + offset.xx;
  }
  // The same as `bits_of_floats` takes them.
  METAL_FUNC uint two_floats(uint i) const {
    uint own = Packing<FORMAT>::BITS == 8 ? word[i / 2 % WORDS] : word[0] >> i / 2 * 8;
    return own >> i % 2 * Packing<FORMAT>::BITS;
  }
  // Of eight neighbours of A what a lane needs for the four: the first of each pair, or the second.
  template <class T>
  static METAL_FUNC metal::vec<T, 4> own(Octet<T> x, bool second) {
    typedef metal::vec<T, 4> Four;
    if (WORDS == 2) return second ? Four(x.low.zw, x.high.zw) : Four(x.low.xy, x.high.xy);
    return second ? x.high : x.low;
  }
};

// Zero is what is taken from a group's integers: of weights that are scale * q + bias the integer next to -bias / scale. q - zero is exact
// in 16 bits; bfloat has 8 of a number. A weight is scale * (q - zero) + rest, where rest is scale * zero + bias. The two terms are
// multiplied apart: rest by the sum of A over the block.
//
// Rest is about half a scale at most, and 1.008 times a weight. So the terms are at most 3.02 times the weight where they cancel. Where
// zero stops, at 0 or the largest integer, they have one sign. Without zero they could be any number of times larger. A block's sums round
// by no more than (31 + 2 * K / 32) * 3.02 parts in 2^24 of all |w| |a|. That is within the bound's K + 1 where K is SURE or more. Else,
// and where something is infinite, so that the terms may have both signs, kernels go product by product. All this is of scales that
// `fast::divide` takes, of 2^-126 to 2^126. Of one beyond them zero is at an end, and the terms may be larger.
constexpr constant uint SURE = 128;
// 1.5 * 2^23: a number that is added to it is rounded to an integer, which stands in its lowest bits. Every `zero` below has it added.
constexpr constant float ROUNDER = 12582912.0f;
template <int FORMAT>
METAL_FUNC float zero_of(float scale, float bias) {
  if (!Packing<FORMAT>::HAS_BIAS) return ROUNDER + float(uint(Packing<FORMAT>::OFFSET));
  // 0 / 0 is a NaN, in place of which fmax takes the other.
  constexpr float MOST = Packing<FORMAT>::BITS == 8 ? 255.0f : 15.0f + 16.0f * float(uint(Packing<FORMAT>::HIGH_MASK));
  return metal::fmin(metal::fmax(metal::fast::divide(-bias, scale) + ROUNDER, ROUNDER), ROUNDER + MOST);
}

// What takes zero away from integers that are set into half's bits: from 1024 on; of two in a byte, of the second, from 64 on. Of -1024
// and -64 the bits are 0xe400 and 0xd400, to which an integer is added in the last place, or in the fourth before it.
template <int FORMAT>
METAL_FUNC metal::half2 offset_of(float zero) {
  constexpr uint STEPS = Packing<FORMAT>::BITS == 8 ? 0x00010001u : 0x00100001u,
                 BITS = Packing<FORMAT>::BITS == 8 ? 0xe400e400u : 0xd400e400u;
  return as_type<metal::half2>(as_type<uint>(zero) * STEPS + (BITS - as_type<uint>(ROUNDER) * STEPS));
}

// Of a column and a block, or half of one.
struct Factor {
  float scale, rest;
};
template <int FORMAT>
METAL_FUNC Factor factor_of(float scale, float bias, float zero) {
  return {scale, Packing<FORMAT>::HAS_BIAS ? metal::fma(scale, zero - ROUNDER, bias) : 0.0f};
}

// What pairs are masked with.
template <int FORMAT>
METAL_FUNC uint low_pair(uint low_byte) {
  uint low = Packing<FORMAT>::BITS == 8 ? low_byte : low_byte >> 4;
  return low * 0x10001u;  // not an or, which NVIDIA's compiler would make part of each mask
}

// All eight in their order, less `zero`.
template <int FORMAT>
METAL_FUNC Octet<half> in_order(Eighth<FORMAT> y, uint high, float zero, uint low_byte) {
  uint low = low_pair<FORMAT>(low_byte);
  metal::half2 offset = offset_of<FORMAT>(zero);
  metal::half2 a = y.pair(0, low, high, offset), b = y.pair(1, low, high, offset), c = y.pair(2, low, high, offset),
               d = y.pair(3, low, high, offset);
  if (Packing<FORMAT>::BITS == 8) return {{a.x, b.x, a.y, b.y}, {c.x, d.x, c.y, d.y}};
  return {{a.x, b.x, c.x, d.x}, {a.y, b.y, c.y, d.y}};
}

// Integers that half has exactly, as T: themselves, in float weights.
template <class T>
struct Integers {
  static METAL_FUNC metal::vec<T, 2> pair(metal::half2 x) { return metal::vec<T, 2>(metal::float2(x)); }
  static METAL_FUNC Octet<T> scaled(Octet<half> x, float, float) {
    return {metal::vec<T, 4>(metal::float4(x.low)), metal::vec<T, 4>(metal::float4(x.high))};
  }
};
template <>
struct Integers<half> {
  static METAL_FUNC metal::half2 pair(metal::half2 x) { return x; }
  static METAL_FUNC Octet<half> scaled(Octet<half> x, float, float) { return x; }
};
template <>
struct Integers<float> {
  static METAL_FUNC Octet<float> scaled(Octet<half> x, float scale, float bias) {
    metal::float4 by = metal::float4(scale), more = metal::float4(bias);
    return {metal::fma(by, metal::float4(x.low), more), metal::fma(by, metal::float4(x.high), more)};
  }
};
