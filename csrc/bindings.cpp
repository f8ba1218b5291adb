// The Python module: converts arguments, holds no logic.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "python_calls.h"

namespace metalmm {
namespace {

// -- device -----------------------------------------------------------------------------------------------------------

nb::object device_array(nb::handle self, nb::object source) {
  if (nb::inst_check(source) && nb::isinstance<Array>(source)) source = to_numpy(*nb::inst_ptr<Array>(source));
  DeviceState& state = state_of(self);
  Tensor from = tensor_of(source, "array");
  Array to = empty_array(nb::borrow(self), &state, from.ndim, from.shape, from.dtype);
  Py_buffer view;
  if (PyObject_GetBuffer(source.ptr(), &view, PyBUF_RECORDS_RO) != 0) throw nb::python_error();
  int failed = PyBuffer_ToContiguous(to.tensor.buffer->data(), &view, view.len, 'C');
  PyBuffer_Release(&view);
  if (failed) throw nb::python_error();
  return nb::cast(std::move(to));
}

nb::dict dict_of(const Info& info) {
  nb::dict dict;
  for (auto& [key, value] : info) std::visit([&, name = key.c_str()](auto& v) { dict[name] = nb::cast(v); }, value);
  return dict;
}

// A dtype of NumPy, or what numpy.dtype() makes one of.
DTypeCode dtype_of(nb::handle dtype) {
  nb::object empty;
  try {
    empty = nb::module_::import_("numpy").attr("empty")(0, dtype);
  } catch (nb::python_error& e) {
    throw Error(ErrorKind::dtype, "empty: numpy knows no dtype " + nb::cast<std::string>(nb::repr(dtype)));
  }
  return tensor_of(empty, "dtype").dtype;
}

std::string dtype_name(DTypeCode d) {
  const char* kinds[] = {"int", "uint", "float", "", "bfloat", "complex", "bool"};
  return d.code == 6 ? "bool" : kinds[d.code] + std::to_string(d.bits);
}

nb::tuple shape_of(const Tensor& t) {
  nb::list shape;
  for (int i = 0; i < t.ndim; i++) shape.append(t.shape[i]);
  return nb::tuple(shape);
}

Range range_of(nb::handle pair) {
  auto t = nb::cast<nb::tuple>(pair);
  return {nb::cast<uint32_t>(t[0]), nb::cast<uint32_t>(t[1])};
}

void register_variant(const std::string& id, bool enabled, uint32_t bm, uint32_t bn, uint32_t threads, nb::tuple m, nb::tuple n,
                      nb::tuple k, nb::tuple batch, std::vector<uint32_t> n_values, unsigned layouts, bool bias, bool c, bool alpha,
                      unsigned devices, const std::string& builtin, uint32_t bk, unsigned specializes) {
  Variant v;
  v.id = id, v.enabled = enabled, v.tiling = {bm, bn, threads};
  v.m = range_of(m), v.n = range_of(n), v.k = range_of(k), v.batch = range_of(batch);
  v.n_values = std::move(n_values), v.layouts = layouts, v.bias = bias, v.c = c, v.alpha = alpha;
  v.devices = devices, v.builtin = builtin, v.bk = bk, v.specializes = specializes;
  registry().add(std::move(v));
}

void translate(const std::exception_ptr& p, void*) {
  try {
    std::rethrow_exception(p);
  } catch (const Error& e) {
    PyErr_SetString(hooks().exceptions.at(static_cast<size_t>(e.kind)).ptr(), e.what());
  }
}

MatmulSpec make_spec(int64_t m, int64_t n, int64_t k, int64_t batch, bool transpose_a, bool transpose_b, bool bias, float alpha,
                     float beta) {
  for (int64_t size : {m, n, k, batch})
    if (size < 1 || size > UINT32_MAX)
      throw Error(ErrorKind::shape, "MatmulSpec: a size of " + std::to_string(size) + "; sizes are 1 to 2^32 - 1");
  MatmulSpec s;
  s.m = static_cast<uint32_t>(m), s.n = static_cast<uint32_t>(n), s.k = static_cast<uint32_t>(k), s.batch = static_cast<uint32_t>(batch);
  s.transpose_a = transpose_a, s.transpose_b = transpose_b, s.bias = bias, s.c = beta != 0.0f, s.alpha = alpha, s.beta = beta;
  check_sizes(s);
  return s;
}

auto key_of(const MatmulSpec& s) { return std::tuple(s.m, s.n, s.k, s.batch, s.layout_index(), s.bias, s.c, s.alpha, s.beta); }

void refuse_subinterpreter() {
  if (PyInterpreterState_Get() == PyInterpreterState_Main()) return;
  PyErr_SetString(PyExc_ImportError, "metalmm works in the main interpreter alone, not in a subinterpreter");
  throw nb::python_error();
}

// What the garbage collector asks of a class: T::visit(use) calls use(PyObject*) for each reference that an object holds, T::clear()
// drops them.
template <class T>
PyType_Slot* collected() {
  static PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(+[](PyObject* self, visitproc visit, void* arg) -> int {
                                   Py_VISIT(Py_TYPE(self));
                                   if (!nb::inst_ready(self)) return 0;
                                   int result = 0;
                                   nb::inst_ptr<T>(self)->visit([&](PyObject* o) {
                                     if (o && !result) result = visit(o, arg);
                                   });
                                   return result;
                                 })},
                                {Py_tp_clear, reinterpret_cast<void*>(+[](PyObject* self) -> int {
                                   if (nb::inst_ready(self)) nb::inst_ptr<T>(self)->clear();
                                   return 0;
                                 })},
                                {0, nullptr}};
  return slots;
}

constexpr const char* kMatmulDoc =
    "matmul(variant, a, b, *, bias=None, c=None, alpha=1.0, beta=0.0, transpose_a=False, transpose_b=False, out=None, device=None)\n\n"
    "alpha * op(a) @ op(b) + beta * c + bias by the kernel variant of that id; float16 in and out, float32 accumulation.\n\n"
    "a: (m, k), or (k, m) with transpose_a; with a batch, (batch, m, k). b: (k, n), or (n, k) with transpose_b; (batch, ...)\n"
    "or 2-D and shared. bias: (n,). c: (m, n) or (batch, m, n); read only where beta is not 0. out: C-contiguous, of the\n"
    "result's shape; it may be c itself and overlap nothing else. NumPy arrays in give a NumPy array; metalmm.Array in, a\n"
    "metalmm.Array. Rows must be contiguous; they may be any distance apart.\n\n"
    "Raises UnknownVariantError, UnsupportedError, ShapeError, DTypeError, LayoutError, DeviceError, ClosedError before\n"
    "anything runs; CompileError on a variant's first use; KernelError if the kernel breaks a rule of Metal.";

}  // namespace

NB_MODULE(_core, m) {
  refuse_subinterpreter();
  nb::set_leak_warnings(false);  // pipelines and the default device live as long as the process
  nb::register_exception_translator(translate, nullptr);

  host_poll = &check_signals;
  m.def("_set_hooks", [](nb::object build_pipeline, nb::object unknown_variant, nb::object default_device, nb::list exceptions) {
    refuse_subinterpreter();  // a second interpreter may share the module of the first
    if (exceptions.size() != static_cast<size_t>(ErrorKind::count)) throw std::runtime_error("metalmm: errors.py and error.h differ");
    hooks() = {std::move(build_pipeline), std::move(unknown_variant), std::move(default_device), {}};
    for (nb::handle e : exceptions) hooks().exceptions.push_back(nb::borrow(e));
  });
  m.def("_register_variant", &register_variant, nb::kw_only(), "id"_a, "enabled"_a, "bm"_a, "bn"_a, "threads"_a, "m"_a, "n"_a, "k"_a,
        "batch"_a, "n_values"_a, "layouts"_a, "bias"_a, "c"_a, "alpha"_a, "devices"_a, "builtin"_a, "bk"_a, "specializes"_a);
  m.def("_metal_devices", [] {
#if METALMM_METAL
    return metal::device_names();
#else
    return std::vector<std::string>{};
#endif
  });
  m.def("_kernel_names", [](nb::handle device, const std::string& code) {
    std::shared_ptr<Device> running = state_of(device).device;
    Unlocked unlocked;
    return running->kernel_names(code);
  });
  m.def("_start_capture", [](nb::handle device, const std::string& path) { state_of(device).device->start_capture(path); });
  m.def("_stop_capture", [] {
#if METALMM_METAL
    metal::stop_capture();
#endif
  });
  m.def(
      "_lacks", [](nb::handle id, const MatmulSpec& spec) { return registry().find(id).lacks(spec); },
      "Empty, or why the variant does not support the spec.");
  m.def("_prepare_pipeline", [](nb::handle device, nb::handle id, const MatmulSpec& spec) {
    const Variant& v = registry().find(id);
    pipeline_for(state_of(device), device, v, v.specialization(spec, contiguous_params(spec)));
  });
  m.def(
      "_describe",
      [](nb::handle device, nb::handle id, const MatmulSpec& spec) {
        const Variant& v = registry().find(id);
        std::shared_ptr<Pipeline> p = pipeline_for(state_of(device), device, v, v.specialization(spec, contiguous_params(spec)));
        Size3 grid = matmul_grid(v.tiling, spec);
        return nb::make_tuple(nb::make_tuple(grid[0], grid[1], grid[2]), p->max_threads, p->static_threadgroup_bytes);
      },
      "Grid, most threads of a threadgroup, bytes of threadgroup memory.");
  m.def(
      "_specialization",
      [](nb::handle id, const MatmulSpec& spec) { return registry().find(id).specialization(spec, contiguous_params(spec)); },
      "What the kernel is compiled for, for operands that lie densely; bits of SPECIALIZATIONS in manifest.py.");
  m.def("_forget_pipelines", [](nb::handle device, nb::handle id) {
    DeviceState& state = *nb::inst_ptr<PyDevice>(device)->state;  // a closed device has none left
    const Variant& v = registry().find(id);
    if (v.index < state.pipelines.size()) state.pipelines[v.index] = {};
  });

  nb::class_<MatmulSpec>(
      m, "MatmulSpec",
      "What a matmul asks for, without its data: sizes, layout and epilogue. beta other than 0 means that beta * c is added.")
      .def(
          "__init__",
          [](MatmulSpec* self, int64_t m, int64_t n, int64_t k, int64_t batch, bool transpose_a, bool transpose_b, bool bias, float alpha,
             float beta) { new (self) MatmulSpec(make_spec(m, n, k, batch, transpose_a, transpose_b, bias, alpha, beta)); },
          "m"_a, "n"_a, "k"_a, "batch"_a = 1, "transpose_a"_a = false, "transpose_b"_a = false, "bias"_a = false, "alpha"_a = 1.0f,
          "beta"_a = 0.0f, "Raises ShapeError for a size of zero or an operand of more than 2^32 - 1 elements.")
      .def_ro("m", &MatmulSpec::m)
      .def_ro("n", &MatmulSpec::n)
      .def_ro("k", &MatmulSpec::k)
      .def_ro("batch", &MatmulSpec::batch)
      .def_ro("transpose_a", &MatmulSpec::transpose_a)
      .def_ro("transpose_b", &MatmulSpec::transpose_b)
      .def_ro("bias", &MatmulSpec::bias)
      .def_ro("alpha", &MatmulSpec::alpha)
      .def_ro("beta", &MatmulSpec::beta)
      .def_prop_ro(
          "layout", [](const MatmulSpec& s) { return std::string(s.layout()); }, "nn, nt, tn or tt: n as given, t transposed.")
      .def("__eq__", [](const MatmulSpec& a,
                        nb::handle b) { return nb::isinstance<MatmulSpec>(b) && key_of(a) == key_of(nb::cast<const MatmulSpec&>(b)); })
      .def("__hash__", [](const MatmulSpec& s) { return nb::hash(nb::cast(key_of(s))); })
      .def("__repr__", [](const MatmulSpec& s) { return "MatmulSpec(" + s.text() + ")"; });

  nb::class_<BatchTiming>(m, "BatchTiming", "Seconds that a batch took, apart; see docs/method.md.")
      .def_ro("encode", &BatchTiming::encode,
              "From opening the batch until all is encoded, the caller's own Python up to submit() included.")
      .def_ro("commit", &BatchTiming::commit, "Handing what was encoded to the device.")
      .def_ro("wait", &BatchTiming::wait, "From wait() to the host seeing completion. On the CPU device the waiting thread does the work.")
      .def_prop_ro(
          "device", [](const BatchTiming& t) { return t.device < 0 ? std::nullopt : std::optional<double>(t.device); },
          "The device's own work; None where it cannot tell.")
      .def_prop_ro(
          "dispatches",
          [](const BatchTiming& t) {
            std::vector<std::optional<double>> all;
            for (double s : t.dispatches) all.push_back(s < 0 ? std::nullopt : std::optional<double>(s));
            return all;
          },
          "The device's own work on each dispatch, of a batch with per_dispatch=True; empty where it cannot tell.")
      .def_ro("calls", &BatchTiming::calls, "Calls of the device's encoder that the batch made; 0 on the CPU device.")
      .def("__repr__", [](const BatchTiming& t) {
        auto us = [](double s) { return std::to_string(s * 1e6) + "us"; };
        return "BatchTiming(encode=" + us(t.encode) + ", commit=" + us(t.commit) + ", wait=" + us(t.wait) +
               ", device=" + (t.device < 0 ? "n/a" : us(t.device)) + ")";
      });

  nb::class_<Array>(m, "Array", nb::type_slots(collected<Array>()),
                    "An array in a device's memory. Made by Device.array, Device.empty and matmul.")
      .def_prop_ro("shape", [](const Array& a) { return shape_of(a.tensor); })
      .def_prop_ro("ndim", [](const Array& a) { return a.tensor.ndim; })
      .def_prop_ro(
          "dtype", [](const Array& a) { return dtype_name(a.tensor.dtype); }, "Its NumPy name, such as 'float16'.")
      .def_prop_ro("nbytes", [](const Array& a) { return a.tensor.buffer->size(); })
      .def_prop_ro("device", [](const Array& a) { return a.owner; })
      .def("numpy", &to_numpy, "The same memory as a NumPy array, without a copy. Raises ClosedError after the device's end.")
      .def(
          "__array__",
          [](const Array& a, nb::handle dtype, nb::handle copy) {
            nb::object view = to_numpy(a);
            if (!dtype.is_none() &&
                !view.attr("dtype").equal(call_python(nb::module_::import_("numpy").attr("dtype"), nb::borrow(dtype)))) {
              if (!copy.is_none() && !nb::cast<bool>(copy)) throw nb::value_error("metalmm.Array: another dtype needs a copy");
              return call_python(view.attr("astype"), nb::borrow(dtype));
            }
            return !copy.is_none() && nb::cast<bool>(copy) ? call_python(view.attr("copy")) : view;
          },
          "dtype"_a = nb::none(), "copy"_a = nb::none())
      .def("__dlpack__", [](const Array& a, nb::kwargs kwargs) { return to_numpy(a).attr("__dlpack__")(**kwargs); })
      .def("__dlpack_device__", [](const Array& a) { return call_python(to_numpy(a).attr("__dlpack_device__")); })
      .def("__repr__", [](const Array& a) {
        return "metalmm.Array(shape=" + nb::cast<std::string>(nb::str(shape_of(a.tensor))) + ", dtype=" + dtype_name(a.tensor.dtype) + ")";
      });

  nb::class_<Prepared>(m, "PreparedCall", nb::type_slots(collected<Prepared>()),
                       "A matmul with everything resolved; call it to run it. Reads its arrays at each call.")
      .def("__call__", &Prepared::run, "Runs it and returns out. Raises KernelError, ClosedError.")
      .def_prop_ro("out", [](const Prepared& p) { return p.out(); })
      .def_prop_ro("variant", &Prepared::variant)
      .def_prop_ro("device_seconds", &Prepared::device_seconds,
                   "What the device worked in the last call, in seconds; None where it cannot tell.");

  nb::class_<Batch>(
      m, "Batch", nb::type_slots(collected<Batch>()),
      "Any number of matmuls, submitted once and run in order. A context manager: leaving it submits and waits; leaving it by an\n"
      "exception drops it. Results are valid after wait(); arrays are read when the batch runs.")
      .def("__enter__", [](nb::handle self) { return nb::borrow(self); })
      .def("__exit__", &Batch::exit, "type"_a.none(), "value"_a.none(), "traceback"_a.none())
      .def("matmul", &Batch::matmul, "variant"_a, "a"_a.none(), "b"_a.none(), nb::kw_only(), "bias"_a = nb::none(), "c"_a = nb::none(),
           "alpha"_a = 1.0, "beta"_a = 0.0, "transpose_a"_a = false, "transpose_b"_a = false, "out"_a = nb::none(),
           "Adds a matmul; arguments and errors as metalmm.matmul. Returns out, not yet filled.")
      .def("add", &Batch::add, "call"_a, "Adds a prepared call. Returns its out.")
      .def("submit", &Batch::submit, "Hands the batch to the device.")
      .def("record", &Batch::record,
           "Ends the batch without running it: a Recording, which runs it any number of times at a cost that hardly depends on its size.")
      .def("wait", &Batch::wait, "Waits until it is done. Raises what went wrong, naming the kernel.")
      .def_prop_ro("timing", &Batch::timing)
      .def("__len__", &Batch::size);

  nb::class_<PyRecording>(m, "Recording", nb::type_slots(collected<PyRecording>()),
                          "A batch that can be run again and again. Arrays are read and results written anew each time; they are fixed,\n"
                          "as are shapes and epilogues.")
      .def("replay", &PyRecording::replay, "Hands it to the device once more, after all that was submitted before.")
      .def("wait", &PyRecording::wait, "Waits until every replay is done. Raises what went wrong first.")
      .def_prop_ro("timing", &PyRecording::timing, "Of the last replay.")
      .def("__len__", &PyRecording::size);

  nb::class_<Kernel>(m, "Kernel", nb::type_slots(collected<Kernel>()), "A kernel of a compiled library with its function constants.")
      .def(nb::init<nb::object, const std::string&, const std::string&, const std::string&, nb::dict>())
      .def("__call__", &Kernel::call, "args"_a, nb::kw_only(), "grid"_a.none(), "threadgroup"_a.none(), "threadgroup_memory"_a = nb::none(),
           "batch"_a = nb::none(),
           "Runs the kernel over `grid` threadgroups of `threadgroup` threads. Arguments are its buffers in index order, or one dict\n"
           "{index: buffer}: NumPy arrays (used in place), metalmm.Array, bytes for constants, or None for one that the kernel will\n"
           "not touch (it finds 4 KB of zeros). threadgroup_memory: bytes of each\n"
           "dynamic threadgroup argument. With batch=, it is added there instead, and None returned. Returns the seconds that the device "
           "worked, or None.\n"
           "Raises KernelError for a dispatch that Metal would refuse.")
      .def_prop_ro("name", [](const Kernel& k) { return k.pipeline().name; })
      .def_prop_ro("max_total_threads_per_threadgroup", [](const Kernel& k) { return k.pipeline().max_threads; })
      .def_prop_ro(
          "static_threadgroup_memory_length", [](const Kernel& k) { return k.pipeline().static_threadgroup_bytes; }, "Bytes.")
      .def_prop_ro("buffer_indices", &Kernel::buffer_indices);

  nb::class_<PyDevice>(m, "Device")
      .def(
          "__init__",
          [](PyDevice* self, unsigned threads, size_t threadgroup_memory_limit, bool lenient_barriers, bool debug, bool guards,
             double timeout) {
            new (self) PyDevice(std::make_shared<cpu::CpuDevice>(
                cpu::CpuOptions{threads, threadgroup_memory_limit, lenient_barriers, debug, guards, timeout}));
          },
          "threads"_a, "threadgroup_memory_limit"_a, "lenient_barriers"_a, "debug"_a, "guards"_a, "timeout"_a)
      .def(
          "__init__",
          [](PyDevice* self, int64_t index, double spin, uint32_t most_operations, uint64_t most_bytes) {
            new (self) PyDevice(metal_device(index, spin, most_operations, most_bytes));
          },
          "index"_a, "spin"_a, "most_operations"_a, "most_bytes"_a)
      .def_prop_ro(
          "name", [](const PyDevice& d) { return d.state->open()->name(); }, "cpu or metal.")
      .def_prop_ro(
          "info", [](const PyDevice& d) { return dict_of(d.state->open()->info()); }, "Limits and properties, by name; sizes in bytes.")
      .def_prop_ro(
          "counters", [](const PyDevice& d) { return dict_of(d.state->open()->counters()); },
          "What the device counted since it was made, such as pipelines found in its archives.")
      .def_prop_ro(
          "threads",
          [](const PyDevice& d) -> std::optional<unsigned> {
            auto* cpu = dynamic_cast<cpu::CpuDevice*>(d.state->open().get());
            return cpu ? std::optional<unsigned>(cpu->threads()) : std::nullopt;
          },
          "OS threads that work for it; None on a GPU.")
      .def(
          "_watch",
          [](PyDevice& d, nb::handle out, nb::handle counts) {
            auto cpu = std::dynamic_pointer_cast<cpu::CpuDevice>(d.state->open());
            Tensor o = tensor_of(out, "out"), c = tensor_of(counts, "counts");
            if (!cpu || c.buffer->size() * 2 < o.buffer->size()) throw Error(ErrorKind::device, "writes are counted on device cpu");
            Unlocked unlocked;
            cpu->watch(o.buffer->data(), o.buffer->data() + o.buffer->size(), c.buffer->data());
          },
          "out"_a, "counts"_a)
      .def("array", &device_array, "array"_a, "A copy of a NumPy array in the device's memory.")
      .def(
          "empty",
          [](nb::handle self, nb::handle shape, nb::handle dtype) {
            std::vector<int64_t> sizes;
            for_each_size(shape, [&](nb::handle item) { sizes.push_back(number<int64_t>(item, "empty", ErrorKind::shape)); });
            if (sizes.empty() || sizes.size() > kMaxDims) throw Error(ErrorKind::shape, "empty: an array has 1 to 8 dimensions");
            for (int64_t s : sizes)
              if (s < 0) throw Error(ErrorKind::shape, "empty: a size of " + std::to_string(s));
            return empty_array(nb::borrow(self), &state_of(self), static_cast<int>(sizes.size()), sizes.data(), dtype_of(dtype));
          },
          "shape"_a, "dtype"_a = "float16",
          "An array of the device with undefined contents; dtype: of NumPy, or its name. Raises ShapeError, DTypeError, DeviceError.")
      .def(
          "batch", [](nb::object self, bool per_dispatch) { return std::make_unique<Batch>(std::move(self), per_dispatch); }, nb::kw_only(),
          "per_dispatch"_a = false,
          "A new Batch. per_dispatch: its timing tells each dispatch's own time, which keeps a GPU from overlapping them.")
      .def(
          "prepare",
          [](nb::object self, nb::handle variant, nb::object a, nb::object b, nb::object bias, nb::object c, double alpha, double beta,
             bool ta, bool tb,
             nb::object out) { return std::make_unique<Prepared>(std::move(self), variant, a, b, bias, c, alpha, beta, ta, tb, out); },
          "variant"_a, "a"_a.none(), "b"_a.none(), nb::kw_only(), "bias"_a = nb::none(), "c"_a = nb::none(), "alpha"_a = 1.0,
          "beta"_a = 0.0, "transpose_a"_a = false, "transpose_b"_a = false, "out"_a = nb::none(),
          "A PreparedCall; arguments and errors as metalmm.matmul.")
      .def("close", &PyDevice::close,
           "Waits for all that was submitted and ends the device. Its arrays, prepared calls and batches raise ClosedError afterwards.");

  m.def("matmul", &matmul, "variant"_a, "a"_a.none(), "b"_a.none(), nb::kw_only(), "bias"_a = nb::none(), "c"_a = nb::none(),
        "alpha"_a = 1.0, "beta"_a = 0.0, "transpose_a"_a = false, "transpose_b"_a = false, "out"_a = nb::none(), "device"_a = nb::none(),
        kMatmulDoc);
}

}  // namespace metalmm
