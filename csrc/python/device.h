// The Python class Device.
#pragma once
#include "array.h"

namespace metalmm {

struct PyDevice {
  DeviceState* state = nullptr;  // never freed while arrays may point to it: they hold the Device
  explicit PyDevice(std::shared_ptr<Device> device) : state(new DeviceState{std::move(device), {}}) {}
  ~PyDevice();
  // Finishes all that was submitted, and closes. Where that is interrupted, the device stays as it was.
  void close();
  PyDevice(const PyDevice&) = delete;
};

DeviceState& state_of(nb::handle device);
// The device that was named, else that of the first Array, else the default one.
nb::object device_of(nb::handle device, std::initializer_list<nb::handle> arrays);

inline std::string device_text(const nb::object& device) { return device.is_valid() ? repr_of(device) : "no device"; }

void bind_device(nb::module_& m);

}  // namespace metalmm
