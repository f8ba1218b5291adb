// What gcc and clang have built in and NVRTC has not, and half as a class. Before everything else: NVRTC brings CUDA's own float4, min
// and the like, which would meet MSL's; from here on those names are others'.
#pragma once

#define __builtin_memcpy memcpy
#define __builtin_trap __trap
// As constexpr as the compilers' own: kernels have numeric_limits<T>::infinity() and INFINITY in constants.
#define __builtin_inff() __builtin_bit_cast(float, 0x7f800000)
#define __builtin_nanf(text) __builtin_bit_cast(float, 0x7fc00000)
#define __builtin_expect(value, likely) (value)
#define __builtin_bswap32(x) __byte_perm(x, 0, 0x0123)
#define __builtin_bswap64(x) \
  (static_cast<unsigned long long>(__byte_perm(static_cast<unsigned>(x), 0, 0x0123)) << 32 | \
   __byte_perm(static_cast<unsigned>(static_cast<unsigned long long>(x) >> 32), 0, 0x0123))
#define __builtin_prefetch(...) static_cast<void>(0)

#define __builtin_acosf acosf
#define __builtin_acoshf acoshf
#define __builtin_asinf asinf
#define __builtin_asinhf asinhf
#define __builtin_atanf atanf
#define __builtin_atan2f atan2f
#define __builtin_atanhf atanhf
#define __builtin_ceilf ceilf
#define __builtin_copysignf copysignf
#define __builtin_cosf cosf
#define __builtin_coshf coshf
#define __builtin_expf expf
#define __builtin_exp2f exp2f
#define __builtin_fabsf fabsf
#define __builtin_fdimf fdimf
#define __builtin_floorf floorf
#define __builtin_fmaf fmaf
#define __builtin_fmaxf fmaxf
#define __builtin_fminf fminf
#define __builtin_fmodf fmodf
#define __builtin_frexpf frexpf
#define __builtin_ldexpf ldexpf
#define __builtin_logf logf
#define __builtin_log2f log2f
#define __builtin_log10f log10f
#define __builtin_nextafterf nextafterf
#define __builtin_powf powf
#define __builtin_rintf rintf
#define __builtin_roundf roundf
#define __builtin_sinf sinf
#define __builtin_sinhf sinhf
#define __builtin_sqrtf sqrtf
#define __builtin_tanf tanf
#define __builtin_tanhf tanhf
#define __builtin_truncf truncf

namespace metalmm::cuda {
inline double sin_of(double x) { return ::sin(x); }
inline double rint_of(double x) { return ::rint(x); }
inline double fabs_of(double x) { return ::fabs(x); }
inline int ilogb_of(float x) { return ::ilogbf(x); }
inline bool is_inf(float x) { return (__float_as_uint(x) & 0x7fffffffu) == 0x7f800000u; }
inline bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }
inline bool is_normal(float x) { return is_finite(x) && (__float_as_uint(x) & 0x7f800000u) != 0; }
inline bool sign_bit(float x) { return __float_as_uint(x) >> 31; }
constexpr int bits_of(unsigned x) {
  if (!__builtin_is_constant_evaluated()) return __popc(x);
  int n = 0;
  for (; x; x &= x - 1) n++;
  return n;
}
constexpr int zeros_before(unsigned x) {
  if (!__builtin_is_constant_evaluated()) return __clz(static_cast<int>(x));
  int n = 32;
  for (; x; x >>= 1) n--;
  return n;
}
constexpr int zeros_behind(unsigned x) { return x ? 31 - zeros_before(x & (0u - x)) : 32; }
inline int popcount(unsigned long x) { return __popcll(x); }
inline int leading_zeros(unsigned long x) { return __clzll(static_cast<long long>(x)); }
inline int trailing_zeros(unsigned long x) { return __ffsll(static_cast<long long>(x)) - 1; }

// What `(const T*)x->bytes` becomes, where x's class is aligned to At alone (python/metalmm/msl/classes.py). Apple's GPUs load a T from
// there; here that is a fault, so a T comes in parts.
template <class T, unsigned long At> struct Words {
  const unsigned char* at;
  T operator[](long i) const {
    T value;
    const unsigned char* from = at + i * static_cast<long>(sizeof(T));
    auto* to = reinterpret_cast<unsigned char*>(&value);
    constexpr unsigned part = At < 4 ? At : 4;
    for (unsigned j = 0; j < sizeof(T); j += part) {
      if constexpr (part == 4) *reinterpret_cast<unsigned*>(to + j) = *reinterpret_cast<const unsigned*>(from + j);
      else if constexpr (part == 2) *reinterpret_cast<unsigned short*>(to + j) = *reinterpret_cast<const unsigned short*>(from + j);
      else to[j] = from[j];
    }
    return value;
  }
  T operator*() const { return (*this)[0]; }
};
template <class M> inline constexpr bool is_array = false;
template <class E, unsigned long N> inline constexpr bool is_array<E[N]> = true;
template <class T, unsigned long At, class M> inline auto words_of(const M& member) {
  if constexpr (is_array<M> && At < alignof(T)) return Words<T, At>{reinterpret_cast<const unsigned char*>(member)};
  else return (const T*)member;
}

// Of one word; a smaller object is part of one.
template <class T> inline bool compare_exchange(volatile T* object, T* expected, T desired) {
  static_assert(sizeof(T) == 1 || sizeof(T) == 4 || sizeof(T) == 8, "an atomic of 1, 4 or 8 bytes");
  if constexpr (sizeof(T) == 8) {
    unsigned long long old, want, found;
    memcpy(&old, expected, 8), memcpy(&want, &desired, 8);
    found = atomicCAS(const_cast<unsigned long long*>(reinterpret_cast<volatile unsigned long long*>(object)), old, want);
    memcpy(expected, &found, 8);
    return found == old;
  } else if constexpr (sizeof(T) == 4) {
    unsigned old, want, found;
    memcpy(&old, expected, 4), memcpy(&want, &desired, 4);
    found = atomicCAS(const_cast<unsigned*>(reinterpret_cast<volatile unsigned*>(object)), old, want);
    memcpy(expected, &found, 4);
    return found == old;
  } else {
    auto address = reinterpret_cast<unsigned long long>(object);
    auto* word = reinterpret_cast<unsigned*>(address & ~3ull);
    unsigned shift = static_cast<unsigned>(address & 3) * 8, now = *reinterpret_cast<volatile unsigned*>(word);
    for (;;) {
      unsigned char byte = static_cast<unsigned char>(now >> shift), old, want;
      memcpy(&old, expected, 1), memcpy(&want, &desired, 1);
      if (byte != old) return memcpy(expected, &byte, 1), false;
      unsigned found = atomicCAS(word, now, (now & ~(0xffu << shift)) | static_cast<unsigned>(want) << shift);
      if (found == now) return true;
      now = found;
    }
  }
}
}  // namespace metalmm::cuda

#define __builtin_sin ::metalmm::cuda::sin_of
#define __builtin_rint ::metalmm::cuda::rint_of
#define __builtin_ilogbf ::metalmm::cuda::ilogb_of
#define __builtin_fabs ::metalmm::cuda::fabs_of
#define __builtin_isinf ::metalmm::cuda::is_inf
#define __builtin_isfinite ::metalmm::cuda::is_finite
#define __builtin_isnormal ::metalmm::cuda::is_normal
#define __builtin_signbit ::metalmm::cuda::sign_bit
// For kernels that know their compiler is clang, in constants, too.
#define __builtin_popcount ::metalmm::cuda::bits_of
#define __builtin_clz ::metalmm::cuda::zeros_before
#define __builtin_ctz ::metalmm::cuda::zeros_behind
#define __builtin_popcountl ::metalmm::cuda::popcount
#define __builtin_clzl ::metalmm::cuda::leading_zeros
#define __builtin_ctzl ::metalmm::cuda::trailing_zeros

// The order is stronger than MSL's relaxed where an operation reads and writes, as on the CPU device.
#define __ATOMIC_SEQ_CST 5
#define __atomic_thread_fence(order) __threadfence()
template <class T> inline void __atomic_load(const volatile T* object, T* to, int) {
  if constexpr (sizeof(T) == 8) {
    unsigned long long bits = *reinterpret_cast<const volatile unsigned long long*>(object);
    memcpy(to, &bits, 8);
  } else if constexpr (sizeof(T) == 4) {
    unsigned bits = *reinterpret_cast<const volatile unsigned*>(object);
    memcpy(to, &bits, 4);
  } else {
    *to = *object;
  }
}
template <class T> inline bool __atomic_compare_exchange(volatile T* object, T* expected, const T* desired, bool, int, int) {
  return ::metalmm::cuda::compare_exchange(object, expected, *desired);
}
template <class T> inline void __atomic_exchange(volatile T* object, const T* desired, T* old, int) {
  __atomic_load(object, old, 0);
  while (!::metalmm::cuda::compare_exchange(object, old, *desired)) {
  }
}
template <class T> inline void __atomic_store(volatile T* object, const T* desired, int) {
  T old;
  __atomic_exchange(object, desired, &old, 0);
}

// As constexpr as the other types' conversions; at run time one instruction each, to nearest even.
namespace metalmm::cuda {
inline float widened(unsigned short bits) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
  return f;
}
inline unsigned short narrowed(float f) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(f));
  return bits;
}
inline unsigned short narrowed_to_bfloat(float f) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(f));
  return bits;
}
constexpr float half_to_float(unsigned short bits) {
  if (!__builtin_is_constant_evaluated()) return widened(bits);
  unsigned sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, mantissa = bits & 0x3ff;
  if (exponent == 31) return __builtin_bit_cast(float, sign | 0x7f800000u | mantissa << 13);
  if (exponent) return __builtin_bit_cast(float, sign | (exponent + 112) << 23 | mantissa << 13);
  float f = static_cast<float>(mantissa) * 0x1p-24f;
  return sign ? -f : f;
}
constexpr unsigned short float_to_half(float f) {
  if (!__builtin_is_constant_evaluated()) return narrowed(f);
  unsigned u = __builtin_bit_cast(unsigned, f), sign = u >> 16 & 0x8000u, magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<unsigned short>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<unsigned short>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // less than the least normal: in units of 2^-24
    float scaled = __builtin_bit_cast(float, magnitude) * 0x1p24f;
    unsigned whole = static_cast<unsigned>(scaled);
    float rest = scaled - static_cast<float>(whole);
    whole += rest > 0.5f || (rest == 0.5f && (whole & 1)) ? 1 : 0;
    return static_cast<unsigned short>(sign | whole);
  }
  unsigned rounded = magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1);
  return static_cast<unsigned short>(sign | rounded >> 13);
}
template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <class T, class U> constexpr bool is_same = false;
template <class T> constexpr bool is_same<T, T> = true;
template <class T, class... U> constexpr bool is_one_of = (is_same<T, U> || ...);
template <class T>
constexpr bool is_whole = is_one_of<T, bool, char, signed char, unsigned char, short, unsigned short, int, unsigned, long, unsigned long, long long, unsigned long long>;
template <class T> using if_whole = typename enable_if<is_whole<T>>::type;
}  // namespace metalmm::cuda

// NVRTC has no such type of its own. Every operation rounds to binary16: through float, whose 24 bits make a second rounding harmless
// for + - * /.
#ifdef METALMM_HALF_CONVERTS  // where a program asks for it, and lowering has decided its ?: (undecided.conditionals)
#define METALMM_HALF_EXPLICIT
#else
#define METALMM_HALF_EXPLICIT explicit
#endif
struct half {
  unsigned short bits;
  half() = default;
  constexpr half(float x) : bits(metalmm::cuda::float_to_half(x)) {}
  constexpr half(double x) : half(static_cast<float>(x)) {}
  template <class T, class = metalmm::cuda::if_whole<T>> constexpr half(T x) : half(static_cast<float>(x)) {}
  // Templates, so that copies stay trivial.
  template <class H, class = typename metalmm::cuda::enable_if<metalmm::cuda::is_same<H, half>>::type> half(const volatile H& h) : bits(h.bits) {}
  template <class H, class = typename metalmm::cuda::enable_if<metalmm::cuda::is_same<H, half>>::type> void operator=(const volatile H& h) volatile { bits = h.bits; }
  // To a float alone where nobody asks: see bfloat.
  template <class F, class = typename metalmm::cuda::enable_if<metalmm::cuda::is_same<F, float>>::type> constexpr operator F() const {
    return metalmm::cuda::half_to_float(bits);
  }
  template <class F, class = typename metalmm::cuda::enable_if<metalmm::cuda::is_same<F, float>>::type> operator F() const volatile {
    return metalmm::cuda::half_to_float(bits);
  }
  template <class T, class = typename metalmm::cuda::enable_if<metalmm::cuda::is_whole<T> || metalmm::cuda::is_same<T, double>>::type, class = void>
  constexpr METALMM_HALF_EXPLICIT operator T() const {
    return static_cast<T>(metalmm::cuda::half_to_float(bits));
  }
  constexpr half operator-() const {
    half x = *this;
    x.bits ^= 0x8000u;
    return x;
  }
  constexpr half operator+() const { return *this; }
  half& operator++() { return *this = half(static_cast<float>(*this) + 1.0f); }
  half& operator--() { return *this = half(static_cast<float>(*this) - 1.0f); }
  half operator++(int) {
    half before = *this;
    ++*this;
    return before;
  }
  half operator--(int) {
    half before = *this;
    --*this;
    return before;
  }
};
// Two halfs of a word in one instruction, each rounded once, as the class does it in five.
namespace metalmm::cuda {
template <char Op, class V> inline V both(const V& a, const V& b) {
  static_assert(sizeof(V) == 4 && (Op == '+' || Op == '-' || Op == '*'), "of two halfs");
  unsigned x, y;
  memcpy(&x, &a, 4), memcpy(&y, &b, 4);
  if constexpr (Op == '+') asm("add.rn.f16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
  if constexpr (Op == '-') asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
  if constexpr (Op == '*') asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
  V result;
  memcpy(&result, &x, 4);
  return result;
}
template <class V> inline V both_fma(const V& a, const V& b, const V& c) {
  static_assert(sizeof(V) == 4, "of two halfs");
  unsigned x, y, z;
  memcpy(&x, &a, 4), memcpy(&y, &b, 4), memcpy(&z, &c, 4);
  asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(x) : "r"(y), "r"(z));
  V result;
  memcpy(&result, &x, 4);
  return result;
}
}  // namespace metalmm::cuda
// With half or an integer it stays half; with float it is float.
#define METALMM_HALF_OP(op)                                                                                                    \
  constexpr half operator op(half a, half b) { return static_cast<float>(a) op static_cast<float>(b); }                        \
  constexpr float operator op(half a, float b) { return static_cast<float>(a) op b; }                                          \
  constexpr float operator op(float a, half b) { return a op static_cast<float>(b); }                                          \
  template <class T, class = metalmm::cuda::if_whole<T>> constexpr half operator op(half a, T b) { return a op half(b); }      \
  template <class T, class = metalmm::cuda::if_whole<T>> constexpr half operator op(T a, half b) { return half(a) op b; }      \
  template <class T> inline auto operator op##=(half& a, T b)->decltype((a = a op b)) { return a = a op b; }                   \
  template <class T, class = typename metalmm::cuda::enable_if<metalmm::cuda::is_whole<T> || metalmm::cuda::is_same<T, float>>::type> \
  inline T& operator op##=(T& a, half b) { return a = static_cast<T>(a op b); }
METALMM_HALF_OP(+)
METALMM_HALF_OP(-)
METALMM_HALF_OP(*)
METALMM_HALF_OP(/)
#undef METALMM_HALF_OP
#define METALMM_HALF_RELATION(op)                                                                                              \
  constexpr bool operator op(half a, half b) { return static_cast<float>(a) op static_cast<float>(b); }                        \
  constexpr bool operator op(half a, float b) { return static_cast<float>(a) op b; }                                           \
  constexpr bool operator op(float a, half b) { return a op static_cast<float>(b); }                                           \
  template <class T, class = metalmm::cuda::if_whole<T>> constexpr bool operator op(half a, T b) { return static_cast<float>(a) op static_cast<float>(b); } \
  template <class T, class = metalmm::cuda::if_whole<T>> constexpr bool operator op(T a, half b) { return static_cast<float>(a) op static_cast<float>(b); }
METALMM_HALF_RELATION(==)
METALMM_HALF_RELATION(!=)
METALMM_HALF_RELATION(<)
METALMM_HALF_RELATION(>)
METALMM_HALF_RELATION(<=)
METALMM_HALF_RELATION(>=)
#undef METALMM_HALF_RELATION

#define char1 metalmm_char1
#define char2 metalmm_char2
#define char3 metalmm_char3
#define char4 metalmm_char4
#define uchar1 metalmm_uchar1
#define uchar2 metalmm_uchar2
#define uchar3 metalmm_uchar3
#define uchar4 metalmm_uchar4
#define short1 metalmm_short1
#define short2 metalmm_short2
#define short3 metalmm_short3
#define short4 metalmm_short4
#define ushort1 metalmm_ushort1
#define ushort2 metalmm_ushort2
#define ushort3 metalmm_ushort3
#define ushort4 metalmm_ushort4
#define int1 metalmm_int1
#define int2 metalmm_int2
#define int3 metalmm_int3
#define int4 metalmm_int4
#define uint1 metalmm_uint1
#define uint2 metalmm_uint2
#define uint3 metalmm_uint3
#define uint4 metalmm_uint4
#define long1 metalmm_long1
#define long2 metalmm_long2
#define long3 metalmm_long3
#define long4 metalmm_long4
#define ulong1 metalmm_ulong1
#define ulong2 metalmm_ulong2
#define ulong3 metalmm_ulong3
#define ulong4 metalmm_ulong4
#define longlong1 metalmm_longlong1
#define longlong2 metalmm_longlong2
#define longlong3 metalmm_longlong3
#define longlong4 metalmm_longlong4
#define ulonglong1 metalmm_ulonglong1
#define ulonglong2 metalmm_ulonglong2
#define ulonglong3 metalmm_ulonglong3
#define ulonglong4 metalmm_ulonglong4
#define float1 metalmm_float1
#define float2 metalmm_float2
#define float3 metalmm_float3
#define float4 metalmm_float4
#define double1 metalmm_double1
#define double2 metalmm_double2
#define double3 metalmm_double3
#define double4 metalmm_double4
#define abs metalmm_abs
#define acos metalmm_acos
#define acosh metalmm_acosh
#define asin metalmm_asin
#define asinh metalmm_asinh
#define atan metalmm_atan
#define atan2 metalmm_atan2
#define atanh metalmm_atanh
#define cbrt metalmm_cbrt
#define ceil metalmm_ceil
#define copysign metalmm_copysign
#define cos metalmm_cos
#define cosh metalmm_cosh
#define cospi metalmm_cospi
#define cyl_bessel_i0 metalmm_cyl_bessel_i0
#define cyl_bessel_i1 metalmm_cyl_bessel_i1
#define erf metalmm_erf
#define erfc metalmm_erfc
#define erfcinv metalmm_erfcinv
#define erfcx metalmm_erfcx
#define erfinv metalmm_erfinv
#define exp metalmm_exp
#define exp10 metalmm_exp10
#define exp2 metalmm_exp2
#define expm1 metalmm_expm1
#define fabs metalmm_fabs
#define fdim metalmm_fdim
#define floor metalmm_floor
#define fma metalmm_fma
#define fmax metalmm_fmax
#define fmin metalmm_fmin
#define fmod metalmm_fmod
#define frexp metalmm_frexp
#define hypot metalmm_hypot
#define ilogb metalmm_ilogb
#define isfinite metalmm_isfinite
#define isinf metalmm_isinf
#define isnan metalmm_isnan
#define isnormal metalmm_isnormal
#define ldexp metalmm_ldexp
#define lgamma metalmm_lgamma
#define log metalmm_log
#define log10 metalmm_log10
#define log1p metalmm_log1p
#define log2 metalmm_log2
#define logb metalmm_logb
#define max metalmm_max
#define min metalmm_min
#define modf metalmm_modf
#define nearbyint metalmm_nearbyint
#define nextafter metalmm_nextafter
#define norm metalmm_norm
#define norm3d metalmm_norm3d
#define normcdf metalmm_normcdf
#define normcdfinv metalmm_normcdfinv
#define pow metalmm_pow
#define remainder metalmm_remainder
#define rhypot metalmm_rhypot
#define rint metalmm_rint
#define round metalmm_round
#define rsqrt metalmm_rsqrt
#define scalbn metalmm_scalbn
#define signbit metalmm_signbit
#define sin metalmm_sin
#define sincos metalmm_sincos
#define sincospi metalmm_sincospi
#define sinh metalmm_sinh
#define sinpi metalmm_sinpi
#define sqrt metalmm_sqrt
#define tan metalmm_tan
#define tanh metalmm_tanh
#define tgamma metalmm_tgamma
#define trunc metalmm_trunc
#define saturate metalmm_saturate
#define mul24 metalmm_mul24
#define umul24 metalmm_umul24
#define clock metalmm_clock
#define clock64 metalmm_clock64
#define fdividef metalmm_fdividef
#define j0 metalmm_j0
#define j1 metalmm_j1
#define jn metalmm_jn
#define y0 metalmm_y0
#define y1 metalmm_y1
#define yn metalmm_yn
#define rcbrt metalmm_rcbrt
#define fdivide metalmm_fdivide
#define llrint metalmm_llrint
#define lrint metalmm_lrint
#define llround metalmm_llround
#define lround metalmm_lround
#define ilogbf metalmm_ilogbf
#define cbrtf metalmm_cbrtf
#define cospif metalmm_cospif
#define erfcf metalmm_erfcf
#define erfcinvf metalmm_erfcinvf
#define erfcxf metalmm_erfcxf
#define erff metalmm_erff
#define erfinvf metalmm_erfinvf
#define exp10f metalmm_exp10f
#define expm1f metalmm_expm1f
#define hypotf metalmm_hypotf
#define j0f metalmm_j0f
#define j1f metalmm_j1f
#define jnf metalmm_jnf
#define lgammaf metalmm_lgammaf
#define llrintf metalmm_llrintf
#define llroundf metalmm_llroundf
#define log1pf metalmm_log1pf
#define logbf metalmm_logbf
#define lrintf metalmm_lrintf
#define lroundf metalmm_lroundf
#define modff metalmm_modff
#define nearbyintf metalmm_nearbyintf
#define normcdff metalmm_normcdff
#define normcdfinvf metalmm_normcdfinvf
#define rcbrtf metalmm_rcbrtf
#define remainderf metalmm_remainderf
#define remquof metalmm_remquof
#define rhypotf metalmm_rhypotf
#define rsqrtf metalmm_rsqrtf
#define scalbnf metalmm_scalbnf
#define sincosf metalmm_sincosf
#define sincospif metalmm_sincospif
#define sinpif metalmm_sinpif
#define tgammaf metalmm_tgammaf
#define y0f metalmm_y0f
#define y1f metalmm_y1f
#define ynf metalmm_ynf
#define labs metalmm_labs
#define llabs metalmm_llabs
#define ballot metalmm_ballot
#define malloc metalmm_malloc
#define free metalmm_free
#define dim3 metalmm_dim3
#define clock_t metalmm_clock_t
#define va_list metalmm_va_list
#define cudaError_t metalmm_cudaError_t
#define cudaStream_t metalmm_cudaStream_t
#define cudaExtent metalmm_cudaExtent
#undef assert
