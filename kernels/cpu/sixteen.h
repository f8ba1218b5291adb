// Sixteen neighbours as float, for devices that run one thread at a time, wide. They are a vector of the compiler's own.
#pragma once
#include <metal_stdlib>

#ifdef __METALMM_CPU__
typedef float Sixteen __attribute__((vector_size(64)));
METAL_FUNC Sixteen sixteen_of(const thread float (&x)[16]) {
  Sixteen all;
  __builtin_memcpy(&all, x, sizeof(all));
  return all;
}
// Of sixteen bytes what a shift and a mask leave, with the bits of `flip` turned, less `offset`.
METAL_FUNC Sixteen sixteen_bytes(const device uchar* p, int shift, int mask, int flip, int offset) {
  float x[16];
  metal::floats_of_bytes(p, shift, mask, flip, offset, x);
  return sixteen_of(x);
}
// The upper bits of a block of 32, times 16: of weights with an even k, or an odd. Each eighth has its own from every fourth bit on.
METAL_FUNC Sixteen sixteen_times(const thread uint (&high)[4], uint which, uint mask) {
  float x[16];
  for (uint i = 0; i < 16; i++) x[i] = float(int(high[i / 4] >> (i % 4 * 2 + which) * 4 & mask) * 16);
  return sixteen_of(x);
}
// Of the low or the high halves of sixteen bytes, e2m1, twice its value.
METAL_FUNC Sixteen sixteen_of_e2m1(const device uchar* p, int shift) {
  float x[16];
  for (uint i = 0; i < 16; i++) {
    uint code = p[i] >> shift & 15;
    int twice = int(0xc8643210u >> (code & 7) * 4 & 15);
    x[i] = as_type<float>(as_type<uint>(float(twice)) | (code & 8) << 28);
  }
  return sixteen_of(x);
}
// Of sixteen bytes, e4m3: of the least exponent a multiple of 2^-9.
typedef uint SixteenWords __attribute__((vector_size(64)));
METAL_FUNC Sixteen sixteen_of_e4m3(const device uchar* p) {
  uint codes[16];
  for (uint i = 0; i < 16; i++) codes[i] = p[i];
  SixteenWords code, bits, small;
  __builtin_memcpy(&code, codes, sizeof(code));
  SixteenWords rest = code & 127u, is_small = SixteenWords(rest < 8u);
  Sixteen least = __builtin_convertvector(rest, Sixteen) * 0.001953125f, x;
  __builtin_memcpy(&small, &least, sizeof(small));
  bits = (small & is_small) | (((rest << 20) + 0x3c000000u) & ~is_small) | (code & 128u) << 24;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
}
METAL_FUNC Sixteen all_sixteen(float x) { return x - Sixteen{}; }  // a sum with 0 would lose -0
METAL_FUNC Sixteen two_eights(float x, float y) {
  return __builtin_shufflevector(all_sixteen(x), all_sixteen(y), 0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31);
}
METAL_FUNC Sixteen multiply_add(Sixteen x, Sixteen y, Sixteen z) { return x * y + z; }  // one rounding: contracted
// Of 32 every other, from the first or the second on.
template <int FIRST>
METAL_FUNC Sixteen every_other(Sixteen x, Sixteen y) {
  constexpr int F = FIRST;
  return __builtin_shufflevector(x, y, F, F + 2, F + 4, F + 6, F + 8, F + 10, F + 12, F + 14, F + 16, F + 18, F + 20, F + 22, F + 24,
                                 F + 26, F + 28, F + 30);
}
// WHOLE: p stands on a vector of 4. They come by way of a matrix, which the CPU device converts eight or sixteen in an instruction; of a
// loop over halves g++ 12 makes as many conversions.
template <bool WHOLE, class T>
METAL_FUNC Sixteen sixteen(const device T* p) {
  float x[16];
  if (WHOLE) {
    metal::float4x4 values = metal::float4x4(*reinterpret_cast<const device metal::matrix<T, 4, 4>*>(p));
    for (uint i = 0; i < 16; i++) x[i] = values[i / 4][i % 4];
  } else {
    for (uint i = 0; i < 16; i++) x[i] = float(p[i]);
  }
  return sixteen_of(x);
}
#endif
