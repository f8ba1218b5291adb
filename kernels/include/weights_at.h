// Where weights are, and what a kernel keeps of some.
#pragma once
#include <metal_stdlib>

// Whether sums of 32 products of A and a byte are far from the largest float, so that the scale can wait for them.
template <class T>
struct IsSmall {
  enum { VALUE = 0 };
};
template <>
struct IsSmall<half> {
  enum { VALUE = 1 };
};

// Where the weights of one matrix are. 2^shift neighbours along K share a scale; ldb: of dense ones, in elements; whole: rows of A
// and of the weights begin on vectors.
struct WeightsAt {
  const device uchar* values;
  const device uchar* scales;
  const device uchar* biases;
  uint n, k, ldb, shift, low_byte;
  bool whole;
};

struct Eight {
  metal::float4 low, high;
};

// Where threadgroup memory holds element i of A, by fours: another four between blocks of 32, for lanes that are 32 apart would otherwise
// want the same bank.
constexpr constant uint PITCH = 9;
METAL_FUNC uint staged_at(uint i) { return i / 32 * PITCH + i % 32 / 4; }

// What makes weights of a piece's integers. Of those that are shifted, `rest` is what is added where the integer was set into 2^16 (halves
// of bytes: 2^11), and where into 2^8 (2^7).
struct Factors {
  float scale;
  metal::float2 rest;
};

// Weights of a format: dense_weights.h, weights.h.
template <class T, int FORMAT, bool CANONICAL>
struct Weights;
