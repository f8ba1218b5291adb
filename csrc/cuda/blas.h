// Matmuls by cuBLAS (cublasLt), which is looked for at run time: what kernels of ours are compared with.
#pragma once
#include <array>
#include <map>
#include <mutex>

#include "../core/device.h"
#include "../core/matmul.h"
#include "driver.h"

namespace metalmm::cuda {

struct LtContext;
struct LtDescription;
struct LtLayout;
struct LtPreference;
struct LtAlgorithm {  // cublasLtMatmulAlgo_t
  uint64_t data[8];
};
struct LtHeuristic {  // cublasLtMatmulHeuristicResult_t
  LtAlgorithm algorithm;
  size_t workspace;
  int status;
  float waves;
  int reserved[4];
};

// X(name of ours, symbol, parameters)
#define METALMM_CUBLAS_FUNCTIONS(X)                                                                                                       \
  X(create, cublasLtCreate, (LtContext**))                                                                                                \
  X(destroy, cublasLtDestroy, (LtContext*))                                                                                               \
  X(description_create, cublasLtMatmulDescCreate, (LtDescription**, int, int))                                                            \
  X(description_destroy, cublasLtMatmulDescDestroy, (LtDescription*))                                                                     \
  X(description_set, cublasLtMatmulDescSetAttribute, (LtDescription*, int, const void*, size_t))                                          \
  X(layout_create, cublasLtMatrixLayoutCreate, (LtLayout**, int, uint64_t, uint64_t, int64_t))                                            \
  X(layout_destroy, cublasLtMatrixLayoutDestroy, (LtLayout*))                                                                             \
  X(layout_set, cublasLtMatrixLayoutSetAttribute, (LtLayout*, int, const void*, size_t))                                                  \
  X(preference_create, cublasLtMatmulPreferenceCreate, (LtPreference**))                                                                  \
  X(preference_destroy, cublasLtMatmulPreferenceDestroy, (LtPreference*))                                                                 \
  X(preference_set, cublasLtMatmulPreferenceSetAttribute, (LtPreference*, int, const void*, size_t))                                      \
  X(heuristic, cublasLtMatmulAlgoGetHeuristic,                                                                                            \
    (LtContext*, LtDescription*, LtLayout*, LtLayout*, LtLayout*, LtLayout*, LtPreference*, int, LtHeuristic*, int*))                     \
  X(matmul, cublasLtMatmul,                                                                                                               \
    (LtContext*, LtDescription*, const void*, const void*, LtLayout*, const void*, LtLayout*, const void*, const void*, LtLayout*, void*, \
     LtLayout*, const LtAlgorithm*, void*, size_t, Stream))

struct Cublas {
#define METALMM_DECLARE(name, symbol, parameters) int(*name) parameters = nullptr;
  METALMM_CUBLAS_FUNCTIONS(METALMM_DECLARE)
#undef METALMM_DECLARE
};

// Where the operands of one product lie; what is not there is 0.
struct BlasOperands {
  Address a, b, d, c, bias;
};

// Products of one layout and type, of any size. The context must be current.
class BlasMatmul {
 public:
  // library: the file to load. Throws DeviceError.
  BlasMatmul(const std::string& library, const LibraryMatmul& what);
  ~BlasMatmul();
  // d = alpha * op(a) @ op(b) + beta * c + bias, summed in float32. workspace: kWorkspace bytes that are its own until it is through.
  void launch(const MatmulParams& p, const BlasOperands& o, Stream stream, Address workspace);
  static constexpr size_t kWorkspace = 32 << 20;  // what NVIDIA advises on compute capability 9.0
  void forget() { context_ = nullptr; }           // the GPU's context is gone, and with it all that this has there

 private:
  struct Plan;
  using Key = std::array<uint32_t, 18>;
  Plan& plan_for(const MatmulParams& p, const BlasOperands& o);

  const Cublas* lt_ = nullptr;
  LibraryMatmul what_;
  LtContext* context_ = nullptr;
  std::mutex mutex_;
  std::map<Key, std::unique_ptr<Plan>> plans_;
};

// The process is about to end, and cuBLAS with it, which other threads may be in: waits for them; nothing calls it any more.
void end_blas();

}  // namespace metalmm::cuda
