// metal_math, metal_common, metal_integer, metal_relational, metal_geometric and as_type.
#pragma once
#include "matrices.h"

namespace metalmm::msl {

// The value type behind an argument: scalars stay, swizzles and packed vectors become vectors.
template <class A> struct value { using type = typename conditional<is_scalar<A>::value, A, void>::type; };
template <class T, int N> struct value<vec<T, N>> { using type = vec<T, N>; };
template <class V, class T, int N, int... I> struct value<swizzle<V, T, N, I...>> { using type = V; };
template <class V, class T, int N> struct value<packed<V, T, N>> { using type = V; };
template <class A> using value_t = typename value<A>::type;
template <class A> constexpr bool is_vector = (width_of<A> > 1);

template <class T> struct element { using type = T; };
template <class T, int N> struct element<vec<T, N>> { using type = T; };
template <class T> using element_t = typename element<T>::type;

// What operands of an elementwise function have in common: the vector, if one is; the usual conversions otherwise.
// Nothing, if one is a class of the program's own that is no number either: its overload of the function is meant.
template <class T> T some_value();
template <class T> struct nothing { using type = void; };
template <class A, class B, class = void> struct common_number { using type = void; };
template <class A, class B> struct common_number<A, B, typename nothing<decltype(true ? some_value<A>() : some_value<B>())>::type> {
  using type = value_t<decltype(true ? some_value<A>() : some_value<B>())>;
};
template <class A> constexpr bool counts_as_number = __is_enum(A) || !is_same<typename common_number<A, float>::type, void>::value;
template <class A, class B, bool VA = is_vector<A>, bool VB = is_vector<B>> struct common { using type = value_t<A>; };
template <class A, class B> struct common<A, B, true, false> { using type = typename conditional<counts_as_number<B>, value_t<A>, void>::type; };
template <class A, class B> struct common<A, B, false, true> { using type = typename conditional<counts_as_number<A>, value_t<B>, void>::type; };
template <class A, class B> struct common<A, B, false, false> : common_number<A, B> {};
template <class A> struct common<A, A, false, false> { using type = typename conditional<__is_enum(A), A, value_t<A>>::type; };
// Of a class ?: cannot say.
template <class B> struct common<bfloat, B, false, false> { using type = typename conditional<is_same<B, float>::value || is_same<B, double>::value, float, bfloat>::type; };
template <class A> struct common<A, bfloat, false, false> { using type = typename common<bfloat, A>::type; };
template <> struct common<bfloat, bfloat, false, false> { using type = bfloat; };
template <> struct common<half, bfloat, false, false> { using type = bfloat; };
template <> struct common<bfloat, half, false, false> { using type = bfloat; };
#ifdef __CUDACC__
template <> struct common<half, float, false, false> { using type = float; };
template <> struct common<float, half, false, false> { using type = float; };
template <> struct common<half, double, false, false> { using type = double; };
template <> struct common<double, half, false, false> { using type = double; };
template <class B> struct common<half, B, false, false> { using type = half; };
template <class A> struct common<A, half, false, false> { using type = half; };
template <> struct common<half, half, false, false> { using type = half; };
#endif
template <class A, class B> using common_t = typename common<A, B>::type;
template <class T> using not_void = enable_if_t<!is_same<T, void>::value, T>;

// Replaces the element type: the results of relational functions, for one.
template <class V, class T> struct with_element { using type = T; };
template <class U, int N, class T> struct with_element<vec<U, N>, T> { using type = vec<T, N>; };
template <class V, class T> using with_element_t = typename with_element<V, T>::type;

// A math function's type: floating types stay, integers count as float.
template <class T> using float_of = typename conditional<is_float<T>::value, T, float>::type;
template <class V> using float_like = with_element_t<V, float_of<element_t<V>>>;

namespace unmet {  // see types.h
template <class V> METALMM_INLINE element_t<V> at(const V& v, int i) {
  if constexpr (is_vector<V>) return v[i];
  else return v;
}

template <class R, class F, class... V> METALMM_INLINE R elementwise(F f, const V&... v) {
  if constexpr (is_vector<R>) {
    R r;
    for (int i = 0; i < R::count; i++) r[i] = static_cast<element_t<R>>(f(at(v, i)...));
    return r;
  } else {
    return static_cast<R>(f(v...));
  }
}
}  // namespace unmet

}  // namespace metalmm::msl

// What of this MSL has, metal exports by name below: `using namespace metal` must not bring our own helpers into a kernel's scope.
namespace metalmm::msl {
template <class T> struct unsigned_of { using type = T; };
template <> struct unsigned_of<signed char> { using type = unsigned char; };
template <> struct unsigned_of<char> { using type = unsigned char; };
template <> struct unsigned_of<short> { using type = unsigned short; };
template <> struct unsigned_of<int> { using type = unsigned int; };
template <> struct unsigned_of<long> { using type = unsigned long; };
template <class T> using unsigned_t = typename unsigned_of<T>::type;
template <class T> struct signed_of { using type = T; };
template <> struct signed_of<unsigned char> { using type = char; };
template <> struct signed_of<unsigned short> { using type = short; };
template <> struct signed_of<unsigned int> { using type = int; };
template <> struct signed_of<unsigned long> { using type = long; };
template <class T> constexpr bool is_signed_int = !is_same<unsigned_t<T>, T>::value;
template <class T> constexpr T int_max = is_signed_int<T> ? static_cast<T>(static_cast<unsigned_t<T>>(-1) >> 1) : static_cast<T>(-1);
template <class T> constexpr T int_min = is_signed_int<T> ? static_cast<T>(-int_max<T> - 1) : T(0);

// sin(pi x), exact at multiples of a half: the argument is reduced before pi comes in.
// In float: of a double clang 14 makes no half that is right.
METALMM_INLINE float sin_of_pi(double x) {
  double r = x - 2 * __builtin_rint(x / 2);
  if (r > 0.5) r = 1 - r;
  if (r < -0.5) r = -1 - r;
  return static_cast<float>(__builtin_sin(3.14159265358979323846 * r));
}
}  // namespace metalmm::msl

namespace metalmm::msl::library {

#define METALMM_MATH1(name, ...)                                                        \
  template <class A, class V = not_void<value_t<A>>, class R = float_like<V>>            \
  METALMM_INLINE R name(const A& a) {                                                   \
    return elementwise<R>([](float x) { return __VA_ARGS__; }, V(a));                   \
  }
#define METALMM_MATH2(name, ...)                                                         \
  template <class A, class B, class V = not_void<common_t<A, B>>, class R = float_like<V>> \
  METALMM_INLINE R name(const A& a, const B& b) {                                        \
    return elementwise<R>([](float x, float y) { return __VA_ARGS__; }, V(a), V(b));     \
  }
#define METALMM_MATH3(name, ...)                                                                         \
  template <class A, class B, class C, class V = not_void<common_t<common_t<A, B>, C>>, class R = float_like<V>> \
  METALMM_INLINE R name(const A& a, const B& b, const C& c) {                                            \
    return elementwise<R>([](float x, float y, float z) { return __VA_ARGS__; }, V(a), V(b), V(c));      \
  }
METALMM_MATH1(acos, __builtin_acosf(x)) METALMM_MATH1(acosh, __builtin_acoshf(x)) METALMM_MATH1(asin, __builtin_asinf(x))
METALMM_MATH1(asinh, __builtin_asinhf(x)) METALMM_MATH1(atan, __builtin_atanf(x)) METALMM_MATH1(atanh, __builtin_atanhf(x))
METALMM_MATH1(ceil, __builtin_ceilf(x)) METALMM_MATH1(cos, __builtin_cosf(x)) METALMM_MATH1(cosh, __builtin_coshf(x))
METALMM_MATH1(exp, __builtin_expf(x)) METALMM_MATH1(exp2, __builtin_exp2f(x))
METALMM_MATH1(exp10, __builtin_powf(10.0f, x)) METALMM_MATH1(fabs, __builtin_fabsf(x))
METALMM_MATH1(floor, __builtin_floorf(x)) METALMM_MATH1(log, __builtin_logf(x)) METALMM_MATH1(log2, __builtin_log2f(x))
METALMM_MATH1(log10, __builtin_log10f(x)) METALMM_MATH1(rint, __builtin_rintf(x)) METALMM_MATH1(round, __builtin_roundf(x))
METALMM_MATH1(sin, __builtin_sinf(x)) METALMM_MATH1(sinh, __builtin_sinhf(x)) METALMM_MATH1(sqrt, __builtin_sqrtf(x))
METALMM_MATH1(rsqrt, 1.0f / __builtin_sqrtf(x)) METALMM_MATH1(tan, __builtin_tanf(x)) METALMM_MATH1(tanh, __builtin_tanhf(x))
METALMM_MATH1(trunc, __builtin_truncf(x)) METALMM_MATH1(sinpi, sin_of_pi(x)) METALMM_MATH1(cospi, sin_of_pi(__builtin_fabs(x) + 0.5))
METALMM_MATH1(tanpi, sin_of_pi(x) / sin_of_pi(__builtin_fabs(x) + 0.5))
METALMM_MATH1(saturate, x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f)  // NaN gives 0, as in MSL
METALMM_MATH1(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x == 0.0f ? x : 0.0f)
METALMM_MATH2(atan2, __builtin_atan2f(x, y)) METALMM_MATH2(copysign, __builtin_copysignf(x, y))
METALMM_MATH2(fdim, __builtin_fdimf(x, y)) METALMM_MATH2(fmod, __builtin_fmodf(x, y)) METALMM_MATH2(pow, __builtin_powf(x, y))
METALMM_MATH2(powr, __builtin_powf(x, y)) METALMM_MATH2(divide, x / y)
METALMM_MATH2(fmin, x < y || y != y ? x : y) METALMM_MATH2(fmax, x > y || y != y ? x : y)
METALMM_MATH2(step, y < x ? 0.0f : 1.0f)
namespace fast {  // within the 2.5 ulp that MSL gives it where |y| is from 2^-126 to 2^126
#ifdef __CUDACC__
METALMM_INLINE float quotient(float x, float y) {
  float q;
  asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(q) : "f"(x), "f"(y));
  return q;
}
METALMM_MATH2(divide, quotient(x, y))
#else
METALMM_MATH2(divide, x / y)
#endif
}  // namespace fast
METALMM_MATH3(mix, x + (y - x) * z)
METALMM_MATH3(smoothstep, [](float t) { return t * t * (3.0f - 2.0f * t); }(__builtin_fminf(__builtin_fmaxf((z - x) / (y - x), 0.0f), 1.0f)))
#undef METALMM_MATH1
#undef METALMM_MATH2
#undef METALMM_MATH3

// The largest value below 1 in the element's own type bounds it.
template <class A, class V = not_void<value_t<A>>> METALMM_INLINE V fract(const A& a) {
  return elementwise<V>([](auto x) {
    float f = static_cast<float>(x) - __builtin_floorf(static_cast<float>(x));
    float limit = is_same<decltype(x), half>::value ? 0x1.ffcp-1f : is_same<decltype(x), bfloat>::value ? 0x1.fep-1f : 0x1.fffffep-1f;
    return f < limit ? f : f != f ? f : limit;
  }, V(a));
}

// One rounding.
template <class A, class B, class C, class V = not_void<common_t<common_t<A, B>, C>>>
METALMM_INLINE V fma(const A& a, const B& b, const C& c) {
#if defined(__FMA__)
  if constexpr (is_same<V, vec<float, 4>>::value) {  // compilers do not make one instruction of four calls
    V r;
#if __has_builtin(__builtin_elementwise_fma)
    r.v = __builtin_elementwise_fma(V(a).v, V(b).v, V(c).v);
#else
    r.v = __builtin_ia32_vfmaddps(V(a).v, V(b).v, V(c).v);
#endif
    return r;
  }
#endif
#ifdef __CUDACC__
  if constexpr (is_same<V, vec<half, 2>>::value) return metalmm::cuda::both_fma(V(a), V(b), V(c));
#endif
  return elementwise<V>([](auto x, auto y, auto z) {
    if constexpr (is_same<decltype(x), half>::value) {
      // The product of two halfs is exact in float; an inexact sum is made odd, so that rounding it again cannot tie wrongly.
      float p = static_cast<float>(x) * static_cast<float>(y), w = static_cast<float>(z);
      float s = p + w, t = s - p, error = (p - (s - t)) + (w - t);
      int bits;
      __builtin_memcpy(&bits, &s, 4);
      if (error != 0 && error == error && !(bits & 1)) bits += (error > 0) == (s > 0) ? 1 : -1;
      __builtin_memcpy(&s, &bits, 4);
      return static_cast<half>(s);
    } else {
      return __builtin_fmaf(x, y, z);
    }
  }, V(a), V(b), V(c));
}

// Elementwise in the operands' own type.
#define METALMM_OWN2(name, ...)                                                       \
  template <class A, class B, class V = not_void<common_t<A, B>>>                      \
  METALMM_INLINE V name(const A& a, const B& b) {                                     \
    return elementwise<V>([](auto x, auto y) { return __VA_ARGS__; }, V(a), V(b));    \
  }
METALMM_OWN2(min, x < y || y != y ? x : y)
METALMM_OWN2(max, x > y || y != y ? x : y)
METALMM_OWN2(mul24, static_cast<decltype(x)>((x << 8 >> 8) * (y << 8 >> 8)))
METALMM_OWN2(hadd, static_cast<decltype(x)>((x & y) + ((x ^ y) >> 1)))
METALMM_OWN2(rhadd, static_cast<decltype(x)>((x | y) - ((x ^ y) >> 1)))
#undef METALMM_OWN2

template <class A, class V = not_void<value_t<A>>> METALMM_INLINE V abs(const A& a) {
  return elementwise<V>([](auto x) { return static_cast<decltype(x)>(x < 0 || (is_float<decltype(x)>::value && x == 0) ? -x + 0 : x); }, V(a));
}
template <class A, class B, class C> METALMM_INLINE auto clamp(const A& x, const B& lo, const C& hi) { return min(max(x, lo), hi); }
template <class A, class B, class C> METALMM_INLINE auto min3(const A& a, const B& b, const C& c) { return min(a, min(b, c)); }
template <class A, class B, class C> METALMM_INLINE auto max3(const A& a, const B& b, const C& c) { return max(a, max(b, c)); }
template <class A, class B, class C> METALMM_INLINE auto fmin3(const A& a, const B& b, const C& c) { return min3(a, b, c); }
template <class A, class B, class C> METALMM_INLINE auto fmax3(const A& a, const B& b, const C& c) { return max3(a, b, c); }
template <class A, class B, class C> METALMM_INLINE auto fmedian3(const A& a, const B& b, const C& c) {
  return max(min(a, b), min(max(a, b), c));
}
template <class A, class B, class C> METALMM_INLINE auto median3(const A& a, const B& b, const C& c) {
  return max(min(a, b), min(max(a, b), c));
}

template <class A, class V = not_void<value_t<A>>> METALMM_INLINE V sincos(const A& a, V& c) { c = cos(V(a)); return sin(V(a)); }
template <class A, class V = not_void<value_t<A>>> METALMM_INLINE V modf(const A& a, V& whole) {
  whole = trunc(V(a));
  return copysign(elementwise<V>([](float x, float w) { return __builtin_isinf(x) ? 0.0f : x - w; }, V(a), whole), V(a));
}
template <class A, class V = not_void<value_t<A>>> METALMM_INLINE V frexp(const A& a, with_element_t<V, int>& e) {
  if constexpr (is_vector<V>) {
    V r;
    for (int i = 0; i < V::count; i++) r[i] = static_cast<element_t<V>>(__builtin_frexpf(V(a)[i], &e[i]));
    return r;
  } else {
    return static_cast<V>(__builtin_frexpf(a, &e));
  }
}
template <class A, class E, class V = not_void<value_t<A>>> METALMM_INLINE V ldexp(const A& a, const E& e) {
  return elementwise<V>([](float x, int n) { return __builtin_ldexpf(x, n); }, V(a), with_element_t<V, int>(e));
}
template <class A, class V = not_void<value_t<A>>> METALMM_INLINE with_element_t<V, int> ilogb(const A& a) {
  return elementwise<with_element_t<V, int>>([](float x) { return __builtin_ilogbf(x); }, V(a));
}
// Steps through the bit patterns of the element's own type: sign and magnitude.
template <class A, class B, class V = not_void<common_t<A, B>>> METALMM_INLINE V nextafter(const A& a, const B& b) {
  return elementwise<V>([](auto x, auto y) {
    if constexpr (sizeof(x) == 2) {
      if (x != x || y != y) return static_cast<decltype(x)>(x + y);
      if (x == y) return y;
      ushort bits;
      __builtin_memcpy(&bits, &x, 2);
      if (x == 0) bits = y > 0 ? 1 : 0x8001;
      else bits = static_cast<ushort>((x < y) == (x > 0) ? bits + 1 : bits - 1);
      __builtin_memcpy(&x, &bits, 2);
      return x;
    } else {
      return __builtin_nextafterf(x, y);
    }
  }, V(a), V(b));
}

// Relational.
#define METALMM_CLASSIFY(name, ...)                                                                      \
  template <class A, class V = not_void<value_t<A>>> METALMM_INLINE with_element_t<V, bool> name(const A& a) { \
    return elementwise<with_element_t<V, bool>>([](auto x) { return static_cast<bool>(__VA_ARGS__); }, V(a)); \
  }
METALMM_CLASSIFY(isnan, x != x)
METALMM_CLASSIFY(isinf, __builtin_isinf(static_cast<float>(x)))
METALMM_CLASSIFY(isfinite, __builtin_isfinite(static_cast<float>(x)))
METALMM_CLASSIFY(isnormal, is_same<decltype(x), half>::value
                               ? __builtin_isfinite(static_cast<float>(x)) && __builtin_fabsf(static_cast<float>(x)) >= 0x1p-14f
                               : __builtin_isnormal(static_cast<float>(x)))
METALMM_CLASSIFY(signbit, __builtin_copysignf(1.0f, static_cast<float>(x)) < 0.0f)  // g++ 12 falls over __builtin_signbit of four bfloats
#undef METALMM_CLASSIFY
template <class A, class B> METALMM_INLINE auto isunordered(const A& a, const B& b) { return isnan(a) || isnan(b); }
template <class A, class B> METALMM_INLINE auto isordered(const A& a, const B& b) { return !isunordered(a, b); }
template <class A> METALMM_INLINE bool any(const A& a) {
  bool r = false;
  auto v = value_t<A>(a);
  for (int i = 0; i < width_of<A>; i++) r = r || at(v, i);
  return r;
}
template <class A> METALMM_INLINE bool all(const A& a) {
  bool r = true;
  auto v = value_t<A>(a);
  for (int i = 0; i < width_of<A>; i++) r = r && at(v, i);
  return r;
}
template <class A, class B, class C, class V = not_void<common_t<A, B>>>
METALMM_INLINE V select(const A& a, const B& b, const C& c) {
  using M = with_element_t<V, bool>;
  return elementwise<V>([](auto x, auto y, bool m) { return m ? y : x; }, V(a), V(b), M(c));
}

// Integer.
#define METALMM_BITS(name, ...)                                                                 \
  template <class A, class V = not_void<value_t<A>>> METALMM_INLINE V name(const A& a) {        \
    return elementwise<V>([](auto s) {                                                          \
      using T = decltype(s);                                                                    \
      constexpr int bits = 8 * sizeof(T);                                                       \
      unsigned_t<T> x = static_cast<unsigned_t<T>>(s);                                          \
      (void)bits;                                                                               \
      return static_cast<T>(__VA_ARGS__);                                                       \
    }, V(a));                                                                                   \
  }
METALMM_BITS(popcount, __builtin_popcountl(x))
METALMM_BITS(clz, x ? __builtin_clzl(x) - (64 - bits) : bits)
METALMM_BITS(ctz, x ? __builtin_ctzl(x) : bits)
METALMM_BITS(reverse_bits, [](unsigned long v) {
  unsigned long r = 0;
  for (int i = 0; i < bits; i++) r |= (v >> i & 1) << (bits - 1 - i);
  return r;
}(x))
#undef METALMM_BITS
template <class A, class B, class V = not_void<value_t<A>>> METALMM_INLINE V rotate(const A& a, const B& b) {
  return elementwise<V>([](auto s, auto n) {
    using T = decltype(s);
    constexpr int bits = 8 * sizeof(T);
    unsigned_t<T> x = static_cast<unsigned_t<T>>(s);
    int k = static_cast<int>(n) & (bits - 1);
    return static_cast<T>(k ? (x << k) | (x >> (bits - k)) : x);
  }, V(a), V(b));
}
template <class A, class V = not_void<value_t<A>>> METALMM_INLINE V extract_bits(const A& a, uint offset, uint count) {
  return elementwise<V>([=](auto s) {
    using T = decltype(s);
    constexpr uint bits = 8 * sizeof(T);
    if (count == 0) return T(0);
    auto up = static_cast<T>(static_cast<unsigned_t<T>>(s) << (bits - offset - count));
    return static_cast<T>(up >> (bits - count));  // sign extends where T is signed
  }, V(a));
}
template <class A, class B, class V = not_void<value_t<A>>>
METALMM_INLINE V insert_bits(const A& base, const B& insert, uint offset, uint count) {
  return elementwise<V>([=](auto s, auto n) {
    using U = unsigned_t<decltype(s)>;
    U mask = count == 0 ? U(0) : static_cast<U>((static_cast<U>(-1) >> (8 * sizeof(U) - count)) << offset);
    return static_cast<decltype(s)>((static_cast<U>(s) & ~mask) | ((static_cast<U>(n) << offset) & mask));
  }, V(base), V(insert));
}
// In 128 bits nothing overflows; the bounds of the element type saturate.
#define METALMM_WIDE(name, ...)                                                                         \
  template <class A, class B, class V = not_void<common_t<A, B>>> METALMM_INLINE V name(const A& a, const B& b) { \
    return elementwise<V>([](auto p, auto q) {                                                          \
      using T = decltype(p);                                                                            \
      __int128 x = p, y = q, lo = int_min<T>, hi = int_max<T>;                                          \
      (void)lo; (void)hi;                                                                               \
      return static_cast<T>(__VA_ARGS__);                                                               \
    }, V(a), V(b));                                                                                     \
  }
METALMM_WIDE(addsat, x + y > hi ? hi : x + y < lo ? lo : x + y)
METALMM_WIDE(subsat, x - y > hi ? hi : x - y < lo ? lo : x - y)
#undef METALMM_WIDE
// Holds a product of two, and a third added to it.
template <class T> using wide_t = typename conditional<is_signed_int<T>, __int128, unsigned __int128>::type;
template <class A, class B, class V = not_void<common_t<A, B>>> METALMM_INLINE V mulhi(const A& a, const B& b) {
  return elementwise<V>([](auto x, auto y) { return static_cast<decltype(x)>(static_cast<wide_t<decltype(x)>>(x) * y >> (8 * sizeof(x))); }, V(a), V(b));
}
template <class A, class B, class V = not_void<common_t<A, B>>>
METALMM_INLINE with_element_t<V, unsigned_t<element_t<V>>> absdiff(const A& a, const B& b) {
  using U = unsigned_t<element_t<V>>;
  return elementwise<with_element_t<V, U>>([](auto x, auto y) { return x > y ? U(x) - U(y) : U(y) - U(x); }, V(a), V(b));
}
template <class A, class B, class C, class V = not_void<common_t<common_t<A, B>, C>>> METALMM_INLINE V madhi(const A& a, const B& b, const C& c) {
  return static_cast<V>(mulhi(V(a), V(b)) + V(c));
}
template <class A, class B, class C> METALMM_INLINE auto mad24(const A& a, const B& b, const C& c) { return mul24(a, b) + c; }
template <class A, class B, class C, class V = not_void<common_t<A, B>>>
METALMM_INLINE V madsat(const A& a, const B& b, const C& c) {
  return elementwise<V>([](auto x, auto y, auto z) {
    using T = decltype(x);
    wide_t<T> r = static_cast<wide_t<T>>(x) * y + z, lo = int_min<T>, hi = int_max<T>;
    return static_cast<T>(r > hi ? hi : r < lo ? lo : r);
  }, V(a), V(b), V(c));
}

// Geometric. Sums run in float and are rounded once.
template <class A, class B, class V = not_void<common_t<A, B>>> METALMM_INLINE element_t<V> dot(const A& a, const B& b) {
  V x(a), y(b);
  float s = 0.0f;
  for (int i = 0; i < V::count; i++) s += static_cast<float>(x[i]) * static_cast<float>(y[i]);
  return static_cast<element_t<V>>(s);
}
template <class A> METALMM_INLINE auto length_squared(const A& a) { return dot(a, a); }
template <class A> METALMM_INLINE auto length(const A& a) { return sqrt(dot(a, a)); }
template <class A, class B, class V = not_void<common_t<A, B>>> METALMM_INLINE auto distance_squared(const A& a, const B& b) { return length_squared(V(a) - V(b)); }
template <class A, class B, class V = not_void<common_t<A, B>>> METALMM_INLINE auto distance(const A& a, const B& b) { return length(V(a) - V(b)); }
template <class A, class V = not_void<value_t<A>>> METALMM_INLINE V normalize(const A& a) { return V(a) * rsqrt(dot(a, a)); }
template <class A, class B, class V = not_void<common_t<A, B>>> METALMM_INLINE V cross(const A& p, const B& q) {
  V a(p), b(q);
  return V(a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]);
}
template <class A, class B, class V = not_void<common_t<A, B>>> METALMM_INLINE V reflect(const A& i, const B& n) {
  return V(i) - V(n) * (element_t<V>(2) * dot(n, i));
}
template <class A, class B, class T, class V = not_void<common_t<A, B>>> METALMM_INLINE V refract(const A& i, const B& n, T eta) {
  float d = dot(n, i), k = 1.0f - static_cast<float>(eta) * static_cast<float>(eta) * (1.0f - d * d);
  if (k < 0.0f) return V(element_t<V>(0));
  return V(i) * eta - V(n) * (static_cast<float>(eta) * d + __builtin_sqrtf(k));
}
template <class A, class B, class C, class V = not_void<common_t<A, B>>> METALMM_INLINE V faceforward(const A& n, const B& i, const C& r) {
  return dot(r, i) < 0 ? V(n) : -V(n);
}
template <class T, int C, int R> matrix<T, R, C> transpose(const matrix<T, C, R>& m) {
  matrix<T, R, C> r;
  for (int c = 0; c < C; c++)
    for (int i = 0; i < R; i++) r[i][c] = m[c][i];
  return r;
}
// By the first column, in float.
template <class T, int N> METALMM_INLINE T determinant(const matrix<T, N, N>& m) {
  auto a = [&](int c, int r) { return static_cast<float>(m[c][r]); };
  auto of_two = [&](int c, int r, int s) { return a(c, r) * a(c + 1, s) - a(c, s) * a(c + 1, r); };
  if constexpr (N == 2) {
    return static_cast<T>(of_two(0, 0, 1));
  } else {
    auto of_three = [&](int c, int r, int s, int t) { return a(c, r) * of_two(c + 1, s, t) - a(c, s) * of_two(c + 1, r, t) + a(c, t) * of_two(c + 1, r, s); };
    if constexpr (N == 3) return static_cast<T>(of_three(0, 0, 1, 2));
    else return static_cast<T>(a(0, 0) * of_three(1, 1, 2, 3) - a(0, 1) * of_three(1, 0, 2, 3) + a(0, 2) * of_three(1, 0, 1, 3) - a(0, 3) * of_three(1, 0, 1, 2));
  }
}

}  // namespace metalmm::msl::library

#define METALMM_MATH_NAMES(X) X(abs) X(absdiff) X(acos) X(acosh) X(addsat) X(all) X(any) X(asin) X(asinh) X(atan) X(atan2) X(atanh) \
  X(ceil) X(clamp) X(clz) X(copysign) X(cos) X(cosh) X(cospi) X(cross) X(ctz) X(determinant) X(distance) X(distance_squared) X(dot) X(exp) \
  X(exp10) X(exp2) X(extract_bits) X(fabs) X(faceforward) X(fdim) X(floor) X(fma) X(fmax) X(fmax3) X(fmedian3) X(fmin) X(fmin3) X(fmod) \
  X(fract) X(frexp) X(hadd) X(ilogb) X(insert_bits) X(isfinite) X(isinf) X(isnan) X(isnormal) X(isordered) X(isunordered) X(ldexp) \
  X(length) X(length_squared) X(log) X(log10) X(log2) X(mad24) X(madhi) X(madsat) X(max) X(max3) X(median3) X(min) X(min3) X(mix) \
  X(modf) X(mul24) X(mulhi) X(nextafter) X(normalize) X(popcount) X(pow) X(powr) X(reflect) X(refract) X(reverse_bits) X(rhadd) X(rint) \
  X(rotate) X(round) X(rsqrt) X(saturate) X(select) X(sign) X(signbit) X(sin) X(sincos) X(sinh) X(sinpi) X(smoothstep) X(sqrt) X(step) \
  X(subsat) X(tan) X(tanh) X(tanpi) X(transpose) X(trunc)
#define METALMM_EXPORT(name) using ::metalmm::msl::library::name;
namespace metal {
METALMM_MATH_NAMES(METALMM_EXPORT)
METALMM_EXPORT(divide)
template <class T, int N> using packed_vec = ::metalmm::msl::packed<::metalmm::msl::vec<T, N>, T, N>;
using ::metalmm::msl::vec, ::metalmm::msl::matrix, ::metalmm::msl::enable_if, ::metalmm::msl::enable_if_t, ::metalmm::msl::conditional;
namespace fast { METALMM_MATH_NAMES(METALMM_EXPORT) METALMM_EXPORT(fast::divide) }
namespace precise { METALMM_MATH_NAMES(METALMM_EXPORT) METALMM_EXPORT(divide) }
}  // namespace metal

template <class To, class From> METALMM_INLINE To as_type(const From& from) {
  using V = typename metalmm::msl::conditional<metalmm::msl::is_vector<From>, metalmm::msl::value_t<From>, From>::type;
  static_assert(sizeof(To) == sizeof(V), "as_type: the sizes differ");
  V v = from;
  To to;
  __builtin_memcpy(&to, &v, sizeof(to));
  return to;
}
namespace metal { using ::as_type; }
