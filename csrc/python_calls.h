// What Python calls: variants by id, matmuls, prepared calls, batches, recordings, kernels compiled at run time.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

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

using namespace nb::literals;

// -- what Python supplies ---------------------------------------------------------------------------------------------

struct Hooks {
  nb::object build_pipeline;   // (device, variant id, specialization) -> (code, archive, kernel) of a PipelineSource
  nb::object unknown_variant;  // (id) -> message
  nb::object default_device;   // () -> Device
  std::vector<nb::object> exceptions;
};
inline Hooks& hooks() {
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
    if (it == by_id_.end()) throw Error(ErrorKind::unknown_variant, nb::cast<std::string>(call_python(hooks().unknown_variant, id)));
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
inline Registry& registry() {
  static Registry* r = new Registry;
  return *r;
}

inline std::shared_ptr<Pipeline> build_pipeline(DeviceState& state, nb::handle device, const Variant& v, unsigned specialization) {
  bool transpose_a = specialization & kTransposeA, transpose_b = specialization & kTransposeB;
  if (v.builtin == "blas") return blas_pipeline(v.id, transpose_a, transpose_b);
  PipelineSource source;
  source.name = v.id, source.builtin = v.builtin;
  source.transpose_a = transpose_a, source.transpose_b = transpose_b;
  auto built = nb::cast<nb::tuple>(call_python(hooks().build_pipeline, device, v.id, specialization));
  source.code = nb::cast<std::string>(built[0]), source.archive = nb::cast<std::string>(built[1]);
  source.kernel = nb::cast<std::string>(built[2]);
  std::shared_ptr<Device> running = state.open();
  std::shared_ptr<Pipeline> pipeline;
  {
    Unlocked unlocked;  // Metal compiles here
    pipeline = running->load_pipeline(source);
  }
  give_warnings(*running);
  return pipeline;
}

inline const std::shared_ptr<Pipeline>& pipeline_for(DeviceState& state, nb::handle device, const Variant& v, unsigned s) {
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

inline nb::object device_of(nb::handle device, std::initializer_list<nb::handle> arrays) {
  if (!device.is_none()) return nb::borrow(device);
  for (nb::handle h : arrays)
    if (nb::inst_check(h) && nb::isinstance<Array>(h)) return nb::inst_ptr<Array>(h)->owner;
  return call_python(hooks().default_device);
}

struct PyDevice {
  DeviceState* state = nullptr;  // never freed while arrays may point to it: they hold the Device
  explicit PyDevice(std::shared_ptr<Device> device) : state(new DeviceState{std::move(device), {}}) {}
  ~PyDevice() {
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
  // Finishes all that was submitted, and closes. Where that is interrupted, the device stays as it was.
  void close() {
    std::shared_ptr<Device> device = state->device;
    if (!device) return;
    {
      Unlocked unlocked;
      device->finish();
    }
    auto pipelines = std::move(state->pipelines);
    state->pipelines.clear();
    state->device.reset();
    {
      Unlocked unlocked;
      pipelines.clear();
    }
    give_warnings(*device);
  }
  PyDevice(const PyDevice&) = delete;
};

inline std::shared_ptr<Device> metal_device(int64_t index, double spin, uint32_t most_operations, uint64_t most_bytes) {
#if METALMM_METAL
  return metal::make_device({index, spin, most_operations, most_bytes});
#else
  (void)index, (void)spin, (void)most_operations, (void)most_bytes;
  throw Error(ErrorKind::device, "this build of metalmm has no device metal");
#endif
}

inline DeviceState& state_of(nb::handle device) {
  if (!nb::isinstance<PyDevice>(device)) throw Error(ErrorKind::device, "device is not a metalmm.Device");
  DeviceState* state = nb::inst_ptr<PyDevice>(device)->state;
  state->open();
  return *state;
}

inline void resolve(Matmul& call, DeviceState& state, nb::handle device, nb::handle variant, nb::handle a, nb::handle b, nb::handle bias,
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
  if (out.is_none() && !call.out.is_array() && state.open()->poisons())
    std::memset(call.out.get()->buffer->data(), 0xff, call.out.get()->buffer->size());
  if (!out.is_none()) check_out(call.plan, call.args, *call.out.get());
  call.out.get()->buffer->mutable_since = true;
  call.pipeline = &pipeline_for(state, device, v, v.specialization(call.plan.spec, call.plan.params));
}

inline nb::object matmul(nb::handle variant, nb::handle a, nb::handle b, nb::handle bias, nb::handle c, double alpha, double beta,
                         bool transpose_a, bool transpose_b, nb::handle out, nb::handle device) {
  nb::object owner = device_of(device, {a, b, out, c, bias});
  DeviceState& state = state_of(owner);
  Matmul call;
  resolve(call, state, owner, variant, a, b, bias, c, alpha, beta, transpose_a, transpose_b, out);
  std::shared_ptr<Pipeline> keep = *call.pipeline;  // another thread may load a pipeline and move the table
  call.pipeline = &keep;
  std::shared_ptr<Device> running = state.open();
  call.dispatch([&](const Dispatch& d) {
    Unlocked unlocked;
    return running->run(d);
  });
  give_warnings(*running);
  return call.result;
}

// -- prepared calls ---------------------------------------------------------------------------------------------------

class Prepared {
 public:
  Prepared(nb::object device, nb::handle variant, nb::object a, nb::object b, nb::object bias, nb::object c, double alpha, double beta,
           bool transpose_a, bool transpose_b, nb::object out)
      : device_(std::move(device)), state_(&state_of(device_)), keep_{a, b, bias, c} {
    resolve(call_, *state_, device_, variant, a, b, bias, c, alpha, beta, transpose_a, transpose_b, out);
    pipeline_ = *call_.pipeline;
    call_.pipeline = &pipeline_;
  }
  Prepared(const Prepared&) = delete;

  nb::object run() {
    std::shared_ptr<Device> device = state_->open();
    call_.dispatch([&](const Dispatch& d) {
      Unlocked unlocked;
      seconds_.store(device->run(d), std::memory_order_relaxed);
      return 0;
    });
    give_warnings(*device);
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

  // For the garbage collector. A NumPy array is held twice: by the object, and by the buffer that was made of it.
  template <class Visit>
  void visit(Visit&& visit) const {
    visit(device_.ptr());
    for (const nb::object& o : keep_) visit(o.ptr());
    visit(call_.result.ptr());
    for (const Operand* o : {&call_.a, &call_.b, &call_.bias, &call_.c, &call_.out})
      if (auto* buffer = o->own_buffer()) visit(static_cast<PyObject*>((*buffer)->owner));
  }
  void clear() {
    state_ = closed_state();
    call_.a = call_.b = call_.bias = call_.c = call_.out = Operand();
    for (nb::object& o : keep_) o.reset();
    call_.result.reset();
    device_.reset();
  }

 private:
  nb::object device_;
  DeviceState* state_;
  nb::object keep_[4];
  Matmul call_;
  std::shared_ptr<Pipeline> pipeline_;
  std::atomic<double> seconds_{-1};
};

// What a batch or recording holds of Python beside its device, for the garbage collector: prepared calls, and NumPy memory that
// lives for as long as the work does.
struct Held {
  std::vector<nb::object> calls;
  std::vector<std::weak_ptr<Buffer>> buffers;

  void add(const nb::object& call) {
    if (calls.empty() || !calls.back().is(call)) calls.push_back(call);
  }
  void add(const Operand& operand) {
    if (auto* buffer = operand.own_buffer()) buffers.push_back(*buffer);
  }
  template <class Visit>
  void visit(Visit&& visit) const {
    for (const nb::object& o : calls) visit(o.ptr());
    for (auto& weak : buffers)
      if (auto buffer = weak.lock()) visit(static_cast<PyObject*>(buffer->owner));
  }
  void clear() {
    auto gone = std::move(calls);
    calls.clear(), buffers.clear();
  }
};

// -- batches ----------------------------------------------------------------------------------------------------------

class PyRecording {
 public:
  PyRecording(nb::object device, std::shared_ptr<Recording> recording, size_t size, Held held)
      : device_(std::move(device)), state_(&state_of(device_)), recording_(std::move(recording)), held_(std::move(held)), size_(size) {}

  void replay() {
    std::shared_ptr<Device> device = state_->open();
    if (pending_.size() >= kMaxPending) wait_for_first(*device);
    auto start = Clock::now();
    std::shared_ptr<Submission> submission;
    {
      Unlocked unlocked;
      submission = device->submit(*recording_);
    }
    pending_.push_back(std::move(submission));
    taken_ = seconds(Clock::now() - start);
    give_warnings(*device);
  }
  void wait() {
    std::shared_ptr<Device> device = state_->open();
    while (!pending_.empty()) wait_for_first(*device);
    give_warnings(*device);
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }
  BatchTiming timing() const {
    BatchTiming t = pending_.empty() ? last_ : pending_.back()->timing();
    t.encode = taken_ - t.commit;
    return t;
  }
  size_t size() const { return size_; }

  template <class Visit>
  void visit(Visit&& visit) const {
    visit(device_.ptr());
    held_.visit(visit);
  }
  void clear() {
    state_ = closed_state();
    held_.clear();
    device_.reset();
  }

 private:
  static constexpr size_t kMaxPending = 32;  // whose failures it remembers
  // Stays in the list until it is done: another thread may wait, too.
  void wait_for_first(Device& device) {
    std::shared_ptr<Submission> first = pending_.front();
    std::exception_ptr failure;
    try {
      Unlocked unlocked;
      device.wait(*first);
    } catch (const Error&) {
      failure = std::current_exception();
    }
    if (pending_.empty() || pending_.front() != first) return;
    pending_.pop_front();
    if (!failure_) failure_ = failure;
    last_ = first->timing();
  }
  nb::object device_;
  DeviceState* state_;
  std::shared_ptr<Recording> recording_;
  Held held_;
  std::deque<std::shared_ptr<Submission>> pending_;
  std::exception_ptr failure_;
  BatchTiming last_;
  double taken_ = 0;
  size_t size_;
};

class Batch {
 public:
  Batch(nb::object device, bool per_dispatch)
      : device_(std::move(device)), state_(&state_of(device_)), running_(state_->open()), per_dispatch_(per_dispatch), batch_(fresh()) {}

  nb::object matmul(nb::handle variant, nb::handle a, nb::handle b, nb::handle bias, nb::handle c, double alpha, double beta,
                    bool transpose_a, bool transpose_b, nb::handle out) {
    state_->open();
    Matmul call;
    resolve(call, *state_, device_, variant, a, b, bias, c, alpha, beta, transpose_a, transpose_b, out);
    call.dispatch([&](const Dispatch& d) {
      batch_->encode(d);
      return 0;
    });
    for (const Operand* o : {&call.a, &call.b, &call.bias, &call.c, &call.out}) held_.add(*o);
    return std::move(call.result);
  }

  nb::object add(nb::handle handle) {
    if (!nb::isinstance<Prepared>(handle)) throw Error(ErrorKind::device, "batch.add takes what Device.prepare() gives");
    const Prepared& call = *nb::inst_ptr<Prepared>(handle);
    if (!call.device().is(device_)) throw Error(ErrorKind::device, "the call was prepared for another device");
    call.encode([&](const Dispatch& d) {
      encode(d);
      return 0;
    });
    held_.add(nb::borrow(handle));
    return call.out();
  }

  void encode(const Dispatch& d) {
    state_->open();
    batch_->encode(d);
  }
  void hold(const Operand& operand) { held_.add(operand); }
  void submit() {
    hand_over();
    give_warnings(*running_);
  }
  void wait() {
    state_->open();
    std::shared_ptr<CommandBatch> batch = batch_;
    {
      Unlocked unlocked;
      batch->wait();
    }
    give_warnings(*running_);
  }
  std::unique_ptr<PyRecording> record() {
    state_->open();
    size_t size = batch_->size();
    auto recording = batch_->record();
    return std::make_unique<PyRecording>(device_, std::move(recording), size, std::exchange(held_, {}));
  }
  void exit(nb::handle type, nb::handle, nb::handle) {
    if (!type.is_none()) {
      batch_ = fresh();  // dropped: nothing of it will run that was not submitted
      held_.clear();
      return;
    }
    if (batch_->recorded()) return;
    if (!batch_->submitted()) hand_over();
    wait();
  }
  BatchTiming timing() const { return batch_->timing(); }
  size_t size() const { return batch_->size(); }
  const nb::object& device() const { return device_; }

  template <class Visit>
  void visit(Visit&& visit) const {
    visit(device_.ptr());
    held_.visit(visit);
  }
  void clear() {
    state_ = closed_state();
    batch_ = fresh();
    held_.clear();
    device_.reset();
  }

 private:
  std::shared_ptr<CommandBatch> fresh() const { return std::make_shared<CommandBatch>(running_, per_dispatch_); }
  void hand_over() {
    state_->open();
    std::shared_ptr<CommandBatch> batch = batch_;
    batch->close();
    Unlocked unlocked;
    batch->submit();
  }
  nb::object device_;
  DeviceState* state_;
  std::shared_ptr<Device> running_;
  bool per_dispatch_;
  Held held_;
  std::shared_ptr<CommandBatch> batch_;
};

// -- kernels compiled at run time -------------------------------------------------------------------------------------

// A whole number of Python or NumPy as T, or an error that names the argument.
template <class T>
T number(nb::handle value, const char* name, ErrorKind kind) {
  auto whole = nb::steal(PyNumber_Index(value.ptr()));
  if (!whole.is_valid()) PyErr_Clear();
  T result;
  if (!whole.is_valid() || !nb::try_cast(whole, result))
    throw Error(kind, std::string(name) + ": " + nb::cast<std::string>(nb::repr(value)) + " is not a whole number in range");
  return result;
}

// use(item) for each of an iterable; anything else is taken as one item.
template <class Use>
void for_each_size(nb::handle value, Use&& use) {
  auto items = nb::steal(PyObject_GetIter(value.ptr()));
  if (!items.is_valid()) {
    PyErr_Clear();
    return use(value);
  }
  for (nb::handle item : nb::iter(value)) use(item);
}

inline Size3 size3(nb::handle value, const char* name) {
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

inline FunctionConstant constant_of(nb::handle key, nb::handle value) {
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
    throw Error(ErrorKind::compile, "constants: " + nb::cast<std::string>(nb::repr(value)) + " is neither bool nor int nor float");
  return c;
}

class Kernel {
 public:
  Kernel(nb::object device, const std::string& code, const std::string& archive, const std::string& name, nb::dict constants)
      : device_(std::move(device)), state_(&state_of(device_)) {
    PipelineSource source;
    source.name = source.kernel = name, source.code = code, source.archive = archive;
    for (auto [key, value] : constants) source.constants.push_back(constant_of(key, value));
    std::shared_ptr<Device> device_of_source = state_->open();
    {
      Unlocked unlocked;  // Metal compiles here
      pipeline_ = device_of_source->load_pipeline(source);
    }
    give_warnings(*device_of_source);
  }

  std::optional<double> call(nb::args args, nb::handle grid, nb::handle threadgroup, nb::handle threadgroup_memory, nb::handle batch) {
    std::shared_ptr<Device> device = state_->open();
    Bound bound;
    bind_all(bound, args);
    std::vector<ThreadgroupMemory> memory;
    if (!threadgroup_memory.is_none() && !nb::isinstance<nb::dict>(threadgroup_memory))
      throw Error(ErrorKind::kernel,
                  "threadgroup_memory: " + nb::cast<std::string>(nb::repr(threadgroup_memory)) + " is not a dict of {index: bytes}");
    if (!threadgroup_memory.is_none())
      for (auto [key, value] : nb::cast<nb::dict>(threadgroup_memory))
        memory.push_back({number<uint32_t>(key, "threadgroup_memory", ErrorKind::kernel),
                          number<size_t>(value, "threadgroup_memory", ErrorKind::kernel)});
    Dispatch d{&pipeline_,         bound.buffers.data(), bound.buffers.size(),
               bound.bytes.data(), bound.bytes.size(),   memory.data(),
               memory.size(),      size3(grid, "grid"),  size3(threadgroup, "threadgroup")};
    if (!batch.is_none()) {
      if (!nb::isinstance<Batch>(batch)) throw Error(ErrorKind::kernel, "batch: it takes what Device.batch() gives");
      auto& target = nb::cast<Batch&>(batch);
      if (!target.device().is(device_))
        throw Error(ErrorKind::device, "the batch belongs to another device than kernel '" + pipeline_->name + "'");
      target.encode(d);
      for (const Operand& o : bound.operands) target.hold(o);
      return std::nullopt;
    }
    double took;
    {
      Unlocked unlocked;
      took = device->run(d);
    }
    give_warnings(*device);
    return took < 0 ? std::nullopt : std::optional<double>(took);
  }
  const Pipeline& pipeline() const { return *pipeline_; }
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

  void bind_all(Bound& bound, const nb::args& args) {
    if (args.size() == 1 && nb::isinstance<nb::dict>(args[0])) {
      for (auto [key, value] : nb::cast<nb::dict>(args[0])) bind(bound, number<uint32_t>(key, "buffer index", ErrorKind::kernel), value);
      return;
    }
    std::vector<uint32_t> taken = buffer_indices();
    if (args.size() != taken.size()) {
      throw Error(ErrorKind::kernel, "kernel '" + pipeline_->name + "': " + std::to_string(args.size()) + " arguments; it takes " +
                                         std::to_string(taken.size()) + ", for " + indices());
    }
    for (size_t i = 0; i < taken.size(); i++) bind(bound, taken[i], args[i]);
  }

  std::string indices() const {
    std::string list;
    for (uint32_t i : buffer_indices()) list += (list.empty() ? "" : ", ") + std::to_string(i);
    return "the buffer indices " + (list.empty() ? "none" : list);
  }

  void bind(Bound& bound, uint32_t index, nb::handle value) {
    if (index >= kMaxBuffers)
      throw Error(ErrorKind::kernel, "kernel '" + pipeline_->name + "': buffer index " + std::to_string(index) + " is not in 0 to 30");
    if (!(pipeline_->declared >> index & 1))
      throw Error(ErrorKind::kernel, "kernel '" + pipeline_->name + "': it has no argument at buffer index " + std::to_string(index) +
                                         "; it has " + indices());
    bound.owners.push_back(nb::borrow(value));
    if (PyBytes_Check(value.ptr())) {
      bound.bytes.push_back({index, PyBytes_AS_STRING(value.ptr()), static_cast<size_t>(PyBytes_GET_SIZE(value.ptr()))});
      return;
    }
    std::string name = "buffer " + std::to_string(index);
    bound.operands.emplace_back(value, name.c_str(), state_);
    const Tensor* t = bound.operands.back().get();
    if (!t) {
      bound.zeros.push_back(state_->open()->new_buffer(4096));  // its own: the kernel may write there after all
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
  DeviceState* state_;
  std::shared_ptr<Pipeline> pipeline_;
};

}  // namespace metalmm
