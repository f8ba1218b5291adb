// Names that Apple's own headers are made of and that public kernels call: metal_uniform, and the __metal_ functions with
// which MLX gives bfloat its mathematics. Their last argument, fast mathematics or not, makes no difference here.
#pragma once
#include "simd.h"

namespace metal {
// A value that is the same in every thread; to a CPU, a value.
template <class T> struct uniform {
  T value;
  uniform() = default;
  constexpr uniform(T v) : value(v) {}
  constexpr operator T() const { return value; }
};
template <class T> constexpr uniform<T> make_uniform(T v) { return uniform<T>(v); }
}  // namespace metal

#define METALMM_1(name, f) inline float __metal_##name(float x, bool = false) { return metal::f(x); }
#define METALMM_2(name, f) inline float __metal_##name(float x, float y, bool = false) { return metal::f(x, y); }
#define METALMM_3(name, f) inline float __metal_##name(float x, float y, float z, bool = false) { return metal::f(x, y, z); }
METALMM_1(fabs, fabs) METALMM_1(acos, acos) METALMM_1(acosh, acosh) METALMM_1(asin, asin) METALMM_1(asinh, asinh)
METALMM_1(atan, atan) METALMM_1(atanh, atanh) METALMM_1(ceil, ceil) METALMM_1(cos, cos) METALMM_1(cosh, cosh)
METALMM_1(cospi, cospi) METALMM_1(exp, exp) METALMM_1(exp2, exp2) METALMM_1(exp10, exp10) METALMM_1(floor, floor)
METALMM_1(fract, fract) METALMM_1(log, log) METALMM_1(log2, log2) METALMM_1(log10, log10) METALMM_1(rint, rint)
METALMM_1(round, round) METALMM_1(rsqrt, rsqrt) METALMM_1(sin, sin) METALMM_1(sinh, sinh) METALMM_1(sinpi, sinpi)
METALMM_1(sqrt, sqrt) METALMM_1(tan, tan) METALMM_1(tanh, tanh) METALMM_1(tanpi, tanpi) METALMM_1(trunc, trunc)
METALMM_2(atan2, atan2) METALMM_2(divide, divide) METALMM_2(fmax, fmax) METALMM_2(fmin, fmin) METALMM_2(fmod, fmod)
METALMM_2(nextafter, nextafter) METALMM_2(pow, pow) METALMM_2(powr, powr)
METALMM_3(fma, fma) METALMM_3(fmax3, max3) METALMM_3(fmin3, min3) METALMM_3(fmedian3, median3)
#undef METALMM_1
#undef METALMM_2
#undef METALMM_3
inline float __metal_frexp(float x, int* e) { return metal::frexp(x, *e); }
inline float __metal_ldexp(float x, int n, bool = false) { return metal::ldexp(x, n); }
inline ushort __metal_get_thread_index_in_simdgroup(ushort) { return static_cast<ushort>(metalmm::msl::simd_lane()); }
inline ushort __metal_get_simdgroup_size(ushort) { return 32; }

#define METALMM_LANE(name) template <class T, class... A> METALMM_INLINE T __metal_simd_##name(T x, A... a) { return metal::simd_##name(x, static_cast<ushort>(a)...); }
#define METALMM_REDUCE(name) template <class T> METALMM_INLINE T __metal_simd_##name(T x) { return metal::simd_##name(x); }
METALMM_LANE(broadcast) METALMM_LANE(shuffle) METALMM_LANE(shuffle_down) METALMM_LANE(shuffle_up) METALMM_LANE(shuffle_xor)
METALMM_LANE(shuffle_rotate_down) METALMM_LANE(shuffle_rotate_up)
METALMM_REDUCE(sum) METALMM_REDUCE(product) METALMM_REDUCE(min) METALMM_REDUCE(max) METALMM_REDUCE(xor)
METALMM_REDUCE(prefix_inclusive_sum) METALMM_REDUCE(prefix_exclusive_sum) METALMM_REDUCE(prefix_inclusive_product)
METALMM_REDUCE(prefix_exclusive_product)
#undef METALMM_LANE
#undef METALMM_REDUCE
template <class T> METALMM_INLINE T __metal_simd_shuffle_and_fill_down(T x, T fill, ushort delta, ushort modulo) { return metal::simd_shuffle_and_fill_down(x, fill, delta, modulo); }
template <class T> METALMM_INLINE T __metal_simd_shuffle_and_fill_up(T x, T fill, ushort delta, ushort modulo) { return metal::simd_shuffle_and_fill_up(x, fill, delta, modulo); }
