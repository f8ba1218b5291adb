// MSL's matrices of 2 x 2 to 4 x 4.
#pragma once
#include "types.h"

namespace metalmm::msl {

#ifndef __CUDACC__
// Floats of a matrix that lie side by side, and the halves that become them: eight or sixteen at once.
template <int N> struct side_by_side;
#define METALMM_SIDE_BY_SIDE(N, narrow_t, widened)                               \
  template <> struct side_by_side<N> {                                           \
    typedef float floats __attribute__((vector_size(4 * N)));                    \
    typedef narrow_t halves __attribute__((vector_size(2 * N)));                 \
    static METALMM_INLINE floats widen(const halves& narrow) { return widened; } \
  };
#if defined(__clang__) || !defined(__F16C__)
METALMM_SIDE_BY_SIDE(8, half, __builtin_convertvector(narrow, floats))
#else
METALMM_SIDE_BY_SIDE(8, short, __builtin_ia32_vcvtph2ps256(narrow))
#endif
#if !defined(__clang__) && defined(__AVX512F__)  // clang puts two eights together itself, g++ element by element
#define METALMM_SIXTEEN_AT_ONCE
METALMM_SIDE_BY_SIDE(16, short, __builtin_ia32_vcvtph2ps512_mask(narrow, floats{}, -1, 4))  // 4: as MXCSR says
#endif
#undef METALMM_SIDE_BY_SIDE
#endif

// Column-major, C columns of R rows, as in MSL.
template <class T, int C, int R> struct matrix {
  vec<T, R> columns[C];
#ifdef __CUDACC__
  static constexpr int AT_ONCE = 1;
  typedef float some;
  static constexpr bool is_wide = false;
#else
#ifdef METALMM_SIXTEEN_AT_ONCE
  static constexpr int AT_ONCE = C * R % 16 ? 8 : 16;
#else
  static constexpr int AT_ONCE = 8;
#endif
  typedef typename side_by_side<AT_ONCE>::floats some;
  static constexpr bool is_wide = is_same<T, float>::value && R != 3 && C * R % AT_ONCE == 0;
#endif
  METALMM_INLINE some wide(int i) const {
    some v;
    __builtin_memcpy(&v, reinterpret_cast<const char*>(this) + sizeof(v) * i, sizeof(v));  // by bytes: it is aligned to 16 alone
    return v;
  }
  METALMM_INLINE void wide(int i, const some& v) { __builtin_memcpy(reinterpret_cast<char*>(this) + sizeof(v) * i, &v, sizeof(v)); }
  matrix() = default;
  explicit matrix(T diagonal) {
    for (int c = 0; c < C; c++)
      for (int r = 0; r < R; r++) columns[c][r] = c == r ? diagonal : T(0);
  }
  template <class... V, class = enable_if_t<sizeof...(V) == C && (C > 1)>>
  METALMM_CONSTEXPR matrix(const V&... v) : columns{vec<T, R>(v)...} {}
  template <class... N, class = enable_if_t<sizeof...(N) == C * R && (is_scalar<N>::value && ...)>, class = void>
  METALMM_INLINE matrix(const N&... n) {  // column by column
    const T numbers[] = {static_cast<T>(n)...};
    for (int c = 0; c < C; c++)
      for (int r = 0; r < R; r++) columns[c][r] = numbers[c * R + r];
  }
  template <class U> METALMM_INLINE explicit matrix(const matrix<U, C, R>& m) {
#ifndef __CUDACC__
    if constexpr (is_same<U, half>::value && is_wide) {  // half4x4 is how MSL says 16 neighbours
      auto widen = [&](int i) {  // a lambda: of a vector from the body itself g++ 12 makes none again later (test_compiling.py looks at it)
        typename side_by_side<AT_ONCE>::halves narrow;
        __builtin_memcpy(&narrow, reinterpret_cast<const char*>(&m) + sizeof(narrow) * i, sizeof(narrow));
        wide(i, side_by_side<AT_ONCE>::widen(narrow));
      };
      for (int i = 0; i < C * R / AT_ONCE; i++) widen(i);
      return;
    }
#endif
    for (int c = 0; c < C; c++) columns[c] = vec<T, R>(m.columns[c]);
  }
  vec<T, R>& operator[](int c) { return columns[METALMM_INSIDE(C, c)]; }
  const vec<T, R>& operator[](int c) const { return columns[METALMM_INSIDE(C, c)]; }
  template <class F> static matrix each(F f) {
    matrix m;
    for (int c = 0; c < C; c++) m.columns[c] = f(c);
    return m;
  }
#define METALMM_MATRIX_OP(op, B, b_wide, b_column)                                  \
  friend METALMM_INLINE matrix operator op(const matrix& a, B b) {                  \
    matrix m;                                                                       \
    if constexpr (is_wide)                                                          \
      for (int i = 0; i < C * R / AT_ONCE; i++) m.wide(i, a.wide(i) op b_wide);     \
    else                                                                            \
      for (int c = 0; c < C; c++) m.columns[c] = a.columns[c] op b_column;          \
    return m;                                                                       \
  }
  METALMM_MATRIX_OP(+, const matrix&, b.wide(i), b.columns[c])
  METALMM_MATRIX_OP(-, const matrix&, b.wide(i), b.columns[c])
  METALMM_MATRIX_OP(*, T, b, b)
#undef METALMM_MATRIX_OP
  friend METALMM_INLINE matrix operator*(T s, const matrix& a) { return a * s; }
  METALMM_INLINE matrix operator-() const {
    return each([&](int c) { return -columns[c]; });
  }
  METALMM_INLINE matrix& operator+=(const matrix& b) { return *this = *this + b; }
  METALMM_INLINE matrix& operator-=(const matrix& b) { return *this = *this - b; }
  METALMM_INLINE matrix& operator*=(T s) { return *this = *this * s; }
  friend vec<T, R> operator*(const matrix& a, const vec<T, C>& v) {
    vec<T, R> r(T(0));
    for (int c = 0; c < C; c++) r += a[c] * v[c];
    return r;
  }
  friend vec<T, C> operator*(const vec<T, R>& v, const matrix& a) {
    vec<T, C> r(T(0));
    for (int c = 0; c < C; c++)
      for (int i = 0; i < R; i++) r[c] += v[i] * a[c][i];
    return r;
  }
};
template <class T, int C, int K, int R>
matrix<T, C, R> operator*(const matrix<T, K, R>& a, const matrix<T, C, K>& b) {
  return matrix<T, C, R>::each([&](int c) { return a * b[c]; });
}

}  // namespace metalmm::msl

#define METALMM_MATRIX_TYPES(T, name, C)               \
  using name##C##x2 = metalmm::msl::matrix<T, C, 2>;   \
  using name##C##x3 = metalmm::msl::matrix<T, C, 3>;   \
  using name##C##x4 = metalmm::msl::matrix<T, C, 4>;   \
  namespace metal { using ::name##C##x2, ::name##C##x3, ::name##C##x4; }
METALMM_MATRIX_TYPES(float, float, 2) METALMM_MATRIX_TYPES(float, float, 3) METALMM_MATRIX_TYPES(float, float, 4)
METALMM_MATRIX_TYPES(half, half, 2) METALMM_MATRIX_TYPES(half, half, 3) METALMM_MATRIX_TYPES(half, half, 4)
#undef METALMM_MATRIX_TYPES

#ifndef __CUDACC__
namespace metalmm::msl {
// Of sixteen bytes what a shift and a mask leave, with the bits of `flip` turned, less `offset`. g++ 12 converts a vector of bytes one by
// one, and clang leaves some loops over them as they are.
METALMM_INLINE void floats_of_bytes(const uchar* bytes, int shift, int mask, int flip, int offset, float* to) {
#ifdef __clang__
  typedef unsigned char Bytes __attribute__((vector_size(16)));
  typedef int Ints __attribute__((vector_size(64)));
  typedef float Floats __attribute__((vector_size(64)));
  Bytes b;
  __builtin_memcpy(&b, bytes, 16);
  b = (b >> static_cast<unsigned char>(shift) & static_cast<unsigned char>(mask)) ^ static_cast<unsigned char>(flip);
  Floats x = __builtin_convertvector(__builtin_convertvector(b, Ints) - offset, Floats);
  __builtin_memcpy(to, &x, sizeof(x));
#else
  for (int i = 0; i < 16; i++) to[i] = static_cast<float>(((bytes[i] >> shift & mask) ^ flip) - offset);
#endif
}
}  // namespace metalmm::msl
namespace metal { using metalmm::msl::floats_of_bytes; }  // ours: kernels/cpu
#endif
