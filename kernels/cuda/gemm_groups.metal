// gemm_simdgroup and gemm_weights of B given as rows, where four simdgroups multiply together: NVIDIA's wgmma, of compute capability 9.0.
// Tiles stay in threadgroup memory. That is more than a kernel may declare on device cuda, so the host gives it. A simdgroup's number is
// said by one lane: so the compiler knows that all have the same, and which of them bring tiles.
#include <metal_stdlib>

#include "../include/gemm.h"

template <class T, class S>
[[kernel, max_total_threads_per_threadgroup(int(S::THREADS))]] void gemm_groups(
    const device T* A [[buffer(0)]], const device T* B [[buffer(1)]], device T* D [[buffer(2)]], const device T* C [[buffer(3)]],
    const device T* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]], constant metal::TileMaps& maps [[buffer(8)]],
    threadgroup typename StepLoads<false, true, S, DenseB<T, S::BK, S::BN, S::TG, true, true, true>, T>::Sizes& memory [[threadgroup(0)]],
    uint3 group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  typedef DenseB<T, S::BK, S::BN, S::TG, true, true, true> OfB;
  multiply<false, S, OfB>(A, OfB::Stored::weights(B, p, group.z), Output<T>{D, C, bias}, p, group,
                          Thread{metal::simd_broadcast_first(simdgroup), lane}, memory, &maps);
}

template <class T, class Storage, class S>
[[kernel, max_total_threads_per_threadgroup(int(S::THREADS))]] void gemm_groups_weights(
    const device T* A [[buffer(0)]], const device uchar* values [[buffer(1)]], device T* D [[buffer(2)]], const device T* C [[buffer(3)]],
    const device T* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]], const device uchar* scales [[buffer(6)]],
    const device uchar* biases [[buffer(7)]], constant metal::TileMaps& maps [[buffer(8)]],
    threadgroup typename StepLoads<false, true, S, TurnedB<T, Storage, S>, T>::Sizes& memory [[threadgroup(0)]],
    uint3 group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  WeightsAt w = {values, scales, biases, p.n, p.k, p.ldb, p.group_shift, p.low_byte};
  multiply<false, S, TurnedB<T, Storage, S>>(A, w, Output<T>{D, C, bias}, p, group, Thread{metal::simd_broadcast_first(simdgroup), lane},
                                             memory, &maps);
}
