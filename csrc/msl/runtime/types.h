// MSL's scalar and vector types for a C++ compiler.
#pragma once
#include "abi.h"
#ifdef __CUDACC__
#include "cuda/builtins.h"
#endif

#ifndef __CUDACC__
namespace std {
template <class T> class initializer_list {  // as both compilers lay it out
  const T* first_;
  decltype(sizeof(0)) size_;
  constexpr initializer_list(const T* first, decltype(sizeof(0)) size) : first_(first), size_(size) {}

 public:
  constexpr initializer_list() : first_(nullptr), size_(0) {}
  constexpr decltype(sizeof(0)) size() const { return size_; }
  constexpr const T* begin() const { return first_; }
  constexpr const T* end() const { return first_ + size_; }
};
}  // namespace std
#endif

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long;
using uint64_t = unsigned long;
using size_t = decltype(sizeof(0));
using ptrdiff_t = decltype(static_cast<char*>(nullptr) - static_cast<char*>(nullptr));
using uintptr_t = unsigned long;
using intptr_t = long;

// A built-in type, so that conversions, overloads and ?: behave as in MSL. Every operation rounds to binary16: g++ does
// so for _Float16 in C++, clang for __fp16 under -fnative-half-type (clang 14 has no _Float16 without AVX512-FP16).
#if defined(__CUDACC__)  // in cuda/builtins.h
#elif defined(__clang__)
using half = __fp16;
#elif defined(__aarch64__) && __GNUC__ < 13
#error "metalmm: on aarch64 g++ has _Float16 in C++ from version 13 on; install clang, or name another compiler in METALMM_CXX"
#else
using half = _Float16;
#endif

#if defined(__AVX512FP16__)
#error "metalmm: this compiler would use the machine's own half arithmetic, which rounds a * b + c once; compiler.py knows no flag against it"
#endif

#ifdef METALMM_DEBUG
#define METALMM_INSIDE(n, i) ::metalmm::debug::inside<n>(i)
#else
#define METALMM_INSIDE(n, i) (i)
#endif

namespace metalmm::msl {
template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool B, class T = void> using enable_if_t = typename enable_if<B, T>::type;
template <class A, class B> struct is_same { static constexpr bool value = false; };
template <class A> struct is_same<A, A> { static constexpr bool value = true; };
template <class T> constexpr bool is_number = false;
#define METALMM_NUMBER(T) template <> constexpr bool is_number<T> = true;
METALMM_NUMBER(bool) METALMM_NUMBER(char) METALMM_NUMBER(signed char) METALMM_NUMBER(unsigned char) METALMM_NUMBER(short)
METALMM_NUMBER(unsigned short) METALMM_NUMBER(int) METALMM_NUMBER(unsigned int) METALMM_NUMBER(long) METALMM_NUMBER(unsigned long)
METALMM_NUMBER(long long) METALMM_NUMBER(unsigned long long) METALMM_NUMBER(half) METALMM_NUMBER(float) METALMM_NUMBER(double)
#undef METALMM_NUMBER
}  // namespace metalmm::msl

// No compiler of the two has a bfloat type with arithmetic; the conversions round to nearest even.
struct bfloat {
  uint16_t bits;
  bfloat() = default;
  // Overloads, not a template: what converts to a number must not become a bfloat on the way.
  constexpr bfloat(float x) : bits(round(x)) {}
  constexpr bfloat(double x) : bits(round(static_cast<float>(x))) {}
  constexpr bfloat(half x) : bits(round(static_cast<float>(x))) {}
  constexpr bfloat(int x) : bits(round(static_cast<float>(x))) {}
  constexpr bfloat(unsigned x) : bits(round(static_cast<float>(x))) {}
  constexpr bfloat(long x) : bits(round(static_cast<float>(x))) {}
  constexpr bfloat(unsigned long x) : bits(round(static_cast<float>(x))) {}
  // To a float alone where nobody asks: an integer beside a bfloat in ?: then becomes a bfloat, and not the other way round.
  template <class F, class = typename metalmm::msl::enable_if<metalmm::msl::is_same<F, float>::value>::type>
  constexpr operator F() const {
    return __builtin_bit_cast(float, static_cast<uint>(bits) << 16);
  }
  template <class T, class = typename metalmm::msl::enable_if<!metalmm::msl::is_same<T, float>::value && !metalmm::msl::is_same<T, bool>::value && metalmm::msl::is_number<T>>::type, class = void>
  constexpr explicit operator T() const {
    return static_cast<T>(static_cast<float>(*this));
  }
  template <class T, class = typename metalmm::msl::enable_if<metalmm::msl::is_same<T, bool>::value>::type, class = void, class = void>
  constexpr operator T() const {
    return static_cast<float>(*this) != 0.0f;
  }
  static constexpr uint16_t round(float f) {
#ifdef __CUDACC__
    if (!__builtin_is_constant_evaluated()) return metalmm::cuda::narrowed_to_bfloat(f);
#endif
    uint u = __builtin_bit_cast(uint, f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
    return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
  constexpr bfloat operator+() const { return *this; }
  constexpr bfloat operator-() const { return -static_cast<float>(*this); }
  constexpr bfloat& operator++() { return *this = static_cast<float>(*this) + 1.0f; }
  constexpr bfloat& operator--() { return *this = static_cast<float>(*this) - 1.0f; }
  constexpr bfloat operator++(int) {
    bfloat before = *this;
    ++*this;
    return before;
  }
  constexpr bfloat operator--(int) {
    bfloat before = *this;
    --*this;
    return before;
  }
};

namespace metalmm::msl {

template <class T> struct is_scalar { static constexpr bool value = false; };
template <class T> struct is_float { static constexpr bool value = false; };
template <class T> struct is_int { static constexpr bool value = false; };
#define METALMM_TRAIT(trait, T) template <> struct trait<T> { static constexpr bool value = true; };
#define METALMM_INT(T) METALMM_TRAIT(is_scalar, T) METALMM_TRAIT(is_int, T)
#define METALMM_FLOAT(T) METALMM_TRAIT(is_scalar, T) METALMM_TRAIT(is_float, T)
METALMM_TRAIT(is_scalar, bool)
METALMM_INT(char) METALMM_INT(signed char) METALMM_INT(unsigned char) METALMM_INT(short) METALMM_INT(unsigned short)
METALMM_INT(int) METALMM_INT(unsigned int) METALMM_INT(long) METALMM_INT(unsigned long) METALMM_INT(long long)
METALMM_INT(unsigned long long)
METALMM_FLOAT(half) METALMM_FLOAT(bfloat) METALMM_FLOAT(float)
METALMM_TRAIT(is_scalar, double)
#undef METALMM_INT
#undef METALMM_FLOAT
#undef METALMM_TRAIT

// What a kernel's own function of that name is not to meet: a call with a vector looks for names in the vector's namespace, and not in what
// that only uses.
namespace unmet {}
using namespace unmet;

// bfloat with bfloat or an integer, which becomes one, stays bfloat; with another type of floats it is float.
namespace unmet {
template <class T> constexpr float beside_bfloat(T x) {
  return static_cast<T>(0.5f) == static_cast<T>(0) ? static_cast<float>(bfloat(static_cast<float>(x))) : static_cast<float>(x);
}
}  // namespace unmet
template <class T> struct with_bfloat { using type = bfloat; };
template <> struct with_bfloat<half> { using type = float; };
template <> struct with_bfloat<float> { using type = float; };
template <> struct with_bfloat<double> { using type = float; };
template <class B, class T> using if_beside_bfloat = enable_if_t<is_same<B, bfloat>::value && (is_number<T> || __is_enum(T))>;
}  // namespace metalmm::msl
// Templates in both: what is no bfloat must not become one to be compared.
#define METALMM_OF_BFLOAT(op, of_two, of_another)                                                                       \
  constexpr of_two operator op(bfloat a, bfloat b) { return static_cast<float>(a) op static_cast<float>(b); }           \
  template <class B, class T, class = metalmm::msl::if_beside_bfloat<B, T>>                                             \
  constexpr of_another operator op(B a, T b) { return static_cast<float>(a) op metalmm::msl::beside_bfloat(b); }        \
  template <class T, class B, class = metalmm::msl::if_beside_bfloat<B, T>, class = void>                               \
  constexpr of_another operator op(T a, B b) { return metalmm::msl::beside_bfloat(a) op static_cast<float>(b); }
#define METALMM_BFLOAT_OP(op)                                                       \
  METALMM_OF_BFLOAT(op, bfloat, typename metalmm::msl::with_bfloat<T>::type)        \
  constexpr bfloat& operator op##=(bfloat& a, float b) { return a = static_cast<float>(a) op b; }   \
  template <class B, class T, class = metalmm::msl::if_beside_bfloat<B, T>, class = void>           \
  constexpr B& operator op##=(B& a, T b) { return a = static_cast<float>(a op b); } \
  template <class T, class B, class = metalmm::msl::if_beside_bfloat<B, T>>         \
  constexpr T& operator op##=(T& a, B b) { return a = static_cast<T>(a op b); }
METALMM_BFLOAT_OP(+) METALMM_BFLOAT_OP(-) METALMM_BFLOAT_OP(*) METALMM_BFLOAT_OP(/)
#define METALMM_BFLOAT_COMPARISON(op) METALMM_OF_BFLOAT(op, bool, bool)
METALMM_BFLOAT_COMPARISON(==) METALMM_BFLOAT_COMPARISON(!=) METALMM_BFLOAT_COMPARISON(<)
METALMM_BFLOAT_COMPARISON(<=) METALMM_BFLOAT_COMPARISON(>) METALMM_BFLOAT_COMPARISON(>=)
#undef METALMM_BFLOAT_COMPARISON
#undef METALMM_BFLOAT_OP
#undef METALMM_OF_BFLOAT
namespace metalmm::msl {

template <bool B, class T, class F> struct conditional { using type = T; };
template <class T, class F> struct conditional<false, T, F> { using type = F; };
template <class T> using scalar_only = enable_if_t<is_scalar<T>::value>;

// The compiler's own vectors make arithmetic one instruction at any optimization level; half and bool have none.
template <class T, int N> struct native { using type = void; };
#ifndef __CUDACC__  // a lane of a GPU computes one number at a time
#define METALMM_NATIVE(T)                                                                    \
  template <> struct native<T, 2> { typedef T type __attribute__((vector_size(2 * sizeof(T)))); }; \
  template <> struct native<T, 4> { typedef T type __attribute__((vector_size(4 * sizeof(T)))); };
METALMM_NATIVE(float) METALMM_NATIVE(int) METALMM_NATIVE(unsigned int) METALMM_NATIVE(short) METALMM_NATIVE(char)
METALMM_NATIVE(unsigned short) METALMM_NATIVE(signed char) METALMM_NATIVE(unsigned char)
// Not four longs: a vector of 32 bytes would ask for that alignment.
template <> struct native<long, 2> { typedef long type __attribute__((vector_size(16))); };
template <> struct native<unsigned long, 2> { typedef unsigned long type __attribute__((vector_size(16))); };
#undef METALMM_NATIVE
#endif

template <class T, int N> struct vec;

// A member such as v.xz: reads as a vector, writes through to the components.
template <class V, class T, int N, int... I> struct swizzle {
  T data[N];
  METALMM_INLINE operator V() const { return V(data[I]...); }
  // Lowering turns every swizzle that is read into its vector first, so that this takes vectors alone; the assignment that the
  // language gives a class stays trivial, and with it those of vectors and of unions that hold them.
  METALMM_INLINE V operator=(const V& v) {
    int i = 0;
    V copy = v;
    ((data[I] = copy[i++]), ...);
    return copy;
  }
  METALMM_INLINE const T& operator[](int i) const { return data[index(i)]; }
  METALMM_INLINE T& operator[](int i) { return data[index(i)]; }
  METALMM_INLINE const V metalmm_value() const { return *this; }  // for a swizzle of a swizzle
  static constexpr int index(int i) {
    constexpr int at[] = {I...};
    return at[i];
  }
};

// Outside of the class, whose members a compiler walks over wherever a vector is passed.
#define METALMM_OF_SWIZZLE template <class V, class T, int N, int... I> METALMM_INLINE
#define METALMM_UPDATE(op) \
  template <class V, class T, int N, int... I, class U> METALMM_INLINE V operator op##=(swizzle<V, T, N, I...>& s, const U& u) { return s = V(s) op u; }
METALMM_UPDATE(+) METALMM_UPDATE(-) METALMM_UPDATE(*) METALMM_UPDATE(/) METALMM_UPDATE(%)
METALMM_UPDATE(&) METALMM_UPDATE(|) METALMM_UPDATE(^) METALMM_UPDATE(<<) METALMM_UPDATE(>>)
#undef METALMM_UPDATE
METALMM_OF_SWIZZLE V operator++(swizzle<V, T, N, I...>& s) { return s = V(s) + T(1); }
METALMM_OF_SWIZZLE V operator--(swizzle<V, T, N, I...>& s) { return s = V(s) - T(1); }
METALMM_OF_SWIZZLE V operator++(swizzle<V, T, N, I...>& s, int) {
  V before = s;
  ++s;
  return before;
}
METALMM_OF_SWIZZLE V operator--(swizzle<V, T, N, I...>& s, int) {
  V before = s;
  --s;
  return before;
}
METALMM_OF_SWIZZLE V operator-(const swizzle<V, T, N, I...>& s) { return -V(s); }
METALMM_OF_SWIZZLE V operator+(const swizzle<V, T, N, I...>& s) { return s; }
METALMM_OF_SWIZZLE V operator~(const swizzle<V, T, N, I...>& s) { return ~V(s); }
METALMM_OF_SWIZZLE auto operator!(const swizzle<V, T, N, I...>& s) { return !V(s); }
#undef METALMM_OF_SWIZZLE

#define METALMM_S2(N, a, b, i, j) swizzle<vec<T, 2>, T, N, i, j> a##b;
#define METALMM_S3(N, a, b, c, i, j, k) swizzle<vec<T, 3>, T, N, i, j, k> a##b##c;
#define METALMM_S4(N, a, b, c, d, i, j, k, l) swizzle<vec<T, 4>, T, N, i, j, k, l> a##b##c##d;

#define METALMM_D2_2(N, p, q, a, i) METALMM_S2(N, a, p, i, 0) METALMM_S2(N, a, q, i, 1)
#define METALMM_D2_3(N, p, q, a, b, i, j) METALMM_S3(N, a, b, p, i, j, 0) METALMM_S3(N, a, b, q, i, j, 1)
#define METALMM_D2_4(N, p, q, a, b, c, i, j, k) METALMM_S4(N, a, b, c, p, i, j, k, 0) METALMM_S4(N, a, b, c, q, i, j, k, 1)
#define METALMM_E2_3(N, p, q, a, i) METALMM_D2_3(N, p, q, a, p, i, 0) METALMM_D2_3(N, p, q, a, q, i, 1)
#define METALMM_E2_4(N, p, q, a, b, i, j) METALMM_D2_4(N, p, q, a, b, p, i, j, 0) METALMM_D2_4(N, p, q, a, b, q, i, j, 1)
#define METALMM_F2_4(N, p, q, a, i) METALMM_E2_4(N, p, q, a, p, i, 0) METALMM_E2_4(N, p, q, a, q, i, 1)
#define METALMM_G2(N, p, q, a, i) METALMM_D2_2(N, p, q, a, i) METALMM_E2_3(N, p, q, a, i) METALMM_F2_4(N, p, q, a, i)
#define METALMM_SWIZZLES2(N, p, q) METALMM_G2(N, p, q, p, 0) METALMM_G2(N, p, q, q, 1)
#define METALMM_D3_2(N, p, q, r, a, i) METALMM_S2(N, a, p, i, 0) METALMM_S2(N, a, q, i, 1) METALMM_S2(N, a, r, i, 2)
#define METALMM_D3_3(N, p, q, r, a, b, i, j) METALMM_S3(N, a, b, p, i, j, 0) METALMM_S3(N, a, b, q, i, j, 1) METALMM_S3(N, a, b, r, i, j, 2)
#define METALMM_D3_4(N, p, q, r, a, b, c, i, j, k) METALMM_S4(N, a, b, c, p, i, j, k, 0) METALMM_S4(N, a, b, c, q, i, j, k, 1) METALMM_S4(N, a, b, c, r, i, j, k, 2)
#define METALMM_E3_3(N, p, q, r, a, i) METALMM_D3_3(N, p, q, r, a, p, i, 0) METALMM_D3_3(N, p, q, r, a, q, i, 1) METALMM_D3_3(N, p, q, r, a, r, i, 2)
#define METALMM_E3_4(N, p, q, r, a, b, i, j) METALMM_D3_4(N, p, q, r, a, b, p, i, j, 0) METALMM_D3_4(N, p, q, r, a, b, q, i, j, 1) METALMM_D3_4(N, p, q, r, a, b, r, i, j, 2)
#define METALMM_F3_4(N, p, q, r, a, i) METALMM_E3_4(N, p, q, r, a, p, i, 0) METALMM_E3_4(N, p, q, r, a, q, i, 1) METALMM_E3_4(N, p, q, r, a, r, i, 2)
#define METALMM_G3(N, p, q, r, a, i) METALMM_D3_2(N, p, q, r, a, i) METALMM_E3_3(N, p, q, r, a, i) METALMM_F3_4(N, p, q, r, a, i)
#define METALMM_SWIZZLES3(N, p, q, r) METALMM_G3(N, p, q, r, p, 0) METALMM_G3(N, p, q, r, q, 1) METALMM_G3(N, p, q, r, r, 2)
#define METALMM_D4_2(N, p, q, r, s, a, i) METALMM_S2(N, a, p, i, 0) METALMM_S2(N, a, q, i, 1) METALMM_S2(N, a, r, i, 2) METALMM_S2(N, a, s, i, 3)
#define METALMM_D4_3(N, p, q, r, s, a, b, i, j) METALMM_S3(N, a, b, p, i, j, 0) METALMM_S3(N, a, b, q, i, j, 1) METALMM_S3(N, a, b, r, i, j, 2) METALMM_S3(N, a, b, s, i, j, 3)
#define METALMM_D4_4(N, p, q, r, s, a, b, c, i, j, k) METALMM_S4(N, a, b, c, p, i, j, k, 0) METALMM_S4(N, a, b, c, q, i, j, k, 1) METALMM_S4(N, a, b, c, r, i, j, k, 2) METALMM_S4(N, a, b, c, s, i, j, k, 3)
#define METALMM_E4_3(N, p, q, r, s, a, i) METALMM_D4_3(N, p, q, r, s, a, p, i, 0) METALMM_D4_3(N, p, q, r, s, a, q, i, 1) METALMM_D4_3(N, p, q, r, s, a, r, i, 2) METALMM_D4_3(N, p, q, r, s, a, s, i, 3)
#define METALMM_E4_4(N, p, q, r, s, a, b, i, j) METALMM_D4_4(N, p, q, r, s, a, b, p, i, j, 0) METALMM_D4_4(N, p, q, r, s, a, b, q, i, j, 1) METALMM_D4_4(N, p, q, r, s, a, b, r, i, j, 2) METALMM_D4_4(N, p, q, r, s, a, b, s, i, j, 3)
#define METALMM_F4_4(N, p, q, r, s, a, i) METALMM_E4_4(N, p, q, r, s, a, p, i, 0) METALMM_E4_4(N, p, q, r, s, a, q, i, 1) METALMM_E4_4(N, p, q, r, s, a, r, i, 2) METALMM_E4_4(N, p, q, r, s, a, s, i, 3)
#define METALMM_G4(N, p, q, r, s, a, i) METALMM_D4_2(N, p, q, r, s, a, i) METALMM_E4_3(N, p, q, r, s, a, i) METALMM_F4_4(N, p, q, r, s, a, i)
#define METALMM_SWIZZLES4(N, p, q, r, s) METALMM_G4(N, p, q, r, s, p, 0) METALMM_G4(N, p, q, r, s, q, 1) METALMM_G4(N, p, q, r, s, r, 2) METALMM_G4(N, p, q, r, s, s, 3)

struct none {};
template <class T, int N> struct pick_native {
#ifdef METALMM_COUNTS  // what is computed
  using raw = typename native<T, N>::type;
#else
  using raw = typename native<T, N == 3 ? 4 : N>::type;
#endif
  static constexpr bool has = !is_same<raw, void>::value;
  using type = typename conditional<has, raw, none>::type;
};

// Two halfs, of which a GPU makes one instruction: cuda/builtins.h.
#ifdef __CUDACC__
template <class T, int N> constexpr bool is_pair = is_same<T, half>::value && N == 2;
#else
template <class T, int N> constexpr bool is_pair = false;
}  // namespace metalmm::msl
namespace metalmm::cuda {
template <char Op, class V> V both(const V&, const V&);
}  // namespace metalmm::cuda
namespace metalmm::msl {
#endif

// Components, swizzles and the native vector share storage. No alignment over 16 bytes: that is what NumPy gives.
// Aligned storage is a vector's, the other a packed vector's.
template <class T, int N, bool Aligned> struct storage;
// In constant memory of a GPU stands what the compiler computes: there vectors are constexpr, which takes a first value for each element.
struct Zeros {};
#ifdef __CUDACC__
#define METALMM_CONSTEXPR constexpr
#define METALMM_ZEROED : storage<T, N, true>(Zeros{})
#define METALMM_EMPTY (T(0))
#else
#define METALMM_CONSTEXPR
#define METALMM_ZEROED
#define METALMM_EMPTY
#endif
#define METALMM_STORAGE(N, ALIGNED, ALIGN, NATIVE, XYZW, RGBA, ...)    \
  template <class T> struct ALIGN storage<T, N, ALIGNED> {              \
    union {                                                            \
      T e[N];                                                          \
      NATIVE;                                                          \
      struct { T XYZW; };                                              \
      struct { T RGBA; };                                              \
      __VA_ARGS__                                                      \
    }; \
    storage() = default;                                               \
    constexpr explicit storage(Zeros) : e{} {}                         \
  };
#define METALMM_BARE(...) __VA_ARGS__
#define METALMM_BOTH(N, SIZE, XYZW, RGBA, ...)                                                        \
  METALMM_STORAGE(N, true, alignas(SIZE * sizeof(T) < 16 ? SIZE * sizeof(T) : 16), METALMM_BARE(typename pick_native<T, N>::type v), \
                  METALMM_BARE XYZW, METALMM_BARE RGBA, __VA_ARGS__)                                  \
  METALMM_STORAGE(N, false, , none unused, METALMM_BARE XYZW, METALMM_BARE RGBA, __VA_ARGS__)
// A compiler walks over all of these, too: by the 672 of four components g++ takes a quarter longer than by their pairs. So a text that
// names none but pairs gets pairs (python/metalmm/msl/targets/cpu.py).
#ifdef METALMM_ALL_SWIZZLES
METALMM_BOTH(2, 2, (x, y), (r, g), METALMM_SWIZZLES2(2, x, y) METALMM_SWIZZLES2(2, r, g))
METALMM_BOTH(3, 4, (x, y, z), (r, g, b), METALMM_SWIZZLES3(3, x, y, z) METALMM_SWIZZLES3(3, r, g, b))
METALMM_BOTH(4, 4, (x, y, z, w), (r, g, b, a), METALMM_SWIZZLES4(4, x, y, z, w) METALMM_SWIZZLES4(4, r, g, b, a))
#else
METALMM_BOTH(2, 2, (x, y), (r, g), METALMM_D2_2(2, x, y, x, 0) METALMM_D2_2(2, x, y, y, 1))
METALMM_BOTH(3, 4, (x, y, z), (r, g, b), METALMM_D3_2(3, x, y, z, x, 0) METALMM_D3_2(3, x, y, z, y, 1) METALMM_D3_2(3, x, y, z, z, 2))
METALMM_BOTH(4, 4, (x, y, z, w), (r, g, b, a), METALMM_D4_2(4, x, y, z, w, x, 0) METALMM_D4_2(4, x, y, z, w, y, 1) METALMM_D4_2(4, x, y, z, w, z, 2) METALMM_D4_2(4, x, y, z, w, w, 3))
#endif

// Anything that converts to a vector of known width: a vector, a swizzle, a packed vector.
template <class T> struct width { static constexpr int value = is_scalar<T>::value ? 1 : 0; };
template <class T, int N> struct width<vec<T, N>> { static constexpr int value = N; };
template <class V, class T, int N, int... I> struct width<swizzle<V, T, N, I...>> {
  static constexpr int value = sizeof...(I);
};
template <class V, class T, int N> struct packed;
template <class V, class T, int N> struct width<packed<V, T, N>> { static constexpr int value = N; };
template <class T> constexpr int width_of = width<T>::value;

template <class T, int N> struct vec : storage<T, N, true> {
  static_assert(N >= 2 && N <= 4, "vec has two, three or four components");
  using element = T;
  static constexpr int count = N;
  static constexpr bool has_native = pick_native<T, N>::has;

  vec() = default;
  vec(const vec&) = default;
  vec& operator=(const vec&) & = default;  // as all that writes: what is written to a swizzle's value would be lost
  template <class U, class = scalar_only<U>> METALMM_INLINE METALMM_CONSTEXPR vec(U s) METALMM_ZEROED {
    for (int i = 0; i < N; i++) this->e[i] = static_cast<T>(s);
  }
  template <class U> METALMM_INLINE explicit vec(const vec<U, N>& u);
  template <class U, class T2, int M, int... I, class = enable_if_t<sizeof...(I) == N && !is_same<vec, U>::value>>
  METALMM_INLINE explicit vec(const swizzle<U, T2, M, I...>& u) : vec(static_cast<U>(u)) {}
  template <class V, class U> METALMM_INLINE explicit vec(const packed<V, U, N>& p) {
    for (int i = 0; i < N; i++) this->e[i] = static_cast<T>(p.e[i]);
  }
  // {a, b}: the rest is zero, as of an array. An element of its own type, so that no number narrows.
  struct Item {
    T value;
    template <class U, class = scalar_only<U>> METALMM_INLINE constexpr Item(U u) : value(static_cast<T>(u)) {}
  };
  METALMM_INLINE METALMM_CONSTEXPR vec(std::initializer_list<Item> items) METALMM_ZEROED {
    if (items.size() > N) __builtin_trap();
    for (int i = 0; i < N; i++) this->e[i] = i < static_cast<int>(items.size()) ? items.begin()[i].value : T(0);
  }
  template <class A, class B, class... R,
            class = enable_if_t<width_of<A> + width_of<B> + (0 + ... + width_of<R>) == N>>
  METALMM_INLINE METALMM_CONSTEXPR vec(const A& a, const B& b, const R&... rest) METALMM_ZEROED {
    int i = 0;
    put(i, a);
    put(i, b);
    (put(i, rest), ...);
  }
  METALMM_INLINE METALMM_CONSTEXPR T& operator[](int i) { return this->e[METALMM_INSIDE(N, i)]; }
  METALMM_INLINE METALMM_CONSTEXPR const T& operator[](int i) const { return this->e[METALMM_INSIDE(N, i)]; }
  METALMM_INLINE vec& metalmm_value() { return *this; }
  METALMM_INLINE const vec& metalmm_value() const { return *this; }

  METALMM_INLINE vec operator+() const { return *this; }
  METALMM_INLINE METALMM_CONSTEXPR vec operator-() const { return map(*this, [](T a) { return static_cast<T>(-a); }); }
  METALMM_INLINE vec operator~() const { return map(*this, [](T a) { return static_cast<T>(~a); }); }
  METALMM_INLINE vec<bool, N> operator!() const { return vec<bool, N>::map(*this, [](T a) { return !a; }); }
  METALMM_INLINE vec& operator++() & { return *this = *this + T(1); }
  METALMM_INLINE vec& operator--() & { return *this = *this - T(1); }
  METALMM_INLINE vec operator++(int) & {
    vec before = *this;
    ++*this;
    return before;
  }
  METALMM_INLINE vec operator--(int) & {
    vec before = *this;
    --*this;
    return before;
  }

  // f over the components of vectors of this width.
  template <class A, class F> static METALMM_INLINE METALMM_CONSTEXPR vec map(const A& a, F f) {
    vec r METALMM_EMPTY;
    for (int i = 0; i < N; i++) r.e[i] = f(a.e[i]);
    return r;
  }
  template <class A, class B, class F> static METALMM_INLINE vec map(const A& a, const B& b, F f) {
    vec r;
    for (int i = 0; i < N; i++) r.e[i] = f(a.e[i], b.e[i]);
    return r;
  }

#define METALMM_ASSIGN(op) \
  template <class U> METALMM_INLINE vec& operator op##=(const U& u) & { return *this = *this op u; } \
  METALMM_INLINE vec& operator op##=(const vec& u) & { return *this = *this op u; }  // of {a, b}, too
// Scalars meet a vector as its element type, whatever their own.
#define METALMM_SCALAR_FORMS(R, op)                                                                               \
  template <class U, class = scalar_only<U>> friend METALMM_INLINE R operator op(const vec& a, U b) { return a op vec(b); } \
  template <class U, class = scalar_only<U>> friend METALMM_INLINE R operator op(U a, const vec& b) { return vec(a) op b; }
#define METALMM_NATIVE_OP(op)                                                     \
  friend METALMM_INLINE vec operator op(const vec& a, const vec& b) {             \
    if constexpr (is_pair<T, N> && #op[0] != '/') {                               \
      return metalmm::cuda::both<#op[0]>(a, b);                                   \
    } else if constexpr (is_same<T, half>::value) {                               \
      return vec(vec<float, N>(a) op vec<float, N>(b));                           \
    } else if constexpr (has_native && (#op[0] != '/' || is_float<T>::value)) {   \
      vec r;                                                                      \
      r.v = a.v op b.v;                                                           \
      return r;                                                                   \
    } else {                                                                      \
      return map(a, b, [](T x, T y) { return static_cast<T>(x op y); });          \
    }                                                                             \
  }                                                                               \
  METALMM_SCALAR_FORMS(vec, op) METALMM_ASSIGN(op)
#define METALMM_INT_OP(op)                                                  \
  friend METALMM_INLINE vec operator op(const vec& a, const vec& b) {       \
    return map(a, b, [](T x, T y) { return static_cast<T>(x op y); });      \
  }                                                                         \
  METALMM_SCALAR_FORMS(vec, op) METALMM_ASSIGN(op)
  METALMM_NATIVE_OP(+) METALMM_NATIVE_OP(-) METALMM_NATIVE_OP(*) METALMM_NATIVE_OP(/)
  METALMM_INT_OP(%) METALMM_INT_OP(&) METALMM_INT_OP(|) METALMM_INT_OP(^) METALMM_INT_OP(<<) METALMM_INT_OP(>>)
#define METALMM_SHIFT(op)                                                                                              \
  template <class U, class = enable_if_t<is_int<U>::value && !is_same<U, T>::value>> /* by how much: of any type */    \
  friend METALMM_INLINE vec operator op(const vec& a, const vec<U, N>& b) { return a op vec(b); }
  METALMM_SHIFT(<<) METALMM_SHIFT(>>)
#undef METALMM_SHIFT
#define METALMM_RELATION(op)                                                             \
  friend METALMM_INLINE vec<bool, N> operator op(const vec& a, const vec& b) {           \
    return vec<bool, N>::map(a, b, [](T x, T y) { return static_cast<bool>(x op y); });  \
  }                                                                                      \
  METALMM_SCALAR_FORMS(METALMM_BARE(vec<bool, N>), op)
  METALMM_RELATION(==) METALMM_RELATION(!=) METALMM_RELATION(<) METALMM_RELATION(>) METALMM_RELATION(<=)
  METALMM_RELATION(>=) METALMM_RELATION(&&) METALMM_RELATION(||)
#undef METALMM_ASSIGN
#undef METALMM_SCALAR_FORMS
#undef METALMM_NATIVE_OP
#undef METALMM_INT_OP
#undef METALMM_RELATION

 private:
  template <class A> METALMM_INLINE METALMM_CONSTEXPR void put(int& i, const A& a) {
    if constexpr (is_scalar<A>::value) {
      this->e[i++] = static_cast<T>(a);
    } else {
      for (int j = 0; j < width_of<A>; j++) this->e[i++] = static_cast<T>(a[j]);
    }
  }
};

template <class T, int N> template <class U> METALMM_INLINE vec<T, N>::vec(const vec<U, N>& u) {
  if constexpr (is_same<T, U>::value) {
    *this = u;
#ifndef __CUDACC__
  } else if constexpr (has_native && vec<U, N>::has_native) {
    this->v = __builtin_convertvector(u.v, typename pick_native<T, N>::type);
#endif
#if defined(__clang__)
  } else if constexpr ((is_same<T, float>::value && is_same<U, half>::value) ||
                       (is_same<T, half>::value && is_same<U, float>::value)) {
    typedef T to __attribute__((vector_size(N == 3 ? 4 * sizeof(T) : N * sizeof(T))));
    typedef U from __attribute__((vector_size(N == 3 ? 4 * sizeof(U) : N * sizeof(U))));
    from wide;
    __builtin_memcpy(&wide, &u, sizeof(wide));
    to result = __builtin_convertvector(wide, to);
    __builtin_memcpy(this, &result, sizeof(result));
#elif defined(__F16C__)
  } else if constexpr (is_same<T, float>::value && is_same<U, half>::value) {
    // g++ 12 converts a vector of _Float16 element by element; the instruction takes four.
    typedef short v8hi __attribute__((vector_size(16)));
    typedef long long v2di __attribute__((vector_size(16)));
    v2di bits = {};
    __builtin_memcpy(&bits, &u, sizeof(u));
    typedef float v4sf __attribute__((vector_size(16)));
    v4sf wide = __builtin_ia32_vcvtph2ps(reinterpret_cast<v8hi>(bits));
    __builtin_memcpy(&this->v, &wide, sizeof(this->v));
  } else if constexpr (is_same<T, half>::value && is_same<U, float>::value) {
    typedef float v4sf __attribute__((vector_size(16)));
    typedef short v8hi __attribute__((vector_size(16)));
    v4sf wide = {};
    __builtin_memcpy(&wide, &u, sizeof(u));
    v8hi bits = __builtin_ia32_vcvtps2ph(wide, 4);  // 4: round as MXCSR says, to nearest even
    __builtin_memcpy(this->e, &bits, sizeof(this->e));
#endif
  } else {
    for (int i = 0; i < N; i++) this->e[i] = static_cast<T>(u.e[i]);
  }
}

template <class V, class T, int N> struct packed : storage<T, N, false> {
  packed() = default;
  METALMM_INLINE packed(const V& v) { *this = v; }
  template <class A, class B, class... R> METALMM_INLINE packed(const A& a, const B& b, const R&... r) {
    *this = V(a, b, r...);
  }
  template <class U> METALMM_INLINE explicit packed(const vec<U, N>& v) { *this = V(v); }
  METALMM_INLINE packed& operator=(const V& v) {
    for (int i = 0; i < N; i++) this->e[i] = v.e[i];
    return *this;
  }
  METALMM_INLINE operator V() const {
    V v;
    for (int i = 0; i < N; i++) v.e[i] = this->e[i];
    return v;
  }
  METALMM_INLINE V operator-() const { return -V(*this); }
  METALMM_INLINE T& operator[](int i) { return this->e[METALMM_INSIDE(N, i)]; }
  METALMM_INLINE const T& operator[](int i) const { return this->e[METALMM_INSIDE(N, i)]; }
  template <class U> METALMM_INLINE packed& operator+=(const U& u) { return *this = V(*this) + u; }
  template <class U> METALMM_INLINE packed& operator-=(const U& u) { return *this = V(*this) - u; }
  template <class U> METALMM_INLINE packed& operator*=(const U& u) { return *this = V(*this) * u; }
  template <class U> METALMM_INLINE packed& operator/=(const U& u) { return *this = V(*this) / u; }
};

// What lowering writes after a member that is named like a swizzle and read: `v.xy->*metalmm_read`. A member of another type
// that happens to have such a name passes through.
struct Read {};
template <class A> struct read_as { using type = A&&; };
template <class V, class T, int N, int... I> struct read_as<swizzle<V, T, N, I...>&> { using type = V; };
template <class V, class T, int N, int... I> struct read_as<const swizzle<V, T, N, I...>&> { using type = V; };
template <class V, class T, int N, int... I> struct read_as<swizzle<V, T, N, I...>> { using type = V; };
template <class V, class T, int N, int... I> struct read_as<const swizzle<V, T, N, I...>> { using type = V; };
template <class A> METALMM_INLINE constexpr typename read_as<A>::type operator->*(A&& a, Read) {
  return static_cast<typename read_as<A>::type>(a);
}

}  // namespace metalmm::msl
constexpr metalmm::msl::Read metalmm_read{};

#if !defined(__clang__) && !defined(__CUDACC__)
#define __builtin_assume(x) static_cast<void>(0)
#endif
#include "indirect.h"
namespace metal {
using ::uchar, ::ushort, ::uint, ::ulong, ::half, ::bfloat, ::size_t, ::ptrdiff_t;
using ::int8_t, ::uint8_t, ::int16_t, ::uint16_t, ::int32_t, ::uint32_t, ::int64_t, ::uint64_t;
using ::std::initializer_list;
}  // namespace metal

#define METALMM_VECTOR_TYPES(T, name)                                      \
  using name##2 = metalmm::msl::vec<T, 2>;                                 \
  using name##3 = metalmm::msl::vec<T, 3>;                                 \
  using name##4 = metalmm::msl::vec<T, 4>;                                 \
  using packed_##name##2 = metalmm::msl::packed<name##2, T, 2>;            \
  using packed_##name##3 = metalmm::msl::packed<name##3, T, 3>;            \
  using packed_##name##4 = metalmm::msl::packed<name##4, T, 4>;            \
  namespace metal {                                                        \
  using ::name##2, ::name##3, ::name##4;                                   \
  using ::packed_##name##2, ::packed_##name##3, ::packed_##name##4;        \
  }
METALMM_VECTOR_TYPES(bool, bool)
METALMM_VECTOR_TYPES(char, char)
METALMM_VECTOR_TYPES(unsigned char, uchar)
METALMM_VECTOR_TYPES(short, short)
METALMM_VECTOR_TYPES(unsigned short, ushort)
METALMM_VECTOR_TYPES(int, int)
METALMM_VECTOR_TYPES(unsigned int, uint)
METALMM_VECTOR_TYPES(long, long)
METALMM_VECTOR_TYPES(unsigned long, ulong)
METALMM_VECTOR_TYPES(half, half)
METALMM_VECTOR_TYPES(bfloat, bfloat)
METALMM_VECTOR_TYPES(float, float)
#undef METALMM_VECTOR_TYPES
