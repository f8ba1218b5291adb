// Eight quantized weights as half, two at once and without a conversion.
#pragma once
#include <metal_stdlib>

#include "octet.h"
#include "weights.h"

// A lane's eight weights of a block of 32 of k.
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
  // The ith of four pairs: of bytes 0 and 2, 1 and 3, 4 and 6, 5 and 7; of halves of bytes i and i + 4; less `zero`. low: two that are
  // 0xff, or 0xf, from the host (weights.h says why).
  METAL_FUNC metal::half2 pair(uint i, uint low, float zero) const {
    constexpr uint SIGNS = FORMAT == Q8_0 ? 0x00800080u : 0;
    if (Packing<FORMAT>::BITS == 8) {
      uint bits = word[i / 2 % WORDS];
      return as_type<metal::half2>(((i % 2 ? bits >> 8 : bits) & low) ^ (0x64006400u | SIGNS)) - metal::half2(half(1024.0f + zero));
    }
    uint bits = i / 2 ? word[0] >> 8 : word[0];
    if (i % 2)
      return metal::fma(as_type<metal::half2>((bits & low << 4) | 0x64006400u), metal::half2(half(0.0625f)),
                        metal::half2(half(-64.0f - zero)));
    return as_type<metal::half2>((bits & low) | 0x64006400u) - metal::half2(half(1024.0f + zero));
  }
  // Of eight neighbours of A what a lane needs for the four: the first of each pair, or the second.
  static METAL_FUNC metal::half4 own(Octet<half> x, bool second) {
    if (WORDS == 2) return second ? metal::half4(x.low.zw, x.high.zw) : metal::half4(x.low.xy, x.high.xy);
    return second ? x.high : x.low;
  }
};

// What pairs are masked with.
template <int FORMAT>
METAL_FUNC uint low_pair(uint low_byte) {
  uint low = Packing<FORMAT>::BITS == 8 ? low_byte : low_byte >> 4;
  return low | low << 16;
}
