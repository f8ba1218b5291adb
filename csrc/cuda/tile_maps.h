// Maps by which a kernel's copies find their part of A and of B: kernels/cuda/copies.h.
#pragma once
#include "../core/matmul.h"
#include "../msl/runtime/abi.h"
#include "driver.h"

namespace metalmm::cuda {

// Makes those of a matmul's operands at these addresses; the rows of a copy are said. They are not there where a copy could not begin at
// each row, at a multiple of 16 bytes, or the driver refuses.
void make_maps(abi::TileMaps& maps, const MatmulParams& p, bool quantized, Address a, Address b);

}  // namespace metalmm::cuda
