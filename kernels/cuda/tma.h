// Whole tiles by TMA (compute capability 9.0): simdgroups that multiply nothing bring them, while others multiply. One thread asks for A's
// tile and B's. They come swizzled, as Tile and StoredB have them. A stage's mbarrier, `ready`, says that both have come: those that
// multiply wait for its parity, `turn`. That a stage was read no mbarrier says, but the barrier of each step, as Memory's IN_USE counts.
#pragma once
#include "../include/step_loads.h"

#ifdef __METALMM_CUDA__
// All threads of a core begin with equal parts of its 65,536 registers. Those that bring keep LEFT and give the others the rest.
template <class S, class B>
struct Registers<S, B, true> {
  // EACH follows from the launch bounds, whatever the code needs: were it less, who takes would wait forever.
  enum : uint {
    BESIDE = S::BESIDE > 0 ? S::BESIDE : 1,
    EACH = 65536 / (BESIDE * S::THREADS) / 8 * 8,
    LEFT = B::REGISTERS_OF_OTHERS,
    TAKEN = EACH + (EACH - LEFT) * (S::THREADS - S::TG) / S::TG
  };
  static_assert(EACH <= TAKEN && TAKEN <= 256 && TAKEN % 8 == 0, "setmaxnreg takes multiples of 8, and no fewer than a thread has");
  static METAL_FUNC void take() { metal::take_registers<TAKEN>(); }
  static METAL_FUNC void give() { metal::give_registers<LEFT>(); }
};

template <class S, class B, class T>
struct StepLoads<false, true, S, B, T, true> {
  typedef Tile<S::BM, S::BK, false, true> A;
  typedef Memory<T, A, B, S> Sizes;
  // TILES_FIRST: nobody waits for scales before tiles are asked for. With a bias besides, 128 x 128 took longer so.
  enum : uint { K = S::BK, APART = 1, TILES_FIRST = int(B::Stored::SCALING) == SCALED, STAGES = Sizes::STAGES };
  typename B::OfOthers of_b;
  uint turn = 0;

  static METAL_FUNC constant metal::TileMaps& maps(thread const Task<T>& task) {
    return *reinterpret_cast<constant metal::TileMaps*>(task.maps);
  }
  // Of a thread among those that bring; the first asks for tiles.
  static METAL_FUNC uint index(thread const Task<T>& task) { return task.index() - S::TG; }
  // Lines past the edge are zeros, or old numbers in rows whose results nobody stores. Where K ends in a tile it is not whole.
  static METAL_FUNC bool is_whole(thread const Task<T>& task, constant MatmulParams&) { return maps(task).there; }
  METAL_FUNC void begin(thread const Task<T>& task, constant MatmulParams&, uint k, threadgroup Sizes& memory) thread {
    if (index(task) == 0) {
#pragma clang loop unroll(full)
      for (uint stage = 0; stage < STAGES; stage++) metal::begin_ready(memory.ready(stage));
      metal::show_group();
    }
    of_b.template begin_factors<true>(task.w, k, task.col0, index(task));
  }
  METAL_FUNC void load(thread const Task<T>& task, constant MatmulParams& p, uint k, threadgroup Sizes& memory, uint stage) thread {
    constant metal::TileMaps& of = maps(task);
    threadgroup ulong* ready = memory.ready(stage);
    if (index(task) == 0) {
      uint batch_a = p.stride_a > 0 ? task.batch : 0;
      if (of.rows_of_a == S::BM) {  // one copy: a loop seemed slower, on another loan (docs/lab/cuda.md)
        metal::expect_tiles(ready, A::SIZE * sizeof(T));
        metal::copy_tile(memory.tile_a(stage), of.a, k, task.row0, batch_a, ready);
      } else {
        uint rows = task.row0 + S::BM <= p.m ? uint(S::BM) : of.rows_of_last_a;
        metal::expect_tiles(ready, rows * (S::BK * sizeof(T)));
        for (uint row = 0; row < rows; row += of.rows_of_a)
          metal::copy_tile(memory.tile_a(stage) + row * S::BK, of.a, k, task.row0 + row, batch_a, ready);
      }
      metal::expect_tiles(ready, B::BYTES_COPIED);
      metal::copy_tile(memory.tile_b(stage), of.b, k / B::PER_BYTE, task.col0, p.stride_b > 0 ? task.batch : 0, ready);
    }
  }
  METAL_FUNC void close() thread {}
  METAL_FUNC void put_factors(thread const Task<T>& task, threadgroup Sizes& memory, uint stage) const thread {
    of_b.put_factors(memory.tile_b(stage), index(task));
  }
  METAL_FUNC void load_factors(thread const Task<T>& task, uint k) thread { of_b.template load_factors<true>(task.w, k, index(task)); }
  METAL_FUNC void finish(thread const Task<T>&, threadgroup Sizes&, uint) thread {}
  METAL_FUNC void wait(threadgroup Sizes& memory, uint stage) thread {
    metal::wait_for_tiles(memory.ready(stage), turn);
    if (stage + 1 == STAGES) turn ^= 1;
  }
};
#endif
