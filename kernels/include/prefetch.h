// Asks for memory that will be read soon. Apple's GPUs hide latency behind other simdgroups and have nothing to ask; the
// CPU device runs one thread at a time, and a tile that jumps from row to row defeats its hardware prefetcher.
#pragma once
#include <metal_stdlib>

template <class T>
METAL_FUNC void prefetch(const device T* first, uint count) {
#ifdef __METALMM_CPU__
  for (uint i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(first + i);  // 64 bytes a line
#else
  (void)first, (void)count;
#endif
}
