// The scales of a block of 32 weights as they are stored, with the upper bits of 5 and 6 where a format has them there.
#pragma once
#include <metal_stdlib>

#include "packing.h"

// A column's place in memory: of weight k, and of the scale of its group, which is the `group`th. Of a K-quant `group` counts 256 weights.
struct Cursor {
  const device uchar* values;
  const device uchar* scales;
  const device uchar* biases;
  uint group;
};

// The scale of a block of 32, and its bias, as they are stored.
template <class S, bool HAS_BIAS>
struct Scales {
  enum : uint { BYTES = sizeof(S), BIAS_BYTES = sizeof(S), IN_16_BITS = sizeof(S) == 2 };
  S of_block, added;

  static METAL_FUNC Scales load(Cursor c) {
    Scales x = {*reinterpret_cast<const device S*>(c.scales), S(0.0f)};
    if (HAS_BIAS) x.added = *reinterpret_cast<const device S*>(c.biases);
    return x;
  }
  static METAL_FUNC Scales none() { return {S(0.0f), S(0.0f)}; }
  METAL_FUNC float scale(uint) const thread { return float(of_block); }
  METAL_FUNC float bias(uint) const thread { return float(added); }
};
// Of a K-quant: a block, or each half of one, has a byte, times a factor of 256 weights. Floats have the product of 8 bits and 11 exactly.
// With a bias it has another byte, and a factor of those, whose product is subtracted.
template <bool HAS_BIAS, bool IN_HALVES>
struct ScalesOfK;
template <>
struct ScalesOfK<true, false> {
  enum : uint { BYTES = 2, BIAS_BYTES = 4, IN_16_BITS = 0 };
  metal::char2 bytes;
  metal::half2 factors;

  static METAL_FUNC ScalesOfK load(Cursor c) { return of(*reinterpret_cast<const device metal::char2*>(c.scales), c); }
  static METAL_FUNC ScalesOfK of(metal::char2 bytes, Cursor c) { return {bytes, *reinterpret_cast<const device metal::half2*>(c.biases)}; }
  static METAL_FUNC ScalesOfK none() { return {metal::char2(0), metal::half2(half(0.0f))}; }
  METAL_FUNC float scale(uint) const thread { return float(factors.x) * float(bytes.x); }
  METAL_FUNC float bias(uint) const thread { return -(float(factors.y) * float(bytes.y)); }
};
template <>
struct ScalesOfK<false, true> {
  enum : uint { BYTES = 2, BIAS_BYTES = 2, IN_16_BITS = 0 };
  metal::char2 bytes;
  half factor;

  static METAL_FUNC ScalesOfK load(Cursor c) { return of(*reinterpret_cast<const device metal::char2*>(c.scales), c); }
  static METAL_FUNC ScalesOfK of(metal::char2 bytes, Cursor c) { return {bytes, *reinterpret_cast<const device half*>(c.biases)}; }
  static METAL_FUNC ScalesOfK none() { return {metal::char2(0), half(0.0f)}; }
  METAL_FUNC float scale(uint half_index) const thread { return float(factor) * float(half_index != 0 ? bytes.y : bytes.x); }
  METAL_FUNC float bias(uint) const thread { return 0.0f; }
};
template <>
struct ScalesOfK<true, true> {
  enum : uint { BYTES = 4, BIAS_BYTES = 4, IN_16_BITS = 0 };
  metal::char4 bytes;
  metal::half2 factors;

  static METAL_FUNC ScalesOfK load(Cursor c) {
    return {*reinterpret_cast<const device metal::char4*>(c.scales), *reinterpret_cast<const device metal::half2*>(c.biases)};
  }
  static METAL_FUNC ScalesOfK none() { return {metal::char4(0), metal::half2(half(0.0f))}; }
  METAL_FUNC float scale(uint half_index) const thread { return float(factors.x) * float(half_index != 0 ? bytes.z : bytes.x); }
  METAL_FUNC float bias(uint half_index) const thread { return -(float(factors.y) * float(half_index != 0 ? bytes.w : bytes.y)); }
};
// Two bytes of scales, two of nothing, and the HIGH upper bits of the block's integers: one word, or one of each half. In the
// word that `high_of` returns for an eighth, value i has bits 4 * i to 4 * i + HIGH - 1. Those between are other eighths'.
template <class S, uint HIGH>
struct ScalesAndBits {
  enum : uint { BYTES = 4 + 4 * HIGH, BIAS_BYTES = S::BIAS_BYTES, IN_16_BITS = 0 };
  S scales;
  metal::uint2 bits;

  static METAL_FUNC ScalesAndBits load(Cursor c) {
    if (HIGH == 1) {
      metal::uint2 both = *reinterpret_cast<const device metal::uint2*>(c.scales);
      return {S::of(as_type<metal::char4>(both.x).xy, c), both.yy};
    }
    metal::uint3 all = *reinterpret_cast<const device metal::packed_uint3*>(c.scales);
    return {S::of(as_type<metal::char4>(all.x).xy, c), all.yz};
  }
  static METAL_FUNC ScalesAndBits none() { return {S::none(), metal::uint2(0)}; }
  METAL_FUNC float scale(uint half_index) const thread { return scales.scale(half_index); }
  METAL_FUNC float bias(uint half_index) const thread { return scales.bias(half_index); }
};
template <class By>
METAL_FUNC metal::uint2 upper_bits(By) {
  return metal::uint2(0);
}
template <class S, uint HIGH>
METAL_FUNC metal::uint2 upper_bits(ScalesAndBits<S, HIGH> by) {
  return by.bits;
}
// Those of an eighth.
template <int FORMAT>
METAL_FUNC uint high_of(metal::uint2 bits, uint eighth) {
  constexpr uint HIGH = Packing<FORMAT>::HIGH;
  return HIGH == 0 ? 0 : (HIGH == 2 && eighth >= 2 ? bits.y : bits.x) >> eighth * HIGH % 4;
}
// Of numbers of few bits: the upper 16 bits of a float, or those of two, S together.
template <class S>
struct ScalesOfFloats {
  enum : uint { BYTES = sizeof(S), BIAS_BYTES = sizeof(S), IN_16_BITS = 0 };
  S stored;

  static METAL_FUNC ScalesOfFloats load(Cursor c) { return {*reinterpret_cast<const device S*>(c.scales)}; }
  static METAL_FUNC ScalesOfFloats none() { return {S(0)}; }
  METAL_FUNC float scale(uint half_index) const thread {
    return as_type<float>(sizeof(S) == 4 && half_index != 0 ? uint(stored) & 0xffff0000u : uint(stored) << 16);
  }
  METAL_FUNC float bias(uint) const thread { return 0.0f; }
};
template <class T, int FORMAT, bool IS_K>
struct ScalesFor {
  typedef Scales<half, false> type;  // of GGUF's oldest formats
};
template <class T>
struct ScalesFor<T, NVFP4, false> {
  typedef ScalesOfFloats<uint> type;
};
template <class T>
struct ScalesFor<T, FP4, false> {
  typedef ScalesOfFloats<ushort> type;
};
template <class T>
struct ScalesFor<T, FP8, false> {
  typedef ScalesOfFloats<ushort> type;
};
template <class T>
struct ScalesFor<T, AFFINE8, false> {
  typedef Scales<T, true> type;
};
template <class T>
struct ScalesFor<T, AFFINE4, false> {
  typedef Scales<T, true> type;
};
template <class T, int FORMAT>
struct ScalesFor<T, FORMAT, true> {
  typedef ScalesOfK<Packing<FORMAT>::HAS_BIAS, Packing<FORMAT>::HALVES == 2> type;
};
template <class T>
struct ScalesFor<T, Q5_K, true> {
  typedef ScalesAndBits<ScalesOfK<true, false>, 1> type;
};
template <class T>
struct ScalesFor<T, Q6_K, true> {
  typedef ScalesAndBits<ScalesOfK<false, true>, 2> type;
};
