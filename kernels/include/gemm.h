// A threadgroup's tile of a product: what comes to threadgroup memory, the loop over K, and how results leave.
#pragma once
#include <metal_simdgroup_matrix>
#include <metal_stdlib>

#include "../cuda/products.h"
#include "../cuda/tma.h"
#include "dense_b.h"
#include "next.h"
#include "products.h"
#include "quantized_b.h"
#include "results.h"
#include "step_loads.h"
#include "weights.h"

// BM x BN outputs of a threadgroup, BK of k at a time; WM x WN simdgroups for each of WK parts of these k.
template <int M, int N, int K, int M_SIMDGROUPS, int N_SIMDGROUPS, int K_SIMDGROUPS>
struct Blocks {
  enum : uint {
    BM = M,
    BN = N,
    BK = K,
    WM = M_SIMDGROUPS,
    WN = N_SIMDGROUPS,
    WK = K_SIMDGROUPS,
    TG = WM * WN * WK * 32,
    THREADS = TG,      // and those that bring tiles
    TM = BM / WM / 8,  // 8 x 8 tiles of a simdgroup
    TN = BN / WN / 8,
    PITCH_D = TN * 8 + 4,
    GROUPED = 0,  // or the way in which simdgroups multiply by fours
    STAGES = 0,   // tiles in threadgroup memory: as many as there is room for
    SPLIT = 1,    // threadgroups that share K
    ONE_SUM = 0,  // that waits for its factor: registers have no room for more
    BESIDE = 0    // threadgroups that a core has registers for; 0: as many as it turns out
  };
  // A simdgroup's first row and column of the tile, and k of its step.
  static METAL_FUNC metal::uint3 first(uint simdgroup) {
    return {simdgroup / WN % WM * TM * 8, simdgroup % WN * TN * 8, simdgroup / (WM * WN) * (K / WK)};
  }
};
// Blocks whose simdgroups multiply by fours; four others bring tiles. SPLIT threadgroups are a cluster (../cuda/groups.h).
template <Way WAY, int M, int N, int M_SIMDGROUPS, int N_SIMDGROUPS, int STAGES_, int SPLIT_>
struct Fours : Blocks<M, N, 64, M_SIMDGROUPS, N_SIMDGROUPS, 1> {
  enum : uint {
    GROUPED = WAY,
    STAGES = STAGES_,
    SPLIT = SPLIT_,
    THREADS = 2 * M + 128,
    ONE_SUM = M <= 64 && STAGES_ <= 4,
    BESIDE = ONE_SUM ? 3
    : M <= 64        ? 2
                     : 0
  };
};
// 64 rows by N at an instruction.
template <int M, int N, int STAGES, int SPLIT>
struct Groups : Fours<TOGETHER, M, N, M / 16, 1, STAGES, SPLIT> {};
// The same of quantized weights, which are the left operand: an instruction has 64 of B's columns, 16 of each simdgroup, by rows of A.
template <int M, int N, int STAGES, int SPLIT>
struct Turned : Fours<TURNED, M, N, M / N, N / 16, STAGES, SPLIT> {};
// What multiplies: as the blocks say, but TURNED_IN_TWO where B's weights are sums of two halves.
template <class T, class S, class B>
struct SumsOf {
  enum { ON_TENSOR_CORES = OnTensorCores<T, S::TM, S::TN>::VALUE, AS_TWO = int(B::Stored::SCALING) == IN_TWO };
  typedef Products<T, S::TM, S::TN, AS_TWO ? int(TURNED_IN_TWO) : S::GROUPED ? int(S::GROUPED) : int(ON_TENSOR_CORES)> Type;
};

// Which tile a threadgroup has: its column and row. Threadgroups begin in the order of x, then y. Sixteen rows of one column come first,
// then those of the next column. So threadgroups that run together share A's and B's lines in the cache.
template <class S>
METAL_FUNC metal::uint2 tile_of(constant MatmulParams& p, metal::uint3 group) {
  uint columns = (p.n - 1) / S::BN + 1, rows = (p.m - 1) / S::BM + 1, x = group.x / S::SPLIT;
  if (columns >= 1u << 27) return {x, group.y};  // sixteen rows of them would pass 32 bits
  uint number = group.y * columns + x, band = number / (16 * columns), at = number - 16 * columns * band;
  uint high = metal::min(16u, rows - 16 * band);
  return {at / high, 16 * band + at % high};
}

// One place in the text for all barriers of the loops: simdgroups that meet at two are an error on device cpu.
METAL_FUNC void meet_all() { metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup); }

// Of the steps from k to `end`, what is asked for before the first.
template <class Loads, class T>
METAL_FUNC void load_first(thread Loads& loads, thread const Task<T>& task, constant MatmulParams& p, uint k, uint end,
                           threadgroup typename Loads::Sizes& memory) {
  constexpr uint AHEAD = Loads::Sizes::AHEAD, BK = Loads::K;
  loads.begin(task, p, k, memory);
#pragma clang loop unroll(full)
  for (uint d = 0; d < AHEAD; d++) {
    if (k + d * BK < end) loads.load(task, p, k + d * BK, memory, d % Loads::Sizes::STAGES);
    loads.close();
  }
  if (k < end) loads.put_factors(task, memory, 0);
  if (k + BK < end) loads.load_factors(task, k + BK);
}
// In the step of k: the next step's factors are stored. Those of the step after it are asked for, and tiles of the step that is AHEAD.
template <class Loads, class T>
METAL_FUNC void load_next(thread Loads& loads, thread const Task<T>& task, constant MatmulParams& p, uint k, uint end,
                          threadgroup typename Loads::Sizes& memory, uint stage, uint next) {
  constexpr uint AHEAD = Loads::Sizes::AHEAD, BK = Loads::K, STAGES = Loads::Sizes::STAGES;
  uint later = stage + AHEAD < STAGES ? stage + AHEAD : stage + AHEAD - STAGES;
  bool more = k + AHEAD * BK < end;
  if (Loads::TILES_FIRST && more) loads.load(task, p, k + AHEAD * BK, memory, later);
  if (k + BK < end) loads.put_factors(task, memory, next);
  if (k + 2 * BK < end) loads.load_factors(task, k + 2 * BK);
  if (!Loads::TILES_FIRST && more) loads.load(task, p, k + AHEAD * BK, memory, later);
  loads.close();
}

// From k to `end`; WHOLE: all of it is.
template <bool TA, bool WHOLE, class S, class B, class T>
METAL_FUNC void add_steps(thread const Task<T>& task, constant MatmulParams& p, uint k, uint end,
                          threadgroup typename StepLoads<TA, WHOLE, S, B, T>::Sizes& memory, thread typename SumsOf<T, S, B>::Type& sums) {
  typedef StepLoads<TA, WHOLE, S, B, T> Loads;
  typedef TileCopies<Loads::A::SWIZZLED> Copies;
  typedef TileStep<typename Loads::A, B, S::BK / S::WK, S::ONE_SUM> Each;
  constexpr uint STAGES = Loads::Sizes::STAGES;
  metal::uint3 from = S::first(task.me.simdgroup);
  uint lane = task.me.lane;
  if (B::KEEPS) from.y = Copies::kept(from.y), lane = Copies::kept(lane);
  Loads loads;
  if (!Loads::APART) load_first(loads, task, p, k, end, memory);
  for (uint stage = 0, next; k < end; k += S::BK, stage = next) {
    loads.finish(task, memory, stage);
    meet_all();
    loads.wait(memory, stage);
    // Products begin here and go on while what comes next is asked for. In `add`, WITH_REST, A's rows may be added up, too.
    sums.template begin<Each>(memory.tile_a(stage), memory.tile_b(stage), from, lane, task.w);
    next = stage + 1 == STAGES ? 0 : stage + 1;
    if (!Loads::APART) load_next(loads, task, p, k, end, memory, stage, next);
    sums.template add<Each>(memory.tile_a(stage), memory.tile_b(stage), from, task.place, lane, task.w);
    if (STAGES == 1) meet_all();
  }
  if (S::GROUPED && Each::SCALING == WITH_REST) meet_all();
  sums.template settle<Each>(from, lane, task.w);
  meet_all();
}
// The same steps of simdgroups that multiply nothing. They bring all where tiles come by TMA. They meet the others as often: barriers are
// as many as in add_steps, which has more than one stage then.
template <bool TA, bool WHOLE, class S, class B, class T>
METAL_FUNC void bring_steps(thread const Task<T>& task, constant MatmulParams& p, uint k, uint end,
                            threadgroup typename StepLoads<TA, WHOLE, S, B, T>::Sizes& memory) {
  typedef StepLoads<TA, WHOLE, S, B, T> Loads;
  Loads loads;
  if (Loads::APART) load_first(loads, task, p, k, end, memory);
  for (uint stage = 0, next; k < end; k += S::BK, stage = next) {
    meet_all();
    next = stage + 1 == Loads::Sizes::STAGES ? 0 : stage + 1;
    if (Loads::APART) load_next(loads, task, p, k, end, memory, stage, next);
    // Sums of A's rows are read a step later: Memory's IN_USE keeps the stage.
    RowSums<S, B>::put(loads, memory, stage, task.w, task.me.simdgroup - S::TG / 32, task.me.lane);
  }
  // The others read the last step's sums in `settle`.
  if (B::Stored::SCALING == WITH_REST) meet_all();
  meet_all();
}

// Whether the next kernel begins as this one ends, rather than behind its last load: of tiles of 32 or 64 rows, where a row of calls is
// faster so. Dense tiles do without a cluster; those of `gemm` where A has one row of them. Dense clusters, and quantized ones of two, do
// where sums are long and a part of the next kernel's threadgroups, not all, would find room beside them. The rest would begin late, and
// the kernel after it waits for them. The bounds are for 132 cores (docs/lab/cuda.md). With another number of cores they cost time alone.
template <class S, class B, uint BYTES>
METAL_FUNC bool lets_next_last(constant MatmulParams& p) {
  constexpr bool DENSE = B::Stored::SCALING == PLAIN, TWO_FIT_A_CORE = BYTES <= 113u << 10;
  if (S::BM <= 16 || S::BM > 64) return false;
  if (S::SPLIT == 1) return DENSE && (S::GROUPED || p.m <= S::BM);
  uint groups = ((p.m - 1) / S::BM + 1) * ((p.n - 1) / S::BN + 1) * p.batch * S::SPLIT;
  if (!DENSE) return S::SPLIT == 2 && p.k >= 8192 && groups > 66 && groups < 129;
  return TWO_FIT_A_CORE ? p.k >= 4096 && groups > 112 && groups < 212 : p.k >= 8192 && groups > 66 && groups < 117;
}

template <bool TA, class S, class B, class T>
METAL_FUNC void multiply(const device T* a, WeightsAt w, Output<T> to, constant MatmulParams& p, metal::uint3 group, Thread me,
                         threadgroup typename StepLoads<TA, true, S, B, T>::Sizes& memory, constant void* maps = nullptr) {
  typedef Cluster<S::SPLIT> Own;
  typedef typename StepLoads<TA, true, S, B, T>::Sizes Sizes;
  constexpr uint TM = S::TM, PITCH_D = S::PITCH_D, COLUMNS = Sizes::COLUMNS, BANDS = Sizes::BANDS;
  uint rank = group.x % S::SPLIT, begin = 0, last = p.k;
  if (!Own::IS_MANY && rank > 0) return;
  metal::uint2 tile = tile_of<S>(p, group);
  uint batch = group.z, row0 = tile.y * S::BM, col0 = tile.x * S::BN, lane = me.lane, simdgroup = me.simdgroup;
  Task<T> task = {a + batch * p.stride_a, w, row0, col0, me, {0, 0}, batch, maps};
  if (B::Stored::SCALING != PLAIN && !S::GROUPED) {
    task.place = place_of(reinterpret_cast<threadgroup float*>(memory.all) + 64 * simdgroup, lane);
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
  bool whole = StepLoads<TA, true, S, B, T>::is_whole(task, p);
  if (Own::IS_MANY) {
    uint each = ((p.k - 1) / (S::BK * S::SPLIT) + 1) * S::BK;
    begin = metal::min(rank * each, p.k), last = metal::min(begin + each, p.k);
  }
  uint end = whole ? metal::max(begin, last / S::BK * S::BK) : begin;
  if (S::THREADS > S::TG && simdgroup >= S::TG / 32) {
    Registers<S, B>::give();
    bring_steps<TA, true, S, B>(task, p, begin, end, memory);
    bring_steps<TA, false, S, B>(task, p, end, last, memory);
    return;  // no barrier of the threadgroup follows, and a cluster's do not wait for threads that have ended
  }
  Registers<S, B>::take();
  typename SumsOf<T, S, B>::Type sums;
  sums.clear();
  add_steps<TA, true, S, B>(task, p, begin, end, memory, sums);
  add_steps<TA, false, S, B>(task, p, end, last, memory, sums);
  if (!lets_next_last<S, B, sizeof(Sizes)>(p)) {
    let_next_begin();
  }
  // By way of threadgroup memory: which elements of a simdgroup matrix a lane holds is not part of MSL.
  metal::uint3 first = S::first(simdgroup);
  row0 += first.x, col0 += first.y;
  // Vectors of eight, or of four where columns do not divide by eight, if every row of D stands on them.
  constexpr uint VECTOR = COLUMNS % 8 == 0 ? 8 : 4;
  bool in_vectors = TileCopies<SumsOf<T, S, B>::ON_TENSOR_CORES>::on_vector(to.D + batch * p.stride_d) && (p.n | p.ldd) % VECTOR == 0;
  constexpr uint OF_SIMDGROUP = Sizes::ROWS_OF_RESULTS * PITCH_D, OF_PART = S::WM * S::WN * OF_SIMDGROUP;  // floats to the next one's
  threadgroup float* rows = reinterpret_cast<threadgroup float*>(memory.all) + simdgroup % (S::WM * S::WN) * OF_SIMDGROUP;
  uint part = simdgroup / (S::WM * S::WN), count = in_vectors ? VECTOR : 1;
  if (Own::IS_MANY) {
#pragma clang loop unroll(full)
    for (uint i = 0; i < TM; i++) sums.template put<PITCH_D>(i, rows + 8 * i * PITCH_D, lane);
    Own::meet();
    Own::template add_up<8 * TM, COLUMNS, PITCH_D>(rows, rank, lane);
    meet<true>();
  }
#pragma clang loop unroll(full)
  for (uint i = 0; i < TM; i += BANDS) {
    threadgroup float* bands = rows + (Own::IS_MANY ? 8 * i * PITCH_D : 0);
#pragma clang loop unroll(full)
    for (uint j = 0; j < (Own::IS_MANY ? 0 : BANDS); j++) sums.template put<PITCH_D>(i + j, bands + part * OF_PART + 8 * j * PITCH_D, lane);
    if (!Own::IS_MANY) meet<S::WK == 1>();
    for (uint e = count * (32 * part + lane); e < 8 * BANDS * COLUMNS; e += 32 * count * S::WK) {
      uint row = row0 + 8 * i + e / COLUMNS, at = rank * COLUMNS + e % COLUMNS, col = col0 + at;
      threadgroup float* from = bands + (e / COLUMNS * PITCH_D + at);
      if (row >= p.m || col >= p.n) continue;
      if (in_vectors)
        store_results<TA, VECTOR, S::WK, OF_PART, B>(task, to, p, batch, row, col, from);
      else
        store_results<TA, 1, S::WK, OF_PART, B>(task, to, p, batch, row, col, from);
    }
    if (!Own::IS_MANY) meet<S::WK == 1>();
  }
  Own::meet();  // others may still read its memory
}
