// What a simdgroup adds up of the products of two tiles in threadgroup memory.
#pragma once
#include <metal_simdgroup_matrix>
#include <metal_stdlib>

#include "eighth.h"
#include "place.h"
#include "tile.h"
#include "weights.h"

// What stands for B's weights in products.
enum Scaling {
  PLAIN,      // they do
  SCALED,     // integers, of each column and EACH of k with a factor
  WITH_REST,  // and with what is added to each product besides: `rest` times A
  IN_TWO      // sums of two numbers: ../cuda/halves.h
};

// K of k of the tiles of a threadgroup, and of B's its Factors, COLUMNS of them for EACH of k: 32, or 16. ONE_SUM: one at a time waits for
// its factor, for registers have no room for two, or SCALING is WITH_REST.
template <class TileA, class OfB, int K_, bool ONE = false>
struct TileStep {
  typedef TileA A;
  typedef OfB B;
  enum : uint {
    K = K_,
    SCALING = OfB::Stored::SCALING,
    ONE_SUM = ONE || SCALING == WITH_REST,
    COLUMNS = OfB::Stored::COLUMNS,
    EACH = OfB::Stored::EACH
  };
};

// How they are multiplied. PAIRS is of ../cuda/products.h, TOGETHER and TURNED of ../cuda/groups.h, TURNED_IN_TWO of ../cuda/halves.h.
enum Way { ALONE, PAIRS, TOGETHER, TURNED, TURNED_IN_TWO };

// SPLIT threadgroups that share K; each adds up all sums of a part of the tile's columns. Without IS_MANY the first does it all. More than
// one: ../cuda/groups.h.
template <int SPLIT, bool MANY = (SPLIT > 1)>
struct Cluster {
  enum { IS_MANY = 0 };
  static_assert(!MANY, "threadgroups that read each other's memory are of device cuda alone");
  static METAL_FUNC void meet() {}
  template <int ROWS, int WIDTH, int PITCH>
  static METAL_FUNC void add_up(threadgroup float*, uint, uint) {}
};

// Who adds up A's rows of a step, where weights have a bias. With tiles of 64 rows, simdgroups that multiply nothing do
// (../cuda/quantized_b.h). With 128 they would have 32 rows each, which was slower.
template <class S, class B, bool BY_OTHERS = (S::THREADS > S::TG && S::BM <= 64 && int(B::Stored::SCALING) == WITH_REST)>
struct RowSums {
  enum { ARE_BY_OTHERS = 0 };
  template <class Loads, class Sizes>
  static METAL_FUNC void put(thread Loads&, threadgroup Sizes&, uint, WeightsAt, uint, uint) {}
};

// TM x TN sums of 8 x 8 of a simdgroup.
template <class T, int TM, int TN, int WAY = OnTensorCores<T, TM, TN>::VALUE>
struct Products {
  metal::simdgroup_float8x8 of[TM][TN];

  METAL_FUNC void clear() thread {
#pragma clang loop unroll(full)
    for (uint i = 0; i < TM; i++)
#pragma clang loop unroll(full)
      for (uint j = 0; j < TN; j++) of[i][j] = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  // What goes on while loads are asked for.
  template <class Step>
  METAL_FUNC void begin(const threadgroup T*, threadgroup T*, metal::uint3, uint, WeightsAt) thread {}
  // a, b: the tiles; from: the simdgroup's first row, column and k; place: of the lane.
  template <class Step>
  METAL_FUNC void add(const threadgroup T* a, const threadgroup T* b, metal::uint3 from, Place place, uint, WeightsAt) thread {
    constexpr uint K = Step::K, EACH = Step::EACH;
    const threadgroup Factor* by = Step::B::factors(b) + (from.z / EACH * Step::COLUMNS + from.y);
    a += Step::A::at(from.x, from.z), b += Step::B::Layout::at(from.z, from.y);
    if (Step::SCALING == PLAIN) {
#pragma clang loop unroll(full)
      for (uint k = 0; k < K; k += 8) add_eight<Step>(a, b, k);
      return;
    }
#pragma clang loop unroll(full)
    for (uint k = 0; k < K; k += EACH) {
      Products block;
      Products<T, TM, 1, ALONE> of_a;  // sums of A's rows
      block.clear();
      of_a.clear();
#pragma clang loop unroll(full)
      for (uint i = 0; i < EACH && k + i < K; i += 8) {
        block.template add_eight<Step>(a, b, k + i);
        if (Step::SCALING == WITH_REST) of_a.template add_rows<Step>(a, k + i);
      }
#pragma clang loop unroll(full)
      for (uint j = 0; j < TN; j++) {
        const threadgroup Factor* two = by + k / EACH * Step::COLUMNS + 8 * j + place.column;
        Factor f[2] = {two[0], two[1]};
#pragma clang loop unroll(full)
        for (uint i = 0; i < TM; i++)
#pragma clang loop unroll(full)
          for (uint e = 0; e < 2; e++) {
            float sum = metal::fma(f[e].scale, block.of[i][j].thread_elements()[e], of[i][j].thread_elements()[e]);
            if (Step::SCALING == WITH_REST) sum = metal::fma(f[e].rest, of_a.of[i][0].thread_elements()[e], sum);
            of[i][j].thread_elements()[e] = sum;
          }
      }
    }
  }
  // Adds what is on its way.
  template <class Step>
  METAL_FUNC void settle(metal::uint3, uint, WeightsAt) thread {}
  // The ith eight rows, to PITCH floats from row to row.
  template <int PITCH>
  METAL_FUNC void put(uint i, threadgroup float* rows, uint) thread {
#pragma clang loop unroll(full)
    for (uint j = 0; j < TN; j++) simdgroup_store(of[i][j], rows + 8 * j, PITCH);
  }

  template <class Step>
  METAL_FUNC void add_eight(const threadgroup T* a, const threadgroup T* b, uint k) thread {
    typedef typename Step::B::Layout B;
    metal::simdgroup_matrix<T, 8, 8> left[TM], right[TN];
#pragma clang loop unroll(full)
    for (uint i = 0; i < TM; i++) load_rows<Step>(left[i], a, i, k);
#pragma clang loop unroll(full)
    for (uint j = 0; j < TN; j++) simdgroup_load(right[j], b + B::at(k, 8 * j), B::PITCH, metal::ulong2(0), B::TRANSPOSED);
#pragma clang loop unroll(full)
    for (uint i = 0; i < TM; i++)
#pragma clang loop unroll(full)
      for (uint j = 0; j < TN; j++) simdgroup_multiply_accumulate(of[i][j], left[i], right[j], of[i][j]);
  }
  // Of one column: A's rows by ones.
  template <class Step>
  METAL_FUNC void add_rows(const threadgroup T* a, uint k) thread {
    metal::simdgroup_matrix<T, 8, 8> ones = metal::make_filled_simdgroup_matrix<T, 8, 8>(T(1.0f));
#pragma clang loop unroll(full)
    for (uint i = 0; i < TM; i++) {
      metal::simdgroup_matrix<T, 8, 8> left;
      load_rows<Step>(left, a, i, k);
      simdgroup_multiply_accumulate(of[i][0], left, ones, of[i][0]);
    }
  }
  template <class Step>
  static METAL_FUNC void load_rows(thread metal::simdgroup_matrix<T, 8, 8>& left, const threadgroup T* a, uint i, uint k) {
    typedef typename Step::A A;
    simdgroup_load(left, a + A::at(8 * i, k), A::PITCH, metal::ulong2(0), A::TRANSPOSED);
  }
};
