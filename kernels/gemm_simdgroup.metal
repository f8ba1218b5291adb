// Any m, n, k and layout: threadgroup tiles of BM x BN, BK deep, multiplied as 8 x 8 simdgroup matrices by WM x WN simdgroups (on device
// cuda as cuda/products.h says). The next tiles are on their way while these are multiplied.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;  // what follows names its types

#include "include/gemm.h"

template <class T, class S, bool TA, bool TB>
[[kernel, max_total_threads_per_threadgroup(int(S::TG))]] void gemm_simdgroup(
    const device T* A [[buffer(0)]], const device T* B [[buffer(1)]], device T* D [[buffer(2)]], const device T* C [[buffer(3)]],
    const device T* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]], uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  typedef DenseB<T, S::BK, S::BN, S::TG, TB, OnTensorCores<T, S::TM, S::TN>::VALUE> OfB;
  threadgroup typename StepLoads<TA, true, S, OfB, T>::Sizes memory;
  multiply<TA, S, OfB>(A, OfB::Stored::weights(B, p, group.z), Output<T>{D, C, bias}, p, group, Thread{simdgroup, lane}, memory);
}

template <class T, class Storage, class S, bool TA>
[[kernel, max_total_threads_per_threadgroup(int(S::TG))]] void gemm_weights(
    const device T* A [[buffer(0)]], const device uchar* values [[buffer(1)]], device T* D [[buffer(2)]], const device T* C [[buffer(3)]],
    const device T* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]], const device uchar* scales [[buffer(6)]],
    const device uchar* biases [[buffer(7)]], uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  typedef QuantizedB<T, Storage, S::BK, S::BN, S::TG, OnTensorCores<T, S::TM, S::TN>::VALUE> OfB;
  threadgroup typename StepLoads<TA, true, S, OfB, T>::Sizes memory;
  WeightsAt w = {values, scales, biases, p.n, p.k, p.ldb, p.group_shift, p.low_byte};
  multiply<TA, S, OfB>(A, w, Output<T>{D, C, bias}, p, group, Thread{simdgroup, lane}, memory);
}
