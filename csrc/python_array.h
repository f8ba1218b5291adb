// Arrays as Python hands them over: device arrays, or anything with the buffer protocol (NumPy).
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "core/matmul.h"
#include "python_gil.h"

namespace metalmm {

using PipelineRow = std::array<std::shared_ptr<Pipeline>, kSpecializations>;

// A device with its pipelines; what the Python class Device is made of.
struct DeviceState {
  std::shared_ptr<Device> device;      // shared with running calls: close() may come from another thread
  std::vector<PipelineRow> pipelines;  // [variant index][Specialization bits]

  const std::shared_ptr<Device>& open() const {
    if (!device) throw Error(ErrorKind::closed, "the device was closed; make a new metalmm.Device");
    return device;
  }
};

// What an object points to whose device the garbage collector took.
inline DeviceState* closed_state() {
  static DeviceState* state = new DeviceState;
  return state;
}

// Python's metalmm.Array: memory of one device.
struct Array {
  Tensor tensor;
  nb::object owner;  // the Device
  DeviceState* state;

  template <class Visit>
  void visit(Visit&& visit) const {
    visit(owner.ptr());
  }
  void clear() {
    state = closed_state();
    owner.reset();
  }
};

// An argument for the time of a call: either borrowed from an Array or made for a NumPy array.
class Operand {
 public:
  Operand() = default;
  Operand(nb::handle object, const char* name, DeviceState* state);
  const Tensor* get() const { return array_ ? &array_->tensor : local_ ? &*local_ : nullptr; }
  bool is_array() const { return array_ != nullptr; }
  const std::shared_ptr<Buffer>* own_buffer() const { return local_ ? &local_->buffer : nullptr; }  // that it alone made

 private:
  const Array* array_ = nullptr;
  std::optional<Tensor> local_;
};

Tensor tensor_of(nb::handle object, const char* name);  // by the buffer protocol
nb::object to_numpy(const Array& array);
nb::object empty_numpy(int ndim, const int64_t* shape);
Array empty_array(nb::object owner, DeviceState* state, int ndim, const int64_t* shape, DTypeCode dtype);

}  // namespace metalmm
