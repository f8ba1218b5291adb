// Quantized weights as tile B of a GEMM.
#pragma once
#include <metal_stdlib>

#include "eighth.h"
#include "params.h"
#include "products.h"
#include "weights.h"

// BK x BN weights of a threadgroup of TG. In 16 bits integers are multiplied, less one that is next to -bias / scale; the scale of a
// column and EACH of k waits for the sum of their products: `zero_of` says why, with the bound. In float weights are. ../cuda/halves.h has
// another way.
template <class T, class Storage, int BK, int BN, bool STRAIGHT>
struct QuantizedTile {
  typedef typename Storage::Pack Pack;
  typedef typename Storage::By By;
  typedef Eighth<Pack::ID> Bits;
  enum : uint {
    IN_FLOAT = sizeof(T) == 4,
    COLUMNS = BN,
    ACROSS = BK / 8,
    EIGHTS = BN * ACROSS,
    EACH = 32 / Pack::HALVES,
    FACTORS = (BK + EACH - 1) / EACH * BN
  };
  static constexpr constant Scaling SCALING = IN_FLOAT ? PLAIN : Pack::HAS_BIAS ? WITH_REST : SCALED;

  static METAL_FUNC bool is_whole(constant MatmulParams& p, uint) { return b_in_vectors(p, STRAIGHT ? 16 : 8); }
  // Of eight from k on of a column.
  static METAL_FUNC Cursor at(WeightsAt w, uint column, uint k) {
    return Storage::at(w, metal::min(column, w.n - 1), metal::min(k, w.k - 1));
  }
  static METAL_FUNC Bits some(WeightsAt w, Cursor c, uint k) {
    return Bits::some(c.values, k < w.k ? (metal::min(w.k - k, 8u) + Pack::PER_BYTE - 1) / Pack::PER_BYTE : 0);
  }
  // Of the block of 32 that has k; beyond K, which WHOLE ends with a block, none. Not converted, so that nobody waits for the load before
  // it is used.
  template <bool WHOLE>
  static METAL_FUNC By scales(WeightsAt w, Cursor c, uint k) {
    By x = By::none();
    if (WHOLE || k < w.k) x = By::load(c);
    return x;
  }

  // The `eight`th of the tile, from k on, and, of those with one factor the first, it.
  static METAL_FUNC void put(Bits y, By stored, uint eight, threadgroup T* to, threadgroup Factor* by, uint low_byte) {
    uint along = eight % ACROSS * 8;
    float scale = stored.scale(along / 16 % 2), bias = stored.bias(along / 16 % 2);
    float zero = Pack::HAS_BIAS && IN_FLOAT ? ROUNDER : zero_of<Pack::ID>(scale, bias);
    store_bits(to, bits_of(Integers<T>::scaled(in_order<Pack::ID>(y, high_of<Pack::ID>(upper_bits(stored), along / 8 % 4), zero, low_byte),
                                               scale, bias)));
    if (!IN_FLOAT && along % EACH == 0) by[along / EACH * BN + eight / ACROSS] = factor_of<Pack::ID>(scale, bias, zero);
  }
  // Products are added one by one where a sum that waits for its scale overflows, or is not within the bound. All sums are looked at where
  // a weight behind K may be infinite or a NaN: times A's zero there it is a NaN. With two scales it is the other half of a block, which
  // tensor cores' tiles hold whole. Of weights in float it is what follows K among the last eight.
  static METAL_FUNC bool is_good(constant MatmulParams& p, float sum) {
    bool ends_early = (Pack::HALVES == 2 && (p.k - 1) % 32 < 16) || (IN_FLOAT && p.k % 8 != 0);
    if (!ends_early && (IN_FLOAT || (!Pack::HAS_BIAS && IsSmall<T>::VALUE))) return true;
    return metal::isfinite(sum) && (IN_FLOAT || !Pack::HAS_BIAS || p.k >= SURE);
  }
  static METAL_FUNC float one(WeightsAt w, uint column, uint k) { return Storage::one(w, column, k); }
};

// What a thread brings of one, by way of registers; STRAIGHT: ../cuda/products.h.
template <class T, class Storage, int BK, int BN, int TG, bool STRAIGHT>
struct QuantizedB {
  typedef QuantizedTile<T, Storage, BK, BN, STRAIGHT> Stored;
  typedef Tile<BK, BN, true, false> Layout;
  enum : uint { KEEPS = 0, EACH = (Stored::EIGHTS + TG - 1) / TG, BYTES = Layout::SIZE * sizeof(T) + Stored::FACTORS * sizeof(Factor) };
  typename Stored::Bits bits[EACH];
  typename Stored::By by[EACH];

  template <bool WHOLE>
  METAL_FUNC void begin(WeightsAt, uint, uint, uint) thread {}
  template <bool WHOLE>
  METAL_FUNC void load_factors(WeightsAt, uint, uint) thread {}
  METAL_FUNC void put_factors(threadgroup T*, uint) const thread {}
  static METAL_FUNC const threadgroup Factor* factors(const threadgroup T* tile) {
    return reinterpret_cast<const threadgroup Factor*>(tile + Layout::SIZE);
  }
  template <bool WHOLE>
  METAL_FUNC void load(WeightsAt w, uint k0, uint col0, threadgroup T*, uint tid) thread {
#pragma clang loop unroll(full)
    for (uint i = 0; i < EACH; i++) {
      uint eight = tid + i * TG, k = k0 + eight % Stored::ACROSS * 8;
      if (Stored::EIGHTS % TG != 0 && eight >= Stored::EIGHTS) continue;
      Cursor c = Stored::at(w, col0 + eight / Stored::ACROSS, k);
      if (WHOLE)
        bits[i] = Stored::Bits::load(c.values);
      else
        bits[i] = Stored::some(w, c, k);
      by[i] = Stored::template scales<WHOLE>(w, c, k);
    }
  }
  METAL_FUNC void put(WeightsAt w, threadgroup T* tile, uint tid) const thread {
    threadgroup Factor* to = reinterpret_cast<threadgroup Factor*>(tile + Layout::SIZE);
#pragma clang loop unroll(full)
    for (uint i = 0; i < EACH; i++)
      if (Stored::EIGHTS % TG == 0 || tid + i * TG < Stored::EIGHTS)
        Stored::put(bits[i], by[i], tid + i * TG, tile + Layout::template place<TG>(tid, i), to, w.low_byte);
  }
};
