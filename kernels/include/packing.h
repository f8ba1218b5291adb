// Weight formats, and how integers and floats of few bits become numbers.
//
// From an integer to a float without a conversion, which takes Apple's GPUs 4 cycles and NVIDIA's four times an addition: its bits are set
// into the mantissa of a power of two, which is taken away again. A mask, an exclusive or that also makes a signed byte an offset one, and
// a subtraction; each is exact. `low_byte` is 0xff, from the host: a compiler that sees masks loads each anew for each use, for NVIDIA's
// three-input logic takes but one constant. A CPU converts 8 or 16 at once in an instruction: `half_block`.
#pragma once
#include <metal_stdlib>

// Storage::Format in csrc/core/storage.h has the same order.
enum Format { DENSE, Q8_0, Q4_0, AFFINE8, AFFINE4, Q5_K, Q4_K, Q8_K, Q6_K, Q2_K, NVFP4, FP4, FP8 };

template <int FORMAT>
struct Packing {
  enum : uint {
    ID = FORMAT,
    BITS = FORMAT == DENSE                                                                       ? 16
    : FORMAT == Q4_0 || FORMAT == AFFINE4 || (FORMAT >= Q5_K && FORMAT != Q8_K && FORMAT != FP8) ? 4
                                                                                                 : 8,
    COUNT = FORMAT == DENSE ? 8 : 32,                // weights of a piece; of quantized ones all of a block
    HIGH = (FORMAT == Q5_K) + 2 * (FORMAT == Q6_K),  // bits of an integer beside its scale
    HIGH_MASK = (1 << HIGH) - 1,                     // no more than two: 16 times an integer is set into half's ten bits
    PER_BYTE = BITS == 4 ? 2 : 1,
    SIGNED = FORMAT == Q8_0 || FORMAT == Q8_K,
    OFFSET = SIGNED  ? 128
    : FORMAT == Q4_0 ? 8
    : FORMAT == Q6_K ? 32
                     : 0,
    IS_FLOAT = FORMAT >= NVFP4,        // a value is a number of few bits, no integer
    SCALED = OFFSET != 0 || IS_FLOAT,  // by a factor alone
    HAS_BIAS = FORMAT != DENSE && !SCALED,
    IS_K = FORMAT >= Q5_K && !IS_FLOAT,
    HALVES = FORMAT >= Q8_K && FORMAT <= NVFP4 ? 2 : 1,  // of a block, each with a scale of its own
    UNIT = !IS_FLOAT ? 1
    : BITS == 4      ? 32768
                     : 256  // of `bits_of_floats`
  };
};

// Four bytes of a word, less the format's offset.
template <int FORMAT>
METAL_FUNC metal::float4 bytes_of(uint word, uint low_byte) {
  constexpr uint OFFSET = Packing<FORMAT>::OFFSET;
  uint next = word >> 16, second = low_byte << 8;  // byte 0 below 2^23, byte 1 below 2^15
  metal::uint4 bits = metal::uint4(word & low_byte, word & second, next & low_byte, next & second) ^
                      metal::uint4(0x4b000000u | OFFSET, 0x47000000u | OFFSET << 8, 0x4b000000u | OFFSET, 0x47000000u | OFFSET << 8);
  return as_type<metal::float4>(bits) - metal::float4(8388608.0f + OFFSET, 32768.0f + OFFSET, 8388608.0f + OFFSET, 32768.0f + OFFSET);
}

// The four lowest halves of bytes, each set into the mantissa of 2^23, 2^19, 2^15 or 2^11, less the offset. high: as `high_of` says.
template <int FORMAT>
METAL_FUNC metal::float4 nibbles_of(uint word, uint high, uint low_byte) {
  constexpr uint OFFSET = Packing<FORMAT>::OFFSET, MORE = Packing<FORMAT>::HIGH_MASK * 16u;
  uint low = low_byte / 17;  // 15: a shift would be seen through, and four masks made of one at an instruction each time
  metal::uint4 bits = metal::uint4(word) & metal::uint4(low, low << 4, low << 8, low << 12);
  if (MORE != 0) bits |= metal::uint4(high << 4) & metal::uint4(MORE, MORE << 4, MORE << 8, MORE << 12);
  bits |= metal::uint4(0x4b000000u, 0x49000000u, 0x47000000u, 0x45000000u);
  return as_type<metal::float4>(bits) - metal::float4(8388608.0f + OFFSET, 524288.0f + OFFSET, 32768.0f + OFFSET, 2048.0f + OFFSET);
}

// Two numbers of few bits, each in the lowest of 16: e2m1, twice its value, or e4m3. half has their exponents, too; times UNIT they
// are the numbers.
template <int FORMAT>
METAL_FUNC uint bits_of_floats(uint two) {
  if (Packing<FORMAT>::BITS == 4) return (two & 0x00070007u) << 9 | (two & 0x00080008u) << 12;
  return (two & 0x007f007fu) << 7 | (two & 0x00800080u) << 8;
}
template <int FORMAT>
METAL_FUNC metal::half2 halves_of_floats(uint two) {
  return as_type<metal::half2>(bits_of_floats<FORMAT>(two)) * metal::half2(half(float(uint(Packing<FORMAT>::UNIT))));
}
