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
      from[i] = Storage::at(b, metal::min(first + 8 * (block(i) % TILES), b.n - 1), along(k, i));
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
    for (uint t = 0; t < TILES; t++) terms[t] = own[(d * TILES + t) / 4].shuffled(lane / 4 * 4 + (d * TILES + t) % 4);
  }

 private:
  METAL_FUNC uint block(uint i) const thread { return (4 * i + quarter) % BLOCKS; }
  METAL_FUNC uint along(uint k, uint i) const thread { return k + block(i) / TILES * 32; }
};
