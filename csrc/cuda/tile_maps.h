// Maps by which a kernel's copies find their part of A and of B: kernels/cuda/tma.h.
#pragma once
#include "../core/matmul.h"
#include "../msl/runtime/abi.h"
#include "driver.h"

namespace metalmm::cuda {

// Fills in a and b of `maps`, whose rows are given. `there` stays 0 where an address or a pitch is off 16 bytes, a size is past 2^31 - 1,
// or the driver refuses.
void make_maps(abi::TileMaps& maps, const MatmulParams& p, bool quantized, Address a, Address b);

}  // namespace metalmm::cuda
