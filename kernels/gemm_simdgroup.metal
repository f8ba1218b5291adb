// Any m, n, k and layout: threadgroup tiles of BM x BN, BK deep, multiplied as 8 x 8 simdgroup matrices by WM x WN simdgroups (on device
// cuda as cuda/products.h says). The next tiles are on their way while these are multiplied.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;  // what follows names its types

#include "cuda/products.h"
#include "include/dense_b.h"
#include "include/epilogue.h"
#include "include/lanes.h"
#include "include/next.h"
#include "include/products.h"
#include "include/quantized_b.h"
#include "include/weights.h"

// BM x BN outputs of a threadgroup, BK of k at a time; WM x WN simdgroups.
template <int M, int N, int K, int M_SIMDGROUPS, int N_SIMDGROUPS>
struct Blocks {
  enum : uint {
    BM = M,
    BN = N,
    BK = K,
    WM = M_SIMDGROUPS,
    WN = N_SIMDGROUPS,
    TG = WM * WN * 32,
    TM = BM / WM / 8,  // 8 x 8 tiles of a simdgroup
    TN = BN / WN / 8,
    PITCH_D = TN * 8 + 4
  };
  // A simdgroup's first of the tile.
  static METAL_FUNC uint row(uint simdgroup) { return simdgroup / WN * TM * 8; }
  static METAL_FUNC uint col(uint simdgroup) { return simdgroup % WN * TN * 8; }
};

// Threadgroup memory: tiles, as many of each as there is room for; then results.
template <class T, class A, class B, class S>
struct Memory {
  enum : uint {
    MOST = Straight<A::SWIZZLED>::MOST_STAGES,
    LIMIT = A::SWIZZLED ? 48 * 1024 : 32 * 1024,
    OF_B = A::SIZE * sizeof(T),  // bytes
    TILES = OF_B + B::BYTES,
    ROOM = LIMIT / TILES,
    STAGES = ROOM == 0 ? 1
    : ROOM < MOST      ? ROOM
                       : MOST,
    AHEAD = A::SWIZZLED ? STAGES - 1 : 1,
    RESULTS = S::TG / 32 * 8 * S::PITCH_D * sizeof(float),
    BYTES = STAGES * TILES > RESULTS ? STAGES * TILES : RESULTS
  };
  static_assert(!A::SWIZZLED || STAGES > 1, "what is brought a step ahead needs a stage of its own");
  float4 all[BYTES / 16];

  METAL_FUNC threadgroup T* tile_a(uint stage) threadgroup { return reinterpret_cast<threadgroup T*>(all) + stage * (TILES / sizeof(T)); }
  METAL_FUNC threadgroup T* tile_b(uint stage) threadgroup { return tile_a(stage) + OF_B / sizeof(T); }
};

// What a threadgroup multiplies.
template <class T>
struct Task {
  const device T* a;
  WeightsAt w;
  uint row0, col0;  // its first
  Thread me;
  Place place;

  METAL_FUNC uint index() const thread { return me.simdgroup * 32 + me.lane; }
};

// What a thread brings for one step.
template <bool TA, bool WHOLE, class S, class B, class T>
struct Next {
  typedef Tile<S::BM, S::BK, TA, OnTensorCores<T, S::TM, S::TN>::VALUE> A;
  typedef Memory<T, A, B, S> Sizes;
  Brought<T, A, S::TG> of_a;
  B of_b;

  METAL_FUNC void begin(thread const Task<T>& task, constant MatmulParams& p, uint k) thread {
    of_a.template begin<WHOLE>(task.a, p.lda, TA ? uint2(task.row0, k) : uint2(k, task.row0), TA ? p.k : p.m, task.index());
    of_b.template begin<WHOLE>(task.w, k, task.col0, task.index());
  }
  METAL_FUNC void load(thread const Task<T>& task, constant MatmulParams& p, uint k, threadgroup Sizes& memory, uint stage) thread {
    uint2 left = {p.k - k, p.m - task.row0};
    of_a.template load<WHOLE>(TA ? left.yx : left, S::BK * (TA ? p.lda : 1), memory.tile_a(stage), task.index());
    of_b.template load<WHOLE>(task.w, k, task.col0, memory.tile_b(stage), task.index());
  }
  METAL_FUNC void put(thread const Task<T>& task, threadgroup Sizes& memory, uint stage) const thread {
    of_a.put(memory.tile_a(stage), task.index());
    of_b.put(task.w, memory.tile_b(stage), task.index());
  }
};

// From k to `end`; WHOLE: all of it is.
template <bool TA, bool WHOLE, class S, class B, class T>
METAL_FUNC void add_steps(thread const Task<T>& task, constant MatmulParams& p, uint k, uint end,
                          threadgroup typename Next<TA, WHOLE, S, B, T>::Sizes& memory, thread Products<T, S::TM, S::TN>& sums) {
  typedef typename Next<TA, WHOLE, S, B, T>::A A;
  typedef typename Next<TA, WHOLE, S, B, T>::Sizes Sizes;
  typedef Straight<A::SWIZZLED> Copies;
  typedef Step<A, B, S::BK> Each;
  constexpr uint STAGES = Sizes::STAGES, AHEAD = Sizes::AHEAD, BK = S::BK;
  uint sm = S::row(task.me.simdgroup), sn = S::col(task.me.simdgroup);
  Next<TA, WHOLE, S, B, T> next;
  next.begin(task, p, k);
#pragma clang loop unroll(full)
  for (uint d = 0; d < AHEAD; d++) {
    if (k + d * BK < end) next.load(task, p, k + d * BK, memory, d % STAGES);
    Copies::close();
  }
  for (uint stage = 0; k < end; k += BK) {
    Copies::template wait<AHEAD>();
    // This step's tiles are completed, the one AHEAD is loaded, and factors of the next one.
    next.put(task, memory, stage);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint later = stage + AHEAD < STAGES ? stage + AHEAD : stage + AHEAD - STAGES;
    if (k + AHEAD * BK < end) next.load(task, p, k + AHEAD * BK, memory, later);
    Copies::close();
    if (k + BK < end) next.of_b.load_factors(task.w, k + BK, task.index());
    sums.template add<Each>(memory.tile_a(stage), memory.tile_b(stage), uint2(sm, sn), task.place, task.me.lane, task.w);
    if (STAGES == 1) threadgroup_barrier(mem_flags::mem_threadgroup);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

template <bool TA, class S, class B, class T>
METAL_FUNC void multiply(thread Task<T>& task, Output<T> to, constant MatmulParams& p, uint batch,
                         threadgroup typename Next<TA, true, S, B, T>::Sizes& memory) {
  constexpr uint TM = S::TM, TN = S::TN, PITCH_D = S::PITCH_D;
  uint row0 = task.row0, col0 = task.col0, lane = task.me.lane, simdgroup = task.me.simdgroup;
  if (B::Of::SCALING != PLAIN) {
    task.place = place_of(reinterpret_cast<threadgroup float*>(memory.all) + 64 * simdgroup, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  Products<T, TM, TN> sums;
  sums.clear();
  bool whole = a_in_vectors(p, 8) && (!TA || row0 + S::BM <= p.m) && B::Of::is_whole(p, col0);
  uint end = whole ? p.k / S::BK * S::BK : 0;
  add_steps<TA, true, S, B>(task, p, 0, end, memory, sums);
  add_steps<TA, false, S, B>(task, p, end, p.k, memory, sums);
  let_next_begin();
  // By way of threadgroup memory: which elements of a simdgroup matrix a lane holds is not part of MSL.
  row0 += S::row(simdgroup), col0 += S::col(simdgroup);
  threadgroup float* rows = reinterpret_cast<threadgroup float*>(memory.all) + simdgroup * 8 * PITCH_D;
#pragma clang loop unroll(full)
  for (uint i = 0; i < TM; i++) {
    sums.template put<PITCH_D>(i, rows, lane);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (uint e = lane; e < 64 * TN; e += 32) {
      uint row = row0 + 8 * i + e / (8 * TN), col = col0 + e % (8 * TN);
      if (row >= p.m || col >= p.n) continue;
      float sum = rows[e / (8 * TN) * PITCH_D + e % (8 * TN)];
      if (!B::Of::is_good(p, sum)) {
        sum = 0.0f;
        for (uint k = 0; k < p.k; k++) sum += B::Of::one(task.w, col, k) * float(task.a[TA ? k * p.lda + row : row * p.lda + k]);
      }
      store_result(to.D, to.C, to.bias, p, batch, row, col, sum);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}

template <class T, class S, bool TA, bool TB>
[[kernel, max_total_threads_per_threadgroup(int(S::TG))]] void gemm_simdgroup(
    const device T* A [[buffer(0)]], const device T* B [[buffer(1)]], device T* D [[buffer(2)]], const device T* C [[buffer(3)]],
    const device T* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]], uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  typedef DenseB<T, S::BK, S::BN, S::TG, TB, OnTensorCores<T, S::TM, S::TN>::VALUE> OfB;
  threadgroup typename Next<TA, true, S, OfB, T>::Sizes memory;
  const device uchar* values = reinterpret_cast<const device uchar*>(B + group.z * p.stride_b);
  WeightsAt w = {values, values, values, p.n, p.k, p.ldb, 0, 0};
  Task<T> task = {A + group.z * p.stride_a, w, group.y * S::BM, group.x * S::BN, {simdgroup, lane}, {0, 0}};
  multiply<TA, S, OfB>(task, Output<T>{D, C, bias}, p, group.z, memory);
}

template <class T, class From, class S, bool TA>
[[kernel, max_total_threads_per_threadgroup(int(S::TG))]] void gemm_weights(
    const device T* A [[buffer(0)]], const device uchar* values [[buffer(1)]], device T* D [[buffer(2)]], const device T* C [[buffer(3)]],
    const device T* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]], const device uchar* scales [[buffer(6)]],
    const device uchar* biases [[buffer(7)]], uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  typedef QuantizedB<T, From, S::BK, S::BN, S::TG, OnTensorCores<T, S::TM, S::TN>::VALUE> OfB;
  threadgroup typename Next<TA, true, S, OfB, T>::Sizes memory;
  WeightsAt w = {values, scales, biases, p.n, p.k, p.ldb, p.group_shift, p.low_byte};
  Task<T> task = {A + group.z * p.stride_a, w, group.y * S::BM, group.x * S::BN, {simdgroup, lane}, {0, 0}};
  multiply<TA, S, OfB>(task, Output<T>{D, C, bias}, p, group.z, memory);
}
