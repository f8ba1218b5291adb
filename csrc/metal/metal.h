// The Metal device as the rest of the extension sees it: no Apple header.
#pragma once
#include "../core/batch.h"

namespace metalmm::metal {

struct MetalOptions {
  int64_t index = -1;  // the system's default device
  double spin = 50e-6;
  uint32_t most_operations = 512;  // in a command buffer
  uint64_t most_bytes = uint64_t{4} << 30;
};

std::vector<std::string> device_names();
std::shared_ptr<Device> make_device(const MetalOptions& options);
void stop_capture();

}  // namespace metalmm::metal
