// Rows of weights as they are stored: dense, or integers or floats of 4 to 8 bits that a scale for each group along K turns into weights
// (python/metalmm/quantized.py says the formats). Of 5 and 6 bits the upper ones stand beside the scale.
//
// Where scale * q + bias is asked for, nothing need be taken away: scale * (power + q) + (bias - scale * power) is the same rounding of the
// same number if the difference is exact, and of 16-bit scales and biases it is, but where the bias is tiny beside the scale: `factors`.
// Where it is thousands of times the scale, a difference may round, and a weight twice: the bound is K + 1 roundings, of which sums of 32
// and more take K / 4 + 6.
#pragma once
#include <metal_stdlib>

#include "../cpu/sixteen.h"
#include "dense_weights.h"
#include "octet.h"
#include "packing.h"
#include "scales.h"

// Weights of one format: CANONICAL blocks, or rows. T: the operands' type.
template <class T, int FORMAT, bool CANONICAL>
struct Weights {
  typedef Packing<FORMAT> Pack;
  typedef typename ScalesFor<T, FORMAT, Packing<FORMAT>::IS_K>::type By;
  enum : uint {
    LOADS = Packing<FORMAT>::BITS / 4,  // of 16 bytes
    BLOCK = 16 * LOADS,                 // bytes
    IS_CANONICAL = CANONICAL,
    SHIFTED = Packing<FORMAT>::HAS_BIAS && By::IN_16_BITS
  };

  struct Piece {
    metal::uint4 bits[LOADS];
    By by;
  };

  static METAL_FUNC Piece nothing() {
    Piece p;
#pragma clang loop unroll(full)
    for (uint i = 0; i < LOADS; i++) p.bits[i] = metal::uint4(0);
    p.by = By::none();
    return p;
  }

  static METAL_FUNC uint shift(WeightsAt w) { return Packing<FORMAT>::HAS_BIAS && !Packing<FORMAT>::IS_K ? w.shift : 5; }
  // Where K has 2^shift weights each.
  static METAL_FUNC uint group(WeightsAt w, uint column, uint k, uint shift) {
    uint of_k = k >> shift;
    return CANONICAL ? of_k * w.n + column : column * (((w.k - 1) >> shift) + 1) + of_k;
  }
  static METAL_FUNC const device uchar* byte(WeightsAt w, uint column, uint k) {
    constexpr uint PER_BYTE = Packing<FORMAT>::PER_BYTE;
    if (CANONICAL) return w.values + ((k / 32 * w.n + column) * BLOCK + k % 32 / PER_BYTE);
    return w.values + (column * ((w.k - 1) / PER_BYTE + 1) + k / PER_BYTE);
  }

  // From a weight to that so many blocks of 32 further along K.
  static METAL_FUNC uint bytes_along(WeightsAt w, uint blocks) { return CANONICAL ? blocks * BLOCK * w.n : blocks * BLOCK; }

  static METAL_FUNC const device uchar* further(const device uchar* p, uint scales) { return p + ulong(scales) * By::BYTES; }
  static METAL_FUNC const device uchar* bias(WeightsAt w, uint i) { return w.biases + ulong(i) * By::BIAS_BYTES; }
  static METAL_FUNC Cursor at(WeightsAt w, uint column, uint k) {
    uint i = group(w, column, k, shift(w)), of_biases = Packing<FORMAT>::IS_K ? group(w, column, k, 8) : i;
    return {byte(w, column, k), further(w.scales, i), bias(w, of_biases), of_biases};
  }
  // STEP blocks of 32 further, `times` over, from k: by as many bytes for every lane, where STEP is a whole number of groups.
  template <uint STEP>
  static METAL_FUNC Cursor moved(WeightsAt w, Cursor c, uint k, uint times) {
    uint groups = (STEP * 32 >> shift(w)) * times, values = bytes_along(w, STEP * times), to = k + STEP * 32 * times;
    if (Packing<FORMAT>::IS_K) {
      uint i = c.group + ((k % 256 + STEP * 32 * times) >> 8) * (CANONICAL ? w.n : 1);
      return {c.values + values, further(c.scales, CANONICAL ? groups * w.n : groups), bias(w, i), i};
    }
    if (Packing<FORMAT>::HAS_BIAS && STEP % 4 != 0) groups = (to >> shift(w)) - (k >> shift(w));
    if (CANONICAL) groups *= w.n;
    uint i = c.group + groups;
    if (Packing<FORMAT>::HAS_BIAS) return {c.values + values, further(w.scales, i), bias(w, i), i};  // one sum for both
    return {c.values + values, further(c.scales, groups), c.biases, i};
  }

  // Of rows, what follows the first so many.
  static METAL_FUNC WeightsAt behind(WeightsAt w, uint rows) {
    ulong groups = ((w.k - 1) >> shift(w)) + 1, of_biases = Packing<FORMAT>::IS_K ? ((w.k - 1) >> 8) + 1 : groups;
    w.values += rows * ulong((w.k - 1) / Packing<FORMAT>::PER_BYTE + 1);
    w.scales += rows * groups * By::BYTES, w.biases += rows * of_biases * By::BIAS_BYTES;
    return w;
  }

  // A whole block, which stands on sixteen bytes.
  static METAL_FUNC Piece load(Cursor c) {
    Piece p;
    const device metal::uint4* v = reinterpret_cast<const device metal::uint4*>(c.values);
#pragma clang loop unroll(full)
    for (uint i = 0; i < LOADS; i++) p.bits[i] = v[i];
    p.by = By::load(c);
    return p;
  }

  // `exact` stays true if the weights that `eight` makes with them lose nothing to a bias that is tiny beside its scale; else `one` makes
  // them.
  static METAL_FUNC Factors factors(Piece piece, uint half_index, thread bool& exact) {
    constexpr float NEAR = Packing<FORMAT>::BITS == 4 ? 2048.0f : 65536.0f, FAR = Packing<FORMAT>::BITS == 4 ? 128.0f : 256.0f;
    float scale = piece.by.scale(half_index), bias = piece.by.bias(half_index);
    if (!SHIFTED) return {scale, metal::float2(bias)};
    metal::float2 rest = metal::float2(metal::fma(-NEAR, scale, bias), metal::fma(-FAR, scale, bias));
    exact = exact && metal::fma(NEAR, scale, rest.x) == bias;
    return {scale, rest};
  }
  // Weights 8 * i to 8 * i + 7 of a piece; of those that are SCALED by a factor alone, without it.
  static METAL_FUNC Eight eight(Piece piece, Factors by, uint i, uint low_byte) {
    if (SHIFTED) {
      bool halves = Packing<FORMAT>::BITS == 4;
      metal::uint4 bits = piece.bits[halves ? 0 : i / 2 % LOADS];
      uint first = halves ? bits[i] : bits[i % 2 * 2], second = halves ? first >> 16 : bits[i % 2 * 2 + 1];
      // 15 << 12 and 15 << 16; 255 << 7 and 255 << 15. Of shifts a compiler makes one mask and shifts what it leaves, each time.
      uint near = halves ? low_byte / 17 * 4000 + 1440 : low_byte * 127 + 255;
      uint far = halves ? low_byte / 17 * 65000 + 8040 : low_byte * 32512 + 65280;
      metal::uint4 mask = metal::uint4(near, far, near, far);
      uint high = halves ? 0x45000000u : 0x47800000u, low = 0x43000000u | (halves ? 0 : 0x800000u);
      metal::uint4 power = metal::uint4(high, low, high, low);
      metal::uint4 a, b;
      if (halves) {
        a = metal::uint4(first << 12, first << 12, first << 4, first << 4);
        b = metal::uint4(first >> 4, first >> 4, first >> 12, first >> 12);
      } else {
        a = metal::uint4(first << 7, first << 7, first >> 9, first >> 9);
        b = metal::uint4(second << 7, second << 7, second >> 9, second >> 9);
      }
      metal::float4 scale = metal::float4(by.scale), rest = metal::float4(by.rest, by.rest);
      return {metal::fma(scale, as_type<metal::float4>((a & mask) | power), rest),
              metal::fma(scale, as_type<metal::float4>((b & mask) | power), rest)};
    }
    Eight x = integers(piece, i, low_byte);
    if (Packing<FORMAT>::HAS_BIAS) {
      x.low = metal::fma(metal::float4(by.scale), x.low, metal::float4(by.rest.x));
      x.high = metal::fma(metal::float4(by.scale), x.high, metal::float4(by.rest.x));
    }
    return x;
  }
  static METAL_FUNC Eight integers(Piece piece, uint i, uint low_byte) {
    if (Packing<FORMAT>::IS_FLOAT) {
      bool halves = Packing<FORMAT>::BITS == 4;
      metal::uint4 bits = piece.bits[halves ? 0 : i / 2 % LOADS];
      uint first = halves ? bits[i] : bits[i % 2 * 2], second = halves ? first >> 8 : bits[i % 2 * 2 + 1], one = halves ? 4 : 8;
      metal::float2 a = metal::float2(halves_of_floats<FORMAT>(first)), b = metal::float2(halves_of_floats<FORMAT>(first >> one)),
                    c = metal::float2(halves_of_floats<FORMAT>(second)), d = metal::float2(halves_of_floats<FORMAT>(second >> one));
      if (halves) return {{a.x, b.x, c.x, d.x}, {a.y, b.y, c.y, d.y}};
      return {{a.x, b.x, a.y, b.y}, {c.x, d.x, c.y, d.y}};
    }
    if (Packing<FORMAT>::BITS == 4) {
      uint word = piece.bits[0][i], high = high_of<FORMAT>(upper_bits(piece.by), i);
      return {nibbles_of<FORMAT>(word, high, low_byte), nibbles_of<FORMAT>(word >> 16, high >> 16, low_byte)};
    }
    metal::uint4 bits = piece.bits[i / 2 % LOADS];
    return {bytes_of<FORMAT>(bits[i % 2 * 2], low_byte), bytes_of<FORMAT>(bits[i % 2 * 2 + 1], low_byte)};
  }

#ifdef __METALMM_CPU__
  // Sixteen weights of a block, before their scale: the first or the second; of two in a byte those with an even k, or an odd.
  template <bool WHOLE>
  static METAL_FUNC Sixteen half_block(Cursor c, uint which) {
    if (Packing<FORMAT>::IS_FLOAT && Packing<FORMAT>::BITS == 4) return sixteen_of_e2m1(c.values, 4 * which);
    if (Packing<FORMAT>::IS_FLOAT) return sixteen_of_e4m3(c.values + 16 * which);
    if (Packing<FORMAT>::BITS == 4) {
      Sixteen x = sixteen_bytes(c.values, 4 * which, 15, 0, int(Packing<FORMAT>::OFFSET));
      if (Packing<FORMAT>::HIGH == 0) return x;
      metal::uint2 bits = upper_bits(By::load(c));
      const uint high[4] = {high_of<FORMAT>(bits, 0), high_of<FORMAT>(bits, 1), high_of<FORMAT>(bits, 2), high_of<FORMAT>(bits, 3)};
      return x + sixteen_times(high, which, Packing<FORMAT>::HIGH_MASK);
    }
    constexpr int SIGN = Packing<FORMAT>::SIGNED ? 128 : 0;
    return sixteen_bytes(c.values + 16 * which, 0, 255, SIGN, SIGN);
  }
  // Makes weights of both, or, LATE, finds the scale of both.
  template <bool LATE>
  static METAL_FUNC void scale(Cursor c, thread Sixteen (&y)[2], thread Sixteen& scale) {
    constexpr bool IN_EACH = Packing<FORMAT>::HALVES == 2 && Packing<FORMAT>::BITS == 4;
    By by = By::load(c);
    scale = all_sixteen(by.scale(0));
    for (uint i = 0; i < (LATE ? 0 : 2); i++) {
      Sixteen own = IN_EACH ? two_eights(by.scale(0), by.scale(1)) : all_sixteen(by.scale(i)),
              bias = IN_EACH ? two_eights(by.bias(0), by.bias(1)) : all_sixteen(by.bias(i));
      y[i] = multiply_add(own, y[i], bias);
    }
  }
#endif

  // One weight, wherever it stands.
  static METAL_FUNC float one(WeightsAt w, uint column, uint k) {
    Cursor c = at(w, column, k);
    uint bits = *c.values, half_index = k / 16 % 2;
    if (Packing<FORMAT>::BITS == 4) bits = k % 2 ? bits >> 4 : bits & 15;
    float value = Packing<FORMAT>::SIGNED ? float(as_type<char>(uchar(bits))) : float(int(bits) - int(Packing<FORMAT>::OFFSET));
    if (Packing<FORMAT>::IS_FLOAT) value = float(halves_of_floats<FORMAT>(bits).x);
    By by = By::load(c);
    if (Packing<FORMAT>::HIGH > 0)
      value += float((high_of<FORMAT>(upper_bits(by), k / 8 % 4) >> k % 8 * 4 & Packing<FORMAT>::HIGH_MASK) * 16);
    return Packing<FORMAT>::HAS_BIAS ? metal::fma(by.scale(half_index), value, by.bias(half_index)) : by.scale(half_index) * value;
  }
};
