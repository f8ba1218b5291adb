// Products of tiles (../include/products.h) on NVIDIA's tensor cores, 16 x 8 x 16 at an instruction, where the type is of 16 bits and the
// tiles come in pairs. For device cuda alone: half of such an instruction would be empty with simdgroup matrices, which are 8 x 8.
//
// Tensor cores cut off what they add: a sum of thousands would lose a bit at each step. So 32 of k are added to each other there, and
// then, rounded, to the rest.
#pragma once
#include "../include/products.h"
#include "../include/quantized_b.h"

#ifdef __METALMM_CUDA__
template <>
struct Straight<true> {
  enum : uint { MOST_STAGES = 4 };
  template <uint BYTES, class T>
  static METAL_FUNC void copy(threadgroup uint* to, const device T* from) {
    metal::copy_later<BYTES>(to, from);
  }
  static METAL_FUNC void close() { metal::close_copies(); }
  template <uint AHEAD>
  static METAL_FUNC void wait() {
    metal::wait_for_copies<AHEAD - 1>();
  }
};

template <class T, int TM, int TN>
struct Products<T, TM, TN, true> {
  metal::float4 of[TM / 2][TN];  // lanes as PTX says of m16n8k16

  METAL_FUNC void clear() thread {
#pragma clang loop unroll(full)
    for (uint i = 0; i < TM / 2; i++)
#pragma clang loop unroll(full)
      for (uint j = 0; j < TN; j++) of[i][j] = metal::float4(0.0f);
  }
  template <class Step>
  METAL_FUNC void add(const threadgroup T* a, const threadgroup T* b, const threadgroup Factor* by, uint2 from, Place, uint lane) thread {
    typedef typename Step::A A;
    typedef typename Step::B B;
    constexpr uint K = Step::K, AT_ONCE = K % 32 == 0 ? 2 : 1;
    uint matrix = lane / 8, row = lane % 8;
#pragma clang loop unroll(full)
    for (uint k = 0; k < K; k += 16 * AT_ONCE) {
      metal::uint4 left[TM / 2][AT_ONCE];
      metal::float4 of_a[TM / 2];
#pragma clang loop unroll(full)
      for (uint i = 0; i < TM / 2; i++) {
        of_a[i] = metal::float4(0.0f);
#pragma clang loop unroll(full)
        for (uint s = 0; s < AT_ONCE; s++) {
          uint r = from.x + 16 * i + matrix % 2 * 8, at = k + 16 * s + matrix / 2 * 8;
          left[i][s] = A::TRANSPOSED ? metal::load_transposed(a + A::at(r, at + row)) : metal::load_matrices(a + A::at(r + row, at));
          if (Step::SCALING == SHIFTED) of_a[i] = metal::mma_16x8x16<T>(of_a[i], left[i][s], metal::uint2(ones()));
        }
      }
#pragma clang loop unroll(full)
      for (uint j = 0; j < TN; j += 2) {
        metal::uint4 right[AT_ONCE];
#pragma clang loop unroll(full)
        for (uint s = 0; s < AT_ONCE; s++) {
          uint c = from.y + 8 * j + matrix / 2 * 8, at = k + 16 * s + matrix % 2 * 8;
          right[s] = B::TRANSPOSED ? metal::load_matrices(b + B::at(at, c + row)) : metal::load_transposed(b + B::at(at + row, c));
        }
        const threadgroup Factor* two = by + k / 32 * Step::COLUMNS + 8 * j + lane % 4 * 2;
#pragma clang loop unroll(full)
        for (uint i = 0; i < TM / 2; i++) {
          metal::float4 first = metal::float4(0.0f), second = first;
#pragma clang loop unroll(full)
          for (uint s = 0; s < AT_ONCE; s++) {
            first = metal::mma_16x8x16<T>(first, left[i][s], right[s].xy);
            second = metal::mma_16x8x16<T>(second, left[i][s], right[s].zw);
          }
          add_scaled<Step>(of[i][j], first, of_a[i], two);
          add_scaled<Step>(of[i][j + 1], second, of_a[i], two + 8);
        }
      }
    }
  }
  template <int PITCH>
  METAL_FUNC void put(uint i, threadgroup float* rows, uint lane) thread {
#pragma clang loop unroll(full)
    for (uint j = 0; j < TN; j++) {
      metal::float4 sum = of[i / 2][j];
      *reinterpret_cast<threadgroup metal::float2*>(rows + lane / 4 * PITCH + 8 * j + lane % 4 * 2) = i % 2 ? sum.zw : sum.xy;
    }
  }

 private:
  static METAL_FUNC uint ones() { return as_type<uint>(metal::vec<T, 2>(T(1.0f))); }
  // two: of the lane's columns.
  template <class Step>
  static METAL_FUNC void add_scaled(thread metal::float4& to, metal::float4 sum, metal::float4 of_a, const threadgroup Factor* two) {
    if (Step::SCALING == PLAIN) {
      to += sum;
      return;
    }
    Factor x = two[0], y = two[1];
    to = metal::fma(metal::float4(x.scale, y.scale, x.scale, y.scale), sum, to);
    if (Step::SCALING == SHIFTED) to = metal::fma(metal::float4(x.rest, y.rest, x.rest, y.rest), of_a, to);
  }
};

// Eight weights' bits lie first where they will be in the tile. Which half of a word a scale is depends on where it stands, so words are
// brought; each once, by one thread for all, so a step before the weights that wait for them.
template <class T, class From, int BK, int BN, int TG>
struct QuantizedB<T, From, BK, BN, TG, true> {
  typedef QuantizedTile<T, From, BK, BN> Of;
  typedef Tile<BK, BN, true, true> In;
  typedef typename Of::Bits Bits;
  typedef typename Of::S S;
  enum : uint { EACH = (Of::EIGHTS + TG - 1) / TG, HAS_BIAS = Of::Pack::HAS_BIAS, WORDS = Of::FACTORS * (1 + HAS_BIAS) };
  const device uchar* next[EACH];

  template <bool WHOLE>
  METAL_FUNC void begin(WeightsAt w, uint k, uint col0, threadgroup uint* words, uint tid) thread {
#pragma clang loop unroll(full)
    for (uint i = 0; i < EACH; i++) {
      uint eight = tid + i * TG;
      next[i] = Of::at(w, col0 + eight / Of::ACROSS, k + eight % Of::ACROSS * 8).values;
    }
    load_words<false>(w, k, col0, words, tid);
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
  // words: of the next step.
  template <bool WHOLE>
  METAL_FUNC void load(WeightsAt w, uint k0, uint col0, threadgroup T* tile, threadgroup uint* words, uint tid) thread {
#pragma clang loop unroll(full)
    for (uint i = 0; i < EACH; i++) {
      uint eight = tid + i * TG, k = k0 + eight % Of::ACROSS * 8;
      if (Of::EIGHTS % TG != 0 && eight >= Of::EIGHTS) continue;
      threadgroup uint* to = reinterpret_cast<threadgroup uint*>(tile + In::template place<TG>(tid, i));
      if (WHOLE) {
        metal::copy_later<Bits::BYTES>(to, next[i]);
        next[i] += From::bytes_along(w, BK / 32);
      } else {
        Bits y = Of::some(w, Of::at(w, col0 + eight / Of::ACROSS, k), k);
        to[0] = y.word[0], to[Bits::WORDS - 1] = y.word[Bits::WORDS - 1];
      }
    }
    load_words<WHOLE>(w, k0 + BK, col0, words, tid);
  }
  METAL_FUNC void put(WeightsAt w, uint k0, uint col0, threadgroup T* tile, threadgroup Factor* by, const threadgroup uint* words,
                      uint tid) const thread {
    const threadgroup S* halves = reinterpret_cast<const threadgroup S*>(words);
#pragma clang loop unroll(full)
    for (uint i = 0; i < EACH; i++) {
      uint eight = tid + i * TG, column = eight / Of::ACROSS, along = eight % Of::ACROSS * 8, at = along / 32 * BN + column;
      if (Of::EIGHTS % TG != 0 && eight >= Of::EIGHTS) continue;
      Cursor c = Of::at(w, col0 + column, k0 + along);
      threadgroup T* to = tile + In::template place<TG>(tid, i);
      const threadgroup uint* from = reinterpret_cast<const threadgroup uint*>(to);
      Bits y;
      y.word[0] = from[0], y.word[Bits::WORDS - 1] = from[Bits::WORDS - 1];
      float scale = float(halves[2 * at + half_of(c.scales)]);
      Of::put(y, scale, HAS_BIAS ? float(halves[2 * (Of::FACTORS + at) + half_of(c.biases)]) : 0.0f, eight, to, by, w.low_byte);
    }
  }

 private:
  static METAL_FUNC uint half_of(const device uchar* from) { return uint(metal::address_of(from)) / 2 % 2; }
  template <bool WHOLE>
  static METAL_FUNC void load_words(WeightsAt w, uint k0, uint col0, threadgroup uint* words, uint tid) {
#pragma clang loop unroll(full)
    for (uint j = 0; j < (Of::FACTORS + TG - 1) / TG; j++) {
      uint i = tid + j * TG;
      if (Of::FACTORS % TG != 0 && i >= Of::FACTORS) continue;
      uint k = k0 + i / BN * 32;
      Cursor c = Of::at(w, col0 + i % BN, k);
      if (WHOLE) {
        metal::copy_later<4>(words + i, c.scales - 2 * half_of(c.scales));
        if (HAS_BIAS) metal::copy_later<4>(words + Of::FACTORS + i, c.biases - 2 * half_of(c.biases));
      } else {
        store_both(words + i, Of::scale(w, c, k));
        if (HAS_BIAS) store_both(words + Of::FACTORS + i, Of::bias(w, c, k));
      }
    }
  }
  static METAL_FUNC void store_both(threadgroup uint* to, S x) {
    threadgroup S* halves = reinterpret_cast<threadgroup S*>(to);
    halves[0] = halves[1] = x;
  }
};
#endif
