// The Python module: converts arguments, holds no logic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <deque>
#include <unordered_map>

#include "blas.h"
#include "core/batch.h"
#include "cpu/cpu_device.h"
#include "python_array.h"
#if METALMM_METAL
#include "metal/metal.h"
#endif

namespace metalmm {
namespace {

using namespace nb::literals;

// -- what Python supplies ---------------------------------------------------------------------------------------------

struct Hooks {
  nb::object build_pipeline;   // (device, variant id, specialization) -> (code, archive, kernel) of a PipelineSource
  nb::object unknown_variant;  // (id) -> message
  nb::object default_device;   // () -> Device
  std::vector<nb::object> exceptions;
};
Hooks& hooks() {
  static Hooks* h = new Hooks;  // outlives the interpreter's own clean-up
  return *h;
}

// -- variants ---------------------------------------------------------------------------------------------------------

class Registry {
 public:
  void add(Variant v) {
    auto it = by_id_.find(v.id);
    if (it != by_id_.end()) {
      v.index = it->second->index;
      *it->second = std::move(v);
      return;
    }
    v.index = static_cast<uint32_t>(variants_.size());
    variants_.push_back(std::move(v));
    by_id_[variants_.back().id] = &variants_.back();
  }

  const Variant& find(nb::handle id) {
    // A literal in the caller's code is one object: most look-ups end at its address.
    Seen& seen = seen_[reinterpret_cast<uintptr_t>(id.ptr()) / 16 % kSeen];
    if (seen.id.ptr() == id.ptr()) return *seen.variant;
    if (!PyUnicode_Check(id.ptr())) throw Error(ErrorKind::unknown_variant, "a variant is named by a string, 'family/name'");
    Py_ssize_t size;
    const char* text = PyUnicode_AsUTF8AndSize(id.ptr(), &size);
    if (!text) throw nb::python_error();
    auto it = by_id_.find(std::string(text, static_cast<size_t>(size)));
    if (it == by_id_.end()) throw Error(ErrorKind::unknown_variant, nb::cast<std::string>(hooks().unknown_variant(id)));
    seen = {nb::borrow(id), it->second};
    return *it->second;
  }

  std::string alternatives(const MatmulSpec& spec, DeviceKind device) const {
    std::string list;
    int count = 0;
    for (const Variant& v : variants_)
      if (v.enabled && (v.devices & device) && v.supports(spec) && count++ < 5) list += (list.empty() ? "" : ", ") + v.id;
    if (list.empty()) return "; no variant supports " + spec.text();
    return "; supported by " + list + (count > 5 ? " and " + std::to_string(count - 5) + " more" : "");
  }

 private:
  static constexpr size_t kSeen = 256;
  struct Seen {
    nb::object id;
    const Variant* variant = nullptr;
  };
  std::deque<Variant> variants_;  // references stay valid
  std::unordered_map<std::string, Variant*> by_id_;
  Seen seen_[kSeen];
};
Registry& registry() {
  static Registry* r = new Registry;
  return *r;
}

void give_warnings(Device& device) {
  for (const std::string& text : device.take_warnings())
    if (PyErr_WarnEx(PyExc_RuntimeWarning, text.c_str(), 2) != 0) throw nb::python_error();
}

std::shared_ptr<Pipeline> build_pipeline(DeviceState& state, nb::handle device, const Variant& v, unsigned specialization) {
  bool transpose_a = specialization & kTransposeA, transpose_b = specialization & kTransposeB;
  if (v.builtin == "blas") return blas_pipeline(v.id, transpose_a, transpose_b);
  PipelineSource source;
  source.name = v.id, source.builtin = v.builtin;
  source.transpose_a = transpose_a, source.transpose_b = transpose_b;
  auto built = nb::cast<nb::tuple>(hooks().build_pipeline(device, v.id, specialization));
  source.code = nb::cast<std::string>(built[0]), source.archive = nb::cast<std::string>(built[1]);
  source.kernel = nb::cast<std::string>(built[2]);
  std::shared_ptr<Device> running = state.open();
  std::shared_ptr<Pipeline> pipeline;
  {
    nb::gil_scoped_release unlocked;  // Metal compiles here
    pipeline = running->load_pipeline(source);
  }
  give_warnings(*running);
  return pipeline;
}

const std::shared_ptr<Pipeline>& pipeline_for(DeviceState& state, nb::handle device, const Variant& v, unsigned s) {
  if (state.pipelines.size() <= v.index) state.pipelines.resize(v.index + 1);
  if (!state.pipelines[v.index][s]) {
    auto pipeline = build_pipeline(state, device, v, s);
    if (v.tiling.threads > pipeline->max_threads) {
      throw Error(ErrorKind::kernel, v.id + ": the manifest gives " + std::to_string(v.tiling.threads) + " threads; the kernel allows " +
                                         std::to_string(pipeline->max_threads));
    }
    if (state.pipelines.size() <= v.index) state.pipelines.resize(v.index + 1);
    state.pipelines[v.index][s] = std::move(pipeline);
  }
  return state.pipelines[v.index][s];
}

// -- matmul -----------------------------------------------------------------------------------------------------------

// Everything that a matmul call resolves, with the objects that keep its memory alive.
struct Matmul {
  const Variant* variant = nullptr;
  Tiling tiling;  // a copy: a manifest that is loaded again must not change a prepared call
  Operand a, b, bias, c, out;
  MatmulArgs args;
  MatmulPlan plan;
  nb::object result;
  const std::shared_ptr<Pipeline>* pipeline = nullptr;

  template <class Use>
  auto dispatch(Use&& use) const {
    return with_dispatch(tiling, *pipeline, plan, args, *out.get(), std::forward<Use>(use));
  }
};

nb::object device_of(nb::handle device, std::initializer_list<nb::handle> arrays) {
  if (!device.is_none()) return nb::borrow(device);
  for (nb::handle h : arrays)
    if (nb::inst_check(h) && nb::isinstance<Array>(h)) return nb::inst_ptr<Array>(h)->owner;
  return hooks().default_device();
}

struct PyDevice {
  DeviceState* state = nullptr;  // never freed while arrays may point to it: they hold the Device
  explicit PyDevice(std::shared_ptr<Device> device) : state(new DeviceState{std::move(device), {}}) {}
  ~PyDevice() { delete state; }
  PyDevice(const PyDevice&) = delete;
};

std::shared_ptr<Device> cpu_device(unsigned threads, size_t threadgroup_memory_limit, bool lenient_barriers, bool debug) {
  return std::make_shared<cpu::CpuDevice>(cpu::CpuOptions{threads, threadgroup_memory_limit, lenient_barriers, debug});
}

std::shared_ptr<Device> metal_device(int64_t index, double spin, uint32_t most_operations, uint64_t most_bytes) {
#if METALMM_METAL
  return metal::make_device({index, spin, most_operations, most_bytes});
#else
  (void)index, (void)spin, (void)most_operations, (void)most_bytes;
  throw Error(ErrorKind::device, "this build of metalmm has no device metal");
#endif
}

DeviceState& state_of(nb::handle device) {
  if (!nb::isinstance<PyDevice>(device)) throw Error(ErrorKind::device, "device is not a metalmm.Device");
  DeviceState* state = nb::inst_ptr<PyDevice>(device)->state;
  state->open();
  return *state;
}

void resolve(Matmul& call, DeviceState& state, nb::handle device, nb::handle variant, nb::handle a, nb::handle b, nb::handle bias,
             nb::handle c, double alpha, double beta, bool transpose_a, bool transpose_b, nb::handle out) {
  call.variant = &registry().find(variant);
  call.tiling = call.variant->tiling;
  call.a = Operand(a, "a", &state);
  call.b = Operand(b, "b", &state);
  if (!call.a.get() || !call.b.get()) throw Error(ErrorKind::dtype, "matmul: a and b must be arrays, not None");
  call.bias = Operand(bias, "bias", &state);
  call.c = Operand(c, "c", &state);
  call.args = {call.a.get(), call.b.get(), call.bias.get(), call.c.get(), static_cast<float>(alpha), static_cast<float>(beta),
               transpose_a,  transpose_b};
  call.plan = plan_matmul(call.args);
  const Variant& v = *call.variant;
  DeviceKind kind = state.open()->kind();
  if (!(v.devices & kind) || !v.supports(call.plan.spec)) {
    std::string lack = v.devices & kind ? v.lacks(call.plan.spec)
                                        : std::string("unavailable on device ") + state.open()->name() + ", it needs device " +
                                              (v.devices & kMetal ? "metal" : "cpu");
    throw Error(ErrorKind::unsupported, v.id + ": " + lack + registry().alternatives(call.plan.spec, kind));
  }
  if (!out.is_none()) {
    call.result = nb::borrow(out);
  } else if (call.a.is_array() || call.b.is_array()) {
    call.result = nb::cast(empty_array(nb::borrow(device), &state, call.plan.out_ndim, call.plan.out_shape, kFloat16));
  } else {
    call.result = empty_numpy(call.plan.out_ndim, call.plan.out_shape);
  }
  call.out = Operand(call.result, "out", &state);
  if (!out.is_none()) check_out(call.plan, call.args, *call.out.get());
  call.out.get()->buffer->mutable_since = true;
  call.pipeline = &pipeline_for(state, device, v, v.specialization(call.plan.spec, call.plan.params));
}

nb::object matmul(nb::handle variant, nb::handle a, nb::handle b, nb::handle bias, nb::handle c, double alpha, double beta,
                  bool transpose_a, bool transpose_b, nb::handle out, nb::handle device) {
  nb::object owner = device_of(device, {a, b, out, c, bias});
  DeviceState& state = state_of(owner);
  Matmul call;
  resolve(call, state, owner, variant, a, b, bias, c, alpha, beta, transpose_a, transpose_b, out);
  std::shared_ptr<Pipeline> keep = *call.pipeline;  // another thread may load a pipeline and move the table
  call.pipeline = &keep;
  std::shared_ptr<Device> running = state.open();
  call.dispatch([&](const Dispatch& d) {
    nb::gil_scoped_release unlocked;
    return running->run(d);
  });
  return call.result;
}

// -- prepared calls ---------------------------------------------------------------------------------------------------

class Prepared {
 public:
  Prepared(nb::object device, nb::handle variant, nb::object a, nb::object b, nb::object bias, nb::object c, double alpha, double beta,
           bool transpose_a, bool transpose_b, nb::object out)
      : device_(std::move(device)), state_(state_of(device_)), keep_{a, b, bias, c} {
    resolve(call_, state_, device_, variant, a, b, bias, c, alpha, beta, transpose_a, transpose_b, out);
    pipeline_ = *call_.pipeline;
    call_.pipeline = &pipeline_;
  }
  Prepared(const Prepared&) = delete;

  nb::object run() {
    std::shared_ptr<Device> device = state_.open();
    call_.dispatch([&](const Dispatch& d) {
      nb::gil_scoped_release unlocked;
      seconds_.store(device->run(d), std::memory_order_relaxed);
      return 0;
    });
    return call_.result;
  }
  template <class Use>
  void encode(Use&& use) const {
    call_.dispatch(std::forward<Use>(use));
  }
  const nb::object& out() const { return call_.result; }
  const nb::object& device() const { return device_; }
  std::optional<double> device_seconds() const {
    double s = seconds_.load(std::memory_order_relaxed);
    return s < 0 ? std::nullopt : std::optional<double>(s);
  }
  std::string variant() const { return call_.variant->id; }

 private:
  nb::object device_;
  DeviceState& state_;
  nb::object keep_[4];
  Matmul call_;
  std::shared_ptr<Pipeline> pipeline_;
  std::atomic<double> seconds_{-1};
};

// -- batches ----------------------------------------------------------------------------------------------------------

class PyRecording {
 public:
  PyRecording(nb::object device, std::shared_ptr<Recording> recording, size_t size)
      : device_(std::move(device)), state_(state_of(device_)), recording_(std::move(recording)), size_(size) {}

  void replay() {
    state_.open();
    if (pending_.size() >= kMostPending) wait_for_first();
    auto start = Clock::now();
    std::shared_ptr<Submission> submission;
    {
      nb::gil_scoped_release unlocked;
      submission = recording_->replay();
    }
    pending_.push_back(std::move(submission));
    taken_ = seconds(Clock::now() - start);
  }
  void wait() {
    state_.open();
    while (!pending_.empty()) wait_for_first();
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }
  BatchTiming timing() const {
    BatchTiming t = pending_.empty() ? last_ : pending_.back()->timing();
    t.encode = taken_ - t.commit;
    return t;
  }
  size_t size() const { return size_; }

 private:
  static constexpr size_t kMostPending = 32;  // far below what a queue has
  // Stays in the list until it is done: another thread may wait, too.
  void wait_for_first() {
    std::shared_ptr<Submission> first = pending_.front();
    std::exception_ptr failure;
    try {
      nb::gil_scoped_release unlocked;
      first->wait();
    } catch (...) {
      failure = std::current_exception();
    }
    if (pending_.empty() || pending_.front() != first) return;
    pending_.pop_front();
    if (!failure_) failure_ = failure;
    last_ = first->timing();
  }
  nb::object device_;
  DeviceState& state_;
  std::shared_ptr<Recording> recording_;
  std::deque<std::shared_ptr<Submission>> pending_;
  std::exception_ptr failure_;
  BatchTiming last_;
  double taken_ = 0;
  size_t size_;
};

class Batch {
 public:
  Batch(nb::object device, bool per_dispatch)
      : device_(std::move(device)), state_(state_of(device_)), running_(state_.open()), per_dispatch_(per_dispatch), batch_(fresh()) {}

  nb::object matmul(nb::handle variant, nb::handle a, nb::handle b, nb::handle bias, nb::handle c, double alpha, double beta,
                    bool transpose_a, bool transpose_b, nb::handle out) {
    state_.open();
    Matmul call;
    resolve(call, state_, device_, variant, a, b, bias, c, alpha, beta, transpose_a, transpose_b, out);
    call.dispatch([&](const Dispatch& d) {
      batch_->encode(d);
      return 0;
    });
    return std::move(call.result);
  }

  nb::object add(const Prepared& call) {
    if (!call.device().is(device_)) throw Error(ErrorKind::device, "the call was prepared for another device");
    call.encode([&](const Dispatch& d) {
      encode(d);
      return 0;
    });
    return call.out();
  }

  void encode(const Dispatch& d) {
    state_.open();
    batch_->encode(d);
  }
  void submit() {
    hand_over();
    give_warnings(*running_);
  }
  void wait() {
    state_.open();
    std::shared_ptr<CommandBatch> batch = batch_;
    nb::gil_scoped_release unlocked;
    batch->wait();
  }
  std::unique_ptr<PyRecording> record() {
    state_.open();
    size_t size = batch_->size();
    return std::make_unique<PyRecording>(device_, batch_->record(), size);
  }
  void exit(nb::handle type, nb::handle, nb::handle) {
    if (!type.is_none()) {
      batch_ = fresh();  // dropped: nothing of it will run that was not submitted
      return;
    }
    if (batch_->recorded()) return;
    if (!batch_->submitted()) hand_over();
    wait();
  }
  BatchTiming timing() const { return batch_->timing(); }
  size_t size() const { return batch_->size(); }
  const nb::object& device() const { return device_; }

 private:
  std::shared_ptr<CommandBatch> fresh() const { return std::make_shared<CommandBatch>(running_, per_dispatch_); }
  nb::object device_;
  void hand_over() {
    state_.open();
    std::shared_ptr<CommandBatch> batch = batch_;
    batch->close();
    nb::gil_scoped_release unlocked;
    batch->submit();
  }
  DeviceState& state_;
  std::shared_ptr<Device> running_;
  bool per_dispatch_;
  std::shared_ptr<CommandBatch> batch_;
};

// -- kernels compiled at run time -------------------------------------------------------------------------------------

// A Python number as T, or an error that names the argument.
template <class T>
T number(nb::handle value, const char* name, ErrorKind kind) {
  try {
    return nb::cast<T>(value);
  } catch (const nb::cast_error&) {
    throw Error(kind, std::string(name) + ": " + nb::cast<std::string>(nb::repr(value)) + " is not a whole number in range");
  }
}

Size3 size3(nb::handle value, const char* name) {
  Size3 size{1, 1, 1};
  size_t count = 0;
  auto add = [&](nb::handle item) {
    auto v = number<int64_t>(item, name, ErrorKind::kernel);
    if (count >= 3 || v < 1 || v > UINT32_MAX)
      throw Error(ErrorKind::kernel, std::string(name) + " takes up to three sizes of 1 to 2^32 - 1");
    size[count++] = static_cast<uint32_t>(v);
  };
  if (PyLong_Check(value.ptr())) {
    add(value);
    return size;
  }
  for (nb::handle item : nb::iter(value)) add(item);
  return size;
}

FunctionConstant constant_of(nb::handle key, nb::handle value) {
  FunctionConstant c;
  if (nb::isinstance<nb::str>(key))
    c.name = nb::cast<std::string>(key);
  else
    c.index = number<uint32_t>(key, "constants", ErrorKind::compile);
  if (PyBool_Check(value.ptr()))
    c.value = value.is(nb::handle(Py_True));
  else if (PyFloat_Check(value.ptr()))
    c.value = nb::cast<double>(value);
  else
    c.value = number<int64_t>(value, "constants", ErrorKind::compile);
  return c;
}

class Kernel {
 public:
  Kernel(nb::object device, const std::string& code, const std::string& archive, const std::string& name, nb::dict constants)
      : device_(std::move(device)), state_(state_of(device_)) {
    PipelineSource source;
    source.name = source.kernel = name, source.code = code, source.archive = archive;
    for (auto [key, value] : constants) source.constants.push_back(constant_of(key, value));
    std::shared_ptr<Device> device_of_source = state_.device;
    {
      nb::gil_scoped_release unlocked;  // Metal compiles here
      pipeline_ = device_of_source->load_pipeline(source);
    }
    give_warnings(*device_of_source);
  }

  std::optional<double> call(nb::args args, nb::handle grid, nb::handle threadgroup, nb::handle threadgroup_memory, nb::handle batch) {
    Bound bound;
    bind_all(bound, args);
    std::vector<ThreadgroupMemory> memory;
    if (!threadgroup_memory.is_none())
      for (auto [key, value] : nb::cast<nb::dict>(threadgroup_memory))
        memory.push_back({number<uint32_t>(key, "threadgroup_memory", ErrorKind::kernel),
                          number<size_t>(value, "threadgroup_memory", ErrorKind::kernel)});
    Dispatch d{&pipeline_,         bound.buffers.data(), bound.buffers.size(),
               bound.bytes.data(), bound.bytes.size(),   memory.data(),
               memory.size(),      size3(grid, "grid"),  size3(threadgroup, "threadgroup")};
    std::shared_ptr<Device> device = state_.open();
    if (!batch.is_none()) {
      auto& target = nb::cast<Batch&>(batch);
      if (!target.device().is(device_))
        throw Error(ErrorKind::device, "the batch belongs to another device than kernel '" + pipeline_->name + "'");
      target.encode(d);
      return std::nullopt;
    }
    double took;
    {
      nb::gil_scoped_release unlocked;
      took = device->run(d);
    }
    return took < 0 ? std::nullopt : std::optional<double>(took);
  }
  const Pipeline& pipeline() const { return *pipeline_; }

 private:
  struct Bound {
    std::vector<nb::object> owners;  // a caller's dict may change while the kernel runs
    std::deque<Operand> operands;
    std::deque<std::shared_ptr<Buffer>> zeros;
    std::vector<BufferBinding> buffers;
    std::vector<BytesBinding> bytes;
  };

  void bind_all(Bound& bound, const nb::args& args) {
    if (args.size() == 1 && nb::isinstance<nb::dict>(args[0])) {
      for (auto [key, value] : nb::cast<nb::dict>(args[0])) bind(bound, number<uint32_t>(key, "buffer index", ErrorKind::kernel), value);
      return;
    }
    std::vector<uint32_t> indices;
    for (const KernelArgument& a : pipeline_->arguments)
      if (a.kind == KernelArgument::Kind::buffer) indices.push_back(a.index);
    if (args.size() != indices.size()) {
      std::string list;
      for (uint32_t i : indices) list += (list.empty() ? "" : ", ") + std::to_string(i);
      throw Error(ErrorKind::kernel, "kernel '" + pipeline_->name + "': " + std::to_string(args.size()) + " arguments; it takes " +
                                         std::to_string(indices.size()) + ", for the buffer indices " + list);
    }
    for (size_t i = 0; i < indices.size(); i++) bind(bound, indices[i], args[i]);
  }

  void bind(Bound& bound, uint32_t index, nb::handle value) {
    if (index >= kMaxBuffers)
      throw Error(ErrorKind::kernel, "kernel '" + pipeline_->name + "': buffer index " + std::to_string(index) + " is not in 0 to 30");
    bound.owners.push_back(nb::borrow(value));
    if (PyBytes_Check(value.ptr())) {
      bound.bytes.push_back({index, PyBytes_AS_STRING(value.ptr()), static_cast<size_t>(PyBytes_GET_SIZE(value.ptr()))});
      return;
    }
    std::string name = "buffer " + std::to_string(index);
    bound.operands.emplace_back(value, name.c_str(), &state_);
    const Tensor* t = bound.operands.back().get();
    if (!t) {
      bound.zeros.push_back(state_.open()->new_buffer(4096));  // its own: the kernel may write there after all
      std::memset(bound.zeros.back()->data(), 0, 4096);
      bound.buffers.push_back({index, &bound.zeros.back(), 0});
      return;
    }
    int64_t stride = 1;
    for (int i = t->ndim - 1; i >= 0; i--) {
      if (t->shape[i] > 1 && t->strides[i] != stride)
        throw Error(ErrorKind::layout,
                    "kernel '" + pipeline_->name + "': " + name + " is not C-contiguous; pass numpy.ascontiguousarray of it");
      stride *= t->shape[i];
    }
    t->buffer->mutable_since = true;
    bound.buffers.push_back({index, &t->buffer, t->offset});
  }

  nb::object device_;
  DeviceState& state_;
  std::shared_ptr<Pipeline> pipeline_;
};

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
  nb::set_leak_warnings(false);  // pipelines and the default device live as long as the process
  nb::register_exception_translator(translate, nullptr);

  m.def("_set_hooks", [](nb::object build_pipeline, nb::object unknown_variant, nb::object default_device, nb::list exceptions) {
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
    nb::gil_scoped_release unlocked;
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

  nb::class_<Array>(m, "Array", "An array in a device's memory. Made by Device.array, Device.empty and matmul.")
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
            if (!dtype.is_none() && !view.attr("dtype").equal(nb::module_::import_("numpy").attr("dtype")(dtype))) {
              if (!copy.is_none() && !nb::cast<bool>(copy)) throw nb::value_error("metalmm.Array: another dtype needs a copy");
              return nb::object(view.attr("astype")(dtype));
            }
            return !copy.is_none() && nb::cast<bool>(copy) ? nb::object(view.attr("copy")()) : view;
          },
          "dtype"_a = nb::none(), "copy"_a = nb::none())
      .def("__dlpack__", [](const Array& a, nb::kwargs kwargs) { return to_numpy(a).attr("__dlpack__")(**kwargs); })
      .def("__dlpack_device__", [](const Array& a) { return to_numpy(a).attr("__dlpack_device__")(); })
      .def("__repr__", [](const Array& a) {
        return "metalmm.Array(shape=" + nb::cast<std::string>(nb::str(shape_of(a.tensor))) + ", dtype=" + dtype_name(a.tensor.dtype) + ")";
      });

  nb::class_<Prepared>(m, "PreparedCall", "A matmul with everything resolved; call it to run it. Reads its arrays at each call.")
      .def("__call__", &Prepared::run, "Runs it and returns out. Raises KernelError, ClosedError.")
      .def_prop_ro("out", [](const Prepared& p) { return p.out(); })
      .def_prop_ro("variant", &Prepared::variant)
      .def_prop_ro("device_seconds", &Prepared::device_seconds,
                   "What the device worked in the last call, in seconds; None where it cannot tell.");

  nb::class_<Batch>(
      m, "Batch",
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

  nb::class_<PyRecording>(m, "Recording",
                          "A batch that can be run again and again. Arrays are read and results written anew each time; they are fixed,\n"
                          "as are shapes and epilogues.")
      .def("replay", &PyRecording::replay, "Hands it to the device once more, after all that was submitted before.")
      .def("wait", &PyRecording::wait, "Waits until every replay is done. Raises what went wrong first.")
      .def_prop_ro("timing", &PyRecording::timing, "Of the last replay.")
      .def("__len__", &PyRecording::size);

  nb::class_<Kernel>(m, "Kernel", "A kernel of a compiled library with its function constants.")
      .def(nb::init<nb::object, const std::string&, const std::string&, const std::string&, nb::dict>())
      .def("__call__", &Kernel::call, "args"_a, nb::kw_only(), "grid"_a, "threadgroup"_a, "threadgroup_memory"_a = nb::none(),
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
      .def_prop_ro("buffer_indices", [](const Kernel& k) {
        std::vector<uint32_t> indices;
        for (const KernelArgument& a : k.pipeline().arguments)
          if (a.kind == KernelArgument::Kind::buffer) indices.push_back(a.index);
        return indices;
      });

  nb::class_<PyDevice>(m, "Device")
      .def(
          "__init__",
          [](PyDevice* self, unsigned threads, size_t threadgroup_memory_limit, bool lenient_barriers, bool debug) {
            new (self) PyDevice(cpu_device(threads, threadgroup_memory_limit, lenient_barriers, debug));
          },
          "threads"_a, "threadgroup_memory_limit"_a, "lenient_barriers"_a, "debug"_a)
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
            auto* cpu = dynamic_cast<cpu::CpuDevice*>(d.state->open().get());
            Tensor o = tensor_of(out, "out"), c = tensor_of(counts, "counts");
            if (!cpu || c.buffer->size() * 2 < o.buffer->size()) throw Error(ErrorKind::device, "writes are counted on device cpu");
            cpu->watch(o.buffer->data(), o.buffer->data() + o.buffer->size(), c.buffer->data());
          },
          "out"_a, "counts"_a)
      .def("array", &device_array, "array"_a, "A copy of a NumPy array in the device's memory.")
      .def(
          "empty",
          [](nb::handle self, nb::handle shape, const std::string& dtype) {
            std::vector<int64_t> sizes;
            if (PyLong_Check(shape.ptr()))
              sizes.push_back(number<int64_t>(shape, "empty", ErrorKind::shape));
            else
              for (nb::handle item : nb::iter(shape)) sizes.push_back(number<int64_t>(item, "empty", ErrorKind::shape));
            if (sizes.empty() || sizes.size() > kMaxDims) throw Error(ErrorKind::shape, "empty: an array has 1 to 8 dimensions");
            for (int64_t s : sizes)
              if (s < 0) throw Error(ErrorKind::shape, "empty: a size of " + std::to_string(s));
            Tensor like = tensor_of(nb::module_::import_("numpy").attr("empty")(0, dtype), "dtype");
            return empty_array(nb::borrow(self), &state_of(self), static_cast<int>(sizes.size()), sizes.data(), like.dtype);
          },
          "shape"_a, "dtype"_a = "float16", "An array of the device with undefined contents.")
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
      .def(
          "close",
          [](PyDevice& d) {
            auto pipelines = std::move(d.state->pipelines);
            auto device = std::move(d.state->device);
            d.state->pipelines.clear();
            if (!device) return;
            {
              nb::gil_scoped_release unlocked;  // a GPU may have work to finish, which ends in releasing NumPy memory
              device->finish();
            }
            give_warnings(*device);
            nb::gil_scoped_release unlocked;
            pipelines.clear();
            device.reset();
          },
          "Ends the device. Its arrays, prepared calls and batches raise ClosedError afterwards.");

  m.def("matmul", &matmul, "variant"_a, "a"_a.none(), "b"_a.none(), nb::kw_only(), "bias"_a = nb::none(), "c"_a = nb::none(),
        "alpha"_a = 1.0, "beta"_a = 0.0, "transpose_a"_a = false, "transpose_b"_a = false, "out"_a = nb::none(), "device"_a = nb::none(),
        kMatmulDoc);
}

}  // namespace metalmm
