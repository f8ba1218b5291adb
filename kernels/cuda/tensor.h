// Rows of half, or of bfloat, by integers on NVIDIA's tensor cores.
//
// One row, two or four, `add`: inner products of a simdgroup's lanes. Four lanes share a column, each with a quarter of what is taken of K
// at once; eight lanes of as many columns have the same quarter, and want the same of A. So a product of 16 x 16 weights by 16 x 8 of A has
// eight weights of each lane, four each of two blocks of 32, and A in two columns for each quarter, which are zero where other quarters'
// weights meet them: a lane finds its own sums among the four that it holds. A's two columns are two of its rows. Of one row, and an odd
// number of a lane's columns, they are the row for two blocks, and of an odd number of blocks in flight the last product is half empty.
//
// Eight rows, `add_tiles`: 16 columns by eight rows, a block of 32 of k in two products, whose places for k are for lanes to fill as they
// hold it.
//
// Products of 16 bits are exact, and sums are of float, as tensor cores add: they may cut off where they should round (below).
//
// For device cuda alone (csrc/msl/runtime/cuda/matrix.h): a simdgroup matrix is 8 x 8, and Apple's GPUs multiply them on the units that
// multiply and add, to which the zeros would be as much work.
#pragma once
#include <metal_stdlib>

#include "../include/terms.h"

// Where threadgroup memory holds ROWS of A, of each `BLOCKS` blocks of 32, four times sixteen bytes: two rows a pair, whose lines stand in
// other banks, as do the zeros behind the first. For weights with a bias the sums of each eight are behind all.
template <uint BLOCKS, int ROWS>
struct StagedRows {
  enum : uint {
    OF_PAIR = ROWS > 1 ? 2 : 1,
    PITCH = 4 * BLOCKS + 1,
    ZEROS = OF_PAIR * 4 * BLOCKS + 2,
    PAIR = ZEROS + 6,
    SUMS = (ROWS + 1) / 2 * PAIR,
    SIZE = SUMS + ROWS * BLOCKS
  };
  static METAL_FUNC uint row(uint r) { return r / 2 * PAIR + r % 2 * PITCH; }
};

// Of a kernel that does without, nothing.
template <bool YES>
struct TensorCores {
  static_assert(!YES, "a variant with mma = true is of device cuda alone: devices = [\"cuda\"]");
  template <int FORMAT, uint BLOCKS, int ROWS, class T>
  static METAL_FUNC void put(threadgroup float4*, uint, const thread OctetBits<T> (&)[ROWS]) {}
  template <uint BLOCKS, int ROWS>
  static METAL_FUNC void put_zeros(threadgroup float4*, uint) {}
  template <int FORMAT, class Piece, int ROWS, int COLS, int DEPTH>
  static METAL_FUNC void add(const thread Piece (&)[DEPTH][COLS], const threadgroup float4*, uint, uint, uint,
                             thread metal::float4 (&)[ROWS][COLS]) {}
  template <int FORMAT, int ROWS, int TILES, class T>
  static METAL_FUNC void add_tiles(const thread Eighth<FORMAT> (&)[TILES], const thread Terms<FORMAT> (&)[TILES],
                                   const thread Octet<T> (&)[ROWS], uint, uint, uint, thread metal::float2 (&)[ROWS][TILES]) {}
};
#ifdef __METALMM_CUDA__
template <>
struct TensorCores<true> {
  // Eight elements of each row, from the ith on.
  template <int FORMAT, uint BLOCKS, int ROWS>
  static METAL_FUNC void put(threadgroup float4* staged, uint i, const thread OctetBits<half> (&x)[ROWS]) {
    typedef StagedRows<BLOCKS, ROWS> At;
#pragma clang loop unroll(full)
    for (uint r = 0; r < ROWS; r++) {
      reinterpret_cast<threadgroup metal::uint4*>(staged)[At::row(r) + i / 8] = arranged<FORMAT>(x[r]);
      if (!Packing<FORMAT>::HAS_BIAS) continue;
      Octet<half> y = octet_of(x[r]);
      float4 both = float4(y.low) + float4(y.high);
      reinterpret_cast<threadgroup float*>(staged + At::SUMS + r * BLOCKS)[i / 8] = (both.x + both.y) + (both.z + both.w);
    }
  }
  template <uint BLOCKS, int ROWS>
  static METAL_FUNC void put_zeros(threadgroup float4* staged, uint worker) {
    if (worker < 4) staged[StagedRows<BLOCKS, ROWS>::ZEROS + worker] = float4(0.0f);
  }
  // Adds this lane's products to its sums' first, of one block of each column at once, of one row and an odd number of columns two. lane:
  // of its simdgroup; quarter: of the four lanes that share its columns.
  template <int FORMAT, class Piece, int ROWS, int COLS, int DEPTH>
  static METAL_FUNC void add(const thread Piece (&pieces)[DEPTH][COLS], const threadgroup float4* staged, uint lane, uint quarter, uint low,
                             thread metal::float4 (&sums)[ROWS][COLS]) {
    typedef StagedRows<4 * DEPTH, ROWS> At;
    static_assert(ROWS == 1 || (ROWS % 2 == 0 && COLS % 2 == 0), "several rows and columns are pairs");
    constexpr uint BESIDE = COLS % 2 != 0 ? 2 : 1, PAIRS = (ROWS + 1) / 2;
    // Of the two columns of A for its quarter, the one that it brings: 0 or 1. More: it brings zeros.
    uint brought = lane / 4 - lane % 4 * 2;
#pragma clang loop unroll(full)
    for (uint d = 0; d < DEPTH; d += BESIDE) {
      bool brings = brought < (ROWS > 1 ? 2 : metal::min(BESIDE, DEPTH - d));
      uint own_row = brings ? brought : 0;
      const threadgroup metal::uint4* from =
          reinterpret_cast<const threadgroup metal::uint4*>(staged) + 4 * (quarter + 4 * d) + (ROWS > 1 ? At::row(own_row) : 16 * own_row);
      metal::uint4 x[PAIRS][4];
      float4 of_a[ROWS], of_next;
#pragma clang loop unroll(full)
      for (uint p = 0; p < PAIRS; p++) {
        const threadgroup metal::uint4* own =
            brings ? from + p * At::PAIR : reinterpret_cast<const threadgroup metal::uint4*>(staged) + At::ZEROS;
#pragma clang loop unroll(full)
        for (uint i = 0; i < 4; i++) x[p][i] = own[i];
      }
      // Of A the lane's own block, and that of d + 1.
#pragma clang loop unroll(full)
      for (uint r = 0; r < ROWS; r++)
        of_a[r] = Packing<FORMAT>::HAS_BIAS ? staged[At::SUMS + r * 4 * DEPTH + quarter + 4 * d] : float4(0.0f);
      of_next = of_a[0];
      if (Packing<FORMAT>::HAS_BIAS && BESIDE > 1) of_next = staged[At::SUMS + quarter + 4 * metal::min(d + 1, uint(DEPTH - 1))];
      add_blocks<FORMAT>(pieces, d, x, of_a, of_next, low, sums);
    }
  }
  // Adds a block of 32 of k to TILES times eight columns of eight rows of A. A lane has of column lane / 4 of each tile, and of row lane /
  // 4 of A, the eighth lane % 4, if its half is among the first `halves`: of its sums that column's of rows 2 * (lane % 4) and the next.
  // Cut off as is said below, a block's four steps lose 16 parts in 2^24 and A's as many: with zero_of's factors and K / 32 sums 74 of the
  // bound's 129 at K = SURE.
  template <int FORMAT, int ROWS, int TILES, class T>
  static METAL_FUNC void add_tiles(const thread Eighth<FORMAT> (&y)[TILES], const thread Terms<FORMAT> (&by)[TILES],
                                   const thread Octet<T> (&own)[ROWS], uint eighth, uint halves, uint low,
                                   thread metal::float2 (&sums)[ROWS][TILES]) {
    static_assert(TILES % 2 == 0, "a product has two tiles");
#pragma clang loop unroll(full)
    for (uint h = 0; h < Packing<FORMAT>::HALVES; h++)
      if (h < halves) add_half(y, by, own, h, eighth, low, sums);
  }

 private:
  // Half h of the block; eighth: the lane's.
  template <int FORMAT, int ROWS, int TILES, class T>
  static METAL_FUNC void add_half(const thread Eighth<FORMAT> (&y)[TILES], const thread Terms<FORMAT> (&by)[TILES],
                                  const thread Octet<T> (&own)[ROWS], uint h, uint eighth, uint low,
                                  thread metal::float2 (&sums)[ROWS][TILES]) {
    metal::uint4 x[ROWS], ones = metal::uint4(as_type<uint>(metal::vec<T, 2>(T(1.0f))));
    float4 of_a[ROWS];
#pragma clang loop unroll(full)
    for (uint r = 0; r < ROWS; r++) {
      x[r] = arranged<FORMAT>(bits_of(own[r]));
      if (Packing<FORMAT>::HALVES > 1 && eighth / 2 != h) x[r] = metal::uint4(0);
      of_a[r] = float4(0.0f);
      if (!Packing<FORMAT>::HAS_BIAS) continue;
      of_a[r] = metal::mma_16x8x16<T>(of_a[r], ones, x[r].xy);
      of_a[r] = metal::mma_16x8x16<T>(of_a[r], ones, x[r].zw);
    }
#pragma clang loop unroll(full)
    for (uint t = 0; t < TILES; t += 2) {
      uint high[2] = {by[t].high(eighth), by[t + 1].high(eighth)};
      metal::half2 offset[2] = {by[t].offset[h], by[t + 1].offset[h]};
      metal::uint4 weights[2];
#pragma clang loop unroll(full)
      for (uint j = 0; j < 2; j++)
        weights[j] = {pair<T>(y[t], 2 * j, low, high[0], offset[0]), pair<T>(y[t + 1], 2 * j, low, high[1], offset[1]),
                      pair<T>(y[t], 2 * j + 1, low, high[0], offset[0]), pair<T>(y[t + 1], 2 * j + 1, low, high[1], offset[1])};
#pragma clang loop unroll(full)
      for (uint r = 0; r < ROWS; r++) {
        float4 sum = metal::mma_16x8x16<T>(float4(0.0f), weights[0], x[r].xy);
        sum = metal::mma_16x8x16<T>(sum, weights[1], x[r].zw);
        sums[r][t].x = added<FORMAT>(by[t].factor[h], sum.x, of_a[r].x, sums[r][t].x);
        sums[r][t].y = added<FORMAT>(by[t].factor[h], sum.y, of_a[r].y, sums[r][t].y);
        sums[r][t + 1].x = added<FORMAT>(by[t + 1].factor[h], sum.z, of_a[r].x, sums[r][t + 1].x);
        sums[r][t + 1].y = added<FORMAT>(by[t + 1].factor[h], sum.w, of_a[r].y, sums[r][t + 1].y);
      }
    }
  }
  // Of block d, and, of an odd number of columns, of d + 1. x: of A, arranged, what this lane brings. of_a, of_next: the sums of A's
  // eights.
  template <int FORMAT, class Piece, int ROWS, int COLS, int DEPTH, int PAIRS>
  static METAL_FUNC void add_blocks(const thread Piece (&pieces)[DEPTH][COLS], uint d, const thread metal::uint4 (&x)[PAIRS][4],
                                    const thread float4 (&of_a)[ROWS], float4 of_next, uint low, thread metal::float4 (&sums)[ROWS][COLS]) {
    constexpr bool APART = COLS % 2 != 0;
    constexpr uint HALVES = Packing<FORMAT>::HALVES, EACH = 4 / HALVES;
    // Of scale * q + bias, as `zero_of` says, the products: two sums of 64 in eight steps. If each step cuts off one bit below the last of
    // the largest term, they lose 32 parts in 2^24, with zero_of's 2.01. A's sum rounds five times, with 1.01. With K / 32 sums after them
    // that is within the bound at K = 2 * SURE.
#pragma clang loop unroll(full)
    for (uint c = 0; c < COLS; c += APART ? 1 : 2) {
      uint second = APART ? metal::min(d + 1, uint(DEPTH - 1)) : d, beside = APART ? c : c + 1;
      Piece left = pieces[d][c], right = pieces[second][beside];
      Terms<FORMAT> own = Terms<FORMAT>::of(left.by), other = Terms<FORMAT>::of(right.by);
#pragma clang loop unroll(full)
      for (uint h = 0; h < HALVES; h++) {
        metal::half2 offset = own.offset[h], beside_offset = other.offset[h];
        float4 both[PAIRS][2];
#pragma clang loop unroll(full)
        for (uint p = 0; p < PAIRS; p++) both[p][0] = both[p][1] = float4(0.0f);
#pragma clang loop unroll(full)
        for (uint i = h * EACH; i < (h + 1) * EACH; i++) {
          Eighth<FORMAT> y = eighth_of<FORMAT>(left, i), z = eighth_of<FORMAT>(right, i);
          uint high = own.high(i), beside_high = other.high(i);
#pragma clang loop unroll(full)
          for (uint j = 0; j < 2; j++) {
            metal::uint4 weights = {pair<half>(y, 2 * j, low, high, offset), pair<half>(z, 2 * j, low, beside_high, beside_offset),
                                    pair<half>(y, 2 * j + 1, low, high, offset), pair<half>(z, 2 * j + 1, low, beside_high, beside_offset)};
#pragma clang loop unroll(full)
            for (uint p = 0; p < PAIRS; p++) both[p][j] = metal::mma_16x8x16(both[p][j], weights, j == 0 ? x[p][i].xy : x[p][i].zw);
          }
        }
#pragma clang loop unroll(full)
        for (uint p = 0; p < PAIRS; p++) {
          float4 sum = both[p][0] + both[p][1];
          // Of a pair of rows a lane has of each column both sums; of one row its own, and beside it that of d + 1.
#pragma clang loop unroll(full)
          for (uint r = 2 * p; r < (ROWS > 1 ? 2 * p + 2 : 1); r++) {
            sums[r][c].x = added<FORMAT>(own.factor[h], r % 2 ? sum.y : sum.x, sum_of(of_a[r], HALVES, h), sums[r][c].x);
            if (!APART || d + 1 < DEPTH)
              sums[r][beside].x = added<FORMAT>(other.factor[h], APART || r % 2 ? sum.w : sum.z,
                                                sum_of(APART ? of_next : of_a[r], HALVES, h), sums[r][beside].x);
          }
        }
      }
    }
  }
  // Of a block's four eights, or of half h.
  static METAL_FUNC float sum_of(float4 eights, uint halves, uint h) {
    if (halves == 2) return h == 0 ? eights.x + eights.y : eights.z + eights.w;
    return (eights.x + eights.y) + (eights.z + eights.w);
  }
  // Eight of A in the order in which Eighth has pairs of weights.
  template <int FORMAT, class T>
  static METAL_FUNC metal::uint4 arranged(OctetBits<T> x) {
    metal::uint4 w = Packing<FORMAT>::BITS == 4 ? metal::uint4(x.bits.xz, x.bits.yw) : x.bits;
    metal::ushort4 l = as_type<metal::ushort4>(w.xy), h = as_type<metal::ushort4>(w.zw);
    return {as_type<uint>(l.xz), as_type<uint>(l.yw), as_type<uint>(h.xz), as_type<uint>(h.yw)};
  }
  template <int FORMAT, class Piece>
  static METAL_FUNC Eighth<FORMAT> eighth_of(Piece piece, uint i) {
    constexpr uint WORDS = Eighth<FORMAT>::WORDS;
    Eighth<FORMAT> y;
#pragma clang loop unroll(full)
    for (uint j = 0; j < WORDS; j++) y.word[j] = piece.bits[(WORDS * i + j) / 4][(WORDS * i + j) % 4];
    return y;
  }
  // Of numbers of few bits in UNITs, by which the sum is multiplied.
  template <class T, int FORMAT>
  static METAL_FUNC uint pair(Eighth<FORMAT> y, uint i, uint low, uint high, metal::half2 offset) {
    bool is_float = Packing<FORMAT>::IS_FLOAT;
    metal::half2 x = is_float ? as_type<metal::half2>(bits_of_floats<FORMAT>(y.two_floats(i))) : y.pair(i, low, high, offset);
    return as_type<uint>(Integers<T>::pair(x));
  }
  template <int FORMAT>
  static METAL_FUNC float added(Factor by, float sum, float of_a, float to) {
    to = metal::fma(by.scale, Packing<FORMAT>::IS_FLOAT ? sum * float(uint(Packing<FORMAT>::UNIT)) : sum, to);
    return Packing<FORMAT>::HAS_BIAS ? metal::fma(by.rest, of_a, to) : to;
  }
};
#endif
