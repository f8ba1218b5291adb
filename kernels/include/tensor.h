// Inner products of a simdgroup's lanes on NVIDIA's tensor cores, of one row of half by integers. Four lanes share a column, each with a
// quarter of what is taken of K at once; eight lanes of as many columns have the same quarter, and want the same of A. So a product of 16 x
// 16 weights by 16 x 8 of A has eight weights of each lane, four each of two blocks of 32, and A in two columns for each quarter, which are
// zero where other quarters' weights meet them: a lane finds its own two sums among the four that it holds. Products of half are exact, and
// sums are of float. A turn of weight_turns.metal, its loads included, has 2.1 instructions a weight of q8_0 so for 4.3, and 1.8 of q4_0
// (with one column a lane 2.3) for 4.0.
//
// For device cuda alone (csrc/msl/runtime/cuda/matrix.h): a simdgroup matrix is 8 x 8, and Apple's GPUs multiply them on the units that
// multiply and add, to which the zeros would be as much work.
#pragma once
#include <metal_stdlib>

#include "eighth.h"

// Of a kernel that does without, nothing.
template <bool YES>
struct TensorCores {
  template <int FORMAT, class T>
  static METAL_FUNC void put(threadgroup float4*, uint, OctetBits<T>) {}
  static METAL_FUNC void put_zeros(threadgroup float4*, uint, uint) {}
  static METAL_FUNC uint brought(uint) { return 0; }
  template <int FORMAT, class T>
  static METAL_FUNC metal::uint4 arranged(OctetBits<T>) {
    return metal::uint4(0);
  }
  static METAL_FUNC void bring(const threadgroup float4*, uint, uint, bool, thread metal::uint4 (&)[4]) {}
  template <int FORMAT, bool APART, class Piece>
  static METAL_FUNC float2 multiply(Piece, Piece, const thread metal::uint4 (&)[4], uint) {
    return float2(0.0f);
  }
};
#ifdef __METALMM_CUDA__
template <>
struct TensorCores<true> {
  // Threadgroup memory has A eight elements at a time, and zeros behind all `blocks` of 32, in other banks than what is read beside them.
  template <int FORMAT>
  static METAL_FUNC void put(threadgroup float4* staged, uint i, OctetBits<half> x) {
    reinterpret_cast<threadgroup metal::uint4*>(staged)[i / 8] = arranged<FORMAT>(x);
  }
  static METAL_FUNC void put_zeros(threadgroup float4* staged, uint blocks, uint worker) {
    if (worker < 4) staged[4 * blocks + 2 + worker] = float4(0.0f);
  }
  // Of the two columns of A for a lane's quarter, the one that it brings: 0 or 1. More: it brings zeros.
  static METAL_FUNC uint brought(uint lane) { return lane / 4 - lane % 4 * 2; }
  // Eight of A in the order in which Eighth has pairs of weights.
  template <int FORMAT>
  static METAL_FUNC metal::uint4 arranged(OctetBits<half> x) {
    metal::uint4 w = Packing<FORMAT>::BITS == 4 ? x.bits.xzyw : x.bits;
    return {(w.x & 0xffffu) | w.y << 16, w.x >> 16 | (w.y & 0xffff0000u), (w.z & 0xffffu) | w.w << 16, w.z >> 16 | (w.w & 0xffff0000u)};
  }
  static METAL_FUNC void bring(const threadgroup float4* staged, uint block, uint blocks, bool brings, thread metal::uint4 (&x)[4]) {
    const threadgroup metal::uint4* from =
        reinterpret_cast<const threadgroup metal::uint4*>(staged) + (brings ? 4 * block : 4 * blocks + 2);
#pragma clang loop unroll(full)
    for (uint i = 0; i < 4; i++) x[i] = from[i];
  }
  // This lane's sums over two blocks: APART, the first with the first column of A, the second with the second; else both with the first.
  template <int FORMAT, bool APART, class Piece>
  static METAL_FUNC float2 multiply(Piece first, Piece second, const thread metal::uint4 (&x)[4], uint low) {
    float4 sum[2] = {float4(0.0f), float4(0.0f)};
#pragma clang loop unroll(full)
    for (uint i = 0; i < 4; i++) {
      Eighth<FORMAT> y = eighth_of<FORMAT>(first, i), z = eighth_of<FORMAT>(second, i);
#pragma clang loop unroll(full)
      for (uint j = 0; j < 2; j++) {
        metal::uint4 weights = {pair(y, 2 * j, low), pair(z, 2 * j, low), pair(y, 2 * j + 1, low), pair(z, 2 * j + 1, low)};
        sum[j] = metal::mma_16x8x16(sum[j], weights, j == 0 ? x[i].xy : x[i].zw);
      }
    }
    return {sum[0].x + sum[1].x, APART ? sum[0].w + sum[1].w : sum[0].z + sum[1].z};
  }

 private:
  template <int FORMAT, class Piece>
  static METAL_FUNC Eighth<FORMAT> eighth_of(Piece piece, uint i) {
    constexpr uint WORDS = Eighth<FORMAT>::WORDS;
    Eighth<FORMAT> y;
#pragma clang loop unroll(full)
    for (uint j = 0; j < WORDS; j++) y.word[j] = piece.bits[(WORDS * i + j) / 4][(WORDS * i + j) % 4];
    return y;
  }
  template <int FORMAT>
  static METAL_FUNC uint pair(Eighth<FORMAT> y, uint i, uint low) {
    return as_type<uint>(y.pair(i, low, float(uint(Packing<FORMAT>::OFFSET))));
  }
};
#endif
