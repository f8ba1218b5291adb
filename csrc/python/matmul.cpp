#include "matmul.h"

#include <cmath>
#include <limits>

#include "source.h"
#include "trace.h"

namespace metalmm {

namespace {

const char* const kIsFloat = "; it is a float32: 0, or of a size from 1.4e-45 to 3.4e38";

// Infinities and NaN are floats; what is past the largest is none, and what would round to 0.
bool is_no_float(double x) {
  return std::isfinite(x) && (std::fabs(x) > std::numeric_limits<float>::max() || (x != 0 && static_cast<float>(x) == 0));
}

}  // namespace

// alpha or beta, which kernels have in float32.
double factor(PyObject* value, const char* what, double otherwise) {
  double x = real(value, what, otherwise);
  if (is_no_float(x)) bad_argument(std::string(what) + " is " + repr_of(value) + kIsFloat);
  return x;
}

namespace {

bool is_quantized_array(nb::handle object) {
  return PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(hooks().quantized_array.ptr()));
}

// The parts of a QuantizedArray, whose class's own checks a user can go round: plan_matmul() looks at them again.
MatmulCall::Quantized parts_of(nb::handle array) {
  MatmulCall::Quantized q;
  std::string name = text_of(array.attr("storage"));
  auto storage = Storage::parse(name);
  nb::object given = array.attr("shape");
  bool is_pair = PyTuple_Check(given.ptr()) && PyTuple_GET_SIZE(given.ptr()) == 2;
  auto shape = is_pair ? nb::cast<nb::tuple>(given) : nb::make_tuple(0, 0);
  if (!storage || storage->is_dense() || !is_pair)
    bad_argument("matmul: b is a QuantizedArray of storage '" + name + "', of which there is none");
  q.storage = *storage;
  q.n = number<int64_t>(shape[0], "matmul: n of b", ErrorKind::shape), q.k = number<int64_t>(shape[1], "matmul: k of b", ErrorKind::shape);
  q.global_scale = real(nb::object(array.attr("global_scale")).ptr(), "matmul: global_scale of b", 1.0);
  q.values = array.attr("values"), q.scales = array.attr("scales"), q.biases = array.attr("biases");
  if (q.scales.is_none() || q.biases.is_none() == storage->has_biases())
    bad_argument("matmul: b is " + name +
                 (q.scales.is_none()      ? " without scales"
                  : storage->has_biases() ? " without biases"
                                          : " with biases"));
  return q;
}

}  // namespace

MatmulCall MatmulCall::take(PyObject* const* args, Py_ssize_t count, PyObject* kwnames, bool takes_device) {
  enum { kVariant, kA, kB, kBias, kC, kAlpha, kBeta, kTa, kTb, kOut, kRowInvariant, kDevice, kCount };
  static const std::vector<const char*> names = {"variant",     "a",           "b",   "bias",          "c",     "alpha", "beta",
                                                 "transpose_a", "transpose_b", "out", "row_invariant", "device"};
  static const auto* with = new Parameters("matmul", names, 3, 3);
  static const auto* without = new Parameters("matmul", {names.begin(), names.end() - 1}, 3, 3);
  PyObject* v[kCount] = {};
  (takes_device ? with : without)->take(args, count, kwnames, v);
  auto given = [&](int i) { return nb::handle(v[i] ? v[i] : Py_None); };
  if (!given(kC).is_none() && !v[kBeta])
    bad_argument("matmul: c is given and beta is not, which is 0 by itself, with which c is not read; pass beta=1.0 to add c, or beta=0.0");
  Quantized quantized;
  double alpha = factor(v[kAlpha], "matmul: alpha", 1.0);
  bool is_quantized = v[kB] && is_quantized_array(v[kB]);
  if (is_quantized) {
    quantized = parts_of(v[kB]);
    alpha *= quantized.global_scale;
    if (is_no_float(alpha)) bad_argument("matmul: alpha times b's global_scale is " + repr_of(nb::float_(alpha).ptr()) + kIsFloat);
    if (!flag(v[kTb], "matmul: transpose_b", true))
      bad_argument("matmul: transpose_b is False and b is quantized, n rows of k weights; leave it out, or pass True");
  }
  return {given(kVariant),
          given(kA),
          is_quantized ? nb::handle(quantized.values) : given(kB),
          given(kBias),
          given(kC),
          given(kOut),
          given(kDevice),
          alpha,
          factor(v[kBeta], "matmul: beta", 0.0),
          flag(v[kTa], "matmul: transpose_a", false),
          flag(v[kTb], "matmul: transpose_b", is_quantized),
          flag(v[kRowInvariant], "matmul: row_invariant", false),
          std::move(quantized),
          {},
          false,
          {}};
}

namespace {

// The items of a list or tuple of two or three, or `count` times None where there is none.
std::vector<nb::object> items_of(nb::handle list, const char* what, size_t count) {
  if (list.is_none() && count) return std::vector<nb::object>(count, nb::none());
  if (!PyList_Check(list.ptr()) && !PyTuple_Check(list.ptr()))
    bad_argument(std::string("matmul_fused: ") + what + " is " + repr_of(list) + "; it takes a list, one for each B");
  std::vector<nb::object> items;
  for (nb::handle item : nb::borrow<nb::sequence>(list)) items.push_back(nb::borrow(item));
  if (count ? items.size() != count : items.size() < 2 || items.size() > 3)
    bad_argument(std::string("matmul_fused: ") + what + " has " + std::to_string(items.size()) + "; it takes " +
                 (count ? std::to_string(count) + ", one for each B" : "two or three"));
  return items;
}

}  // namespace

MatmulCall MatmulCall::take_fused(PyObject* const* args, Py_ssize_t count, PyObject* kwnames, bool takes_device) {
  enum { kVariant, kA, kWeights, kBias, kActivation, kOut, kRowInvariant, kDevice, kCount };
  static const std::vector<const char*> names = {"variant", "a", "weights", "bias", "activation", "out", "row_invariant", "device"};
  static const auto* with = new Parameters("matmul_fused", names, 3, 3);
  static const auto* without = new Parameters("matmul_fused", {names.begin(), names.end() - 1}, 3, 3);
  PyObject* v[kCount] = {};
  (takes_device ? with : without)->take(args, count, kwnames, v);
  auto given = [&](int i) { return nb::handle(v[i] ? v[i] : Py_None); };
  MatmulCall call{};
  call.variant = given(kVariant), call.a = given(kA), call.c = Py_None, call.device = given(kDevice);
  call.alpha = 1, call.transpose_b = true, call.row_invariant = flag(v[kRowInvariant], "matmul_fused: row_invariant", false);
  if (nb::handle activation = given(kActivation); !activation.is_none()) {
    if (!PyUnicode_Check(activation.ptr()) || text_of(activation) != "swiglu")
      bad_argument("matmul_fused: activation is " + repr_of(activation) + "; it takes None or 'swiglu'");
    call.swiglu = true;
  }
  std::vector<nb::object> weights = items_of(given(kWeights), "weights", 0), biases = items_of(given(kBias), "bias", weights.size());
  std::vector<nb::object> outs(weights.size(), nb::none());
  if (nb::handle out = given(kOut); call.swiglu)
    outs[0] = nb::borrow(out);
  else if (!out.is_none())
    outs = items_of(out, "out", weights.size());
  for (size_t i = 0; i < weights.size(); i++) {
    Other part{weights[i], biases[i], outs[i], {}};
    if (is_quantized_array(weights[i])) {
      part.quantized = parts_of(weights[i]);
      if (part.quantized.global_scale != 1)
        bad_argument("matmul_fused: weights[" + std::to_string(i) + "] has a global scale of " +
                     std::to_string(part.quantized.global_scale) + ", and a fused call has no alpha: ask for each by matmul");
      part.b = part.quantized.values;
    }
    if (i == 0)
      call.b = part.b, call.bias = part.bias, call.out = part.out, call.quantized = part.quantized;
    else
      call.others.push_back(part);
  }
  for (auto* list : {&weights, &biases, &outs}) call.held.insert(call.held.end(), list->begin(), list->end());
  return call;
}

nb::object MatmulCall::owner() const {
  if (!device.is_none()) return nb::borrow(device);
  if (array_of(quantized.scales)) return device_of(device, {quantized.scales});
  for (const Other& o : others)
    for (nb::handle h : {o.b, o.out, o.bias, nb::handle(o.quantized.scales)})
      if (array_of(h)) return device_of(device, {h});
  return device_of(device, {a, b, out, c, bias});
}

// -- variants and their pipelines -------------------------------------------------------------------------------------

namespace {

Registry& registry() {
  static Registry* r = new Registry;
  return *r;
}

// A literal in the caller's code is one object: most look-ups end at its address.
struct Seen {
  nb::object id;
  const Variant* variant = nullptr;
};
constexpr size_t kSeen = 256;

Seen* seen_variants() {
  static Seen* all = new Seen[kSeen];
  return all;
}

// What "auto" is found as: not in the registry, and no variant of its own.
const Variant& automatic() {
  static const Variant* v = [] {
    auto* made = new Variant;
    made->id = "auto";
    return made;
  }();
  return *v;
}

const Variant& find_variant(nb::handle id) {
  Seen& seen = seen_variants()[reinterpret_cast<uintptr_t>(id.ptr()) / 16 % kSeen];
  if (seen.id.ptr() == id.ptr()) return *seen.variant;
  if (!PyUnicode_Check(id.ptr()))
    throw Error(ErrorKind::unknown_variant, "matmul: variant is " + repr_of(id) + "; a variant is named by a string, 'family/name'");
  Py_ssize_t size;
  const char* text = PyUnicode_AsUTF8AndSize(id.ptr(), &size);
  if (!text) PyErr_Clear();  // a lone surrogate, which no id has
  const Variant* found = text ? registry().find(std::string(text, static_cast<size_t>(size))) : nullptr;
  if (!found && text && automatic().id == text) found = &automatic();
  if (!found) {
    std::string why = text_of(call_python(hooks().add_variant, id));
    if (why.empty() && text) found = registry().find(std::string(text, static_cast<size_t>(size)));
    if (!found)
      throw Error(ErrorKind::unknown_variant, why.empty() ? "variant " + repr_of(id) + " was unloaded by another thread meanwhile" : why);
  }
  seen = {nb::borrow(id), found};
  return *found;
}

std::shared_ptr<Pipeline> build_pipeline(DeviceState& state, nb::handle device, const Variant& v, unsigned specialization) {
  PipelineSource source = source_of(call_python(hooks().build_pipeline, device, v.id, specialization), v.id);
  if (!v.library.empty())
    source.library = LibraryMatmul{v.library, (specialization & kTransposeA) != 0, (specialization & kTransposeB) != 0,
                                   kOperandTypes[(specialization >> kTypeShift) % (1 << (kKindShift - kTypeShift))]};
  std::shared_ptr<Pipeline> pipeline = load_pipeline(state, source);
  if (v.tiling.threads > pipeline->max_threads)
    throw Error(ErrorKind::kernel, v.id + ": the manifest gives " + std::to_string(v.tiling.threads) + " threads; the kernel allows " +
                                       std::to_string(pipeline->max_threads));
  return pipeline;
}

std::shared_ptr<Pipeline> pipeline_for(DeviceState& state, nb::handle device, const Variant& v, unsigned specialization) {
  if (const auto* found = state.pipelines.find(v, specialization)) return *found;
  uint64_t before = state.pipelines.changes();
  auto pipeline = build_pipeline(state, device, v, specialization);
  if (state.pipelines.changes() == before) state.pipelines.keep(v, specialization, pipeline);
  return pipeline;
}

uint64_t choices_generation = 1;  // rises where what "auto" means may have changed

// libraries: whether it may be the matmul of one.
const Variant& chosen_variant(DeviceState& state, nb::handle device, const MatmulSpec& s, bool libraries = true) {
  if (state.choices_generation != choices_generation) {
    state.choices.clear();
    state.choices_generation = choices_generation;
  }
  static_assert(kFormats <= 16, "four bits of the flags");
  unsigned flags = s.layout_index() | s.bias << 2 | s.c << 3 | (s.alpha != 1.0f) << 4 | operand_type(s.a_type) << 5 | s.row_invariant << 7 |
                   s.b_storage.format << 8 | s.b_storage.canonical << 12 | s.b_storage.group << 16 | unsigned{libraries} << 31;
  ChoiceKey key = {s.m, s.n, s.k, s.batch, flags, s.also_n[0], s.also_n[1], s.swiglu};
  auto known = state.choices.find(key);
  if (known != state.choices.end()) return *known->second;
  for (;;) {
    uint64_t before = choices_generation;
    try {
      const Variant& v = find_variant(call_python(hooks().choose_variant, device, s, libraries));
      if (choices_generation == before && state.choices_generation == before) state.choices[key] = &v;
      return v;
    } catch (const Error& e) {  // another thread took the variant out between its choice and here
      if (e.kind != ErrorKind::unknown_variant || choices_generation == before) throw;
    }
  }
}

LibraryCall library_call(const MatmulPlan& plan, const MatmulArgs& args) {
  const MatmulParams& p = plan.params;
  auto room = [](const Tensor& t) { return (t.buffer->size() - t.offset) / t.dtype.size; };
  return {p.m,
          p.n,
          p.k,
          p.batch,
          {args.transpose_a ? p.k : p.m, p.lda, p.stride_a, room(*args.a)},
          {args.transpose_b ? p.n : p.k, p.ldb, p.stride_b, room(*args.b)}};
}

void check_supports(const Variant& v, const MatmulSpec& spec, const Device& device) {
  if (v.runs_on(device) && v.supports(spec)) return;
  std::string lack = v.lacks(spec);
  std::string missing = v.missing(device);
  if (!missing.empty()) {
    lack = "it needs " + missing + ", which this device lacks (Device.info says what it is)";
  } else if (!v.runs_on(device)) {
    std::string names;
    for (const std::string& n : v.devices) names += (names.empty() ? "" : " or ") + n;
    lack = "unavailable on device " + device.name() + ", it needs device " + names;
  }
  throw Error(ErrorKind::unsupported, v.id + ": " + lack + registry().alternatives(spec, device));
}

// Where B's rows begin on vectors, a kernel takes those of A by vectors if they do, too, and adds up in another order if not. All must be
// as rows without gaps are.
void check_begins_of_rows(const MatmulParams& p, bool is_dense) {
  auto on = [](uint32_t ld, uint32_t stride, uint32_t offset, uint32_t size) { return (ld | stride | offset) % size == 0; };
  for (uint32_t size : {8u, 4u}) {
    bool of_b = is_dense ? on(p.ldb, p.stride_b, p.vec_offset_b, size) : size == 8 && on(p.ldb, p.stride_b, p.vec_offset_b, 16);
    if (!of_b || on(p.lda, p.stride_a, p.vec_offset_a, size) == (p.k % size == 0)) continue;
    const char* word = size == 8 ? "eight" : "four";
    throw Error(ErrorKind::layout, "row_invariant: rows of a begin " + std::to_string(p.lda) + " elements apart, matrices " +
                                       std::to_string(p.stride_a) + ", the first on element " + std::to_string(p.vec_offset_a) +
                                       " of eight; all must begin on multiples of " + word +
                                       " where k is one, else not: pass a copy without gaps");
  }
}

}  // namespace

// -- matmul -----------------------------------------------------------------------------------------------------------

Matmul::Matmul(const MatmulCall& call, DeviceState& state, nb::handle device)
    : variant(&find_variant(call.variant)),
      a(call.a, "a", &state),
      b(call.b, "b", &state),
      scales(call.quantized.scales, "b's scales", &state),
      biases(call.quantized.biases, "b's biases", &state),
      bias(call.bias, "bias", &state),
      c(call.c, "c", &state) {
  if (!a.get() || !b.get()) throw Error(ErrorKind::dtype, "matmul: a and b must be arrays, not None");
  args = {a.get(),
          b.get(),
          bias.get(),
          c.get(),
          static_cast<float>(call.alpha),
          static_cast<float>(call.beta),
          call.transpose_a,
          call.transpose_b,
          {call.quantized.storage, call.quantized.n, call.quantized.k, scales.get(), biases.get()}};
  plan = plan_matmul(args);
  for (const MatmulCall::Other& given : call.others) {
    auto& o = *others.emplace_back(std::make_unique<Other>());
    const MatmulCall::Quantized& q = given.quantized;
    o.b = Operand(given.b, "b", &state), o.bias = Operand(given.bias, "bias", &state);
    o.scales = Operand(q.scales, "b's scales", &state), o.biases = Operand(q.biases, "b's biases", &state);
    if (!o.b.get()) throw Error(ErrorKind::dtype, "matmul_fused: each of weights must be an array, not None");
    o.args = {a.get(), o.b.get(), o.bias.get(), nullptr, 1.0f, 0.0f, false, true, {q.storage, q.n, q.k, o.scales.get(), o.biases.get()}};
    o.plan = plan_matmul(o.args);
  }
  bool is_fused = !others.empty();
  if (is_fused) plan.spec = fuse(parts(), call.swiglu);
  plan.spec.row_invariant = call.row_invariant;
  const std::shared_ptr<Device>& running = state.open();
  bool is_automatic = variant == &automatic();
  uint64_t chosen_at = choices_generation;
  bool libraries = true;
  if (is_automatic) variant = &chosen_variant(state, device, plan.spec);
  if (is_automatic && !variant->library.empty() && !running->library_takes(library_call(plan, args)))
    variant = &chosen_variant(state, device, plan.spec, libraries = false);
  check_supports(*variant, plan.spec, *running);
  if (call.row_invariant && variant->form(plan.spec)->rows == Rows::alike_on_vectors) {
    bool is_dense = plan.spec.b_storage.is_dense();
    check_begins_of_rows(plan.params, is_dense);
    for (auto& o : others) check_begins_of_rows(o->plan.params, is_dense);
  }
  bool on_device = a.is_array() || b.is_array();
  for (auto& o : others) on_device |= o->b.is_array();
  auto place_result = [&](nb::handle given, MatmulPlan& its_plan, const MatmulArgs& its_args, Operand& to) {
    nb::object made;
    DType type = plan.spec.a_type;
    if (!given.is_none())
      made = nb::borrow(given);
    else if (on_device)
      made = nb::cast(empty_array(nb::borrow(device), &state, its_plan.out_ndim, its_plan.out_shape, type));
    else
      made = empty_numpy(its_plan.out_ndim, its_plan.out_shape, type);
    to = Operand(made, "out", &state);
    Buffer& buffer = *to.get()->buffer;
    if (given.is_none() && !to.is_array() && running->poisons()) std::memset(buffer.host(), 0xff, buffer.size());
    if (!given.is_none()) check_out(its_plan, its_args, *to.get(), is_fused);
    buffer.mutable_since = true;
    return made;
  };
  result = place_result(call.out, plan, args, out);
  if (is_fused && !call.swiglu) {
    nb::list results;
    results.append(result);
    for (size_t i = 0; i < others.size(); i++)
      results.append(place_result(call.others[i].out, others[i]->plan, others[i]->args, others[i]->out));
    result = nb::tuple(results);  // which owns them, and nobody takes one out of it
  }
  if (is_fused) check_outs_apart(parts());
  uint64_t before;
  do {  // again where a manifest was loaded meanwhile: a kernel of the one and a tiling of the other do not fit
    before = state.pipelines.changes();
    tiling = variant->tiling;
    try {
      pipeline = pipeline_for(state, device, *variant, plan.spec.specialization());
    } catch (const nb::python_error&) {
      if (!is_automatic || choices_generation == chosen_at) throw;
      chosen_at = choices_generation;  // what was chosen is gone: a manifest was loaded meanwhile
      variant = &chosen_variant(state, device, plan.spec, libraries);
      before = state.pipelines.changes() - 1;
    }
  } while (state.pipelines.changes() != before);
}

std::vector<FusedPart> Matmul::parts() const {
  std::vector<FusedPart> all = {{args, plan, out.get()}};
  for (auto& o : others) all.push_back({o->args, o->plan, o->out.get() ? o->out.get() : out.get()});
  return all;
}

TracedDispatch Matmul::traced() const { return {variant->id, matmul_grid(tiling, plan.spec), plan.spec}; }

namespace {

// The device's seconds. last: the submission, where nobody waits for it.
double run_now(const Matmul& call, DeviceState& state, std::shared_ptr<Submission>& last) {
  std::shared_ptr<Device> device = state.open();
  bool traced = tracing();
  Clock::time_point start = traced ? Clock::now() : Clock::time_point();
  double taken = call.dispatch([&](const Dispatch& d) {
    Unlocked unlocked;
    return device->run(d, traced ? nullptr : &last);
  });
  give_warnings(*device);
  if (traced) trace_call(call.traced(), taken, start);
  return taken;
}

nb::object run_matmul(const MatmulCall& call) {
  nb::object owner = call.owner();
  DeviceState& state = state_of(owner);
  Matmul resolved(call, state, owner);
  std::shared_ptr<Submission> untold;
  run_now(resolved, state, untold);
  return resolved.result;
}

PyObject* matmul(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* kwnames) {
  return guarded([&] { return run_matmul(MatmulCall::take(args, count, kwnames, true)); });
}

PyObject* matmul_fused(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* kwnames) {
  return guarded([&] { return run_matmul(MatmulCall::take_fused(args, count, kwnames, true)); });
}

}  // namespace

// -- prepared calls ---------------------------------------------------------------------------------------------------

Prepared::Prepared(nb::object device, MatmulCall call)
    : device_(std::move(device)),
      state_(&state_of(device_)),
      keep_{nb::borrow(call.a), nb::borrow(call.b),    nb::borrow(call.bias),
            nb::borrow(call.c), call.quantized.scales, call.quantized.biases},
      call_(call, *state_, device_) {
  for (const MatmulCall::Other& o : call.others)
    keep_.insert(keep_.end(), {nb::borrow(o.b), nb::borrow(o.bias), o.quantized.scales, o.quantized.biases});
}

nb::object Prepared::run() {
  std::shared_ptr<Submission> last;
  seconds_ = run_now(call_, *state_, last);
  std::swap(last_, last);
  return call_.result;
}

void Prepared::clear() {
  state_ = closed_state();
  call_.a = call_.b = call_.scales = call_.biases = call_.bias = call_.c = call_.out = Operand();
  call_.others.clear();
  keep_.clear();
  call_.result.reset();
  device_.reset();
}

namespace {

PyObject* call_prepared(PyObject* self, PyObject* args, PyObject* kwargs) {
  return guarded([&] {
    if (PyTuple_GET_SIZE(args) || (kwargs && PyDict_Size(kwargs)))
      bad_argument("a PreparedCall takes no arguments: they were given to prepare()");
    return self_of<Prepared>(self).run();
  });
}

}  // namespace

// -- what the manifest says -------------------------------------------------------------------------------------------

namespace {

Range range_of(nb::handle pair) {
  auto t = nb::cast<nb::tuple>(pair);
  return {nb::cast<uint32_t>(t[0]), nb::cast<uint32_t>(t[1])};
}

// The bits of those of `names` that a list has.
template <size_t N>
unsigned bits_of(nb::handle list, const char* const (&names)[N]) {
  unsigned bits = 0;
  for (nb::handle item : nb::borrow<nb::sequence>(list))
    for (unsigned i = 0; i < N; i++) bits |= (nb::cast<std::string>(item) == names[i]) << i;
  return bits;
}

Form form_of(nb::handle table) {
  auto at = [table](const char* key) { return nb::object(table[key]); };
  Form f;
  for (nb::handle name : nb::borrow<nb::sequence>(at("storages")))
    for (unsigned i = 0; i < kStorages; i++) f.storages |= (nb::cast<std::string>(name) == Storage::name_of(i)) << i;
  f.ends = bits_of(at("matrices"), kEndNames);
  f.m = range_of(at("m")), f.n = range_of(at("n")), f.k = range_of(at("k")), f.batch = range_of(at("batch"));
  f.n_values = nb::cast<std::vector<uint32_t>>(at("n_values"));
  f.layouts = bits_of(at("layouts"), kLayoutNames);
  nb::object alike = at("row_invariant");  // a bool, or "on vectors"
  f.rows = PyUnicode_Check(alike.ptr()) ? Rows::alike_on_vectors : nb::cast<bool>(alike) ? Rows::alike : Rows::may_differ;
  f.bias = nb::cast<bool>(at("bias")), f.c = nb::cast<bool>(at("c")), f.alpha = nb::cast<bool>(at("alpha"));
  for (auto [type, why] : nb::cast<nb::dict>(at("without")))
    for (unsigned i = 0; i < kOperandTypeCount; i++)
      if (nb::cast<std::string>(type) == kOperandTypes[i].name()) f.without[i] = nb::cast<std::string>(why);
  return f;
}

void register_variant(const std::string& id, bool enabled, uint32_t bm, uint32_t bn, uint32_t threads, std::vector<std::string> devices,
                      std::vector<std::string> needs, const std::string& library, nb::list forms) {
  Variant v;
  v.id = id, v.enabled = enabled, v.tiling = {bm, bn, threads}, v.library = library;
  for (nb::handle form : forms) v.forms.push_back(form_of(form));
  v.devices = std::move(devices), v.needs = std::move(needs);
  if (!v.devices.empty()) {
    v.device_bits = 0;
    for (const std::string& name : v.devices) v.device_bits |= name_bit(name);
  }
  registry().add(std::move(v));
  choices_generation++;
}

void unregister_variant(const std::string& id) {
  registry().remove(id);
  choices_generation++;
  for (size_t i = 0; i < kSeen; i++) seen_variants()[i] = {};
}

nb::tuple describe(nb::handle device, nb::handle id, const MatmulSpec& spec) {
  const Variant& v = find_variant(id);
  DeviceState& state = state_of(device);
  check_supports(v, spec, *state.open());
  std::shared_ptr<Pipeline> p = pipeline_for(state, device, v, spec.specialization());
  Size3 grid = matmul_grid(v.tiling, spec);
  size_t bytes = p->static_threadgroup_bytes;
  for (const ThreadgroupMemory& piece : p->threadgroup_memory) bytes += threadgroup_space(piece.size);
  return nb::make_tuple(nb::make_tuple(grid[0], grid[1], grid[2]), p->max_threads, bytes);
}

template <size_t N>
nb::tuple names_of(const char* const (&names)[N]) {
  nb::list list;
  for (const char* name : names) list.append(name);
  return nb::tuple(list);
}

constexpr const char* kMatmulDoc =
    "matmul(variant, a, b, *, bias=None, c=None, alpha=1.0, beta=0.0, transpose_a=False, transpose_b=False, out=None,\n"
    "row_invariant=False, device=None)\n--\n\n"
    "alpha * op(a) @ op(b) + beta * c + bias by the kernel variant of that id, summed in float32.\n\n"
    "variant: 'family/name', see metalmm.variants(), or 'auto': what `metalmm tune` chose for these sizes on this device, else a stated\n"
    "rule's choice (docs/decide.md). a: (m, k), or (k, m) with transpose_a; with a batch, (batch, m, k). b: (k, n), or\n"
    "(n, k) with transpose_b; (batch, ...) or 2-D and shared; or a QuantizedArray, (n, k). bias: (n,). c: (m, n) or (batch, m, n); read "
    "only where beta is not 0; with c say beta.\n"
    "row_invariant: a row of the result has the same bits for each m from 1 to 16, in each batch and place; the variant, which must\n"
    "allow it (docs/decide.md), is 'auto's choice by n, k, type, storage and layout alone. m up to 16.\n"
    "out: C-contiguous, of the result's shape; it may be c itself and overlap nothing else. All are float16, bfloat16 or float32, of one\n"
    "type: NumPy arrays, whatever else has __dlpack__ on the CPU, or Arrays. device: by default that of the Arrays, else\n"
    "metalmm.default_device().\n\n"
    "Returns out where it is given, else an Array if a or b is one, else a NumPy array. Rows must be contiguous; they may be any\n"
    "distance apart.\n\n"
    "Raises ArgumentError, UnknownVariantError, UnsupportedError, ShapeError, DTypeError, LayoutError, DeviceError, ClosedError before\n"
    "anything runs; CompileError on a variant's first use; KernelError if the kernel breaks a rule of Metal.";

constexpr const char* kFusedDoc =
    "matmul_fused(variant, a, weights, *, bias=None, activation=None, out=None, row_invariant=False, device=None)\n--\n\n"
    "a @ w.T + b for two or three weights that share a, in one dispatch: gate and up; q, k and v.\n\n"
    "variant: one that takes so many, see metalmm.variants(MatmulSpec(..., also_n=...)), or 'auto'. a: (m, k), or (batch, m, k). weights: "
    "a\n"
    "list of (n, k) each, all dense or all QuantizedArrays of one storage; n may differ. bias: a list, (n,) each. activation: 'swiglu'\n"
    "takes two weights of one n and gives silu(a @ w0.T + b0) * (a @ w1.T + b1), silu(x) = x / (1 + exp(-x)). out: a list of arrays, of\n"
    "which the rows may be columns of one array; of swiglu one array. row_invariant: as of matmul().\n\n"
    "Returns a tuple of results, of swiglu one, as matmul() does. Raises as matmul().";

}  // namespace

void bind_matmul(nb::module_& m) {
  bind_spec(m);
  m.attr("_TYPE_SHIFT") = kTypeShift;
  m.attr("_KIND_SHIFT") = kKindShift;
  m.attr("_ENDS") = names_of(kEndNames);
  m.attr("_ROWS_ALIKE") = kRowsAlike;
  nb::list storages;
  for (unsigned i = 0; i < kStorages; i++) storages.append(Storage::name_of(i));
  m.attr("_STORAGES") = nb::tuple(storages);
  m.attr("_LAYOUTS") = names_of(kLayoutNames);
  m.attr("_FORMATS") = names_of(kFormatNames);
  nb::list types;
  for (DType type : kOperandTypes) types.append(type.name());
  m.attr("_OPERAND_TYPES") = nb::tuple(types);
  m.def("_register_variant", &register_variant, nb::kw_only(), "id"_a, "enabled"_a, "bm"_a, "bn"_a, "threads"_a, "devices"_a, "needs"_a,
        "library"_a, "forms"_a);
  m.def("_unregister_variant", &unregister_variant);
  m.def("_library_takes", [](nb::handle device, const MatmulSpec& s) {  // of operands that lie without gaps
    return state_of(device).open()->library_takes({s.m, s.n, s.k, s.batch, {}, {}});
  });
  m.def("_forget_choices", [] { choices_generation++; });
  m.def(
      "_lacks", [](nb::handle id, const MatmulSpec& spec) { return find_variant(id).lacks(spec); },
      "Empty, or why the variant does not support the spec.");
  m.def("_prepare_pipeline", [](nb::handle device, nb::handle id, const MatmulSpec& spec) { describe(device, id, spec); });
  m.def("_describe", &describe, "Grid, most threads of a threadgroup, bytes of threadgroup memory.");
  m.def(
      "_specialization", [](const MatmulSpec& spec) { return spec.specialization(); },
      "What a kernel is compiled for: the place of the layout in _LAYOUTS, above _TYPE_SHIFT that of the operands' type in\n"
      "_OPERAND_TYPES, above _KIND_SHIFT that of B's storage and end.");
  m.def("_forget_pipelines", [](nb::handle device, nb::handle id) {
    nb::inst_ptr<PyDevice>(device)->state->pipelines.forget(find_variant(id));  // a closed device has none left
  });

  static PyMethodDef none[] = {{}};
  nb::class_<Prepared>(m, "PreparedCall", nb::type_slots(collected<Prepared>(none, &call_prepared)),
                       "A matmul with everything resolved; call it to run it, and it returns out. Reads its arrays at each call. Made by\n"
                       "Device.prepare(). A call raises KernelError, ClosedError.")
      .def_prop_ro(
          "out", [](const Prepared& p) { return p.out(); }, "The result, the same array at each call.")
      .def_prop_ro(
          "variant", [](const Prepared& p) { return p.call().variant->id; }, "Its id.")
      .def_prop_ro(
          "spec", [](const Prepared& p) { return p.call().plan.spec; }, "The MatmulSpec of its arguments.")
      .def_prop_ro("device_seconds", &Prepared::device_seconds,
                   "What the device worked in the last call, in seconds; None where it cannot tell.")
      .def("__repr__", [](const Prepared& p) {
        return "metalmm.PreparedCall(" + p.call().variant->id + ": " + p.call().plan.spec.text() + ", on " + device_text(p.device()) + ")";
      });

  static PyMethodDef method = fast_method("matmul", &matmul, kMatmulDoc);
  nb::object name = nb::cast("metalmm");
  m.attr("matmul") = nb::steal(PyCFunction_NewEx(&method, nullptr, name.ptr()));
  static PyMethodDef fused = fast_method("matmul_fused", &matmul_fused, kFusedDoc);
  m.attr("matmul_fused") = nb::steal(PyCFunction_NewEx(&fused, nullptr, name.ptr()));
}

}  // namespace metalmm
