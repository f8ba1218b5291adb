// Rows of weights that are numbers: what weights.h has for those that are none.
#pragma once
#include <metal_stdlib>

#include "../cpu/sixteen.h"
#include "octet.h"
#include "packing.h"
#include "scales.h"
#include "weights_at.h"

template <class T, bool CANONICAL>
struct Weights<T, DENSE, CANONICAL> {
  typedef Packing<DENSE> Pack;
  enum : uint { SHIFTED = 0 };
  struct Piece {
    Octet<T> elements;
  };
  static METAL_FUNC Piece nothing() { return {{metal::vec<T, 4>(T(0.0f)), metal::vec<T, 4>(T(0.0f))}}; }
  static METAL_FUNC const device T* element(WeightsAt w, uint column, uint k) {
    return reinterpret_cast<const device T*>(w.values) + (column * w.ldb + k);
  }
  static METAL_FUNC Cursor at(WeightsAt w, uint column, uint k) {
    return {reinterpret_cast<const device uchar*>(element(w, column, k)), w.scales, w.biases, 0};
  }
  static METAL_FUNC WeightsAt behind(WeightsAt w, uint rows) {
    w.values += rows * ulong(w.ldb) * sizeof(T);
    return w;
  }
  template <uint STEP>
  static METAL_FUNC Cursor moved(WeightsAt, Cursor c, uint, uint times) {
    return {c.values + STEP * 8 * sizeof(T) * times, c.scales, c.biases, 0};
  }
#ifdef __METALMM_CPU__
  template <bool WHOLE>
  static METAL_FUNC Sixteen half_block(Cursor c, uint which) {
    return sixteen<WHOLE>(reinterpret_cast<const device T*>(c.values) + 16 * which);
  }
  template <bool LATE>
  static METAL_FUNC void scale(Cursor, thread Sixteen (&)[2], thread Sixteen&) {}
#endif
  static METAL_FUNC Piece load(Cursor c) { return {load_octet(reinterpret_cast<const device T*>(c.values))}; }
  static METAL_FUNC Factors factors(Piece, uint, thread bool&) { return {1.0f, metal::float2(0.0f)}; }
  static METAL_FUNC Eight eight(Piece piece, Factors, uint, uint) {
    return {metal::float4(piece.elements.low), metal::float4(piece.elements.high)};
  }
  static METAL_FUNC float one(WeightsAt w, uint column, uint k) { return float(*element(w, column, k)); }
};
