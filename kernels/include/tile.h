// A tile of a matrix in threadgroup memory, and how it comes there.
#pragma once
#include <metal_stdlib>

#include "octet.h"

// Whether a simdgroup's products of TM x TN times 8 x 8 are what ../cuda/products.h makes of them.
template <class T, int TM, int TN>
struct OnTensorCores {
#ifdef __METALMM_CUDA__
  enum { VALUE = sizeof(T) == 2 && TM % 2 == 0 && TN % 2 == 0 };
#else
  enum { VALUE = 0 };
#endif
};

// R x C of a matrix, line by line as it lies in memory: by rows, or TRANSPOSED, by columns. Lines are off the power of two, for fewer bank
// conflicts; or, SWIZZLED, their eights change places, so that eight neighbouring lines have an eighth of the banks each at any one.
template <int R, int C, bool BY_COLUMNS, bool SWIZZLES>
struct Tile {
  enum : uint {
    TRANSPOSED = BY_COLUMNS,
    SWIZZLED = SWIZZLES,
    LINES = BY_COLUMNS ? C : R,
    LENGTH = BY_COLUMNS ? R : C,
    ACROSS = LENGTH / 8,
    PITCH = LENGTH + (SWIZZLES ? 0 : 8),
    SIZE = LINES * PITCH
  };
  static METAL_FUNC uint of_eight(uint line, uint eight) {
    uint key = ACROSS % 8 == 0 ? line % 8 : ACROSS % 4 == 0 ? line / 2 % 4 : ACROSS % 2 == 0 ? line / 4 % 2 : 0;
    return line * PITCH + (SWIZZLED ? eight ^ key : eight) * 8;
  }
  // Of the ith eight that thread `tid` of TG brings. Where TG threads have eight lines or a multiple, keys are alike.
  template <uint TG>
  static METAL_FUNC uint place(uint tid, uint i) {
    if (TG % ACROSS == 0 && TG / ACROSS % 8 == 0) return of_eight(tid / ACROSS, tid % ACROSS) + i * (TG / ACROSS * PITCH);
    return of_eight((tid + i * TG) / ACROSS, (tid + i * TG) % ACROSS);
  }
  static METAL_FUNC uint at(uint row, uint col) {
    uint line = TRANSPOSED ? col : row, along = TRANSPOSED ? row : col;
    return of_eight(line, along / 8) + along % 8;
  }
};

// What goes to threadgroup memory straight, while its thread goes on: ../cuda/products.h. Else by way of registers, one step ahead.
template <bool YES>
struct TileCopies {
  enum : uint { MOST_STAGES = 2 };  // tiles: one that is multiplied, and those on their way
  template <class T>
  static METAL_FUNC void copy(threadgroup uint*, const device T*, bool) {}
  static METAL_FUNC uint kept(uint x) { return x; }  // a number that is not worked out anew at each step
  static METAL_FUNC void close() {}
  template <uint AHEAD>
  static METAL_FUNC void wait() {}
  static METAL_FUNC void show() {}
  template <class T>
  static METAL_FUNC bool on_vector(const device T*) {
    return false;  // MSL does not say where a pointer stands
  }
};

// What one of TG threads brings of a tile: eights of its lines. Straight ones at equal distances need one address, unless there is ROOM in
// registers for one each: with them most dense tiles on wgmma are faster (docs/lab/cuda.md).
template <class T, class Tile, int TG, bool ROOM = false>
struct TileLoads {
  enum : uint {
    STRAIGHT = Tile::SWIZZLED,
    EIGHTS = Tile::LINES * Tile::ACROSS,
    EACH = (EIGHTS + TG - 1) / TG,
    LINES_APART = TG / Tile::ACROSS,
    ONE = STRAIGHT && !ROOM && TG % Tile::ACROSS == 0 && LINES_APART % 8 == 0,
    ADDRESSES = ONE ? 1 : EACH
  };
  OctetBits<T> bits[STRAIGHT ? 1 : EACH];
  const device T* next[ADDRESSES];
  ulong apart;
  uint place, lines_left;  // of ONE, the first eight's in the tile, and from its line to the last

  // From element from.x of line from.y of a matrix of `lines` on. WHOLE, here and below: lines begin on vectors and do not end in the tile,
  // and K does not. Nobody stores what becomes of lines past the last: straight they are zeros, and else others are taken, from the first
  // on. Were they one line, all threadgroups would wait for the part of the cache that has it.
  template <bool WHOLE>
  METAL_FUNC void begin(const device T* source, uint ld, uint2 from, uint lines, uint tid) thread {
    uint first = from.y + tid / Tile::ACROSS;
    apart = ulong(LINES_APART) * ld;
    place = TileCopies<ONE>::kept(Tile::template place<TG>(tid, 0));
    lines_left = TileCopies<ONE>::kept(metal::max(lines, first) - first);
#pragma clang loop unroll(full)
    for (uint i = 0; i < ADDRESSES; i++) {
      uint eight = tid + i * TG, line = from.y + eight / Tile::ACROSS;
      next[i] = source + (WHOLE ? line % lines : line) * ld + (from.x + eight % Tile::ACROSS * 8);
    }
  }
  // left: of the matrix, elements and lines from the tile's first on; zeros beyond. step: to the next tile.
  template <bool WHOLE>
  METAL_FUNC void load(uint2 left, uint step, threadgroup T* tile, uint tid) thread {
#pragma clang loop unroll(full)
    for (uint i = 0; i < EACH; i++) {
      uint eight = tid + i * TG, line = eight / Tile::ACROSS, along = eight % Tile::ACROSS * 8;
      if (EIGHTS % TG != 0 && eight >= EIGHTS) continue;
      threadgroup T* to = tile + (ONE ? place + i * (LINES_APART * Tile::PITCH) : Tile::template place<TG>(tid, i));
      const device T* p = next[ONE ? 0 : i] + (ONE ? i * apart : 0);
      if (!ONE) next[i] += step;
      if (STRAIGHT && WHOLE) {
        TileCopies<STRAIGHT>::copy(reinterpret_cast<threadgroup uint*>(to), p, ONE ? i * LINES_APART < lines_left : line < left.y);
        continue;
      }
      OctetBits<T> x;
      if (WHOLE)
        x = load_bits(p);
      else
        x = bits_of(load_some(p, line < left.y && along < left.x ? left.x - along : 0));
      if (STRAIGHT)
        store_bits(to, x);
      else
        bits[i] = x;
    }
    if (ONE) next[0] += step;
  }
  METAL_FUNC void put(threadgroup T* tile, uint tid) const thread {
#pragma clang loop unroll(full)
    for (uint i = 0; i < (STRAIGHT ? 0 : EACH); i++)
      if (EIGHTS % TG == 0 || tid + i * TG < EIGHTS) store_bits(tile + Tile::template place<TG>(tid, i), bits[i]);
  }
};
