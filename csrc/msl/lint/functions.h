// MSL's mathematics. See declarations.h.
// clang-format off
#pragma once
#pragma clang system_header

// What MSL's own headers are made of; libraries such as MLX use these to give bfloat a mathematics.
#define STRICT_INTERNAL(N)       \
  template <class T, class... R> \
  T N(T, R...);
STRICT_INTERNAL(__metal_acos)
STRICT_INTERNAL(__metal_acosh)
STRICT_INTERNAL(__metal_asin)
STRICT_INTERNAL(__metal_asinh)
STRICT_INTERNAL(__metal_atan)
STRICT_INTERNAL(__metal_atan2)
STRICT_INTERNAL(__metal_atanh)
STRICT_INTERNAL(__metal_ceil)
STRICT_INTERNAL(__metal_cos)
STRICT_INTERNAL(__metal_cosh)
STRICT_INTERNAL(__metal_cospi)
STRICT_INTERNAL(__metal_divide)
STRICT_INTERNAL(__metal_exp)
STRICT_INTERNAL(__metal_exp10)
STRICT_INTERNAL(__metal_exp2)
STRICT_INTERNAL(__metal_fabs)
STRICT_INTERNAL(__metal_floor)
STRICT_INTERNAL(__metal_fma)
STRICT_INTERNAL(__metal_fmax)
STRICT_INTERNAL(__metal_fmax3)
STRICT_INTERNAL(__metal_fmedian3)
STRICT_INTERNAL(__metal_fmin)
STRICT_INTERNAL(__metal_fmin3)
STRICT_INTERNAL(__metal_fmod)
STRICT_INTERNAL(__metal_fract)
STRICT_INTERNAL(__metal_frexp)
STRICT_INTERNAL(__metal_get_simdgroup_size)
STRICT_INTERNAL(__metal_ldexp)
STRICT_INTERNAL(__metal_log)
STRICT_INTERNAL(__metal_log10)
STRICT_INTERNAL(__metal_log2)
STRICT_INTERNAL(__metal_nextafter)
STRICT_INTERNAL(__metal_pow)
STRICT_INTERNAL(__metal_powr)
STRICT_INTERNAL(__metal_rint)
STRICT_INTERNAL(__metal_round)
STRICT_INTERNAL(__metal_rsqrt)
STRICT_INTERNAL(__metal_simd_broadcast)
STRICT_INTERNAL(__metal_simd_max)
STRICT_INTERNAL(__metal_simd_min)
STRICT_INTERNAL(__metal_simd_prefix_exclusive_product)
STRICT_INTERNAL(__metal_simd_prefix_exclusive_sum)
STRICT_INTERNAL(__metal_simd_prefix_inclusive_product)
STRICT_INTERNAL(__metal_simd_prefix_inclusive_sum)
STRICT_INTERNAL(__metal_simd_product)
STRICT_INTERNAL(__metal_simd_shuffle)
STRICT_INTERNAL(__metal_simd_shuffle_and_fill_down)
STRICT_INTERNAL(__metal_simd_shuffle_and_fill_up)
STRICT_INTERNAL(__metal_simd_shuffle_down)
STRICT_INTERNAL(__metal_simd_shuffle_rotate_down)
STRICT_INTERNAL(__metal_simd_shuffle_rotate_up)
STRICT_INTERNAL(__metal_simd_shuffle_up)
STRICT_INTERNAL(__metal_simd_shuffle_xor)
STRICT_INTERNAL(__metal_simd_sum)
STRICT_INTERNAL(__metal_simd_xor)
STRICT_INTERNAL(__metal_sin)
STRICT_INTERNAL(__metal_sinh)
STRICT_INTERNAL(__metal_sinpi)
STRICT_INTERNAL(__metal_sqrt)
STRICT_INTERNAL(__metal_tan)
STRICT_INTERNAL(__metal_tanh)
STRICT_INTERNAL(__metal_tanpi)
STRICT_INTERNAL(__metal_trunc)
template <class T, class... R>
T __metal_select(T, R...);
#define __METAL_MAYBE_FAST_MATH__ 0
#define __METAL_FAST_MATH__ 1
#define __METAL_PRECISE_MATH__ 0

#include "../runtime/indirect.h"

namespace metal {
using ::bfloat;
using ::bool2;
using ::bool3;
using ::bool4;
using ::int16_t;
using ::int32_t;
using ::int64_t;
using ::int8_t;
using ::ptrdiff_t;
using ::size_t;
using ::uchar;
using ::uint;
using ::uint16_t;
using ::uint32_t;
using ::uint64_t;
using ::uint8_t;
using ::ulong;
using ::ushort;
#define STRICT_U(T) \
  using ::T##2;     \
  using ::T##3;     \
  using ::T##4;
STRICT_VECTORS(STRICT_U)
template <class T, int N>
struct strict_vec {
  typedef strict::vec_t<T, N> type;
};
template <int N>
struct strict_vec<bool, N> {
  typedef strict::boolN<N> type;
};
template <class T, int N>
using vec = strict::vec_t<T, N>;
template <class T, int N>
using packed_vec = strict::packed<T, N>;
#define STRICT_P(T)                           \
  typedef strict::packed<T, 2> packed_##T##2; \
  typedef strict::packed<T, 3> packed_##T##3; \
  typedef strict::packed<T, 4> packed_##T##4;
STRICT_VECTORS(STRICT_P)

// Which of the library's functions takes which types. A call resolves as against Apple's overloads: all arguments of one type.
template <class T>
struct element_of {
  typedef typename strict::shape<T>::element type;
};
#define STRICT_FLOAT(T) class = typename strict::when<strict::is_float<typename element_of<T>::type>::value>::type
#define STRICT_NUM(T) class = typename strict::when<strict::is_number<typename element_of<T>::type>::value>::type
#define STRICT_INT(T) class = typename strict::when<strict::is_int<typename element_of<T>::type>::value>::type, class = void
#define STRICT_VFLOAT(T) \
  class = typename strict::when < strict::shape<T>::is_vector && strict::is_float<typename element_of<T>::type>::value > ::type
// Functions of their own for each type and not a template, as Apple's are: a number is converted to what the other argument is.
#define STRICT_1(NAME) \
  half NAME(half);     \
  half2 NAME(half2);   \
  half3 NAME(half3);   \
  half4 NAME(half4);   \
  float NAME(float);   \
  float2 NAME(float2); \
  float3 NAME(float3); \
  float4 NAME(float4);
#define STRICT_2(NAME)         \
  half NAME(half, half);       \
  half2 NAME(half2, half2);    \
  half3 NAME(half3, half3);    \
  half4 NAME(half4, half4);    \
  float NAME(float, float);    \
  float2 NAME(float2, float2); \
  float3 NAME(float3, float3); \
  float4 NAME(float4, float4);
#define STRICT_3(NAME)                 \
  half NAME(half, half, half);         \
  half2 NAME(half2, half2, half2);     \
  half3 NAME(half3, half3, half3);     \
  half4 NAME(half4, half4, half4);     \
  float NAME(float, float, float);     \
  float2 NAME(float2, float2, float2); \
  float3 NAME(float3, float3, float3); \
  float4 NAME(float4, float4, float4);
#define STRICT_MATH                                                                                                                       \
  STRICT_1(acos)                                                                                                                          \
  STRICT_1(acosh)                                                                                                                         \
  STRICT_1(asin)                                                                                                                          \
  STRICT_1(asinh)                                                                                                                         \
  STRICT_1(atan)                                                                                                                          \
  STRICT_1(atanh) STRICT_1(ceil) STRICT_1(cos) STRICT_1(cosh) STRICT_1(cospi) STRICT_1(exp) STRICT_1(exp2) STRICT_1(exp10) STRICT_1(fabs) \
      STRICT_1(floor) STRICT_1(fract) STRICT_1(log) STRICT_1(log2) STRICT_1(log10) STRICT_1(rint) STRICT_1(round) STRICT_1(rsqrt)         \
          STRICT_1(sin) STRICT_1(sinh) STRICT_1(sinpi) STRICT_1(sqrt) STRICT_1(tan) STRICT_1(tanh) STRICT_1(tanpi) STRICT_1(trunc)        \
              STRICT_1(saturate) STRICT_1(sign) STRICT_2(atan2) STRICT_2(fdim) STRICT_2(fmax) STRICT_2(fmin) STRICT_2(fmod) STRICT_2(pow) \
                  STRICT_2(powr) STRICT_2(copysign) STRICT_2(nextafter) STRICT_2(step) STRICT_2(divide) STRICT_3(fma) STRICT_3(mix)       \
                      STRICT_3(smoothstep) STRICT_3(fmedian3) template <class T, STRICT_FLOAT(T)>                                         \
                      T sincos(T, __private T&);
STRICT_MATH
#define STRICT_OF_FOUR(T) STRICT_OF_ONE(T) STRICT_OF_ONE(T##2) STRICT_OF_ONE(T##3) STRICT_OF_ONE(T##4)
#define STRICT_OF_ONE(T) \
  T max(T, T);           \
  T min(T, T);           \
  T clamp(T, T, T);      \
  T abs(T);
#define STRICT_LEAST_AND_MOST                                                          \
  STRICT_OF_FOUR(char)                                                                 \
  STRICT_OF_FOUR(uchar)                                                                \
  STRICT_OF_FOUR(short)                                                                \
  STRICT_OF_FOUR(ushort)                                                               \
  STRICT_OF_FOUR(int)                                                                  \
  STRICT_OF_FOUR(uint) STRICT_OF_FOUR(long) STRICT_OF_FOUR(ulong) STRICT_OF_FOUR(half) \
      STRICT_OF_FOUR(float)  // none of bfloat: libraries write their own
STRICT_LEAST_AND_MOST
#define STRICT_GEOMETRY_OF(T, V) \
  T dot(V, V);                   \
  T length(V);                   \
  T distance(V, V);              \
  V normalize(V);                \
  T length_squared(V);           \
  T distance_squared(V, V);
#define STRICT_GEOMETRY                                                                                                               \
  STRICT_GEOMETRY_OF(half, half2)                                                                                                     \
  STRICT_GEOMETRY_OF(half, half3) STRICT_GEOMETRY_OF(half, half4) STRICT_GEOMETRY_OF(float, float2) STRICT_GEOMETRY_OF(float, float3) \
      STRICT_GEOMETRY_OF(float, float4) float3 cross(float3, float3);                                                                 \
  half3 cross(half3, half3);
STRICT_GEOMETRY
namespace fast {
STRICT_GEOMETRY
}
namespace precise {
STRICT_GEOMETRY
}
namespace fast {
STRICT_MATH STRICT_LEAST_AND_MOST
}
namespace precise {
STRICT_MATH STRICT_LEAST_AND_MOST
}
template <class T, STRICT_FLOAT(T)>
T ldexp(T, int);
#define STRICT_IS(NAME)                                                                 \
  template <class T, class = typename strict::when<!strict::shape<T>::is_vector>::type> \
  bool NAME(T);                                                                         \
  template <class T, int N>                                                             \
  strict::boolN<N> NAME(vec<T, N>);
STRICT_IS(isnan)
STRICT_IS(isinf) STRICT_IS(isfinite) STRICT_IS(isnormal) STRICT_IS(signbit) template <class T, int N>
vec<T, N> ldexp(vec<T, N>, vec<int, N>);
template <class T, STRICT_NUM(T)>
T max3(T, T, T);
STRICT_2(reflect)
STRICT_3(faceforward)
STRICT_3(median3)
STRICT_3(fmax3)
STRICT_3(fmin3)
template <class T, STRICT_FLOAT(T)>
T frexp(T, __private int&);
template <class T, int N, STRICT_FLOAT(T)>
vec<T, N> frexp(vec<T, N>, __private vec<int, N>&);
template <class T, STRICT_FLOAT(T)>
T modf(T, __private T&);
template <class T, STRICT_FLOAT(T), class = typename strict::when<!strict::shape<T>::is_vector>::type>
int ilogb(T);
template <class T, int N, STRICT_FLOAT(T)>
vec<int, N> ilogb(vec<T, N>);
template <class T, int N, class U>
vec<T, N> refract(vec<T, N>, vec<T, N>, U);

#define STRICT_ORDERED(NAME)                                                            \
  template <class T, class = typename strict::when<!strict::shape<T>::is_vector>::type> \
  bool NAME(T, T);                                                                      \
  template <class T, int N>                                                             \
  strict::boolN<N> NAME(vec<T, N>, vec<T, N>);
STRICT_ORDERED(isordered) STRICT_ORDERED(isunordered)
template <class T, STRICT_NUM(T)>
T min3(T, T, T);
template <class T, STRICT_INT(T)>
T median3(T, T, T);

template <class T, STRICT_NUM(T)>
T select(T, T, bool);
template <class T, int N>
vec<T, N> select(vec<T, N>, vec<T, N>, strict::boolN<N>);
template <class T, int N, class B, class = typename strict::when<strict::shape<B>::is_vector&& int(strict::shape<B>::size) == N>::type>
vec<T, N> select(vec<T, N>, vec<T, N>, B);
template <class T, int N>
vec<T, N> select(vec<T, N>, vec<T, N>, bool);
template <class T>
bool any(T);
template <class T>
bool all(T);
template <class T, STRICT_INT(T)>
T clz(T);
template <class T, STRICT_INT(T)>
T ctz(T);
template <class T, STRICT_INT(T)>
T popcount(T);
template <class T, STRICT_INT(T)>
T reverse_bits(T);
template <class T, STRICT_INT(T)>
T rotate(T, T);
template <class T, STRICT_INT(T)>
T mulhi(T, T);
template <class T, STRICT_INT(T)>
T mul24(T, T);
template <class T, STRICT_INT(T)>
T mad24(T, T, T);
template <class T, STRICT_INT(T)>
T madhi(T, T, T);
#define STRICT_ABSDIFF(T, U) \
  U absdiff(T, T);           \
  U##2 absdiff(T##2, T##2);  \
  U##3 absdiff(T##3, T##3);  \
  U##4 absdiff(T##4, T##4);
STRICT_ABSDIFF(char, uchar)
STRICT_ABSDIFF(uchar, uchar)
STRICT_ABSDIFF(short, ushort)
STRICT_ABSDIFF(ushort, ushort)
STRICT_ABSDIFF(int, uint)
STRICT_ABSDIFF(uint, uint)
STRICT_ABSDIFF(long, ulong)
STRICT_ABSDIFF(ulong, ulong)
template <class T, STRICT_INT(T)>
T subsat(T, T);
template <class T, STRICT_INT(T)>
T hadd(T, T);
template <class T, STRICT_INT(T)>
T rhadd(T, T);
template <class T, STRICT_INT(T)>
T madsat(T, T, T);
template <class T, STRICT_INT(T)>
T addsat(T, T);
template <class T, STRICT_INT(T)>
T extract_bits(T, uint, uint);
template <class T, STRICT_INT(T)>
T insert_bits(T, T, uint, uint);
#define STRICT_PACK(NAME, N)             \
  float##N unpack_##NAME##_to_float(uint); \
  half##N unpack_##NAME##_to_half(uint);   \
  uint pack_float_to_##NAME(float##N);     \
  uint pack_half_to_##NAME(half##N);
STRICT_PACK(unorm4x8, 4)
STRICT_PACK(snorm4x8, 4)
STRICT_PACK(unorm2x16, 2)
STRICT_PACK(snorm2x16, 2)
STRICT_PACK(unorm10a2, 4)
float4 unpack_unorm4x8_srgb_to_float(uint);
half4 unpack_unorm4x8_srgb_to_half(uint);
uint pack_float_to_srgb_unorm4x8(float4);
uint pack_half_to_srgb_unorm4x8(half4);
float3 unpack_unorm565_to_float(ushort);
half3 unpack_unorm565_to_half(ushort);
ushort pack_float_to_unorm565(float3);
ushort pack_half_to_unorm565(half3);

enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16
};
mem_flags operator|(mem_flags, mem_flags);
enum memory_order { memory_order_relaxed, memory_order_acquire, memory_order_release, memory_order_acq_rel, memory_order_seq_cst };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };
void threadgroup_barrier(mem_flags);
void threadgroup_barrier(mem_flags, memory_order, thread_scope = thread_scope_threadgroup);
void simdgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags, memory_order, thread_scope = thread_scope_simdgroup);
