// Products of tiles (../include/products.h) on NVIDIA's tensor cores, 16 x 8 x 16 at an instruction, where the type is of 16 bits and the
// tiles come in pairs. For device cuda alone: half of such an instruction would be empty with simdgroup matrices, which are 8 x 8.
//
// Tensor cores cut off what they add: a sum of thousands would lose a bit at each step. So 32 of k are added to each other there, and
// then, rounded, to the rest; of shifted integers 64, where K and groups are long. If each product loses up to one bit below the last of
// the largest, 64 of these lose 64 parts in 2^24, and A's as many: with zero_of's 2.01 and 1.01, and two roundings of 3.02 for each 64, 218
// of the bound's 257 at K = 2 * SURE.
#pragma once
#include "../include/dense_b.h"
#include "../include/products.h"
#include "../include/quantized_b.h"
#include "../include/terms.h"
#include "groups.h"

#ifdef __METALMM_CUDA__
template <>
struct Straight<true> {
  enum : uint { MOST_STAGES = 4 };
  template <class T>
  static METAL_FUNC void copy(threadgroup uint* to, const device T* from) {
    metal::copy_later(to, from);
  }
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
struct Columns {
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
struct Columns<DenseB<T, BK, BN, TG, TB, true>> {
  typedef typename DenseB<T, BK, BN, TG, TB, true>::In In;
  template <int TIMES>
  static METAL_FUNC void load(thread metal::uint4 (&x)[TIMES], const threadgroup T* b, uint k, uint from, uint beyond, uint lane, uint) {
    uint row = lane % 8, c = from + lane / 16 * 8;
#pragma clang loop unroll(full)
    for (uint s = 0; s < TIMES; s++) {
      uint at = k + 16 * s + lane / 8 % 2 * 8;
      x[s] = In::TRANSPOSED ? metal::load_matrices(b + In::at(at, c + row) + beyond * In::PITCH)  // of eight lines keys are alike
                            : metal::load_transposed(b + In::at(at + row, c + beyond));
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
  METAL_FUNC void settle() thread {}
  template <class Step>
  METAL_FUNC void begin(const threadgroup T*, const threadgroup T*, uint3, uint, uint) thread {}
  template <class Step>
  METAL_FUNC void add(const threadgroup T* a, const threadgroup T* b, uint3 from, Place, uint lane, WeightsAt w) thread {
    constexpr uint K = Step::K, MOST = Step::SCALING == SHIFTED && Step::EACH == 32 && K % 64 == 0 ? 4 : K % 32 == 0 ? 2 : 1;
    bool most = MOST < 4 || (w.shift > 5 && w.k >= 2 * SURE);
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
        Columns<typename Step::B>::load(right[j / 2], b, from.z + k, from.y, 8 * j, lane, low_byte);
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
          if (Step::SCALING == SHIFTED) of_a[s / OF_ONE] = metal::mma_16x8x16<T>(of_a[s / OF_ONE], left[s], metal::uint2(ones()));
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
  static METAL_FUNC uint ones() { return as_type<uint>(metal::vec<T, 2>(T(1.0f))); }
  template <class Step>
  static METAL_FUNC void add_scaled(thread metal::float4& to, metal::float4 sum, metal::float4 of_a, const thread Factor (&two)[2]) {
    if (Step::SCALING == PLAIN) {
      to += sum;
      return;
    }
    Factor x = two[0], y = two[1];
    to = metal::fma(metal::float4(x.scale, y.scale, x.scale, y.scale), sum, to);
    if (Step::SCALING == SHIFTED) to = metal::fma(metal::float4(x.rest, y.rest, x.rest, y.rest), of_a, to);
  }
};

// Weights stay in threadgroup memory as they are stored, and become numbers in registers, where lanes hold B. Their order is
// [32 of k][column][word]. Scales come by way of registers, one step ahead.
template <class T, class From, int BK, int BN, int TG>
struct QuantizedB<T, From, BK, BN, TG, true> {
  typedef QuantizedTile<T, From, BK, BN, true> Of;
  typedef typename Of::Bits Bits;
  typedef typename Of::By By;
  typedef typename Of::Pack Pack;
  enum : uint {
    HAS_BIAS = Pack::HAS_BIAS,
    WORDS = From::BLOCK / 4,         // of a block
    PIECES = BK / 32 * (WORDS / 4),  // of a column: 16 bytes each
    EACH = (PIECES * BN + TG - 1) / TG,
    BLOCKS = BK / 32 * BN,  // of 32 of k, whose scales lie together
    BLOCKS_EACH = (BLOCKS + TG - 1) / TG,
    OF_FACTORS = BLOCKS * WORDS,  // words
    OF_ZEROS = OF_FACTORS + Of::FACTORS * (sizeof(Factor) / 4),
    OF_HIGH = OF_ZEROS + HAS_BIAS * Of::FACTORS,
    BYTES = 4 * (OF_HIGH + (Pack::HIGH > 0) * Of::FACTORS)
  };
  const device uchar* next[EACH];
  Cursor factor[BLOCKS_EACH];
  By by[BLOCKS_EACH];

  template <bool WHOLE>
  METAL_FUNC void begin(WeightsAt w, uint k, uint col0, uint tid) thread {
#pragma clang loop unroll(full)
    for (uint i = 0; i < EACH; i++) {
      uint piece = tid + i * TG, at = piece % PIECES * 4;
      next[i] = Of::at(w, col0 + piece / PIECES, k + at / WORDS * 32).values + at % WORDS * 4;
    }
#pragma clang loop unroll(full)
    for (uint j = 0; j < BLOCKS_EACH; j++) {
      uint i = tid + j * TG, k_i = k + i / BN * 32;
      factor[j] = Of::at(w, col0 + i % BN, k_i);
      by[j] = Of::template scales<WHOLE>(w, factor[j], k_i);
    }
  }
  template <bool WHOLE>
  METAL_FUNC void load(WeightsAt w, uint k0, uint col0, threadgroup T* tile, uint tid) thread {
    threadgroup uint* words = reinterpret_cast<threadgroup uint*>(tile);
#pragma clang loop unroll(full)
    for (uint i = 0; i < (WHOLE ? EACH : 0); i++) {
      uint piece = tid + i * TG, at = piece % PIECES * 4;
      if (PIECES * BN % TG != 0 && piece >= PIECES * BN) continue;
      metal::copy_later(words + (at / WORDS * BN + piece / PIECES) * WORDS + at % WORDS, next[i]);
      next[i] += From::bytes_along(w, BK / 32);
    }
    for (uint eight = tid; eight < (WHOLE ? 0 : Of::EIGHTS); eight += TG) {
      uint column = eight / Of::ACROSS, along = eight % Of::ACROSS, k = k0 + along * 8;
      Bits y = Of::some(w, Of::at(w, col0 + column, k), k);
      threadgroup uint* to = words + (along / 4 * BN + column) * WORDS + along % 4 * Bits::WORDS;
      to[0] = y.word[0], to[Bits::WORDS - 1] = y.word[Bits::WORDS - 1];
    }
  }
  // What the next step's `put` stores.
  template <bool WHOLE>
  METAL_FUNC void load_factors(WeightsAt w, uint k0, uint tid) thread {
#pragma clang loop unroll(full)
    for (uint j = 0; j < BLOCKS_EACH; j++) {
      uint k = k0 + (tid + j * TG) / BN * 32;
      factor[j] = From::template moved<1>(w, factor[j], k - BK, BK / 32);
      by[j] = Of::template scales<WHOLE>(w, factor[j], k);
    }
  }
  template <class A>
  METAL_FUNC void put(WeightsAt, const threadgroup T*, threadgroup T* tile, uint tid) const thread {
    threadgroup uint* words = reinterpret_cast<threadgroup uint*>(tile);
#pragma clang loop unroll(full)
    for (uint j = 0; j < BLOCKS_EACH; j++) {
      uint i = tid + j * TG;
      if (BLOCKS % TG != 0 && i >= BLOCKS) continue;
      Terms<Pack::ID> terms = Terms<Pack::ID>::of(by[j]);
#pragma clang loop unroll(full)
      for (uint h = 0; h < Pack::HALVES; h++) {
        uint at = (i / BN * Pack::HALVES + h) * BN + i % BN;
        reinterpret_cast<threadgroup Factor*>(words + OF_FACTORS)[at] = terms.factor[h];
        if (HAS_BIAS) words[OF_ZEROS + at] = as_type<uint>(terms.offset[h]);
        if (Pack::HIGH > 0) words[OF_HIGH + at] = terms.high(2 * h);
      }
    }
  }
  static METAL_FUNC const threadgroup Factor* factors(const threadgroup T* tile) {
    return reinterpret_cast<const threadgroup Factor*>(reinterpret_cast<const threadgroup uint*>(tile) + OF_FACTORS);
  }
  // As lanes hold B: eight columns by 32 of k, two products' worth. Of each eight of k a lane has two neighbours.
  static METAL_FUNC metal::uint4 eight_columns(const threadgroup T* tile, uint k, uint from, uint beyond, uint lane, uint low) {
    const threadgroup uint* words = reinterpret_cast<const threadgroup uint*>(tile);
    uint column = from + lane / 4, further = k / 32 * BN + beyond;
    const threadgroup metal::uint4* bits = reinterpret_cast<const threadgroup metal::uint4*>(words + column * WORDS + further * WORDS);
    metal::half2 zero[Pack::HALVES];
#pragma clang loop unroll(full)
    for (uint h = 0; h < Pack::HALVES; h++)
      zero[h] = HAS_BIAS ? as_type<metal::half2>((words + OF_ZEROS + column)[(k / Of::EACH + h) * BN + beyond])
                         : offset_of<Pack::ID>(zero_of<Pack::ID>(1.0f, 0.0f));
    uint high[Pack::HALVES];
#pragma clang loop unroll(full)
    for (uint h = 0; h < Pack::HALVES; h++) high[h] = Pack::HIGH > 0 ? (words + OF_HIGH + column)[(k / Of::EACH + h) * BN + beyond] : 0;
    metal::uint4 x[2] = {bits[0], bits[WORDS / 4 - 1]};
    metal::uint4 y;
#pragma clang loop unroll(full)
    for (uint i = 0; i < 4; i++) {
      uint first = Pack::BITS == 8 ? x[i / 2][i % 2 * 2] : x[0][i], second = Pack::BITS == 8 ? x[i / 2][i % 2 * 2 + 1] : first;
      uint own = metal::pick_bytes(first, second, which(lane));
      uint half_of = i / 2 % Pack::HALVES, more = 0;
      if (Pack::HIGH > 0)
        more = (metal::pick_bytes(high[half_of], high[half_of], which(lane)) >> i * Pack::HIGH % 4 << 4) & Pack::HIGH_MASK * 0x01000010u;
      y[i] = as_type<uint>(Integers<T>::pair(numbers(own, more, zero[half_of], low)));
    }
    return y;
  }

 private:
  // Of eight bytes a lane's: two neighbours, or the one that has both. They come where a number of type half has its lowest bits.
  static METAL_FUNC uint which(uint lane) {
    uint pair = lane % 4;
    return Pack::BITS == 8 ? 0x100u + 0x202u * pair : 0x101u * pair;
  }
  // more: their upper bits, where these belong.
  static METAL_FUNC metal::half2 numbers(uint bytes, uint more, metal::half2 zero, uint low) {
    if (Pack::IS_FLOAT) return halves_of_floats<Pack::ID>(Pack::BITS == 8 ? bytes : (bytes & 0xffffu) | (bytes >> 4 & 0xffff0000u));
    uint mask = Pack::BITS == 8 ? low * 0x10001u : low / 17 * 0x100001u, signs = Pack::SIGNED ? 0x00800080u : 0;
    uint bits = signs != 0 ? (bytes & mask) ^ (0x64006400u | signs) : (bytes & mask) | 0x64006400u;
    metal::half2 x = as_type<metal::half2>(bits ^ more);
    return Pack::BITS == 8 ? x + zero : metal::fma(x, metal::half2(half(1.0f), half(0.0625f)), zero);
  }
};

// The same with the sums of A's rows over each 32 of k, of weights with a bias: [32 of k][row].
template <class T, class From, class S>
struct TurnedB : QuantizedB<T, From, S::BK, S::BN, S::TG, true> {
  typedef QuantizedB<T, From, S::BK, S::BN, S::TG, true> Base;
  enum : uint { ROWS = S::BM, OF_SUMS = Base::BYTES, BYTES = OF_SUMS + Base::HAS_BIAS * S::BK / 32 * ROWS * sizeof(float) };

  static METAL_FUNC const threadgroup float* sums(const threadgroup T* tile) {
    return reinterpret_cast<const threadgroup float*>(tile + OF_SUMS / sizeof(T));
  }
  // A thread has of A what it brought, so that nobody waits: of four neighbours 32 of k.
  template <class A>
  METAL_FUNC void put(WeightsAt w, const threadgroup T* a, threadgroup T* tile, uint tid) const thread {
    Base::template put<A>(w, a, tile, tid);
    threadgroup float* to = reinterpret_cast<threadgroup float*>(tile + OF_SUMS / sizeof(T));
#pragma clang loop unroll(full)
    for (uint i = 0; i < (Base::HAS_BIAS ? ROWS * A::ACROSS / S::TG : 0); i++) {
      OctetBits<T> bits = {*reinterpret_cast<const threadgroup metal::uint4*>(a + A::template place<S::TG>(tid, i))};
      Octet<T> x = octet_of(bits);
      metal::float4 both = metal::float4(x.low) + metal::float4(x.high);
      float sum = (both.x + both.y) + (both.z + both.w);
      sum += metal::simd_shuffle_xor(sum, 1);
      sum += metal::simd_shuffle_xor(sum, 2);
      uint eight = tid + i * S::TG;
      if (tid % 4 == 0) to[eight % A::ACROSS / 4 * ROWS + eight / A::ACROSS] = sum;
    }
  }
};
#endif
