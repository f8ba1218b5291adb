// Where a matmul kernel comes to what another kernel may just have made.
#pragma once
#include <metal_stdlib>

// Before it a thread reads weights and bias alone: B and what belongs to it. A, C and D come after, on every path. A device that begins a
// kernel while the one before it ends (cuda, by programmatic launches) waits here, with the weights on their way; Apple's GPUs and the
// CPU device know that the one before is through and do nothing.
METAL_FUNC void wait_for_operands() { metal::simdgroup_barrier(metal::mem_flags::mem_none); }
