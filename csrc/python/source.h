// What Python's backends make of a kernel, on its way to a device.
#pragma once
#include "device.h"

namespace metalmm {

// (text, file, kernel, arguments): arguments as (is_buffer, index, is_const, bytes, type).
PipelineSource source_of(nb::handle code, const std::string& name);
std::shared_ptr<Pipeline> load_pipeline(DeviceState& state, const PipelineSource& source);

}  // namespace metalmm
