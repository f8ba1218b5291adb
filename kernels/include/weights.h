// Rows of weights as they are stored: dense, or integers of 8 or 4 bits that a scale for each group along K turns into weights
// (python/metalmm/quantized.py says the formats).
//
// From an integer to a float without a conversion, which takes Apple's GPUs 4 cycles and NVIDIA's four times an addition: its bits are set
// into the mantissa of a power of two, which is taken away again. A mask, an exclusive or that also makes a signed byte an offset one, and
// a subtraction; each is exact. `low_byte` is 0xff, from the host: a compiler that sees masks loads each anew for each use, for NVIDIA's
// three-input logic takes but one constant. A CPU converts 8 or 16 at once in an instruction: `half_block`.
#pragma once
#include <metal_stdlib>

#include "octet.h"
#include "sixteen.h"

enum Format { DENSE, Q8_0, Q4_0, AFFINE8, AFFINE4 };  // Storage::Format in csrc/core/storage.h

template <int FORMAT>
struct Packing {
  enum : uint {
    BITS = FORMAT == DENSE                ? 16
    : FORMAT == Q8_0 || FORMAT == AFFINE8 ? 8
                                          : 4,
    COUNT = FORMAT == DENSE ? 8 : 32,  // weights of a piece; of quantized ones all of a block
    PER_BYTE = BITS == 4 ? 2 : 1,
    OFFSET = FORMAT == Q8_0 ? 128
    : FORMAT == Q4_0        ? 8
                            : 0,
    SCALED = FORMAT == Q8_0 || FORMAT == Q4_0,  // by a factor alone
    HAS_BIAS = FORMAT == AFFINE8 || FORMAT == AFFINE4
  };
};

// Whether sums of 32 products of A and a byte are far from the largest float, so that the scale can wait for them.
template <class T>
struct IsSmall {
  enum { VALUE = 0 };
};
template <>
struct IsSmall<half> {
  enum { VALUE = 1 };
};

// Where the weights of one matrix are. 2^shift neighbours along K share a scale; ldb: of dense ones, in elements.
struct WeightsAt {
  const device uchar* values;
  const device uchar* scales;
  const device uchar* biases;
  uint n, k, ldb, shift, low_byte;
};

struct Eight {
  metal::float4 low, high;
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

// The four lowest halves of bytes, likewise: below 2^23, 2^19, 2^15 and 2^11.
template <int FORMAT>
METAL_FUNC metal::float4 nibbles_of(uint word, uint low_byte) {
  constexpr uint OFFSET = Packing<FORMAT>::OFFSET;
  uint low = low_byte / 17;  // 15: a shift would be seen through, and four masks made of one at an instruction each time
  metal::uint4 bits = metal::uint4(word) & metal::uint4(low, low << 4, low << 8, low << 12);
  bits |= metal::uint4(0x4b000000u, 0x49000000u, 0x47000000u, 0x45000000u);
  return as_type<metal::float4>(bits) - metal::float4(8388608.0f + OFFSET, 524288.0f + OFFSET, 32768.0f + OFFSET, 2048.0f + OFFSET);
}

template <bool OF_OPERANDS, class T>
struct ScaleType {
  typedef half type;  // of GGUF's formats
};
template <class T>
struct ScaleType<true, T> {
  typedef T type;
};

// A column's place in memory: of weight k, and of the scale of its group.
struct Cursor {
  const device uchar* values;
  const device uchar* scales;
  const device uchar* biases;
};

// Weights of one format: CANONICAL blocks, or rows. T: the operands' type.
template <class T, int FORMAT, bool CANONICAL>
struct Weights {
  typedef typename ScaleType<Packing<FORMAT>::HAS_BIAS, T>::type S;
  enum : uint { LOADS = Packing<FORMAT>::BITS / 4, BLOCK = 16 * LOADS };  // of 16 bytes; bytes

  struct Piece {
    metal::uint4 bits[LOADS];
    S scale, bias;
  };

  static METAL_FUNC Piece nothing() {
    Piece p;
#pragma clang loop unroll(full)
    for (uint i = 0; i < LOADS; i++) p.bits[i] = metal::uint4(0);
    p.scale = p.bias = S(0.0f);
    return p;
  }

  static METAL_FUNC uint shift(WeightsAt w) { return Packing<FORMAT>::HAS_BIAS ? w.shift : 5; }
  static METAL_FUNC uint group(WeightsAt w, uint column, uint k) {
    uint of_k = k >> shift(w);
    return CANONICAL ? of_k * w.n + column : column * (((w.k - 1) >> shift(w)) + 1) + of_k;
  }
  static METAL_FUNC const device uchar* byte(WeightsAt w, uint column, uint k) {
    constexpr uint PER_BYTE = Packing<FORMAT>::PER_BYTE;
    if (CANONICAL) return w.values + ((k / 32 * w.n + column) * BLOCK + k % 32 / PER_BYTE);
    return w.values + (column * ((w.k - 1) / PER_BYTE + 1) + k / PER_BYTE);
  }

  static METAL_FUNC const device uchar* further(const device uchar* p, uint elements) {
    return reinterpret_cast<const device uchar*>(reinterpret_cast<const device S*>(p) + elements);
  }
  static METAL_FUNC Cursor at(WeightsAt w, uint column, uint k) {
    uint i = group(w, column, k);  // of elements, for bytes may be more than 32 bits count
    return {byte(w, column, k), further(w.scales, i), further(w.biases, i)};
  }
  // STEP blocks of 32 further, `times` over, from k: by as many bytes for every lane, where STEP is a whole number of groups.
  template <uint STEP>
  static METAL_FUNC Cursor moved(WeightsAt w, Cursor c, uint column, uint k, uint times) {
    uint groups = (STEP * 32 >> shift(w)) * times;
    if (Packing<FORMAT>::HAS_BIAS && STEP % 4 != 0) groups = ((k + STEP * 32 * times) >> shift(w)) - (k >> shift(w));
    uint values = STEP * BLOCK * times;
    if (CANONICAL) values *= w.n, groups *= w.n;
    return {c.values + values, further(c.scales, groups), further(c.biases, groups)};
  }

  // A whole block, which stands on sixteen bytes.
  static METAL_FUNC Piece load(Cursor c) {
    Piece p;
    const device metal::uint4* v = reinterpret_cast<const device metal::uint4*>(c.values);
#pragma clang loop unroll(full)
    for (uint i = 0; i < LOADS; i++) p.bits[i] = v[i];
    p.scale = *reinterpret_cast<const device S*>(c.scales);
    p.bias = Packing<FORMAT>::HAS_BIAS ? *reinterpret_cast<const device S*>(c.biases) : S(0.0f);
    return p;
  }

  // Weights 8 * i to 8 * i + 7 of a piece; of those that are SCALED by a factor alone, without it.
  static METAL_FUNC Eight eight(Piece piece, uint i, uint low_byte) {
    Eight x;
    if (Packing<FORMAT>::BITS == 4) {
      uint word = piece.bits[0][i];
      x = {nibbles_of<FORMAT>(word, low_byte), nibbles_of<FORMAT>(word >> 16, low_byte)};
    } else {
      metal::uint4 bits = piece.bits[i / 2 % LOADS];
      x = {bytes_of<FORMAT>(bits[i % 2 * 2], low_byte), bytes_of<FORMAT>(bits[i % 2 * 2 + 1], low_byte)};
    }
    if (Packing<FORMAT>::HAS_BIAS) {
      x.low = metal::fma(metal::float4(float(piece.scale)), x.low, metal::float4(float(piece.bias)));
      x.high = metal::fma(metal::float4(float(piece.scale)), x.high, metal::float4(float(piece.bias)));
    }
    return x;
  }

  // Sixteen weights of a block, before their scale: the first or the second; of two in a byte those with an even k, or an odd. For a CPU,
  // in loops that become vectors, by way of int: g++ makes none of a signed byte.
  template <bool WHOLE>
  static METAL_FUNC void half_block(Cursor c, uint which, thread float (&x)[16]) {
    if (Packing<FORMAT>::BITS == 4) {
      for (uint i = 0; i < 16; i++) x[i] = float(int(which ? c.values[i] >> 4 : c.values[i] & 15) - int(Packing<FORMAT>::OFFSET));
    } else if (FORMAT == Q8_0) {
      for (uint i = 0; i < 16; i++) x[i] = float(int(c.values[16 * which + i] ^ 128) - 128);
    } else {
      for (uint i = 0; i < 16; i++) x[i] = float(int(c.values[16 * which + i]));
    }
  }
  static METAL_FUNC float scale(Cursor c) { return float(*reinterpret_cast<const device S*>(c.scales)); }
  static METAL_FUNC float bias(Cursor c) { return Packing<FORMAT>::HAS_BIAS ? float(*reinterpret_cast<const device S*>(c.biases)) : 0.0f; }

  // Eight weights from a multiple of eight on, where rows begin on sixteen bytes.
  static METAL_FUNC Eight scaled(WeightsAt w, uint column, uint k) {
    Cursor c = at(w, column, k);
    Piece p = nothing();
    if (Packing<FORMAT>::BITS == 4)
      p.bits[0].x = *reinterpret_cast<const device uint*>(c.values);
    else
      p.bits[0].xy = *reinterpret_cast<const device metal::uint2*>(c.values);
    p.scale = *reinterpret_cast<const device S*>(c.scales);
    if (Packing<FORMAT>::HAS_BIAS) p.bias = *reinterpret_cast<const device S*>(c.biases);
    Eight x = eight(p, 0, w.low_byte);
    if (Packing<FORMAT>::SCALED) x.low *= float(p.scale), x.high *= float(p.scale);
    return x;
  }

  // One weight, wherever it stands.
  static METAL_FUNC float one(WeightsAt w, uint column, uint k) {
    Cursor c = at(w, column, k);
    uint bits = *c.values;
    if (Packing<FORMAT>::BITS == 4) bits = k % 2 ? bits >> 4 : bits & 15;
    float value = FORMAT == Q8_0 ? float(as_type<char>(uchar(bits))) : float(int(bits) - int(Packing<FORMAT>::OFFSET));
    float scale = float(*reinterpret_cast<const device S*>(c.scales));
    return Packing<FORMAT>::HAS_BIAS ? metal::fma(scale, value, float(*reinterpret_cast<const device S*>(c.biases))) : scale * value;
  }
};

template <class T, bool CANONICAL>
struct Weights<T, DENSE, CANONICAL> {
  struct Piece {
    Octet<T> elements;
    float scale;
  };
  static METAL_FUNC Piece nothing() { return {{metal::vec<T, 4>(T(0.0f)), metal::vec<T, 4>(T(0.0f))}, 0.0f}; }
  static METAL_FUNC const device T* element(WeightsAt w, uint column, uint k) {
    return reinterpret_cast<const device T*>(w.values) + (column * w.ldb + k);
  }
  static METAL_FUNC Cursor at(WeightsAt w, uint column, uint k) {
    return {reinterpret_cast<const device uchar*>(element(w, column, k)), w.scales, w.biases};
  }
  template <uint STEP>
  static METAL_FUNC Cursor moved(WeightsAt, Cursor c, uint, uint, uint times) {
    return {c.values + STEP * 8 * sizeof(T) * times, c.scales, c.biases};
  }
  template <bool WHOLE>
  static METAL_FUNC void half_block(Cursor c, uint which, thread float (&x)[16]) {
    sixteen<WHOLE>(reinterpret_cast<const device T*>(c.values) + 16 * which, x);
  }
  static METAL_FUNC float scale(Cursor) { return 1.0f; }
  static METAL_FUNC float bias(Cursor) { return 0.0f; }
  static METAL_FUNC Piece load(Cursor c) { return {load_octet(reinterpret_cast<const device T*>(c.values)), 1.0f}; }
  static METAL_FUNC Eight eight(Piece piece, uint, uint) { return {metal::float4(piece.elements.low), metal::float4(piece.elements.high)}; }
  static METAL_FUNC float one(WeightsAt w, uint column, uint k) { return float(*element(w, column, k)); }
};
