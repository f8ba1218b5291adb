// B given as rows of quantized weights, one row of A: as in weight_columns.metal LANES lanes share a column's K, a block of 32 weights a
// step, but a simdgroup takes its columns in TURNS, and loads the next turn's block as soon as it has used one of the present: what is in
// flight stays as much while it computes, and A is in threadgroup memory once for all turns.
//
// For n so large that each core has several turns: 151936 columns are 9 turns of 16 simdgroups on each of 132 cores, which then all end
// at once. Per output the bytes and, from the integers on, the operations of weight_columns.metal; A costs a load of 16 bytes of
// threadgroup memory for 4 / COLS weights. On NVIDIA's GPUs a load of 16 bytes by each lane is four passes, but two where lanes 2i and 2i +
// 1 want the same: so those have two columns' same part of K. Of Apple's GPUs neither that nor the turns are known; DEPTH * COLS blocks of
// 36 bytes (4 bits: 20) in flight a lane are what weight_columns.metal has.
#include <metal_stdlib>
using namespace metal;  // what follows names its types

#include "include/epilogue.h"
#include "include/wait.h"
#include "include/weights.h"

// One row's K in several windows: what each turn has so far.
template <int LANES, int COLS, int DEPTH, int TURNS, int TG>
struct Shared {
  float4 staged[LANES * DEPTH * PITCH];
  float kept[TURNS][COLS][TG];
};

// WHOLE: rows of A and of the weights begin on 16 bytes.
template <class T, int FORMAT, bool CANONICAL, int LANES, int COLS, int DEPTH, int TURNS, int TG, bool WHOLE>
[[kernel, max_total_threads_per_threadgroup(TG)]] void weight_turns(
    const device T* A [[buffer(0)]], const device uchar* values [[buffer(1)]], device T* D [[buffer(2)]], const device T* C [[buffer(3)]],
    const device T* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]], const device uchar* scales [[buffer(6)]],
    const device uchar* biases [[buffer(7)]], uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  typedef Weights<T, FORMAT, CANONICAL> From;
  constexpr bool SCALED = Packing<FORMAT>::SCALED, LATE = SCALED && IsSmall<T>::VALUE;
  constexpr uint STEP = 32 * LANES, WINDOW = STEP * DEPTH, ACROSS = 32 / LANES;
  constexpr uint STRIDE = TG / 32 * ACROSS * COLS;  // columns of a turn
  constexpr uint STAGES = (WINDOW - 1) / (8 * TG) + 1;
  threadgroup Shared<LANES, COLS, DEPTH, TURNS, TG> shared;
  WeightsAt w = {values, scales, biases, p.n, p.k, p.ldb, p.group_shift, p.low_byte};
  const device T* a = A + group.z * p.stride_a;
  uint worker = simdgroup * 32 + lane, at = lane / 2 % LANES, own = 32 * at, begin = group.x * (STRIDE * TURNS);
  uint first = begin + simdgroup * (ACROSS * COLS) + lane / (2 * LANES) * 2 + lane % 2;
  uint whole = WHOLE ? p.k / 32 * 32 : 0, turns = min(uint(TURNS), (p.n - 1 - begin) / STRIDE + 1), last = p.n - 1;
  typename From::Piece pieces[DEPTH][COLS];
#pragma clang loop unroll(full)
  for (uint c = 0; c < COLS; c++) {
    Cursor from = From::at(w, min(first + c * ACROSS, last), min(own, p.k - 1));
#pragma clang loop unroll(full)
    for (uint d = 0; d < DEPTH; d++) {
      pieces[d][c] = From::nothing();
      if (own + STEP * d < whole) pieces[d][c] = From::load(From::template moved<LANES>(w, from, own, d));
    }
  }
  wait_for_operands();
  uint k = 0;
  do {
    if (k > 0) threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma clang loop unroll(full)
    for (uint j = 0; j < STAGES; j++) {
      uint i = 8 * (TG * j + worker);
      if (i >= WINDOW) continue;
      Octet<T> x = {vec<T, 4>(T(0.0f)), vec<T, 4>(T(0.0f))};
      if (k + i < whole) x = load_octet(a + k + i);
      shared.staged[staged_at(i)] = float4(x.low);
      shared.staged[staged_at(i) + 1] = float4(x.high);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    bool is_last = k + WINDOW >= whole;
#pragma clang loop unroll(disable)
    for (uint turn = 0; turn < turns; turn++) {
      bool goes_on = turn + 1 < turns, exact = true;
      uint column = first + turn * STRIDE, next_column = goes_on ? column + STRIDE : first, next_k = (goes_on ? k : k + WINDOW) + own;
      Cursor next[COLS];
      float4 sums[COLS];
#pragma clang loop unroll(full)
      for (uint c = 0; c < COLS; c++) {
        next[c] = From::at(w, min(next_column + c * ACROSS, last), min(next_k, p.k - 1));
        sums[c] = float4(0.0f);
      }
#pragma clang loop unroll(full)
      for (uint d = 0; d < DEPTH; d++) {
        const threadgroup float4* x = shared.staged + staged_at(own + STEP * d);
        Factors by[COLS];
        float4 part[COLS];
#pragma clang loop unroll(full)
        for (uint c = 0; c < COLS; c++) {
          by[c] = From::factors(pieces[d][c], exact);
          part[c] = LATE ? float4(0.0f) : sums[c];
        }
#pragma clang loop unroll(full)
        for (uint i = 0; i < 4; i++) {
          float4 low = x[2 * i], high = x[2 * i + 1];
#pragma clang loop unroll(full)
          for (uint c = 0; c < COLS; c++) {
            Eight y = From::eight(pieces[d][c], by[c], i, w.low_byte);
            if (SCALED && !LATE) y.low *= by[c].scale, y.high *= by[c].scale;
            part[c] = fma(low, y.low, part[c]);
            part[c] = fma(high, y.high, part[c]);
          }
        }
#pragma clang loop unroll(full)
        for (uint c = 0; c < COLS; c++) {
          sums[c] = LATE ? fma(float4(by[c].scale), part[c], sums[c]) : part[c];
          if (next_k + STEP * d < whole)
            pieces[d][c] = From::load(From::template moved<LANES>(w, next[c], next_k, d));
          else
            pieces[d][c].scale = pieces[d][c].bias = typename From::S(0.0f);  // its integers, whatever they are, count for nothing
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);  // the loads stay here, and are not put off
      }
#pragma clang loop unroll(full)
      for (uint c = 0; c < COLS; c++) {
        uint j = column + c * ACROSS, stored = min(j, last);
        float total = (sums[c].x + sums[c].y) + (sums[c].z + sums[c].w);
        if (From::SHIFTED && !exact) {
          total = 0.0f;
#pragma clang loop unroll(disable)
          for (uint i = k + own; i < min(k + WINDOW, whole); i += STEP)
#pragma clang loop unroll(disable)
            for (uint e = 0; e < 32; e++) total += float(a[i + e]) * From::one(w, stored, i + e);
        }
        if (k > 0) total += shared.kept[turn][c][worker];
        if (!is_last) {
          shared.kept[turn][c][worker] = total;
          continue;
        }
#pragma clang loop unroll(disable)
        for (uint i = whole + at; i < p.k; i += LANES) total += float(a[i]) * From::one(w, stored, i);
#pragma clang loop unroll(full)
        for (uint step = LANES; step > 1; step /= 2) total += simd_shuffle_xor(total, step);
        if (at == c % LANES && j <= last) store_result(D, C, bias, p, group.z, 0, j, total);
      }
    }
    k += WINDOW;
  } while (k < whole);
}
