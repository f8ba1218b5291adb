// B given as K x N (NN), few rows of A: a thread owns 8 neighbouring columns, one load a row of B, and every S-th row, S = TG / OCTETS; the
// threads of one row read OCTETS * 16 contiguous bytes. Sums of a simdgroup meet by shuffles, those of its TG / 32 in threadgroup memory.
//
// For m = 1, per output: 2 * k bytes of B, once; A from the cache, the same element for all lanes of a row; DEPTH loads of 16 bytes in
// flight a thread; one barrier for 8 * OCTETS outputs. rows_nn gives a thread a run of rows, which at n = 1152, k = 896 leaves 9
// threadgroups of 512 threads: here they are 1152 / 8 / OCTETS, and all of K is in flight at once. For Apple's GPUs: 64 contiguous bytes
// for OCTETS = 4, half a line of 128, so that every second threadgroup finds the other half in the second-level cache; more threadgroups
// for that. The CPU device gains nothing.
#include <metal_stdlib>
using namespace metal;  // what follows names its types

#include "include/epilogue.h"
#include "include/octet.h"
#include "include/wait.h"

// Adds every STEP-th row from `first` on. WHOLE: all eight columns are there, and stand on eight.
template <bool WHOLE, int ROWS, int STEP, int DEPTH, class T>
METAL_FUNC void add_rows(const device T* a, const device T* b, constant MatmulParams& p, uint rows, uint count, uint first,
                         thread float (&sum)[ROWS][8]) {
  for (uint k = first; k < p.k; k += STEP * DEPTH) {
    Octet<T> y[DEPTH];
#pragma clang loop unroll(full)
    for (uint d = 0; d < DEPTH; d++) {
      uint from = k + STEP * d < p.k ? k + STEP * d : k;  // past the end, what the thread has: not used below
      y[d] = WHOLE ? load_octet(b + from * p.ldb) : load_some(b + from * p.ldb, count);
    }
    if (k == first) wait_for_operands();
    T x[DEPTH];  // of the first row: in flight at once, too
#pragma clang loop unroll(full)
    for (uint d = 0; d < DEPTH; d++) x[d] = a[k + STEP * d < p.k ? k + STEP * d : k];
#pragma clang loop unroll(full)
    for (uint d = 0; d < DEPTH; d++) {
      if (k + STEP * d < p.k) {
#pragma clang loop unroll(full)
        for (uint r = 0; r < ROWS; r++) {
          float factor = r == 0 ? float(x[d]) : r < rows ? float(a[r * p.lda + k + STEP * d]) : 0.0f;
#pragma clang loop unroll(full)
          for (uint i = 0; i < 4; i++) {
            sum[r][i] += factor * float(y[d].low[i]);
            sum[r][i + 4] += factor * float(y[d].high[i]);
          }
        }
      }
    }
  }
}

template <class T, int ROWS, int OCTETS, int DEPTH, int TG>
[[kernel, max_total_threads_per_threadgroup(TG)]] void octet_rows(const device T* A [[buffer(0)]], const device T* B [[buffer(1)]],
                                                                  device T* D [[buffer(2)]], const device T* C [[buffer(3)]],
                                                                  const device T* bias [[buffer(4)]],
                                                                  constant MatmulParams& p [[buffer(5)]],
                                                                  uint3 group [[threadgroup_position_in_grid]],
                                                                  uint tid [[thread_index_in_threadgroup]]) {
  constexpr uint STEP = TG / OCTETS, WIDTH = 8 * OCTETS;
  threadgroup float partial[TG / 32][ROWS][WIDTH];
  uint octet = tid % OCTETS, col = group.x * WIDTH + 8 * octet, count = col < p.n ? min(8u, p.n - col) : 0;
  uint row0 = group.y * ROWS, rows = min(uint(ROWS), p.m - row0);
  const device T* a = A + group.z * p.stride_a + row0 * p.lda;
  const device T* b = B + group.z * p.stride_b + min(col, p.n - 1);
  bool whole = count == 8 && b_in_vectors(p, 8);

  static_assert(TG % WIDTH == 0, "a thread stores of one column");
  static_assert(TG % 32 == 0 && 32 % OCTETS == 0, "a simdgroup's lanes have whole rows");
  uint own = group.x * WIDTH + tid % WIDTH;
  float added = tid < rows * WIDTH && own < p.n ? bias_of(bias, p, own) : 0.0f;

  float sum[ROWS][8] = {};
  if (whole)
    add_rows<true, ROWS, STEP, DEPTH>(a, b, p, rows, count, tid / OCTETS, sum);
  else
    add_rows<false, ROWS, STEP, DEPTH>(a, b, p, rows, count, tid / OCTETS, sum);
  wait_for_operands();
#pragma clang loop unroll(full)
  for (uint r = 0; r < ROWS; r++) {
#pragma clang loop unroll(full)
    for (uint i = 0; i < 8; i++) {
#pragma clang loop unroll(full)
      for (ushort step = 16; step >= OCTETS; step /= 2) sum[r][i] += simd_shuffle_xor(sum[r][i], step);
      if (tid % 32 < OCTETS) partial[tid / 32][r][8 * octet + i] = sum[r][i];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = tid; i < rows * WIDTH; i += TG) {
    uint r = i / WIDTH, c = i % WIDTH;
    float total = 0.0f;
#pragma clang loop unroll(full)
    for (uint s = 0; s < TG / 32; s++) total += partial[s][r][c];
    if (own < p.n) store_sum(D, C, p, group.z, row0 + r, own, total, added);
  }
}
