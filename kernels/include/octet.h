// Eight neighbours of a row: of 16-bit types one load of 16 bytes.
#pragma once
#include <metal_stdlib>

template <class T>
struct Octet {
  metal::vec<T, 4> low, high;
};

// p stands on eight elements.
template <class T>
METAL_FUNC Octet<T> load_octet(const device T* p) {
  metal::uint4 bits = *reinterpret_cast<const device metal::uint4*>(p);
  return {as_type<metal::vec<T, 4>>(bits.xy), as_type<metal::vec<T, 4>>(bits.zw)};
}
template <>
METAL_FUNC Octet<float> load_octet(const device float* p) {
  const device metal::float4* v = reinterpret_cast<const device metal::float4*>(p);
  return {v[0], v[1]};
}

// The first `count` of eight that stand anywhere, and zeros.
template <class T>
METAL_FUNC Octet<T> load_some(const device T* p, uint count) {
  Octet<T> x = {metal::vec<T, 4>(T(0)), metal::vec<T, 4>(T(0))};
#pragma clang loop unroll(full)
  for (uint i = 0; i < 4; i++) {
    if (i < count) x.low[i] = p[i];
    if (i + 4 < count) x.high[i] = p[i + 4];
  }
  return x;
}

// Four chains of multiply-adds.
template <class T>
METAL_FUNC void add_products(thread metal::float4& sum, Octet<T> x, Octet<T> y) {
  sum = metal::fma(metal::float4(x.low), metal::float4(y.low), sum);
  sum = metal::fma(metal::float4(x.high), metal::float4(y.high), sum);
}
