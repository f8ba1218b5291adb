// MPS's matrix kernels, kept by shape: making one costs more than encoding it.
#pragma once
#import <MetalPerformanceShaders/MetalPerformanceShaders.h>

#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "../../kernels/include/params.h"
#include "../core/dtype.h"
#include "handle.h"

namespace metalmm::metal {

// A place in a buffer.
struct Place {
  id<MTLBuffer> buffer;
  size_t offset;
};

struct MpsMatmul {
  const MatmulParams& p;
  bool transpose_a, transpose_b;
  Place a, b, d;
  bool to_float;  // D is float32, m x n after one another, and has neither alpha nor beta applied
  DType type;     // of A and B, and of D but for that
};

bool has_ndarrays();  // over a buffer: macOS 15

class MpsCache {
 public:
  explicit MpsCache(id<MTLDevice> device) : device_(device) {}
  // MPS encodes into the command buffer itself, which must have no encoder open. What it encoded refers to `keep`.
  void encode_matmul(id<MTLCommandBuffer> commands, const MpsMatmul& what, std::vector<Handle<id>>& keep);
  void encode_matvec(id<MTLCommandBuffer> commands, const MpsMatmul& what, std::vector<Handle<id>>& keep);
  // Rows of A and B without gaps: whether it takes others is not known.
  void encode_ndarray(id<MTLCommandBuffer> commands, const MpsMatmul& what, std::vector<Handle<id>>& keep);
  size_t size() const {
    std::lock_guard lock(mutex_);
    return kernels_.size();
  }

 private:
  enum class Kind { matmul, matvec, ndarray };
  using Key = std::tuple<Kind, bool, bool, uint32_t, uint32_t, uint32_t, uint64_t, uint64_t>;
  template <class Make>  // under mutex_
  id kernel(const Key& key, Make&& make);

  id<MTLDevice> device_;
  mutable std::mutex mutex_;
  std::map<Key, Handle<id>> kernels_;
};

}  // namespace metalmm::metal
