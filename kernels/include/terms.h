// Terms of a block of 32 weights, and of the blocks of a turn, of which four lanes have a quarter each.
#pragma once
#include <metal_stdlib>

#include "eighth.h"

// What makes weights of a block's integers: of each half the factor, and what `Eighth::pair` adds; bits: the upper ones.
template <int FORMAT>
struct Terms {
  Factor factor[Packing<FORMAT>::HALVES];
  metal::half2 offset[Packing<FORMAT>::HALVES];
  metal::uint2 bits;

  template <class By>
  static METAL_FUNC Terms of(By by) {
    Terms x;
#pragma clang loop unroll(full)
    for (uint h = 0; h < Packing<FORMAT>::HALVES; h++) {
      float zero = zero_of<FORMAT>(by.scale(h), by.bias(h));
      x.factor[h] = factor_of<FORMAT>(by.scale(h), by.bias(h), zero);
      x.offset[h] = offset_of<FORMAT>(zero);
    }
    x.bits = upper_bits(by);
    return x;
  }
  METAL_FUNC uint high(uint eighth) const thread { return high_of<FORMAT>(bits, eighth); }
  // Of the simdgroup's lane `from`.
  METAL_FUNC Terms shuffled(uint from) const thread {
    Terms x;
#pragma clang loop unroll(full)
    for (uint h = 0; h < Packing<FORMAT>::HALVES; h++) {
      x.factor[h] = {metal::simd_shuffle(factor[h].scale, ushort(from)), 0.0f};
      if (Packing<FORMAT>::HAS_BIAS) x.factor[h].rest = metal::simd_shuffle(factor[h].rest, ushort(from));
      x.offset[h] = offset[h];
      if (Packing<FORMAT>::HAS_BIAS) x.offset[h] = as_type<metal::half2>(metal::simd_shuffle(as_type<uint>(offset[h]), ushort(from)));
    }
    x.bits = bits;
    if (Packing<FORMAT>::HIGH > 0) x.bits.x = metal::simd_shuffle(bits.x, ushort(from));
    if (Packing<FORMAT>::HIGH > 1) x.bits.y = metal::simd_shuffle(bits.y, ushort(from));
    return x;
  }
};

// The weights of a turn: of DEPTH blocks of each of TILES columns a lane's eighths. The next turn's are loaded as this one's are used, if
// there are MORE: always as many in flight.
template <class Storage, int TILES, int DEPTH, bool IN_FOURS>
struct TurnWeights {
  typedef Eighth<Storage::Pack::ID> Bits;
  const device uchar* next[TILES];
  Bits y[DEPTH][TILES];

  METAL_FUNC void start(WeightsAt b, const thread uint (&column)[TILES], uint k, uint pair) thread {
#pragma clang loop unroll(full)
    for (uint t = 0; t < TILES; t++) {
      next[t] = Storage::at(b, column[t], k).values + Bits::BYTES * pair;
#pragma clang loop unroll(full)
      for (uint d = 0; d < DEPTH; d++) y[d][t] = Bits::load(next[t] + Storage::bytes_along(b, d));
    }
  }
  METAL_FUNC void begin(WeightsAt b) thread {
#pragma clang loop unroll(full)
    for (uint t = 0; t < TILES; t++) next[t] += Storage::bytes_along(b, DEPTH);
  }
  template <bool MORE>
  METAL_FUNC void take(WeightsAt, uint d, uint, thread Bits (&own)[TILES]) thread {
#pragma clang loop unroll(full)
    for (uint t = 0; t < TILES; t++) own[t] = y[d][t];
  }
  // Behind the products: in `take` these loads would cost registers.
  METAL_FUNC void refill(WeightsAt b, uint d) thread {
#pragma clang loop unroll(full)
    for (uint t = 0; t < TILES; t++) y[d][t] = Bits::load(next[t] + Storage::bytes_along(b, d));
  }
};
// Each of the four lanes of a column loads one of four blocks whole, and has the other lanes' eighths from them: a quarter of the requests,
// of 8 bits half.
template <class Storage, int TILES, int DEPTH>
struct TurnWeights<Storage, TILES, DEPTH, true> {
  typedef Eighth<Storage::Pack::ID> Bits;
  enum : uint { LOADS = Storage::LOADS, WORDS = Bits::WORDS };
  const device uchar* next[TILES];
  metal::uint4 blocks[DEPTH / 4][TILES][LOADS];
  Bits y[4][TILES];

  METAL_FUNC void start(WeightsAt b, const thread uint (&column)[TILES], uint k, uint pair) thread {
#pragma clang loop unroll(full)
    for (uint t = 0; t < TILES; t++) {
      next[t] = Storage::at(b, column[t], k + 32 * pair).values;
#pragma clang loop unroll(full)
      for (uint e = 0; e < DEPTH / 4; e++) load(b, t, e);
    }
  }
  METAL_FUNC void begin(WeightsAt b) thread {
#pragma clang loop unroll(full)
    for (uint t = 0; t < TILES; t++) next[t] += Storage::bytes_along(b, DEPTH);
  }
  template <bool MORE>
  METAL_FUNC void take(WeightsAt b, uint d, uint pair, thread Bits (&own)[TILES]) thread {
#pragma clang loop unroll(full)
    for (uint t = 0; t < TILES; t++) {
      if (d % 4 == 0) {
        change_places(blocks[d / 4][t], pair, t);
        if (MORE) load(b, t, d / 4);
      }
      own[t] = y[d % 4][t];
    }
  }
  METAL_FUNC void refill(WeightsAt, uint) thread {}

 private:
  METAL_FUNC void load(WeightsAt b, uint t, uint e) thread {
#pragma clang loop unroll(full)
    for (uint i = 0; i < LOADS; i++)
      blocks[e][t][i] = reinterpret_cast<const device metal::uint4*>(next[t] + Storage::bytes_along(b, 4 * e))[i];
  }
  // Where mask is all ones, else the first.
  static METAL_FUNC uint second_of(uint first, uint second, uint mask) { return first ^ ((first ^ second) & mask); }
  // Of a lane's block the eighths of all four, to the lane's eighth of all four blocks.
  METAL_FUNC void change_places(const thread metal::uint4 (&block)[LOADS], uint pair, uint t) thread {
    uint odd = 0u - pair % 2, upper = 0u - pair / 2;  // masks
#pragma clang loop unroll(full)
    for (uint w = 0; w < WORDS; w++) {
      uint x[4];
#pragma clang loop unroll(full)
      for (uint i = 0; i < 4; i++) x[i] = block[(WORDS * i + w) / 4][(WORDS * i + w) % 4];
#pragma clang loop unroll(full)
      for (uint i = 0; i < 4; i += 2) {
        uint other = metal::simd_shuffle_xor(second_of(x[i + 1], x[i], odd), ushort(1));
        x[i + 1] = second_of(other, x[i + 1], odd);
        x[i] = second_of(x[i], other, odd);
      }
#pragma clang loop unroll(full)
      for (uint i = 0; i < 2; i++) {
        uint other = metal::simd_shuffle_xor(second_of(x[i + 2], x[i], upper), ushort(2));
        y[i][t].word[w] = second_of(x[i], other, upper);
        y[i + 2][t].word[w] = second_of(other, x[i + 2], upper);
      }
    }
  }
};

// The scales of a turn: of DEPTH blocks of each of TILES columns. A lane's columns are eight apart. The next turn's are loaded while this
// one's are used, if there are MORE: `take` asks for them block by block. SHARED, `begin` asks for all.
template <class Storage, int TILES, int DEPTH, bool SHARED>
struct TurnScales {
  typedef typename Storage::By By;
  typedef Terms<Storage::Pack::ID> Own;
  Cursor from[TILES];
  By by[DEPTH][TILES];

  // first: the lane's first column. lane: SHARED, lanes 4 * i to 4 * i + 3 have the same columns.
  METAL_FUNC void start(WeightsAt b, uint first, uint k, uint) thread {
#pragma clang loop unroll(full)
    for (uint t = 0; t < TILES; t++) {
      from[t] = Storage::at(b, metal::min(first + 8 * t, b.n - 1), k);
#pragma clang loop unroll(full)
      for (uint d = 0; d < DEPTH; d++) by[d][t] = By::load(Storage::template moved<1>(b, from[t], k, d));
    }
  }
  template <bool MORE>
  METAL_FUNC void begin(WeightsAt b, uint k) thread {
#pragma clang loop unroll(full)
    for (uint t = 0; t < (MORE ? TILES : 0); t++) from[t] = Storage::template moved<1>(b, from[t], k, DEPTH);
  }
  template <bool MORE>
  METAL_FUNC void take(WeightsAt b, uint k, uint d, uint, thread Own (&terms)[TILES]) thread {
#pragma clang loop unroll(full)
    for (uint t = 0; t < TILES; t++) {
      terms[t] = Own::of(by[d][t]);
      if (MORE) by[d][t] = By::load(Storage::template moved<1>(b, from[t], k + 32 * DEPTH, d));
    }
  }
};
// Each of the four lanes of a column makes terms of a quarter of the blocks. The others have them from it.
template <class Storage, int TILES, int DEPTH>
struct TurnScales<Storage, TILES, DEPTH, true> {
  typedef typename Storage::By By;
  typedef Terms<Storage::Pack::ID> Own;
  enum : uint { BLOCKS = DEPTH * TILES, EACH = (BLOCKS + 3) / 4 };
  Cursor from[EACH];
  By by[EACH];
  Own own[EACH];
  uint quarter;

  METAL_FUNC void start(WeightsAt b, uint first, uint k, uint lane) thread {
    quarter = lane % 4;
#pragma clang loop unroll(full)
    for (uint i = 0; i < EACH; i++) {
      from[i] = Storage::at(b, metal::min(first + 8 * (block(i) / DEPTH), b.n - 1), along(k, i));
      by[i] = By::load(from[i]);
    }
  }
  template <bool MORE>
  METAL_FUNC void begin(WeightsAt b, uint k) thread {
#pragma clang loop unroll(full)
    for (uint i = 0; i < EACH; i++) {
      own[i] = Own::of(by[i]);
      if (!MORE) continue;
      from[i] = Storage::template moved<1>(b, from[i], along(k, i), DEPTH);
      by[i] = By::load(from[i]);
    }
  }
  template <bool MORE>
  METAL_FUNC void take(WeightsAt, uint, uint d, uint lane, thread Own (&terms)[TILES]) const thread {
#pragma clang loop unroll(full)
    for (uint t = 0; t < TILES; t++) terms[t] = own[(t * DEPTH + d) / 4].shuffled(lane / 4 * 4 + (t * DEPTH + d) % 4);
  }

 private:
  METAL_FUNC uint block(uint i) const thread { return (4 * i + quarter) % BLOCKS; }
  METAL_FUNC uint along(uint k, uint i) const thread { return k + block(i) % DEPTH * 32; }
};
