// Kernels compiled at run time: sources as the backends hand them over, and the Python class Kernel.

#include <deque>

#include "batch.h"
#include "source.h"
#include "trace.h"

namespace metalmm {

PipelineSource source_of(nb::handle code, const std::string& name) {
  auto parts = nb::cast<nb::tuple>(code);
  PipelineSource source;
  source.name = name;
  source.text = nb::cast<std::string>(parts[0]), source.file = nb::cast<std::string>(parts[1]);
  source.kernel = nb::cast<std::string>(parts[2]);
  for (nb::handle argument : nb::iter(parts[3])) {
    auto a = nb::cast<nb::tuple>(argument);
    auto kind = nb::cast<bool>(a[0]) ? KernelArgument::Kind::buffer : KernelArgument::Kind::threadgroup;
    source.arguments.push_back(
        {kind, nb::cast<uint32_t>(a[1]), nb::cast<bool>(a[2]), nb::cast<size_t>(a[3]), nb::cast<std::string>(nb::object(a[4]))});
  }
  return source;
}

std::shared_ptr<Pipeline> load_pipeline(DeviceState& state, const PipelineSource& source) {
  std::shared_ptr<Device> device = state.open();
  std::shared_ptr<Pipeline> pipeline;
  {
    Unlocked unlocked;  // a device may compile here
    pipeline = device->load_pipeline(source);
  }
  give_warnings(*device);
  return pipeline;
}

namespace {

// Held while they are looked at: what is asked of a key may change the dictionary.
std::vector<std::pair<nb::object, nb::object>> items_of(nb::handle dict) {
  std::vector<std::pair<nb::object, nb::object>> items;
  PyObject *key, *value;
  for (Py_ssize_t at = 0; PyDict_Next(dict.ptr(), &at, &key, &value);) items.emplace_back(nb::borrow(key), nb::borrow(value));
  return items;
}

Size3 size3(nb::handle value, const char* name) {
  Size3 size{1, 1, 1};
  size_t count = 0;
  auto fail = [&] { throw Error(ErrorKind::kernel, std::string(name) + " takes up to three sizes of 1 to 2^32 - 1, and at least one"); };
  for_each_size(value, [&](nb::handle item) {
    auto v = number<int64_t>(item, name, ErrorKind::kernel);
    if (count >= 3 || v < 1 || v > UINT32_MAX) fail();
    size[count++] = static_cast<uint32_t>(v);
  });
  if (!count) fail();
  return size;
}

FunctionConstant constant_of(nb::handle key, nb::handle value) {
  FunctionConstant c;
  if (nb::isinstance<nb::str>(key))
    c.name = nb::cast<std::string>(key);
  else
    c.index = number<uint32_t>(key, "constants", ErrorKind::compile);
  double real;
  if (PyBool_Check(value.ptr()))
    c.value = value.is(nb::handle(Py_True));
  else if (PyIndex_Check(value.ptr()))
    c.value = number<int64_t>(value, "constants", ErrorKind::compile);
  else if (nb::try_cast(value, real))
    c.value = real;
  else
    throw Error(ErrorKind::compile, "constants: " + repr_of(value) + " is neither bool nor int nor float");
  return c;
}

// What a number of an MSL type is; of no bytes for any other type.
DType number_dtype(const std::string& type) {
  static const auto* known = new std::unordered_map<std::string, DType>{{"bool", {DType::kBool, 1}},
                                                                        {"char", {DType::kInt, 1}},
                                                                        {"int8_t", {DType::kInt, 1}},
                                                                        {"uchar", {DType::kUInt, 1}},
                                                                        {"uint8_t", {DType::kUInt, 1}},
                                                                        {"short", {DType::kInt, 2}},
                                                                        {"int16_t", {DType::kInt, 2}},
                                                                        {"ushort", {DType::kUInt, 2}},
                                                                        {"uint16_t", {DType::kUInt, 2}},
                                                                        {"int", {DType::kInt, 4}},
                                                                        {"int32_t", {DType::kInt, 4}},
                                                                        {"uint", {DType::kUInt, 4}},
                                                                        {"uint32_t", {DType::kUInt, 4}},
                                                                        {"long", {DType::kInt, 8}},
                                                                        {"int64_t", {DType::kInt, 8}},
                                                                        {"ptrdiff_t", {DType::kInt, 8}},
                                                                        {"ulong", {DType::kUInt, 8}},
                                                                        {"uint64_t", {DType::kUInt, 8}},
                                                                        {"size_t", {DType::kUInt, 8}},
                                                                        {"half", kFloat16},
                                                                        {"float", kFloat32},
                                                                        {"bfloat", kBFloat16}};
  auto it = known->find(type);
  return it == known->end() ? DType{DType::kOpaque, 0} : it->second;
}

class Kernel {
 public:
  Kernel(nb::object device, nb::handle code, const std::string& name, nb::dict constants)
      : device_(std::move(device)), state_(&state_of(device_)) {
    PipelineSource source = source_of(code, name);
    for (auto& [key, value] : items_of(constants)) source.constants.push_back(constant_of(key, value));
    pipeline_ = load_pipeline(*state_, source);
  }

  nb::object call(const nb::tuple& all, const nb::dict& named) {
    enum { kGrid, kThreads, kThreadgroup, kMemory, kBatch, kCount };
    static const auto* parameters = new Parameters("kernel", {"grid", "threads", "threadgroup", "threadgroup_memory", "batch"}, 0, kCount);
    PyObject* v[kCount];
    parameters->take(nb::make_tuple(), named, v);
    std::shared_ptr<Device> device = state_->open();
    if (!v[kThreadgroup]) bad_argument(what() + "argument 'threadgroup' is missing: threads of a threadgroup");
    if (!v[kGrid] == !v[kThreads]) bad_argument(what() + "it takes either grid, in threadgroups, or threads, in threads");
    Bound bound;
    bind_all(bound, all);
    std::vector<ThreadgroupMemory> memory = memory_of(v[kMemory]);
    Size3 threadgroup = size3(v[kThreadgroup], "threadgroup"), grid, threads = {0, 0, 0};
    if (v[kGrid]) {
      grid = size3(v[kGrid], "grid");
    } else {
      threads = size3(v[kThreads], "threads");
      for (int i = 0; i < 3; i++) grid[i] = (threads[i] - 1) / threadgroup[i] + 1;
    }
    Dispatch d{&pipeline_,           bound.buffers.data(),
               bound.buffers.size(), bound.bytes.data(),
               bound.bytes.size(),   memory.data(),
               memory.size(),        grid,
               threadgroup,          threads};
    if (v[kBatch] && v[kBatch] != Py_None) {
      add_to(v[kBatch], d, bound);
      return nb::none();
    }
    bool traced = tracing();
    Clock::time_point start = traced ? Clock::now() : Clock::time_point();
    double took;
    {
      Unlocked unlocked;
      took = device->run(d);
    }
    give_warnings(*device);
    if (traced) trace_call({pipeline_->name, grid, std::nullopt}, took, start);
    return took < 0 ? nb::none() : nb::cast(took);
  }
  const Pipeline& pipeline() const { return *pipeline_; }
  const nb::object& device() const { return device_; }
  std::vector<uint32_t> buffer_indices() const {
    std::vector<uint32_t> found;
    for (const KernelArgument& a : pipeline_->arguments)
      if (a.kind == KernelArgument::Kind::buffer) found.push_back(a.index);
    return found;
  }

  template <class Visit>
  void visit(Visit&& visit) const {
    visit(device_.ptr());
  }
  void clear() {
    state_ = closed_state();
    device_.reset();
  }

 private:
  struct Bound {
    std::vector<nb::object> owners;  // a caller's dict may change while the kernel runs
    std::deque<Operand> operands;
    std::deque<std::shared_ptr<Buffer>> zeros;
    std::vector<BufferBinding> buffers;
    std::vector<BytesBinding> bytes;
  };

  std::string what() const { return "kernel '" + pipeline_->name + "': "; }

  static std::vector<ThreadgroupMemory> memory_of(PyObject* given) {
    std::vector<ThreadgroupMemory> memory;
    if (!given || given == Py_None) return memory;
    if (!PyDict_Check(given)) throw Error(ErrorKind::kernel, "threadgroup_memory: " + repr_of(given) + " is not a dict of {index: bytes}");
    for (auto& [key, value] : items_of(given))
      memory.push_back(
          {number<uint32_t>(key, "threadgroup_memory", ErrorKind::kernel), number<size_t>(value, "threadgroup_memory", ErrorKind::kernel)});
    return memory;
  }

  void add_to(nb::handle batch, const Dispatch& d, const Bound& bound) {
    if (!nb::isinstance<Batch>(batch) || !nb::inst_ready(batch))
      throw Error(ErrorKind::kernel, "batch: it takes what Device.batch() gives");
    auto& target = nb::cast<Batch&>(batch);
    if (!target.device().is(device_))
      throw Error(ErrorKind::device, "the batch belongs to another device than kernel '" + pipeline_->name + "'");
    target.encode(d);
    if (tracing()) target.note({pipeline_->name, d.grid, std::nullopt});
    for (const Operand& o : bound.operands) target.hold(o);
  }

  void bind_all(Bound& bound, const nb::tuple& args) {
    if (args.size() == 1 && nb::isinstance<nb::dict>(args[0])) {
      for (auto& [key, value] : items_of(args[0])) bind(bound, number<uint32_t>(key, "buffer index", ErrorKind::kernel), value);
      return;
    }
    std::vector<uint32_t> taken = buffer_indices();
    if (args.size() != taken.size()) {
      throw Error(ErrorKind::kernel,
                  what() + std::to_string(args.size()) + " arguments; it takes " + std::to_string(taken.size()) + ", for " + indices());
    }
    for (size_t i = 0; i < taken.size(); i++) bind(bound, taken[i], args[i]);
  }

  std::string indices() const {
    std::string list;
    for (uint32_t i : buffer_indices()) list += (list.empty() ? "" : ", ") + std::to_string(i);
    return "the buffer indices " + (list.empty() ? "none" : list);
  }

  const KernelArgument* argument_at(uint32_t index) const {
    for (const KernelArgument& a : pipeline_->arguments)
      if (a.kind == KernelArgument::Kind::buffer && a.index == index) return &a;
    return nullptr;
  }

  // The MSL type of an argument that one number can be bound to, or nothing.
  std::string type_of(uint32_t index) const {
    const KernelArgument* a = argument_at(index);
    return a && a->is_const && number_dtype(a->type).size ? a->type : std::string();
  }

  // A number of NumPy has a type of its own, whose bits another one would read as something else.
  void check_scalar(uint32_t index, DType dtype) const {
    std::string type = type_of(index);
    if (type.empty() || number_dtype(type) == dtype) return;
    throw Error(ErrorKind::dtype, what() + "buffer " + std::to_string(index) + " is a number of type " + dtype.name() +
                                      "; the parameter is of type " + type + ": pass a Python number, which becomes that");
  }

  // An array may be read as another type, of which its bytes are as good, unsigned integers above all; but hardly float16 as float, or
  // int32 as float, and NumPy makes float64 and int64, which few kernels have, where nobody said a type.
  void check_array(uint32_t index, DType dtype) const {
    const KernelArgument* a = argument_at(index);
    DType wanted = number_dtype(a ? a->type : std::string());
    auto is_real = [](DType t) { return t.kind == DType::kFloat || t.kind == DType::kBFloat; };
    bool is_number = is_real(dtype) || dtype.kind == DType::kInt || dtype.kind == DType::kUInt;
    if (wanted.size < 2 || !is_number) return;
    bool is_signed = dtype.kind == DType::kInt, for_signed = wanted.kind == DType::kInt;
    if (wanted.size == dtype.size ? (is_signed && is_real(wanted)) || (is_real(dtype) && for_signed)
                                  : dtype.size == 8 || (is_real(dtype) && is_real(wanted)))
      throw Error(ErrorKind::dtype, what() + "buffer " + std::to_string(index) + " is an array of " + dtype.name() +
                                        "; the parameter is of type " + a->type +
                                        ": convert it (astype), or pass its bytes as they are (x.view(numpy.uint8))");
  }

  void bind(Bound& bound, uint32_t index, nb::handle value) {
    if (index >= kMaxBuffers) throw Error(ErrorKind::kernel, what() + "buffer index " + std::to_string(index) + " is not in 0 to 30");
    if (!(pipeline_->declared >> index & 1))
      throw Error(ErrorKind::kernel, what() + "it has no argument at buffer index " + std::to_string(index) + "; it has " + indices());
    bound.owners.push_back(nb::borrow(value));
    if (PyLong_Check(value.ptr()) || PyFloat_Check(value.ptr())) {
      if (const std::string type = type_of(index); !type.empty()) {
        bound.owners.back() = call_python(hooks().pack_number, value, type, what() + "buffer " + std::to_string(index));
        value = bound.owners.back();
      }
    }
    if (PyBytes_Check(value.ptr())) {
      bound.bytes.push_back({index, PyBytes_AS_STRING(value.ptr()), static_cast<size_t>(PyBytes_GET_SIZE(value.ptr()))});
      return;
    }
    std::string name = "buffer " + std::to_string(index);
    bound.operands.emplace_back(value, name.c_str(), state_);
    const Tensor* t = bound.operands.back().get();
    if (!t) {
      static const uint8_t nothing[4096] = {};
      std::shared_ptr<Device> device = state_->open();
      bound.zeros.push_back(device->new_buffer(sizeof(nothing)));  // its own: the kernel may write there after all
      device->write(*bound.zeros.back(), 0, nothing, sizeof(nothing));
      bound.buffers.push_back({index, &bound.zeros.back(), 0});
      return;
    }
    if (!t->contiguous()) throw Error(ErrorKind::layout, what() + name + " is not C-contiguous; pass numpy.ascontiguousarray of it");
    if (t->ndim == 0 && bound.operands.back().own_buffer())
      check_scalar(index, t->dtype);
    else
      check_array(index, t->dtype);
    t->buffer->mutable_since = true;
    bound.buffers.push_back({index, &t->buffer, t->offset});
  }

  nb::object device_;
  DeviceState* state_;
  std::shared_ptr<Pipeline> pipeline_;
};

PyObject* call_kernel(PyObject* self, PyObject* args, PyObject* kwargs) {
  return guarded(
      [&] { return self_of<Kernel>(self).call(nb::borrow<nb::tuple>(args), kwargs ? nb::borrow<nb::dict>(kwargs) : nb::dict()); });
}

}  // namespace

void bind_kernel(nb::module_& m) {
  static PyMethodDef none[] = {{}};
  nb::class_<Kernel>(
      m, "Kernel", nb::type_slots(collected<Kernel>(none, &call_kernel)),
      "A kernel of a compiled library with its function constants. Made by Library.kernel().\n\n"
      "kernel(*args, grid=…, threads=…, threadgroup=…, threadgroup_memory=None, batch=None)\n\n"
      "Runs the kernel, over `grid` threadgroups, or over `threads` threads, where the last threadgroup in each axis may be smaller,\n"
      "of `threadgroup` threads; each up to three sizes.\n\n"
      "args: its buffers in index order, or one dict {index: buffer}: NumPy arrays and others with __dlpack__ on the CPU (used in\n"
      "place), metalmm.Array (a slice binds with its offset), bytes for constants, an int or float where the parameter's type is a\n"
      "known number, or None for one that the kernel will not touch (it finds 4 KB of zeros). threadgroup_memory: {index: bytes} of\n"
      "each dynamic threadgroup argument. With batch=, it is added there instead, and None returned.\n\n"
      "Returns the seconds that the device worked, or None where it cannot tell. Raises KernelError for a dispatch that Metal would\n"
      "refuse, DTypeError, LayoutError, ArgumentError.")
      .def(nb::init<nb::object, nb::handle, const std::string&, nb::dict>())
      .def_prop_ro(
          "name", [](const Kernel& k) { return k.pipeline().name; }, "Its host name.")
      .def_prop_ro(
          "max_total_threads_per_threadgroup", [](const Kernel& k) { return k.pipeline().max_threads; }, "Threads.")
      .def_prop_ro(
          "static_threadgroup_memory_length", [](const Kernel& k) { return k.pipeline().static_threadgroup_bytes; }, "Bytes.")
      .def_prop_ro("buffer_indices", &Kernel::buffer_indices, "Of its buffer arguments, in the order in which a call takes them.")
      .def("__repr__", [](const Kernel& k) { return "metalmm.Kernel('" + k.pipeline().name + "', on " + device_text(k.device()) + ")"; });
}

}  // namespace metalmm
