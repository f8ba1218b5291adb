// Tiles of quantized weights for NVIDIA's tensor cores (products.h).
#pragma once
#include "../include/products.h"
#include "../include/quantized_b.h"
#include "../include/terms.h"
#include "groups.h"
#include "halves.h"

#ifdef __METALMM_CUDA__
// Weights are multiplied as shifted integers, whose sums wait for a factor; or as sums of two halves.
template <class T, class Storage, int BK, int BN, bool IN_TWO_HALVES>
struct MultipliedTile : QuantizedTile<T, Storage, BK, BN, true> {
  typedef Terms<Storage::Pack::ID> OfBlock;
};
template <class T, class Storage, int BK, int BN>
struct MultipliedTile<T, Storage, BK, BN, true> : QuantizedTile<T, Storage, BK, BN, true> {
  typedef TermsInTwo<Storage::Pack::ID> OfBlock;
  static constexpr constant Scaling SCALING = IN_TWO;
};

// Weights stay in threadgroup memory as they are stored, and become numbers in registers, where lanes hold B. What a column has stays
// together, for each part of a line of memory is another access; columns are off the power of two by 16 bytes, so that those of eight have
// other banks. Scales come by way of registers, one step ahead. Neighbouring threads load those of one column.
//
// SWIZZLED, columns are at powers of two, and a column's sixteen bytes are permuted by its number, as TMA does it.
template <class T, class Storage, int BK, int BN, int TG, bool SWIZZLED>
struct StoredB {
  typedef typename Storage::Pack Pack;
  typedef MultipliedTile<T, Storage, BK, BN, SWIZZLED && IsSmall<T>::VALUE && Pack::HAS_BIAS> Stored;
  typedef typename Stored::Bits Bits;
  typedef typename Stored::By By;
  enum : uint {
    HAS_BIAS = Pack::HAS_BIAS,
    KEEPS = SWIZZLED && Pack::BITS == 4,  // in registers, what follows from a lane's number; with 8 bits that was slower
    WORDS = Storage::BLOCK / 4,           // of a block
    ALONG = BK / 32,                      // blocks of a column
    PIECES = ALONG * (WORDS / 4),         // of a column: 16 bytes each
    LENGTH = ALONG * WORDS,               // of a column, words
    PITCH = LENGTH + (SWIZZLED ? 0 : 4),
    EACH = (PIECES * BN + TG - 1) / TG,
    BLOCKS = ALONG * BN,
    BLOCKS_EACH = (BLOCKS + TG - 1) / TG,
    OF_FACTORS = BN * PITCH,  // words
    OF_ZEROS = OF_FACTORS + Stored::FACTORS * (sizeof(Factor) / 4),
    OF_HIGH = OF_ZEROS + HAS_BIAS * Stored::FACTORS,
    BYTES = 4 * (OF_HIGH + (Pack::HIGH > 0) * Stored::FACTORS)
  };
  const device uchar* next[EACH];
  uint place, place_of_factor;  // the first piece's in the tile, and the first factor's
  Cursor factor[BLOCKS_EACH];
  By by[BLOCKS_EACH];

  // Where the tile has that word of the column.
  static METAL_FUNC uint at(uint column, uint word) {
    uint key = !SWIZZLED ? 0 : LENGTH == 16 ? column / 2 % 4 : column / 4 % 2;
    return column * PITCH + ((word / 4 ^ key) * 4 + word % 4);
  }
  template <bool WHOLE>
  METAL_FUNC void begin(WeightsAt w, uint k, uint col0, uint tid) thread {
    static_assert(!SWIZZLED || LENGTH == 16 || LENGTH == 8, "columns of 64 bytes or 32");
    static_assert(TG % PIECES == 0, "a thread's pieces are the same of their columns");
    uint word = tid % PIECES * 4;
    place = metal::kept(at(tid / PIECES, word));
#pragma clang loop unroll(full)
    for (uint i = 0; i < EACH; i++)
      next[i] = Stored::at(w, col0 + tid / PIECES + i * (TG / PIECES), k + word / WORDS * 32).values + word % WORDS * 4 -
                Storage::bytes_along(w, ALONG);
    begin_factors<WHOLE>(w, k, col0, tid);
  }
  template <bool WHOLE>
  METAL_FUNC void begin_factors(WeightsAt w, uint k, uint col0, uint tid) thread {
    place_of_factor = tid % ALONG * (Pack::HALVES * BN) + tid / ALONG;
    if (KEEPS) place_of_factor = metal::kept(place_of_factor);
#pragma clang loop unroll(full)
    for (uint j = 0; j < BLOCKS_EACH; j++) {
      uint i = tid + j * TG, k_i = k + i % ALONG * 32;
      factor[j] = Stored::at(w, col0 + i / ALONG, k_i);
      by[j] = Stored::template scales<WHOLE>(w, factor[j], k_i);
    }
  }
  template <bool WHOLE>
  METAL_FUNC void load(WeightsAt w, uint k0, uint col0, threadgroup T* tile, uint tid) thread {
    threadgroup uint* words = reinterpret_cast<threadgroup uint*>(tile);
#pragma clang loop unroll(full)
    for (uint i = 0; i < (WHOLE ? EACH : 0); i++) next[i] += Storage::bytes_along(w, ALONG);
#pragma clang loop unroll(full)
    for (uint i = 0; i < (WHOLE ? EACH : 0); i++)
      if (PIECES * BN % TG == 0 || tid + i * TG < PIECES * BN) metal::copy_later(words + (place + i * (TG / PIECES * PITCH)), next[i]);
    for (uint eight = tid; eight < (WHOLE ? 0 : Stored::EIGHTS); eight += TG) {
      uint column = eight / Stored::ACROSS, along = eight % Stored::ACROSS, k = k0 + along * 8;
      Bits y = Stored::some(w, Stored::at(w, col0 + column, k), k);
      threadgroup uint* to = words + at(column, along / 4 * WORDS + along % 4 * Bits::WORDS);
      to[0] = y.word[0], to[Bits::WORDS - 1] = y.word[Bits::WORDS - 1];
    }
  }
  // What `put_factors` stores to the next step's tile.
  template <bool WHOLE>
  METAL_FUNC void load_factors(WeightsAt w, uint k0, uint tid) thread {
#pragma clang loop unroll(full)
    for (uint j = 0; j < BLOCKS_EACH; j++) {
      uint k = k0 + (tid + j * TG) % ALONG * 32;
      factor[j] = Storage::template moved<1>(w, factor[j], k - BK, ALONG);
      by[j] = Stored::template scales<WHOLE>(w, factor[j], k);
    }
  }
  METAL_FUNC void put(WeightsAt, threadgroup T*, uint) const thread {}
  METAL_FUNC void put_factors(threadgroup T* tile, uint tid) const thread {
    threadgroup uint* words = reinterpret_cast<threadgroup uint*>(tile);
#pragma clang loop unroll(full)
    for (uint j = 0; j < BLOCKS_EACH; j++) {
      uint i = tid + j * TG;
      if (BLOCKS % TG != 0 && i >= BLOCKS) continue;
      typename Stored::OfBlock terms = Stored::OfBlock::of(by[j]);
#pragma clang loop unroll(full)
      for (uint h = 0; h < Pack::HALVES; h++) {
        uint at = place_of_factor + h * BN + j * (TG / ALONG);
        Factor both = terms.factor[h];
        reinterpret_cast<threadgroup float2*>(words + OF_FACTORS)[at] = float2(both.scale, both.rest);
        if (HAS_BIAS) words[OF_ZEROS + at] = as_type<uint>(terms.offset[h]);
        if (Pack::HIGH > 0) words[OF_HIGH + at] = terms.high(2 * h);
      }
    }
  }
  static METAL_FUNC const threadgroup Factor* factors(const threadgroup T* tile) {
    return reinterpret_cast<const threadgroup Factor*>(reinterpret_cast<const threadgroup uint*>(tile) + OF_FACTORS);
  }
  // As they are stored, for eight columns by 32 of k: of column lane / 4 of these, sixteen bytes or two times.
  struct Stood {
    metal::uint4 bits[WORDS / 4];
  };
  static METAL_FUNC Stood stood(const threadgroup T* tile, uint k, uint from, uint beyond, uint lane) {
    const threadgroup uint* words = reinterpret_cast<const threadgroup uint*>(tile);
    Stood x;
#pragma clang loop unroll(full)
    for (uint i = 0; i < WORDS / 4; i++)  // `beyond` is 0 or 8: the key is the same
      x.bits[i] = *reinterpret_cast<const threadgroup metal::uint4*>(words + at(from + lane / 4, k / 32 * WORDS + 4 * i) + beyond * PITCH);
    return x;
  }
  static METAL_FUNC metal::uint4 eight_columns(const threadgroup T* tile, uint k, uint from, uint beyond, uint lane, uint low) {
    return eight_columns(stood(tile, k, from, beyond, lane), tile, k, from, beyond, lane, low);
  }
  // As lanes hold B: eight columns by 32 of k, two products' worth. Of each eight of k a lane has two neighbours.
  static METAL_FUNC metal::uint4 eight_columns(Stood x, const threadgroup T* tile, uint k, uint from, uint beyond, uint lane, uint low) {
    const threadgroup uint* words = reinterpret_cast<const threadgroup uint*>(tile);
    uint column = from + lane / 4;
    metal::half2 zero[Pack::HALVES];
#pragma clang loop unroll(full)
    for (uint h = 0; h < Pack::HALVES; h++)
      zero[h] = HAS_BIAS ? as_type<metal::half2>((words + OF_ZEROS + column)[(k / Stored::EACH + h) * BN + beyond])
                         : offset_of<Pack::ID>(zero_of<Pack::ID>(1.0f, 0.0f));
    uint high[Pack::HALVES];
#pragma clang loop unroll(full)
    for (uint h = 0; h < Pack::HALVES; h++) high[h] = Pack::HIGH > 0 ? (words + OF_HIGH + column)[(k / Stored::EACH + h) * BN + beyond] : 0;
    metal::uint4 y;
#pragma clang loop unroll(full)
    for (uint i = 0; i < 4; i++) {
      uint first = Pack::BITS == 8 ? x.bits[i / 2][i % 2 * 2] : x.bits[0][i],
           second = Pack::BITS == 8 ? x.bits[i / 2][i % 2 * 2 + 1] : first;
      uint own = metal::pick_bytes(first, second, which(lane));
      uint half_index = i / 2 % Pack::HALVES, more = 0;
      if (Pack::HIGH > 0)
        more =
            (metal::pick_bytes(high[half_index], high[half_index], which(lane)) >> i * Pack::HIGH % 4 << 4) & Pack::HIGH_MASK * 0x01000010u;
      y[i] = as_type<uint>(Integers<T>::pair(numbers(own, more, zero[half_index], low)));
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
    return Pack::BITS == 8 ? x + zero : metal::fma(x, as_type<metal::half2>(low ^ 0x2c003cffu), zero);  // 1 and 1 / 16
  }
};

template <class T, class Storage, int BK, int BN, int TG>
struct QuantizedB<T, Storage, BK, BN, TG, true> : StoredB<T, Storage, BK, BN, TG, false> {};

// Those of wgmma. Of weights with a bias in bfloat they have the sums of A's rows, too: of each part of k with one factor, or of 64. A
// lane's rows, two of each eight, are neighbours.
template <class T, class Storage, class S>
struct TurnedB : StoredB<T, Storage, S::BK, S::BN, S::TG, true> {
  typedef StoredB<T, Storage, S::BK, S::BN, S::TG, true> Base;
  typedef StoredB<T, Storage, S::BK, S::BN, S::THREADS - S::TG, true> OfOthers;  // its factors, by simdgroups that multiply nothing
  enum : uint {
    IN_ROWS = !Storage::IS_CANONICAL,
    BYTES_COPIED = 4 * S::BN * Base::LENGTH,  // tma.h
    PER_BYTE = Base::Pack::PER_BYTE,
    // With 24 the compiler spilled: loads of upper bits, which waited for each other, and terms of two scales with a bias, or in two
    // halves. Sums of rows need 40, too.
    NEEDS_MORE = Base::Pack::HIGH > 0 || (Base::HAS_BIAS && Base::Pack::HALVES > 1) || int(Base::Stored::SCALING) == IN_TWO,
    SUMS_BY_OTHERS = RowSums<S, Base>::ARE_BY_OTHERS,
    REGISTERS_OF_OTHERS = SUMS_BY_OTHERS || (NEEDS_MORE && OfOthers::BLOCKS_EACH > 1) ? 40 : 24,
    ROWS = S::BM,
    OF_LANES = ROWS / 4 + 4,  // from one lane's rows to the next one's: in other banks
    OF_SUMS = Base::BYTES,
    PARTS = S::BK / Base::Stored::EACH,
    BYTES = OF_SUMS + (int(Base::Stored::SCALING) == WITH_REST) * PARTS * 4 * OF_LANES * sizeof(float)
  };

  static METAL_FUNC uint place(uint part, uint row) { return (part * 4 + row % 8 / 2) * OF_LANES + row / 8 * 2 + row % 2; }
  static METAL_FUNC const threadgroup float* sums(const threadgroup T* tile, uint part, uint row) {
    return reinterpret_cast<const threadgroup float*>(tile + OF_SUMS / sizeof(T)) + place(part, row);
  }
  // Adds up sixteen rows from `row` on, by products with ones. To be read after a barrier.
  template <class A>
  static METAL_FUNC void add_rows(const threadgroup T* a, threadgroup T* b, bool one_factor, uint row, uint lane) {
    static_assert(ROWS * 32 == 16 * S::TG && S::BK == 64, "of each simdgroup sixteen rows, four times 16 of k");
    metal::uint4 x[4];
    metal::float4 sum[PARTS];
#pragma clang loop unroll(full)
    for (uint i = 0; i < PARTS; i++) sum[i] = metal::float4(0.0f);
#pragma clang loop unroll(full)
    for (uint i = 0; i < 4; i++) x[i] = metal::load_matrices(a + A::at(row + lane % 16, 16 * i + lane / 16 * 8));
#pragma clang loop unroll(full)
    for (uint i = 0; i < 4 / PARTS; i++)
#pragma clang loop unroll(full)
      for (uint part = 0; part < PARTS; part++)  // by turns: no product waits for the one before
        sum[part] = metal::mma_16x8x16<T>(sum[part], x[part * (4 / PARTS) + i], metal::uint2(ones<T>()));
    if (lane % 4 > 0) return;  // four lanes have the same sums
    threadgroup float* own = reinterpret_cast<threadgroup float*>(b + OF_SUMS / sizeof(T)) + place(0, row + lane / 4);
#pragma clang loop unroll(full)
    for (uint i = 0; i < 2; i++) {  // rows eight apart
      float of[PARTS];
#pragma clang loop unroll(full)
      for (uint part = 0; part < PARTS; part++) of[part] = i > 0 ? sum[part].z : sum[part].x;
      own[i * place(0, 8)] = one_factor ? of[0] + of[1] : of[0];
      if (one_factor) continue;
#pragma clang loop unroll(full)
      for (uint part = 1; part < PARTS; part++) own[i * place(0, 8) + place(part, 0)] = of[part];
    }
  }
};
template <class S, class B>
struct RowSums<S, B, true> {
  enum { ARE_BY_OTHERS = 1 };
  static_assert(2 * S::BM == S::THREADS - S::TG, "of each simdgroup sixteen rows");
  template <class Loads, class Sizes>
  static METAL_FUNC void put(thread Loads& loads, threadgroup Sizes& memory, uint stage, WeightsAt w, uint simdgroup, uint lane) {
    loads.wait(memory, stage);
    B::template add_rows<typename Loads::A>(memory.tile_a(stage), memory.tile_b(stage), adds_64(w), 16 * simdgroup, lane);
  }
};
#endif
