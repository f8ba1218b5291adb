// Debug mode: what a kernel may touch goes to the GPU before a launch; what it was refused comes back after it.
#pragma once
#include <string>
#include <vector>

#include "../core/bound.h"
#include "../msl/runtime/cuda/arguments.h"
#include "memory.h"

namespace metalmm::cuda {

class Watched {
 public:
  // Of a kernel whose table says that it is watched.
  Watched(Home& home, Module module);
  // Before a launch: it may touch these, and of its threadgroup memory all but the last bytes.
  void allow(Home& home, const std::vector<Bound>& bound, uint32_t hidden, Stream stream);
  // After it: empty, or its first access elsewhere.
  std::string refused(Home& home, const std::vector<Bound>& bound, const LaunchHead& head, Stream stream) const;

 private:
  Address watch_ = 0;
  std::vector<std::string> files_;  // of the kernel's text
  std::vector<Bound> own_;          // the module's variables
};

}  // namespace metalmm::cuda
