// metal_pack: numbers in the parts of a word. Those of 5, 6 and 5 bits are left out: which component is the lowest is not written down.
#pragma once
#include "math.h"

namespace metalmm::msl {
// So many parts of so many bits, the lowest first; of the last one LAST.
template <int N, uint BITS, uint LAST = BITS> struct Parts {
  static constexpr uint most(int i) { return (1u << (i == N - 1 ? LAST : BITS)) - 1; }
  static METALMM_INLINE uint at(uint word, int i) { return word >> (static_cast<uint>(i) * BITS) & most(i); }

  template <class Form, class T> static METALMM_INLINE vec<T, N> unpack(uint word) {
    vec<T, N> r;
    for (int i = 0; i < N; i++) r[i] = static_cast<T>(Form::number(at(word, i), most(i), i));
    return r;
  }
  // The nearest, of two an even one; NaN gives 0.
  template <class Form, class T> static METALMM_INLINE uint pack(const vec<T, N>& v) {
    uint word = 0;
    for (int i = 0; i < N; i++) {
      float x = Form::stored(static_cast<float>(v[i]), i), in = x > Form::least ? (x < 1.0f ? x : 1.0f) : x <= Form::least ? Form::least : 0.0f;
      int part = static_cast<int>(__builtin_rintf(in * Form::scale(most(i))));
      word |= (static_cast<uint>(part) & most(i)) << (static_cast<uint>(i) * BITS);
    }
    return word;
  }
};

struct Unsigned {
  static constexpr float least = 0.0f;
  static constexpr float scale(uint most) { return static_cast<float>(most); }
  static METALMM_INLINE float number(uint part, uint most, int) { return static_cast<float>(part) / scale(most); }
  static METALMM_INLINE float stored(float x, int) { return x; }
};
struct Signed : Unsigned {
  static constexpr float least = -1.0f;
  static constexpr float scale(uint most) { return static_cast<float>(most / 2); }
  static METALMM_INLINE float number(uint part, uint most, int) {
    float x = static_cast<float>(part > most / 2 ? static_cast<int>(part - most) - 1 : static_cast<int>(part)) / scale(most);
    return x < least ? least : x;
  }
};
struct Colour : Unsigned {  // sRGB, but for the fourth
  static METALMM_INLINE float number(uint part, uint most, int i) {
    float x = Unsigned::number(part, most, i);
    return i == 3 ? x : x <= 0.04045f ? x / 12.92f : __builtin_powf((x + 0.055f) / 1.055f, 2.4f);
  }
  static METALMM_INLINE float stored(float x, int i) {
    return i == 3 ? x : x <= 0.0031308f ? 12.92f * x : 1.055f * __builtin_powf(x, 1.0f / 2.4f) - 0.055f;
  }
};
}  // namespace metalmm::msl

#define METALMM_UNPACK(from, to, Form, N, ...)                                                                         \
  METALMM_INLINE ::metalmm::msl::vec<to, N> unpack_##from##_to_##to(uint x) {                                          \
    return ::metalmm::msl::Parts<N, __VA_ARGS__>::unpack<::metalmm::msl::Form, to>(x);                                  \
  }
#define METALMM_PACK(from, to, Form, N, ...)                                                                           \
  METALMM_INLINE uint pack_##from##_to_##to(const ::metalmm::msl::vec<from, N>& x) {                                   \
    return ::metalmm::msl::Parts<N, __VA_ARGS__>::pack<::metalmm::msl::Form>(x);                                        \
  }
#define METALMM_PACKS(name, packed, ...)                                                     \
  METALMM_UNPACK(name, float, __VA_ARGS__) METALMM_UNPACK(name, half, __VA_ARGS__)           \
  METALMM_PACK(float, packed, __VA_ARGS__) METALMM_PACK(half, packed, __VA_ARGS__)
namespace metal {
METALMM_PACKS(unorm4x8, unorm4x8, Unsigned, 4, 8) METALMM_PACKS(snorm4x8, snorm4x8, Signed, 4, 8)
METALMM_PACKS(unorm2x16, unorm2x16, Unsigned, 2, 16) METALMM_PACKS(snorm2x16, snorm2x16, Signed, 2, 16)
METALMM_PACKS(unorm10a2, unorm10a2, Unsigned, 4, 10, 2) METALMM_PACKS(unorm4x8_srgb, srgb_unorm4x8, Colour, 4, 8)
}  // namespace metal
#undef METALMM_PACKS
#undef METALMM_PACK
#undef METALMM_UNPACK
