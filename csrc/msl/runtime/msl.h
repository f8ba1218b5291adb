// Everything a lowered .metal file is compiled against.
#pragma once
#include "internals.h"
#ifdef __CUDACC__
#include "cuda/kernel.h"
#else
#include "kernel.h"
#endif
#ifdef METALMM_TENSORS
#include "tensor.h"
#endif
