// What of A and B comes to threadgroup memory for a step of a GEMM.
#pragma once
#include <metal_stdlib>

#include "params.h"
#include "products.h"
#include "results.h"
#include "tile.h"

// Threadgroup memory: tiles, then results.
template <class T, class A, class B, class S>
struct Memory {
  enum : uint {
    OF_B = A::SIZE * sizeof(T),  // bytes
    TILES = S::GROUPED ? (OF_B + B::BYTES + 1023) / 1024 * 1024 : OF_B + B::BYTES,
    MOST = TileCopies<A::SWIZZLED>::MOST_STAGES,
    ROOM = (A::SWIZZLED ? 48 * 1024 : 32 * 1024) / TILES,
    STAGES = S::STAGES > 0 ? S::STAGES
    : ROOM == 0            ? 1
    : ROOM < MOST          ? ROOM
                           : MOST,
    // Stages that may be read: this step's, and of groups the last one's, where products go on or what a bias adds comes a step later.
    IN_USE = S::GROUPED && int(B::Stored::SCALING) != SCALED ? 2 : 1,
    AHEAD = A::SWIZZLED ? STAGES - IN_USE : 1,
    METALMM_CLUSTER = S::SPLIT,
    METALMM_BESIDE = S::BESIDE,
    IS_MANY = Cluster<S::SPLIT>::IS_MANY,
    COLUMNS = 8 * S::TN / (IS_MANY ? S::SPLIT : 1),      // of results that a simdgroup stores
    BAND = S::TG / 32 * 8 * S::PITCH_D * sizeof(float),  // bytes: eight rows of results of each simdgroup
    // Bands that are stored between two barriers: as many as fit where tiles were, and give a lane at most eight results. A cluster's are
    // there all at once.
    FIT = IS_MANY ? 4 : STAGES * TILES / BAND,
    USEFUL = 32 * S::WK / COLUMNS,
    BANDS = S::TM % 4 == 0 && FIT >= 4 && USEFUL >= 4 ? 4
    : S::TM % 2 == 0 && FIT >= 2 && USEFUL >= 2       ? 2
                                                      : 1,
    ROWS_OF_RESULTS = 8 * (IS_MANY ? S::TM : BANDS),  // in threadgroup memory at once
    RESULTS = ROWS_OF_RESULTS / 8 * BAND,
    OF_READY = STAGES * TILES > RESULTS ? STAGES * TILES : RESULTS,
    BYTES = OF_READY + (S::GROUPED ? (STAGES + 1) / 2 * 16 : 0)
  };
  static_assert(!A::SWIZZLED || STAGES > uint(IN_USE), "what is brought a step ahead needs a stage that no product reads");
  float4 all[BYTES / 16];

  METAL_FUNC threadgroup T* tile_a(uint stage) threadgroup { return reinterpret_cast<threadgroup T*>(all) + stage * (TILES / sizeof(T)); }
  METAL_FUNC threadgroup T* tile_b(uint stage) threadgroup { return tile_a(stage) + OF_B / sizeof(T); }
  // The stage's mbarrier, of ../cuda/tma.h.
  METAL_FUNC threadgroup ulong* ready(uint stage) threadgroup { return reinterpret_cast<threadgroup ulong*>(all + OF_READY / 16) + stage; }
};

// Registers that simdgroups which multiply nothing give to those that multiply: ../cuda/tma.h.
template <class S, class B, bool SHARED = (S::THREADS > S::TG)>
struct Registers {
  static METAL_FUNC void take() {}
  static METAL_FUNC void give() {}
};

// Whether whole tiles come by TMA: ../cuda/tma.h. Canonical blocks do not, for a column's are apart.
template <class S, class B, bool GROUPED = (S::GROUPED > 0)>
struct ByTma {
  enum { VALUE = 0 };
};
#ifdef __METALMM_CUDA__
template <class S, class B>
struct ByTma<S, B, true> {
  enum { VALUE = metal::HAS_TMA && B::IN_ROWS };
};
#endif

// What a thread loads for one step.
template <bool TA, bool WHOLE, class S, class B, class T, bool BY_TMA = WHOLE && ByTma<S, B>::VALUE>
struct StepLoads {
  typedef Tile<S::BM, S::BK, TA, OnTensorCores<T, S::TM, S::TN>::VALUE> A;
  typedef Memory<T, A, B, S> Sizes;
  typedef TileCopies<A::SWIZZLED> Copies;
  enum : uint { K = S::BK, APART = 0, TILES_FIRST = 0 };  // APART: simdgroups that multiply nothing bring all; TILES_FIRST: ../cuda/tma.h
  TileLoads<T, A, S::TG, int(S::GROUPED) == TOGETHER> of_a;
  B of_b;

  static METAL_FUNC bool is_whole(thread const Task<T>& task, constant MatmulParams& p) {
    return a_in_vectors(p, 8) && (!TA || task.row0 + S::BM <= p.m) && B::Stored::is_whole(p, task.col0);
  }
  METAL_FUNC void begin(thread const Task<T>& task, constant MatmulParams& p, uint k, threadgroup Sizes&) thread {
    metal::uint2 from = {k, task.row0};
    of_a.template begin<WHOLE>(task.a, p.lda, TA ? from.yx : from, TA ? p.k : p.m, task.index());
    of_b.template begin<WHOLE>(task.w, k, task.col0, task.index());
  }
  METAL_FUNC void load(thread const Task<T>& task, constant MatmulParams& p, uint k, threadgroup Sizes& memory, uint stage) thread {
    metal::uint2 left = {p.k - k, p.m - task.row0};
    of_a.template load<WHOLE>(TA ? left.yx : left, S::BK * (TA ? p.lda : 1), memory.tile_a(stage), task.index());
    of_b.template load<WHOLE>(task.w, k, task.col0, memory.tile_b(stage), task.index());
  }
  METAL_FUNC void close() thread { Copies::close(); }
  METAL_FUNC void put_factors(thread const Task<T>& task, threadgroup Sizes& memory, uint stage) const thread {
    of_b.put_factors(memory.tile_b(stage), task.index());
  }
  METAL_FUNC void load_factors(thread const Task<T>& task, uint k) thread { of_b.template load_factors<WHOLE>(task.w, k, task.index()); }
  // Until there is what the thread brings of the stage's tiles; after a barrier all is.
  METAL_FUNC void finish(thread const Task<T>& task, threadgroup Sizes& memory, uint stage) thread {
    Copies::template wait<Sizes::AHEAD>();
    put(task, memory, stage);
    if (S::GROUPED) Copies::show();
  }
  METAL_FUNC void wait(threadgroup Sizes&, uint) thread {}

 private:
  METAL_FUNC void put(thread const Task<T>& task, threadgroup Sizes& memory, uint stage) const thread {
    of_a.put(memory.tile_a(stage), task.index());
    of_b.put(task.w, memory.tile_b(stage), task.index());
  }
};
