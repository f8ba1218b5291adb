// Maps by which a kernel's copies find their part of A and of B: kernels/cuda/tma.h.
#pragma once
#include "../core/matmul.h"
#include "../msl/runtime/abi.h"
#include "driver.h"

namespace metalmm::cuda {

// Fills in `maps`: rows_of_a and rows_of_b are given as a tile's. `there` stays 0 where an address or a pitch is off 16 bytes, a size is
// past 2^31 - 1, or the driver refuses.
void make_maps(abi::TileMaps& maps, const MatmulParams& p, bool quantized, Address a, Address b);

}  // namespace metalmm::cuda
