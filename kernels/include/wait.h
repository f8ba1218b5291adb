// Where a matmul kernel comes to what another kernel may just have made.
#pragma once
#include <metal_stdlib>

// Before it a thread reads weights and bias alone: B and what belongs to it. A, C and D come after, on every path. A device that begins a
// kernel while the one before it ends (cuda, by programmatic launches) waits here, with the weights on their way; Apple's GPUs and the
// CPU device know that the one before is through and do nothing.
METAL_FUNC void wait_for_operands() { metal::simdgroup_barrier(metal::mem_flags::mem_none); }

// After it a thread loads no more weights, or, where it has not waited for operands yet, has no more to load than is on its way. A device
// that begins the next kernel while this one ends does so from here on: its threadgroups would else take the places of those that are still
// to come, and not be spread evenly when they go on. A kernel that does not say lets it begin at once.
METAL_FUNC void let_next_begin(bool has_waited = true) {
#ifdef __METALMM_CUDA__
  metal::begin_next(has_waited);
#else
  (void)has_waited;
#endif
}
