// Dense B as tile B of a GEMM.
#pragma once
#include <metal_stdlib>

#include "params.h"
#include "products.h"
#include "weights.h"

// What `QuantizedTile` says of weights.
template <class T, int BN, bool TB>
struct DenseTile {
  enum : uint { COLUMNS = BN, EACH = 32 };
  static constexpr constant Scaling SCALING = PLAIN;
  static METAL_FUNC bool is_whole(constant MatmulParams& p, uint col0) { return b_in_vectors(p, 8) && (TB || col0 + BN <= p.n); }
  static METAL_FUNC bool is_good(constant MatmulParams&, float) { return true; }
  static METAL_FUNC WeightsAt weights(const device T* B, constant MatmulParams& p, uint batch) {
    const device uchar* values = reinterpret_cast<const device uchar*>(B + batch * p.stride_b);
    return {values, values, values, p.n, p.k, p.ldb, 0, 0};
  }
  static METAL_FUNC float one(WeightsAt w, uint column, uint k) { return Weights<T, DENSE, false>::one(w, column, k); }
};
template <class T, int BK, int BN, int TG, bool TB, bool STRAIGHT, bool ROOM = false>
struct DenseB {
  typedef DenseTile<T, BN, TB> Stored;
  typedef Tile<BK, BN, TB, STRAIGHT> Layout;
  enum : uint {
    BYTES = Layout::SIZE * sizeof(T),
    KEEPS = 0,
    IN_ROWS = TB,
    BYTES_COPIED = BYTES,
    PER_BYTE = 1,
    REGISTERS_OF_OTHERS = 24
  };  // of tma.h
  typedef DenseB OfOthers;
  TileLoads<T, Layout, TG, ROOM> brought;

  template <bool WHOLE>
  METAL_FUNC void begin(WeightsAt w, uint k, uint col0, uint tid) thread {
    uint2 from = {k, col0};
    brought.template begin<WHOLE>(reinterpret_cast<const device T*>(w.values), w.ldb, TB ? from : from.yx, TB ? w.n : w.k, tid);
  }
  template <bool WHOLE>
  METAL_FUNC void load(WeightsAt w, uint k, uint col0, threadgroup T* tile, uint tid) thread {
    uint2 left = {w.k - k, w.n - col0};
    brought.template load<WHOLE>(TB ? left : left.yx, BK * (TB ? 1 : w.ldb), tile, tid);
  }
  template <bool WHOLE>
  METAL_FUNC void begin_factors(WeightsAt, uint, uint, uint) thread {}
  template <bool WHOLE>
  METAL_FUNC void load_factors(WeightsAt, uint, uint) thread {}
  METAL_FUNC void put(WeightsAt, threadgroup T* tile, uint tid) const thread { brought.put(tile, tid); }
  METAL_FUNC void put_factors(threadgroup T*, uint) const thread {}
  static METAL_FUNC const threadgroup Factor* factors(const threadgroup T* tile) {
    return reinterpret_cast<const threadgroup Factor*>(tile);
  }
};
