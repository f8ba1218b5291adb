// Where a matmul kernel lets the one after it begin. A kernel that includes this file says so somewhere: kernel_source.py looks for it.
#pragma once
#include <metal_stdlib>

// After it a thread loads no more weights, or, where it has not waited for operands yet, has no more to load than is on its way. A device
// that begins the next kernel while this one ends does so from here on: its threadgroups would else take the places of those that are still
// to come, and not be spread evenly when they go on. A kernel without this file lets it begin at once.
METAL_FUNC void let_next_begin(bool has_waited = true) {
#ifdef __METALMM_CUDA__
  metal::begin_next(has_waited);
#else
  (void)has_waited;
#endif
}
