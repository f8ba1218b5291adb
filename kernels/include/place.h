// Which elements of a simdgroup matrix a lane holds.
#pragma once
#include <metal_simdgroup_matrix>
#include <metal_stdlib>

// Two neighbours of one row: `column` and the next.
struct Place {
  uint row, column;
};

// To Apple's compiler thread_elements() is a vector of 64 elements, of which a lane has the first two.
template <class T>
METAL_FUNC void put(thread metal::simdgroup_matrix<T, 8, 8>& matrix, metal::vec<T, 2> pair) {
  matrix.thread_elements()[0] = pair.x;
  matrix.thread_elements()[1] = pair.y;
}

// MSL does not say, so the device is asked, by way of 64 floats of each simdgroup: on NVIDIA's tensor cores it is another place than on
// Apple's GPUs, and a kernel that follows it saves a shuffle for each matrix.
METAL_FUNC Place place_of(threadgroup float* own, uint lane) {
  own[2 * lane] = float(2 * lane);
  own[2 * lane + 1] = float(2 * lane + 1);
  metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
  metal::simdgroup_float8x8 numbered;
  simdgroup_load(numbered, own, 8);
  uint first = uint(numbered.thread_elements()[0]);
  return {first / 8, first % 8};
}
