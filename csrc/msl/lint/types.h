// MSL's types: scalars, vectors, address spaces, constructors. See declarations.h.
// clang-format off
#pragma once
#pragma clang system_header

#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#pragma OPENCL EXTENSION __cl_clang_function_pointers : enable  // as arguments of templates; lint.py refuses others
#ifdef __opencl_c_generic_address_space
#define STRICT_SPACES(F) F(__global) F(__local) F(__private) F(__generic)
#else
#define STRICT_SPACES(F) F(__global) F(__local) F(__private)
#endif

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef uchar uint8_t;
typedef short int16_t;
typedef ushort uint16_t;
typedef int int32_t;
typedef uint uint32_t;
typedef long int64_t;
typedef ulong uint64_t;
typedef ulong size_t;
typedef long ptrdiff_t;
typedef ulong uintptr_t;
typedef long intptr_t;
typedef __bf16 bfloat;

namespace strict {
template <class T, int N>
using vec_t = T __attribute__((ext_vector_type(N)));
}

#define STRICT_VECTORS(F) F(char) F(uchar) F(short) F(ushort) F(int) F(uint) F(long) F(ulong) F(half) F(float) F(bfloat)
#define STRICT_T(T)                 \
  typedef strict::vec_t<T, 2> T##2; \
  typedef strict::vec_t<T, 3> T##3; \
  typedef strict::vec_t<T, 4> T##4;
STRICT_VECTORS(STRICT_T)

namespace strict {
template <class T>
struct remove_as {
  typedef T type;
};
template <class T>
struct remove_as<__global T> {
  typedef T type;
};
template <class T>
struct remove_as<__local T> {
  typedef T type;
};
template <class T>
struct remove_as<__constant T> {
  typedef T type;
};
template <class T>
struct remove_as<__private T> {
  typedef T type;
};
#ifdef __opencl_c_generic_address_space
template <class T>
struct remove_as<__generic T> {
  typedef T type;
};
#endif
template <class T>
struct remove_cv {
  typedef T type;
};
template <class T>
struct remove_cv<const T> {
  typedef T type;
};
template <class T>
struct remove_cv<volatile T> {
  typedef T type;
};
template <class T>
struct remove_cv<const volatile T> {
  typedef T type;
};
template <class T>
struct remove_ref {
  typedef T type;
};
template <class T>
struct remove_ref<T&> {
  typedef T type;
};
template <class T>
struct remove_ref<T&&> {
  typedef T type;
};
template <class T>
using bare = typename remove_cv<typename remove_as<typename remove_cv<typename remove_ref<T>::type>::type>::type>::type;

// Vectors: how many components, of what.
template <class T>
struct shape {
  enum { is_vector = 0, size = 1 };
  typedef T element;
};
template <class T>
struct shape<vec_t<T, 2>> {
  enum { is_vector = 1, size = 2 };
  typedef T element;
};
template <class T>
struct shape<vec_t<T, 3>> {
  enum { is_vector = 1, size = 3 };
  typedef T element;
};
template <class T>
struct shape<vec_t<T, 4>> {
  enum { is_vector = 1, size = 4 };
  typedef T element;
};

template <class A, class B>
struct same {
  enum { value = 0 };
};
template <class A>
struct same<A, A> {
  enum { value = 1 };
};
template <bool B, class T = void>
struct when {};
template <class T>
struct when<true, T> {
  typedef T type;
};
template <bool B, class X, class Y>
struct pick {
  typedef X type;
};
template <class X, class Y>
struct pick<false, X, Y> {
  typedef Y type;
};
template <class T>
T value();

template <class T>
struct is_int {
  enum { value = 0 };
};
template <class T>
struct is_float {
  enum { value = 0 };
};
#define STRICT_I(T)     \
  template <>           \
  struct is_int<T> {    \
    enum { value = 1 }; \
  };
STRICT_I(bool)
STRICT_I(char)
STRICT_I(signed char)
STRICT_I(uchar)
STRICT_I(short)
STRICT_I(ushort) STRICT_I(int) STRICT_I(uint) STRICT_I(long) STRICT_I(ulong)
#define STRICT_F(T)     \
  template <>           \
  struct is_float<T> {  \
    enum { value = 1 }; \
  };
    STRICT_F(half) STRICT_F(float) STRICT_F(bfloat) template <class T>
    struct is_number {
  enum { value = int(is_int<T>::value) || int(is_float<T>::value) };
};
}  // namespace strict

// bool2, bool3, bool4: what a comparison of vectors gives; OpenCL's gives integers, so these convert.
namespace strict {
template <int N>
struct boolN {
  bool x, y, z, w;
  boolN() = default;
  template <class T>
  boolN(vec_t<T, N>);
  boolN(bool);
  template <class... R>
  boolN(bool, bool, R...);
  bool operator[](int) const;
  boolN operator!() const;
  friend boolN operator&&(boolN, boolN);
  friend boolN operator||(boolN, boolN);
  friend boolN operator&(boolN, boolN);
  friend boolN operator|(boolN, boolN);
};
}  // namespace strict
typedef strict::boolN<2> bool2;
typedef strict::boolN<3> bool3;
typedef strict::boolN<4> bool4;

namespace strict {
// Packed vectors: storage that reads and writes as the vector.
template <class T, int N>
struct members;
template <class T>
struct members<T, 2> {
  union {
    struct {
      T x, y;
    };
    struct {
      T r, g;
    };
  };
};
template <class T>
struct members<T, 3> {
  union {
    struct {
      T x, y, z;
    };
    struct {
      T r, g, b;
    };
  };
};
template <class T>
struct members<T, 4> {
  union {
    struct {
      T x, y, z, w;
    };
    struct {
      T r, g, b, a;
    };
  };
};
template <class T, int N>
struct packed : members<T, N> {
  packed() = default;
  packed(vec_t<T, N>);
  explicit packed(T);
  template <class... R>
  packed(T, T, R...);
  operator vec_t<T, N>() const __constant;
  const __constant T& operator[](uint) const __constant;
  typedef vec_t<T, N> V_;
#define STRICT_OP(O)                                  \
  friend V_ operator O(const packed&, const packed&); \
  friend V_ operator O(const packed&, V_);            \
  friend V_ operator O(V_, const packed&);            \
  friend V_ operator O(const packed&, T);             \
  friend V_ operator O(T, const packed&);
  STRICT_OP(+)
  STRICT_OP(-) STRICT_OP(*) STRICT_OP(/)
#undef STRICT_OP
#define STRICT_IN(AS)                               \
  packed(const AS packed&);                         \
  operator vec_t<T, N>() const AS;                  \
  AS packed& operator=(const __private packed&) AS; \
  AS packed& operator=(vec_t<T, N>) AS;             \
  AS packed& operator+=(vec_t<T, N>) AS;            \
  AS packed& operator-=(vec_t<T, N>) AS;            \
  AS packed& operator*=(vec_t<T, N>) AS;            \
  AS packed& operator/=(vec_t<T, N>) AS;            \
  AS T& operator[](uint) AS;                        \
  const AS T& operator[](uint) const AS;
      STRICT_SPACES(STRICT_IN)
#undef STRICT_IN
};
template <class T, int N>
struct shape<packed<T, N>> {
  enum { is_vector = 2, size = N };
  typedef T element;
};

// What T(x, ...) is in MSL, where upstream clang has no constructors for vectors.
template <class T>
struct parts {
  enum { value = shape<T>::size };
};
template <int N>
struct parts<boolN<N>> {
  enum { value = N };
};
template <class... A>
struct sum {
  enum { value = 0 };
};
template <class A, class... R>
struct sum<A, R...> {
  enum { value = int(parts<bare<A>>::value) + int(sum<R...>::value) };
};

template <class V>
struct make {
  template <class... A>
  static constexpr V of(A... a) {
    return V(a...);
  }
};
template <class E, int N>
struct make_vector {
  typedef vec_t<E, N> V;
  static constexpr V of() { return V{}; }
  template <class A>
  static constexpr V of(A) {
    typedef bare<A> B;
    static_assert(int(parts<B>::value) == N || int(parts<B>::value) == 1, "a vector is made of a scalar or of a vector as long");
    static_assert(parts<B>::value != 1 || shape<B>::is_vector || is_number<B>::value || __is_class(B) || __is_enum(B), "not a number");
    return V{};
  }
  template <class A, class B, class... R>
  static constexpr V of(A, B, R...) {
    static_assert(int(sum<A, B, R...>::value) == N, "as many components as the vector has");
    return V{};
  }
};
#define STRICT_MAKE(T)                      \
  template <>                               \
  struct make<T##2> : make_vector<T, 2> {}; \
  template <>                               \
  struct make<T##3> : make_vector<T, 3> {}; \
  template <>                               \
  struct make<T##4> : make_vector<T, 4> {};
STRICT_VECTORS(STRICT_MAKE)

template <class V>
struct cast {
  template <class A>
  V operator->*(A a) const {
    return make<bare<V>>::of(a);
  }
};
template <class V>
struct cast<const V> : cast<V> {};

// A threadgroup variable of a kernel template; upstream allows none outside of a __kernel, which cannot be a template.
struct any_threadgroup {
  template <class T>
  operator __local T&() const;
};
struct function_constant {
  template <class T>
  operator T() const;
  template <class T>
  operator T() const __constant;
};
}  // namespace strict
#define metalmm_tg (::strict::any_threadgroup())
template <class T>
T metalmm_function_constant();
template <class T>
constexpr bool is_function_constant_defined(const T&) {
  return true;
}
bool metalmm_is_defined();

template <class T, class A>
T metalmm_as_type(A a) {
  static_assert(sizeof(T) == sizeof(A), "as_type between types of different sizes");
  return strict::value<T>();
}
