// Eight neighbours of a row: of 16-bit types one load of 16 bytes.
#pragma once
#include <metal_stdlib>

template <class T>
struct Octet {
  metal::vec<T, 4> low, high;
};

// As they are loaded: what a loop keeps from turn to turn, which NVIDIA's compiler would else take apart and put together in each.
template <class T>
struct OctetBits {
  metal::uint4 bits;
};
template <>
struct OctetBits<float> {
  metal::float4 low, high;
};
template <class T>
METAL_FUNC Octet<T> octet_of(OctetBits<T> x) {
  return {as_type<metal::vec<T, 4>>(x.bits.xy), as_type<metal::vec<T, 4>>(x.bits.zw)};
}
template <>
METAL_FUNC Octet<float> octet_of(OctetBits<float> x) {
  return {x.low, x.high};
}

// p stands on eight elements.
template <class T>
METAL_FUNC OctetBits<T> load_bits(const device T* p) {
  return {*reinterpret_cast<const device metal::uint4*>(p)};
}
template <>
METAL_FUNC OctetBits<float> load_bits(const device float* p) {
  const device metal::float4* v = reinterpret_cast<const device metal::float4*>(p);
  return {v[0], v[1]};
}
template <class T>
METAL_FUNC Octet<T> load_octet(const device T* p) {
  return octet_of(load_bits(p));
}

template <class T>
METAL_FUNC void store_bits(threadgroup T* p, OctetBits<T> x) {
  *reinterpret_cast<threadgroup metal::uint4*>(p) = x.bits;
}
template <>
METAL_FUNC void store_bits(threadgroup float* p, OctetBits<float> x) {
  threadgroup metal::float4* v = reinterpret_cast<threadgroup metal::float4*>(p);
  v[0] = x.low, v[1] = x.high;
}

template <class T>
METAL_FUNC void store_bits(device T* p, OctetBits<T> x) {
  *reinterpret_cast<device metal::uint4*>(p) = x.bits;
}
template <>
METAL_FUNC void store_bits(device float* p, OctetBits<float> x) {
  device metal::float4* v = reinterpret_cast<device metal::float4*>(p);
  v[0] = x.low, v[1] = x.high;
}

template <class T>
METAL_FUNC OctetBits<T> bits_of(Octet<T> x) {
  return {metal::uint4(as_type<metal::uint2>(x.low), as_type<metal::uint2>(x.high))};
}
template <>
METAL_FUNC OctetBits<float> bits_of(Octet<float> x) {
  return {x.low, x.high};
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
