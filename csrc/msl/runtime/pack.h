// metal_pack: numbers in the parts of a word. Those of 5, 6 and 5 bits are left out: which component is the lowest is not written down.
#pragma once
#include "math.h"

namespace metalmm::msl {
// So many parts of so many bits, the lowest first; of the last one LAST.
template <int N, uint BITS, uint LAST = BITS> struct Parts {
  static constexpr uint most(int i) { return (1u << (i == N - 1 ? LAST : BITS)) - 1; }
  static METALMM_INLINE uint at(uint word, int i) { return word >> (static_cast<uint>(i) * BITS) & most(i); }

  template <class T> static METALMM_INLINE vec<T, N> unsigned_of(uint word) {
    vec<T, N> r;
    for (int i = 0; i < N; i++) r[i] = static_cast<T>(static_cast<float>(at(word, i)) / static_cast<float>(most(i)));
    return r;
  }
  template <class T> static METALMM_INLINE vec<T, N> signed_of(uint word) {
    vec<T, N> r;
    for (int i = 0; i < N; i++) {
      float x = static_cast<float>(static_cast<int>(at(word, i) << (32 - BITS)) >> (32 - BITS)) / static_cast<float>(most(i) / 2);
      r[i] = static_cast<T>(x < -1.0f ? -1.0f : x);
    }
    return r;
  }
  template <class T> static METALMM_INLINE vec<T, N> colours_of(uint word) {
    vec<T, N> r;
    for (int i = 0; i < N; i++) {
      float x = static_cast<float>(at(word, i)) / static_cast<float>(most(i));
      r[i] = static_cast<T>(i == 3 ? x : x <= 0.04045f ? x / 12.92f : __builtin_powf((x + 0.055f) / 1.055f, 2.4f));
    }
    return r;
  }
  // The nearest, of two an even one; NaN gives 0.
  static METALMM_INLINE uint part(float x, int i, float least, float scale) {
    float in = x > least ? (x < 1.0f ? x : 1.0f) : x <= least ? least : 0.0f;
    return (static_cast<uint>(static_cast<int>(__builtin_rintf(in * scale))) & most(i)) << (static_cast<uint>(i) * BITS);
  }
  template <class T> static METALMM_INLINE uint pack_unsigned(const vec<T, N>& v) {
    uint word = 0;
    for (int i = 0; i < N; i++) word |= part(static_cast<float>(v[i]), i, 0.0f, static_cast<float>(most(i)));
    return word;
  }
  template <class T> static METALMM_INLINE uint pack_signed(const vec<T, N>& v) {
    uint word = 0;
    for (int i = 0; i < N; i++) word |= part(static_cast<float>(v[i]), i, -1.0f, static_cast<float>(most(i) / 2));
    return word;
  }
  template <class T> static METALMM_INLINE uint pack_colours(const vec<T, N>& v) {
    uint word = 0;
    for (int i = 0; i < N; i++) {
      float x = static_cast<float>(v[i]);
      x = i == 3 ? x : x <= 0.0031308f ? 12.92f * x : 1.055f * __builtin_powf(x, 1.0f / 2.4f) - 0.055f;
      word |= part(x, i, 0.0f, static_cast<float>(most(i)));
    }
    return word;
  }
};
}  // namespace metalmm::msl

#define METALMM_PACK_NAMES(X) \
  X(unorm4x8, unsigned_of, pack_unsigned, 4, 8) X(snorm4x8, signed_of, pack_signed, 4, 8) X(unorm2x16, unsigned_of, pack_unsigned, 2, 16) \
  X(snorm2x16, signed_of, pack_signed, 2, 16) X(unorm10a2, unsigned_of, pack_unsigned, 4, 10, 2)
#define METALMM_PACK(name, of, pack, N, ...)                                                                                       \
  METALMM_INLINE ::metalmm::msl::vec<float, N> unpack_##name##_to_float(uint x) { return ::metalmm::msl::Parts<N, __VA_ARGS__>::of<float>(x); } \
  METALMM_INLINE ::metalmm::msl::vec<half, N> unpack_##name##_to_half(uint x) { return ::metalmm::msl::Parts<N, __VA_ARGS__>::of<half>(x); }    \
  METALMM_INLINE uint pack_float_to_##name(const ::metalmm::msl::vec<float, N>& x) { return ::metalmm::msl::Parts<N, __VA_ARGS__>::pack(x); }   \
  METALMM_INLINE uint pack_half_to_##name(const ::metalmm::msl::vec<half, N>& x) { return ::metalmm::msl::Parts<N, __VA_ARGS__>::pack(x); }
namespace metal {
METALMM_PACK_NAMES(METALMM_PACK)
METALMM_INLINE ::metalmm::msl::vec<float, 4> unpack_unorm4x8_srgb_to_float(uint x) { return ::metalmm::msl::Parts<4, 8>::colours_of<float>(x); }
METALMM_INLINE ::metalmm::msl::vec<half, 4> unpack_unorm4x8_srgb_to_half(uint x) { return ::metalmm::msl::Parts<4, 8>::colours_of<half>(x); }
METALMM_INLINE uint pack_float_to_srgb_unorm4x8(const ::metalmm::msl::vec<float, 4>& x) { return ::metalmm::msl::Parts<4, 8>::pack_colours(x); }
METALMM_INLINE uint pack_half_to_srgb_unorm4x8(const ::metalmm::msl::vec<half, 4>& x) { return ::metalmm::msl::Parts<4, 8>::pack_colours(x); }
}  // namespace metal
#undef METALMM_PACK
#undef METALMM_PACK_NAMES
