#include "device.h"

#include "batch.h"
#include "matmul.h"

namespace metalmm {

PyDevice::~PyDevice() {
  nb::error_scope pending;  // a finalizer may run anywhere
  while (state->device) {   // Ctrl-C ends one submission, not those after it
    try {
      close();
    } catch (nb::python_error& e) {
      e.discard_as_unraisable("the end of a metalmm.Device");
    } catch (const std::exception&) {  // from a handler that runs while the device is at work for this thread
      state->device.reset();
    }
  }
  delete state;
}

void PyDevice::close() {
  std::shared_ptr<Device> device = state->device;
  if (!device) return;
  {
    Unlocked unlocked;
    device->finish();
  }
  auto pipelines = state->pipelines.take_all();
  state->device.reset();
  {
    Unlocked unlocked;
    pipelines.clear();
  }
  give_warnings(*device);
}

DeviceState& state_of(nb::handle device) {
  if (!nb::isinstance<PyDevice>(device) || !nb::inst_ready(device))
    throw Error(ErrorKind::device, "device is " + repr_of(device) + "; it takes a metalmm.Device, such as metalmm.Device('cpu')");
  DeviceState* state = nb::inst_ptr<PyDevice>(device)->state;
  state->open();
  return *state;
}

nb::object device_of(nb::handle device, std::initializer_list<nb::handle> arrays) {
  if (!device.is_none()) return nb::borrow(device);
  for (nb::handle h : arrays)
    if (const Array* a = array_of(h)) return a->owner;
  return call_python(hooks().default_device);
}

namespace {

std::shared_ptr<Device> make_device(const std::string& name, const nb::dict& given) {
  const Backend* backend = find_backend(name);
  if (!backend) throw Error(ErrorKind::device, "this build of metalmm has no device " + name);
  Options options;
  for (auto [key, value] : given) {
    std::string option = nb::cast<std::string>(key);
    if (PyBool_Check(value.ptr()))
      options[option] = value.is(nb::handle(Py_True));
    else if (PyLong_Check(value.ptr()))
      options[option] = static_cast<int64_t>(nb::cast<int64_t>(value));
    else
      options[option] = nb::cast<double>(value);
  }
  return backend->make(options);
}

nb::dict dict_of(const Info& info) {
  nb::dict dict;
  for (auto& [key, value] : info) std::visit([&, name = key.c_str()](auto& v) { dict[name] = nb::cast(v); }, value);
  return dict;
}

PyObject* array(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* kwnames) {
  return guarded([&] {
    static const auto* parameters = new Parameters("array", {"array"}, 1, 1);
    PyObject* values[1];
    parameters->take(args, count, kwnames, values);
    return nb::cast(array_from(nb::borrow(self), &state_of(self), values[0]));
  });
}

PyObject* empty(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* kwnames) {
  return guarded([&] {
    static const auto* parameters = new Parameters("empty", {"shape", "dtype"}, 1, 2);
    PyObject* values[2];
    parameters->take(args, count, kwnames, values);
    std::vector<int64_t> sizes;
    auto check = [](bool good) {
      if (!good) throw Error(ErrorKind::shape, "empty: an array has 1 to 8 dimensions");
    };
    for_each_size(values[0], [&](nb::handle item) {
      check(sizes.size() < kMaxDims);
      sizes.push_back(number<int64_t>(item, "empty: shape", ErrorKind::shape));
    });
    check(!sizes.empty());
    for (int64_t s : sizes)
      if (s < 0) throw Error(ErrorKind::shape, "empty: a size of " + std::to_string(s));
    nb::object structured;
    DType dtype = values[1] ? dtype_of(values[1], &structured) : kFloat16;
    return nb::cast(empty_array(nb::borrow(self), &state_of(self), static_cast<int>(sizes.size()), sizes.data(), dtype, structured));
  });
}

PyObject* batch(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* kwnames) {
  return guarded([&] {
    static const auto* parameters = new Parameters("batch", {"per_dispatch"}, 0, 0);
    PyObject* values[1];
    parameters->take(args, count, kwnames, values);
    return nb::cast(std::make_unique<Batch>(nb::borrow(self), flag(values[0], "batch: per_dispatch", false)));
  });
}

PyObject* prepare(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* kwnames) {
  return guarded([&] { return nb::cast(std::make_unique<Prepared>(nb::borrow(self), MatmulCall::take(args, count, kwnames, false))); });
}

PyObject* prepare_fused(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* kwnames) {
  return guarded(
      [&] { return nb::cast(std::make_unique<Prepared>(nb::borrow(self), MatmulCall::take_fused(args, count, kwnames, false))); });
}

PyMethodDef device_methods[] = {
    fast_method(
        "array", &array,
        "array($self, array)\n--\n\n"
        "A copy of an array in the device's memory: of NumPy, another Array, or anything on the CPU with __dlpack__ (torch, jax, mlx).\n\n"
        "Keeps shape and type, C-contiguous. Raises DTypeError, ShapeError, DeviceError, ClosedError."),
    fast_method(
        "empty", &empty,
        "empty($self, shape, dtype='float16')\n--\n\n"
        "An array of the device with undefined contents.\n\n"
        "shape: a size or up to eight. dtype: what numpy.dtype() takes, or 'bfloat16'. Raises ShapeError, DTypeError, DeviceError."),
    fast_method("batch", &batch,
                "batch($self, *, per_dispatch=False)\n--\n\n"
                "A new Batch.\n\nper_dispatch: its timing tells each dispatch's own time, which keeps a GPU from overlapping them."),
    fast_method("prepare", &prepare,
                "prepare($self, variant, a, b, *, bias=None, c=None, alpha=1.0, beta=0.0, transpose_a=False, transpose_b=False, out=None,\n"
                "row_invariant=False)\n--\n\nA PreparedCall: a matmul with everything resolved. Arguments and errors as metalmm.matmul."),
    fast_method("prepare_fused", &prepare_fused,
                "prepare_fused($self, variant, a, weights, *, bias=None, activation=None, out=None, row_invariant=False)\n"
                "--\n\nA PreparedCall of matmul_fused. Arguments and errors as metalmm.matmul_fused."),
    plain_method<PyDevice, &PyDevice::close>(
        "close",
        "close($self)\n--\n\n"
        "Waits for all that was submitted and ends the device. Its arrays, prepared calls and batches raise ClosedError afterwards."),
    {}};

void watch(PyDevice& d, nb::handle out, nb::handle counts) {
  std::shared_ptr<Device> device = d.state->open();
  Tensor o = tensor_of(out, "out"), c = tensor_of(counts, "counts");
  if (c.buffer->size() * 2 < o.buffer->size()) throw Error(ErrorKind::shape, "counts has fewer elements than out has pairs of bytes");
  Unlocked unlocked;
  device->watch(o.buffer->host(), o.buffer->host() + o.buffer->size(), c.buffer->host());
}

nb::list take_findings(PyDevice& d, bool go_on) {
  std::shared_ptr<Device> device = d.state->open();
  std::vector<Device::Finding> found;
  {
    Unlocked unlocked;
    found = device->take_findings(go_on);
  }
  auto str = [](const std::string& text) { return nb::str(text.c_str(), text.size()); };
  nb::list all;
  for (const Device::Finding& one : found) {
    nb::list places;
    for (const std::string& place : one.places) places.append(str(place));
    all.append(nb::make_tuple(str(one.text), places, one.is_sure));
  }
  return all;
}

}  // namespace

void bind_device(nb::module_& m) {
  static PyType_Slot slots[] = {{Py_tp_methods, device_methods}, {0, nullptr}};
  nb::class_<PyDevice>(m, "Device", nb::type_slots(slots), nb::is_weak_referenceable())
      .def(
          "__init__",
          [](PyDevice* self, const std::string& name, const nb::dict& options) { new (self) PyDevice(make_device(name, options)); },
          "name"_a, "options"_a)
      .def_prop_ro(
          "name", [](const PyDevice& d) { return d.state->open()->name(); }, "Its backend's: cpu, metal or cuda.")
      .def_prop_ro(
          "info", [](const PyDevice& d) { return dict_of(d.state->open()->info()); }, "Limits and properties, by name; sizes in bytes.")
      .def_prop_ro(
          "lacking", [](const PyDevice& d) { return d.state->open()->lacking(); },
          "Features that variants may need and this device has not, such as simdgroup_matrix on a GPU before Apple7.")
      .def_prop_ro(
          "counters", [](const PyDevice& d) { return dict_of(d.state->open()->counters()); },
          "What the device counted since it was made, such as pipelines found in its archives.")
      .def_prop_ro(
          "closed", [](const PyDevice& d) { return !d.state->device; }, "Whether it was closed.")
      .def("_watch", &watch, "out"_a, "counts"_a)
      .def("_take_findings", &take_findings, "go_on"_a)
      .def("_count_accesses",
           [](const PyDevice& d) {
             std::shared_ptr<Device> device = d.state->open();
             Unlocked unlocked;
             device->count_accesses();
           })
      .def("_kernel_names",
           [](const PyDevice& d, const std::string& text) {
             std::shared_ptr<Device> device = d.state->open();
             Unlocked unlocked;
             return device->kernel_names(text);
           })
      .def("_start_capture", [](const PyDevice& d, const std::string& path) { d.state->open()->start_capture(path); })
      .def("_stop_capture", [](const PyDevice& d) {
        if (d.state->device) d.state->device->stop_capture();
      });
  m.def("_device_names", [](const std::string& name) {
    const Backend* backend = find_backend(name);
    return backend ? backend->device_names() : std::vector<std::string>{};
  });
  m.def("_end", [] {
    Unlocked unlocked;
    end_backends();
  });
}

}  // namespace metalmm
