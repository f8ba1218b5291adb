// The comparison that needs no GPU: NumPy's BLAS in float32 behind the same interface as a kernel.
#pragma once

namespace metalmm {

void add_blas();  // to the libraries of device cpu

}  // namespace metalmm
