// What MPS does not do in one rounding: adds beta * C and bias to a product that lies in float.
#include <metal_stdlib>
using namespace metal;  // what follows names its types

#include "include/epilogue.h"

template <class T, int TG>
[[kernel, max_total_threads_per_threadgroup(TG)]] void mps_epilogue(const device float* AB [[buffer(0)]], device T* D [[buffer(2)]],
                                                                    const device T* C [[buffer(3)]], const device T* bias [[buffer(4)]],
                                                                    constant MatmulParams& p [[buffer(5)]],
                                                                    uint3 group [[threadgroup_position_in_grid]],
                                                                    uint tid [[thread_index_in_threadgroup]]) {
  uint col = group.x * TG + tid;
  if (col < p.n) store_result(D, C, bias, p, group.z, group.y, col, AB[(group.z * p.m + group.y) * p.n + col]);
}
