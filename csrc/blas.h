// The comparison that needs no GPU: NumPy's BLAS in float32 behind the same interface as a kernel.
#pragma once
#include "python_array.h"

namespace metalmm {

std::shared_ptr<Pipeline> blas_pipeline(const std::string& id, bool transpose_a, bool transpose_b);

}  // namespace metalmm
