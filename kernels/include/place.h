// Which elements of a simdgroup matrix a lane holds.
#pragma once
#include <metal_simdgroup_matrix>
#include <metal_stdlib>

// Two neighbours of one row: `column` and the next.
struct Place {
  uint row, column;
};

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
