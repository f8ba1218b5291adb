// Products of tiles (../include/products.h) on NVIDIA's tensor cores, 16 x 8 x 16 at an instruction, where the type is of 16 bits and the
// tiles come in pairs. For device cuda alone: half of such an instruction would be empty with simdgroup matrices, which are 8 x 8.
//
// Tensor cores cut off what they add: a sum of thousands would lose a bit at each step. So 32 of k, or 16 where a block has two scales, are
// added to each other there, and then, rounded, to the rest; of shifted integers 64, where K and groups are long. If each product loses up
// to one bit below the last of the largest, 64 of these lose 64 parts in 2^24, and A's as many: with zero_of's 2.01 and 1.01, and two
// roundings of 3.02 for each 64, 218 of the bound's 257 at K = 2 * SURE.
#pragma once
#include "../include/dense_b.h"
#include "../include/products.h"
#include "groups.h"
#include "quantized_b.h"

#ifdef __METALMM_CUDA__
template <>
struct TileCopies<true> {
  enum : uint { MOST_STAGES = 4 };
  template <class T>
  static METAL_FUNC void copy(threadgroup uint* to, const device T* from, bool there) {
    metal::copy_later(to, from, there);
  }
  static METAL_FUNC uint kept(uint x) { return metal::kept(x); }
  static METAL_FUNC void close() { metal::close_copies(); }
  template <uint AHEAD>
  static METAL_FUNC void wait() {
    metal::wait_for_copies<AHEAD - 1>();
  }
  static METAL_FUNC void show() { metal::show_group(); }
  template <class T>
  static METAL_FUNC bool on_vector(const device T* p) {
    return reinterpret_cast<ulong>(p) % 16 == 0;
  }
};

// Two times eight columns of B, from column `from + beyond` on, as lanes hold them for products of 16 of k each. `beyond` is known to the
// compiler: added to an address last, it costs nothing there.
template <class OfB>
struct FragmentB {
  template <int TIMES, class T>
  static METAL_FUNC void load(thread metal::uint4 (&x)[TIMES], const threadgroup T* b, uint k, uint from, uint beyond, uint lane,
                              uint low) {
#pragma clang loop unroll(full)
    for (uint s = 0; s < TIMES; s += 2) {
      metal::uint4 first = OfB::eight_columns(b, k + 16 * s, from, beyond, lane, low);
      metal::uint4 second = OfB::eight_columns(b, k + 16 * s, from, beyond + 8, lane, low);
      x[s] = metal::uint4(first.xy, second.xy), x[s + 1] = metal::uint4(first.zw, second.zw);
    }
  }
};
template <class T, int BK, int BN, int TG, bool TB>
struct FragmentB<DenseB<T, BK, BN, TG, TB, true>> {
  typedef typename DenseB<T, BK, BN, TG, TB, true>::Layout Layout;
  template <int TIMES>
  static METAL_FUNC void load(thread metal::uint4 (&x)[TIMES], const threadgroup T* b, uint k, uint from, uint beyond, uint lane, uint) {
    uint row = lane % 8, c = from + lane / 16 * 8;
#pragma clang loop unroll(full)
    for (uint s = 0; s < TIMES; s++) {
      uint at = k + 16 * s + lane / 8 % 2 * 8;
      x[s] = Layout::TRANSPOSED
                 ? metal::load_matrices(b + Layout::at(at, c + row) + beyond * Layout::PITCH)  // of eight lines keys are alike
                 : metal::load_transposed(b + Layout::at(at + row, c + beyond));
    }
  }
};

template <class T, int TM, int TN>
struct Products<T, TM, TN, PAIRS> {
  metal::float4 of[TM / 2][TN];  // lanes as PTX says of m16n8k16

  METAL_FUNC void clear() thread {
#pragma clang loop unroll(full)
    for (uint i = 0; i < TM / 2; i++)
#pragma clang loop unroll(full)
      for (uint j = 0; j < TN; j++) of[i][j] = metal::float4(0.0f);
  }
  template <class Step>
  METAL_FUNC void settle(uint3, uint, WeightsAt) thread {}
  template <class Step>
  METAL_FUNC void begin(const threadgroup T*, threadgroup T*, uint3, uint, WeightsAt) thread {}
  template <class Step>
  METAL_FUNC void add(const threadgroup T* a, const threadgroup T* b, uint3 from, Place, uint lane, WeightsAt w) thread {
    constexpr uint K = Step::K, MOST = Step::SCALING == WITH_REST && Step::EACH == 32 && K % 64 == 0 ? 4 : K % 32 == 0 ? 2 : 1;
    bool most = MOST < 4 || adds_64(w);
    if (most)
      add_blocks<Step, MOST>(a, b, from, lane, w.low_byte);
    else
      add_blocks<Step, 2>(a, b, from, lane, w.low_byte);
  }
  template <int PITCH>
  METAL_FUNC void put(uint i, threadgroup float* rows, uint lane) thread {
    put_rows<PITCH>(of[i / 2], i % 2, rows, lane);
  }

 private:
  // AT_ONCE products of 16 of k are loaded. They are added to each other before the rest, and have one factor, that of the first; or, in
  // PARTS, each is for itself.
  template <class Step, int AT_ONCE>
  METAL_FUNC void add_blocks(const threadgroup T* a, const threadgroup T* b, uint3 from, uint lane, uint low_byte) thread {
    typedef typename Step::A A;
    constexpr uint K = Step::K, PARTS = Step::EACH == 16 ? AT_ONCE : 1, OF_ONE = AT_ONCE / PARTS;
    const threadgroup Factor* by = Step::B::factors(b) + (from.z / Step::EACH * Step::COLUMNS + from.y + lane % 4 * 2);
    uint matrix = lane / 8, row = lane % 8;
#pragma clang loop unroll(full)
    for (uint k = 0; k < K; k += 16 * AT_ONCE) {
      metal::uint4 right[TN / 2][AT_ONCE];
      Factor factor[PARTS][TN][2];  // of the lane's columns
#pragma clang loop unroll(full)
      for (uint j = 0; j < TN; j += 2) {
        FragmentB<typename Step::B>::load(right[j / 2], b, from.z + k, from.y, 8 * j, lane, low_byte);
        if (Step::SCALING == PLAIN) continue;
#pragma clang loop unroll(full)
        for (uint part = 0; part < PARTS; part++) {
          const threadgroup Factor* two = by + ((k / Step::EACH + part) * Step::COLUMNS + 8 * j);
          factor[part][j][0] = two[0], factor[part][j][1] = two[1], factor[part][j + 1][0] = two[8], factor[part][j + 1][1] = two[9];
        }
      }
#pragma clang loop unroll(full)
      for (uint i = 0; i < TM / 2; i++) {
        metal::uint4 left[AT_ONCE];
        metal::float4 of_a[PARTS];
#pragma clang loop unroll(full)
        for (uint s = 0; s < AT_ONCE; s++) {
          if (s % OF_ONE == 0) of_a[s / OF_ONE] = metal::float4(0.0f);
          uint r = from.x + matrix % 2 * 8, at = from.z + k + 16 * s + matrix / 2 * 8;
          left[s] = A::TRANSPOSED ? metal::load_transposed(a + A::at(r + 16 * i, at + row))
                                  : metal::load_matrices(a + A::at(r + row, at) + 16 * i * A::PITCH);  // of eight lines keys are alike
          if (Step::SCALING == WITH_REST) of_a[s / OF_ONE] = metal::mma_16x8x16<T>(of_a[s / OF_ONE], left[s], metal::uint2(ones<T>()));
        }
#pragma clang loop unroll(full)
        for (uint j = 0; j < TN; j += 2) {
          metal::float4 first, second;
#pragma clang loop unroll(full)
          for (uint s = 0; s < AT_ONCE; s++) {
            uint part = s / OF_ONE;
            if (s % OF_ONE == 0) first = second = metal::float4(0.0f);
            first = metal::mma_16x8x16<T>(first, left[s], right[j / 2][s].xy);
            second = metal::mma_16x8x16<T>(second, left[s], right[j / 2][s].zw);
            if (s % OF_ONE != OF_ONE - 1) continue;
            add_scaled<Step>(of[i][j], first, of_a[part], factor[part][j]);
            add_scaled<Step>(of[i][j + 1], second, of_a[part], factor[part][j + 1]);
          }
        }
      }
    }
  }
  template <class Step>
  static METAL_FUNC void add_scaled(thread metal::float4& to, metal::float4 sum, metal::float4 of_a, const thread Factor (&two)[2]) {
    if (Step::SCALING == PLAIN) {
      to += sum;
      return;
    }
    Factor x = two[0], y = two[1];
    to = metal::fma(metal::float4(x.scale, y.scale, x.scale, y.scale), sum, to);
    if (Step::SCALING == WITH_REST) to = metal::fma(metal::float4(x.rest, y.rest, x.rest, y.rest), of_a, to);
  }
};
#endif
