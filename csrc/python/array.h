// Arrays as Python hands them over: device arrays, NumPy's, and whatever speaks DLPack.
#pragma once
#include <nanobind/ndarray.h>

#include "../core/pipeline_cache.h"
#include "call.h"

namespace metalmm {

// What a choice of a variant goes by: sizes, and layout, epilogue and type as bits.
using ChoiceKey = std::array<uint32_t, 8>;

// A device with its pipelines; what the Python class Device is made of.
struct DeviceState {
  std::shared_ptr<Device> device;  // shared with running calls: close() may come from another thread
  PipelineCache pipelines;
  std::map<ChoiceKey, const Variant*> choices{};  // what "auto" means, as of that generation
  uint64_t choices_generation = 0;

  const std::shared_ptr<Device>& open() const {
    if (!device) throw Error(ErrorKind::closed, "the device was closed; make a new metalmm.Device");
    return device;
  }
};

// What an object points to whose device the garbage collector took.
DeviceState* closed_state();

// Python's metalmm.Array: memory of one device, or a part of it.
struct Array {
  Tensor tensor;
  nb::object owner;  // the Device
  DeviceState* state;
  nb::object structured;  // NumPy's dtype, where the elements are opaque to us

  template <class Visit>
  void visit(Visit&& visit) const {
    visit(owner.ptr());
  }
  void clear() {
    state = closed_state();
    owner.reset();
  }
};

const Array* array_of(nb::handle object);  // null for anything else

// An argument for the time of a call: either borrowed from an Array or made for an array of the host.
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

bool is_known(DType t);           // an element type that NumPy has, too, and that all devices know
size_t span_of(const Tensor& t);  // bytes from its first element to past its last
// In place: it is on the way of every call with an array of the host.
void read_tensor(nb::handle object, const char* name, Tensor& t, const Device* device = nullptr);
Tensor tensor_of(nb::handle object, const char* name);  // of the host's memory, by the buffer protocol or DLPack
nb::object to_numpy(const Array& array);
nb::object empty_numpy(int ndim, const int64_t* shape, DType dtype);
Array empty_array(nb::object owner, DeviceState* state, int ndim, const int64_t* shape, DType dtype, nb::object structured = {});
Array array_from(nb::object owner, DeviceState* state, nb::handle source);
// Of NumPy, by its name or whatever else numpy.dtype() takes; `structured` is then the dtype of what is opaque to us.
DType dtype_of(nb::handle dtype, nb::object* structured);
nb::object numpy_dtype(DType dtype);
nb::object dtype_object(nb::handle array);  // NumPy's, of what has one or of what NumPy makes of it: of a memoryview, say

void bind_array(nb::module_& m);

}  // namespace metalmm
