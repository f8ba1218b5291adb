// Whole tiles by TMA (compute capability 9.0). One thread asks for A's tile and one for B's. They come swizzled, as Tile and StoredB have
// them. A stage has an mbarrier, `ready`; `turn` is its parity, for which all threads wait.
#pragma once
#include "../include/step_loads.h"

#ifdef __METALMM_CUDA__
template <class S, class B, class T>
struct StepLoads<false, true, S, B, T, true> {
  typedef Tile<S::BM, S::BK, false, true> A;
  typedef Memory<T, A, B, S> Sizes;
  enum : uint { STAGES = Sizes::STAGES, SIMDGROUPS = S::TG / 32 };
  B of_b;  // its factors
  uint turn;

  static METAL_FUNC constant metal::TileMaps& maps(thread const Task<T>& task) {
    return *reinterpret_cast<constant metal::TileMaps*>(task.maps);
  }
  // Lines past the edge come as zeros: each tile is whole, but where K ends in it.
  static METAL_FUNC bool is_whole(thread const Task<T>& task, constant MatmulParams&) { return maps(task).there; }
  METAL_FUNC void begin(thread const Task<T>& task, constant MatmulParams&, uint k, threadgroup Sizes& memory) thread {
    turn = 0;
    of_b.template begin<true>(task.w, k, task.col0, task.index());
    if (task.index() == 0) {
#pragma clang loop unroll(full)
      for (uint stage = 0; stage < STAGES; stage++) metal::begin_ready(memory.ready(stage));
      metal::show_group();
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
  // Simdgroups take turns, for a copy takes its thread a while.
  METAL_FUNC void load(thread const Task<T>& task, constant MatmulParams& p, uint k, threadgroup Sizes& memory, uint stage) thread {
    constant metal::TileMaps& of = maps(task);
    threadgroup ulong* ready = memory.ready(stage);
    if (task.index() == stage % SIMDGROUPS * 32) {
      metal::expect_tiles(ready, A::SIZE * sizeof(T));
      metal::copy_tile(memory.tile_a(stage), of.a, k, task.row0, p.stride_a > 0 ? task.batch : 0, ready);
    }
    if (task.index() == (stage + SIMDGROUPS / 2) % SIMDGROUPS * 32) {
      metal::expect_tiles(ready, B::BYTES_COPIED);
      metal::copy_tile(memory.tile_b(stage), of.b, k / B::PER_BYTE, task.col0, p.stride_b > 0 ? task.batch : 0, ready);
    }
  }
  METAL_FUNC void close() thread {}
  METAL_FUNC void wait(thread const Task<T>&, threadgroup Sizes& memory, uint stage) thread {
    metal::wait_for_tiles(memory.ready(stage), turn);
    if (stage + 1 == STAGES) turn ^= 1;
  }
};
#endif
