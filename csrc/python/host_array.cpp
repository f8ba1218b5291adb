// Arrays of the host, taken as tensors: by the buffer protocol, by DLPack, or as MLX's bfloat16.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "array.h"

namespace metalmm {

// Types of elements that NumPy has, too, and that all devices know.
bool is_known(DType t) {
  switch (t.kind) {
    case DType::kFloat:
      return t.size == 2 || t.size == 4 || t.size == 8;
    case DType::kBFloat:
      return t.size == 2;
    case DType::kComplex:
      return t.size == 8 || t.size == 16;
    case DType::kBool:
      return t.size == 1;
    case DType::kOpaque:
      return t.size > 0 && t.size <= 1u << 20;
    default:
      return t.size == 1 || t.size == 2 || t.size == 4 || t.size == 8;
  }
}

// From the first element to past the last.
size_t span_of(const Tensor& t) {
  int64_t last = 0;
  for (int i = 0; i < t.ndim; i++) {
    if (t.shape[i] == 0) return 0;
    if (t.strides[i] > 0) last += (t.shape[i] - 1) * t.strides[i];
  }
  return static_cast<size_t>(last + 1) * t.dtype.size;
}

namespace {

const char* class_name(nb::handle object) { return Py_TYPE(object.ptr())->tp_name; }

constexpr DType kNoType = {DType::kUInt, 0};

// Of the buffer protocol's format; kNoType: one that is no plain number's.
DType known_format(const char* format, Py_ssize_t itemsize) {
  if (!format) format = "B";
  const char* f = format + std::strspn(format, "<=@");
  auto size = static_cast<uint32_t>(itemsize);
  if (f[0] && f[1] == '\0') {
    if (std::strchr("efd", *f)) return {DType::kFloat, size};
    if (std::strchr("bhilq", *f)) return {DType::kInt, size};
    if (std::strchr("BHILQ", *f)) return {DType::kUInt, size};
    if (*f == '?') return {DType::kBool, size};
  }
  if (f[0] == 'Z' && (f[1] == 'f' || f[1] == 'd')) return {DType::kComplex, size};
  if ((f[0] == 'T' && f[1] == '{') || std::strchr(f, 'x')) return {DType::kOpaque, size};  // whose dtype tensor_of() looks at
  return kNoType;
}

DType dtype_of_format(const char* name, const char* format, Py_ssize_t itemsize) {
  DType found = known_format(format, itemsize);
  if (found.size) return found;
  throw Error(ErrorKind::dtype, std::string(name) + " is an array of format '" + format + "'; it takes a plain little-endian number type");
}

// The deleter runs wherever the last user lets go, with or without the GIL.
template <class T>
std::function<void()> released(T* view, void (*release)(T*)) {
  return [view, release] {
    if (!Py_IsInitialized()) return;  // the memory goes with the process
    if (PyGILState_Check())
      release(view);
    else
      let_go_later([view, release] { release(view); });
  };
}

void check_ndim(const char* name, int64_t ndim) {
  if (ndim > kMaxDims)
    throw Error(ErrorKind::shape,
                std::string(name) + " has " + std::to_string(ndim) + " dimensions; the limit is " + std::to_string(kMaxDims));
}

struct ReleaseView {
  void operator()(Py_buffer* b) const {
    PyBuffer_Release(b);
    delete b;
  }
};
using View = std::unique_ptr<Py_buffer, ReleaseView>;

// Empty where the object has no buffer protocol.
View view_of(nb::handle object) {
  auto* raw = new Py_buffer{};
  if (PyObject_GetBuffer(object.ptr(), raw, PyBUF_RECORDS_RO) == 0) return View(raw);
  PyErr_Clear();
  delete raw;
  return {};
}

void read_view(View view, const char* name, Tensor& t) {
  t.ndim = view->ndim;
  t.dtype = dtype_of_format(name, view->format, view->itemsize);
  check_ndim(name, view->ndim);
  for (int i = 0; i < view->ndim; i++) {
    t.shape[i] = view->shape[i];
    if (!view->strides) continue;
    if (view->itemsize == 0 || view->strides[i] % view->itemsize)
      throw Error(ErrorKind::layout, std::string(name) + " has strides that are no multiple of its elements");
    t.strides[i] = view->strides[i] / view->itemsize;
  }
  if (!view->strides) t.make_contiguous();  // of ctypes, say
  Py_buffer* raw = view.release();
  t.buffer =
      std::make_shared<Buffer>(raw->buf, span_of(t), raw->readonly != 0, released<Py_buffer>(raw, [](Py_buffer* b) { ReleaseView()(b); }));
  t.buffer->owner = raw->obj;
}

// ml_dtypes' bfloat16, which NumPy exports by neither protocol: the same memory as whole numbers.
bool is_bfloat16(nb::handle object) {
  if (!nb::hasattr(object, "dtype") || !nb::hasattr(object, "__array_interface__")) return false;
  nb::object dtype = object.attr("dtype");
  return nb::hasattr(dtype, "name") && text_of(nb::str(dtype.attr("name"))) == "bfloat16";
}

void read_bfloat16(nb::handle object, const char* name, Tensor& t) {
  nb::object structured;
  dtype_of(object.attr("dtype"), &structured);  // refuses the other order of bytes
  nb::object bits = call_python(object.attr("view"), "uint16");
  View view = view_of(bits);
  if (!view) throw Error(ErrorKind::dtype, std::string(name) + " is of bfloat16 and does not hand its memory over");
  read_view(std::move(view), name, t);
  t.dtype = kBFloat16;
  // The array itself is held, and not the view, whose reference to it the garbage collector would not find.
  auto release = released<PyObject>(nb::borrow(object).release().ptr(), [](PyObject* o) { Py_DECREF(o); });
  t.buffer = std::make_shared<Buffer>(t.buffer->host(), t.buffer->size(), t.buffer->read_only(), release);
  t.buffer->owner = object.ptr();
}

[[noreturn]] void bad_dlpack(const char* name, nb::handle object, const std::string& what) {
  throw Error(ErrorKind::dtype, std::string(name) + " is a " + class_name(object) + " " + what);
}

// What an array of another library answers; its failure is ours, with its words.
nb::object ask(const char* name, nb::handle object, const char* method, const nb::dict& options) {
  auto function = nb::steal(PyObject_GetAttrString(object.ptr(), method));
  auto answer = function.is_valid() ? nb::steal(or_stop([&] { return PyObject_Call(function.ptr(), nb::tuple().ptr(), options.ptr()); }))
                                    : nb::object();
  if (answer.is_valid()) return answer;
  if (!PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError)) throw nb::python_error();
  if (nb::len(options) && PyErr_ExceptionMatches(PyExc_TypeError)) {  // of a time before versions
    PyErr_Clear();
    return ask(name, object, method, nb::dict());
  }
  nb::python_error e;
  bad_dlpack(name, object, "that does not hand its memory over: " + text_of(nb::str(e.value())));
}

// What nanobind reads of a capsule without asking: a producer may leave the shape out, or name strides that reach past all memory.
void check_capsule(nb::handle object, nb::handle capsule, const char* name) {
  struct Versioned {
    uint32_t version[2];
    void *manager, *deleter;
    uint64_t flags;
    nb::dlpack::dltensor tensor;
  };
  const nb::dlpack::dltensor* t = nullptr;
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned"))
    t = &static_cast<Versioned*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"))->tensor;
  else if (PyCapsule_IsValid(capsule.ptr(), "dltensor"))
    t = static_cast<nb::dlpack::dltensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (!t) return;  // nanobind says what it is
  check_ndim(name, t->ndim);
  if (t->ndim > 0 && !t->shape) bad_dlpack(name, object, "without a shape");
  constexpr double kMost = 1ull << 47;  // bytes that a process can reach
  double reach = 1, count = 1;
  for (int i = 0; i < t->ndim; i++) {
    if (t->shape[i] < 0) bad_dlpack(name, object, "with a negative size");
    count *= static_cast<double>(t->shape[i]);
    if (t->strides && t->shape[i]) reach += static_cast<double>(t->shape[i] - 1) * std::abs(static_cast<double>(t->strides[i]));
  }
  if (std::max(reach, count) * (t->dtype.bits / 8.0) > kMost || static_cast<double>(t->byte_offset) > kMost)
    bad_dlpack(name, object, "whose sizes and strides reach past all memory");
}

// `device`: whose own memory is taken, too; may be null.
void read_dlpack(nb::handle object, const char* name, Tensor& t, const Device* device) {
  nb::object where = ask(name, object, "__dlpack_device__", nb::dict());
  if (!PyTuple_Check(where.ptr()) || PyTuple_GET_SIZE(where.ptr()) != 2)
    bad_dlpack(name, object, "whose __dlpack_device__() is " + repr_of(where));
  int place[2] = {};
  for (int i = 0; i < 2; i++) {
    nb::object number = nb::steal(PyNumber_Index(PyTuple_GET_ITEM(where.ptr(), i)));
    if (!number.is_valid() || !nb::try_cast(number, place[i])) place[i] = -1;
    PyErr_Clear();
  }
  bool is_its = device && device->dlpack_place() == std::array<int, 2>{place[0], place[1]};
  auto check_place = [&](bool is_here) {
    if (!is_here)
      throw Error(ErrorKind::device,
                  std::string(name) + " is a " + class_name(object) + " in the memory of another device; copy it to the CPU first");
  };
  check_place(place[0] == 1 || is_its);
  using Shared = nb::ndarray<>;
  using ReadOnly = nb::ndarray<nb::ro>;
  nb::dict options;
  options["max_version"] = nb::make_tuple(1, 0);
  if (is_its) options["stream"] = nb::int_(device->dlpack_stream());  // what wrote it comes before our work there
  nb::object capsule = ask(name, object, "__dlpack__", options);
  check_capsule(object, capsule, name);
  auto* held = new ReadOnly;
  Shared writable;
  bool can_write = nb::try_cast(capsule, writable, false);
  if (can_write) *held = ReadOnly(writable);
  if (!can_write && !nb::try_cast(capsule, *held, false)) {
    delete held;
    bad_dlpack(name, object, "whose DLPack capsule cannot be read");
  }
  void* data = const_cast<void*>(static_cast<const void*>(held->data()));
  auto buffer = std::make_shared<Buffer>(data, 0, !can_write, released<ReadOnly>(held, [](ReadOnly* a) { delete a; }));
  nb::dlpack::dtype d = held->dtype();
  t.dtype = {static_cast<DType::Kind>(d.code), static_cast<uint32_t>(d.bits / 8)};
  if (d.lanes != 1 || d.bits % 8 || d.code > DType::kBool || t.dtype.kind == DType::kOpaque || !is_known(t.dtype))
    throw Error(ErrorKind::dtype, std::string(name) + " has elements of DLPack's type " + std::to_string(d.code) + " with " +
                                      std::to_string(d.bits) + " bits, which are not supported");
  check_place(is_its ? held->device_type() == place[0] && held->device_id() == place[1] : held->device_type() == 1);
  check_ndim(name, static_cast<int64_t>(held->ndim()));
  t.ndim = static_cast<int>(held->ndim());
  for (int i = 0; i < t.ndim; i++) {
    t.shape[i] = static_cast<int64_t>(held->shape(static_cast<size_t>(i)));
    t.strides[i] = held->stride(static_cast<size_t>(i));
  }
  if (!data && t.count()) bad_dlpack(name, object, "without memory");
  if (is_its)
    t.buffer =
        std::make_shared<Buffer>(nullptr, span_of(t), !can_write, [buffer] {}, data ? data : held, reinterpret_cast<uintptr_t>(data));
  else
    t.buffer = std::make_shared<Buffer>(data, span_of(t), !can_write, [buffer] {});
}

}  // namespace

// An array of NumPy's whose mask nothing here would look at. A plain one is seen by its name, without a search for attributes.
static bool is_masked(nb::handle object) {
  return std::strcmp(Py_TYPE(object.ptr())->tp_name, "numpy.ndarray") != 0 && nb::hasattr(object, "mask") && nb::hasattr(object, "filled");
}

bool has_dlpack(nb::handle object) { return nb::hasattr(object, "__dlpack__") && nb::hasattr(object, "__dlpack_device__"); }

void read_tensor(nb::handle object, const char* name, Tensor& t, const Device* device) {
  View view = view_of(object);
  if (view && !known_format(view->format, view->itemsize).size && has_dlpack(object) && !nb::hasattr(object, "__array_interface__"))
    view.reset();  // MLX's bfloat16, which DLPack can say; NumPy's arrays have no more to say by it
  if (view && is_masked(object))
    throw Error(ErrorKind::dtype,
                std::string(name) + " is " + class_name(object) + ", whose mask would not count; pass its .filled(0) or .data");
  if (view) {
    read_view(std::move(view), name, t);
    if (t.dtype.kind != DType::kOpaque) return;
    nb::object structured;
    if (dtype_of(dtype_object(object), &structured).size != t.dtype.size)
      throw Error(ErrorKind::dtype, std::string(name) + " says two sizes of its elements");
    return;
  }
  if (is_bfloat16(object)) return read_bfloat16(object, name, t);
  if (has_dlpack(object)) return read_dlpack(object, name, t, device);
  bool is_number = PyLong_Check(object.ptr()) || PyFloat_Check(object.ptr());
  throw Error(ErrorKind::dtype, std::string(name) + " is " + class_name(object) +
                                    "; pass a numpy array, a metalmm.Array or an array with " + "__dlpack__" +
                                    (is_number ? ", or a number whose type says its size, such as numpy.int32(5)" : ""));
}

Tensor tensor_of(nb::handle object, const char* name) {
  Tensor t;
  read_tensor(object, name, t);
  return t;
}

namespace {

// The life of the NumPy array that owns the memory, seen by a weak reference, with which NumPy lets nobody resize it. Null for what
// does not begin on a page, which no device wraps, or whose owner is unknown.
std::shared_ptr<HostLife> life_of(nb::handle object, const Buffer& memory) {
  static const auto page = static_cast<uintptr_t>(getpagesize());
  if (!memory.size() || reinterpret_cast<uintptr_t>(memory.host()) % page) return nullptr;
  static nb::object* ndarray = nullptr;  // no initializers: see blas.cpp
  if (!ndarray) ndarray = new nb::object(nb::module_::import_("numpy").attr("ndarray"));
  nb::object owner = nb::borrow(object);
  auto is_array = [&](nb::handle h) { return PyObject_TypeCheck(h.ptr(), reinterpret_cast<PyTypeObject*>(ndarray->ptr())) != 0; };
  if (!is_array(owner)) return nullptr;
  nb::object getter = ndarray->attr("base").attr("__get__");  // NumPy's own: a subclass may say something else by that name
  for (nb::object base = call_python(getter, owner); is_array(base); base = call_python(getter, owner)) owner = base;
  struct Seen {
    std::shared_ptr<HostLife> life;
    nb::object reference;
  };
  static auto* seen = new std::map<PyObject*, Seen>;  // under the GIL
  auto it = seen->find(owner.ptr());
  if (it != seen->end()) return it->second.life;
  nb::object ended = nb::cpp_function([key = owner.ptr()](nb::handle) {
    static auto* called = new nb::object;  // a weak reference must outlive its own callback
    auto last = seen->extract(key);        // let go of when nobody looks at the map any more
    if (!last.empty()) *called = std::move(last.mapped().reference);
  });
  auto reference = nb::steal(PyWeakref_NewRef(owner.ptr(), ended.ptr()));
  if (!reference.is_valid()) return PyErr_Clear(), nullptr;
  return ((*seen)[owner.ptr()] = {std::make_shared<HostLife>(), std::move(reference)}).life;
}

}  // namespace

Operand::Operand(nb::handle object, const char* name, DeviceState* state) {
  if (object.is_none()) return;
  if (array_ = array_of(object); array_) {
    if (state && array_->state != state) {
      throw Error(ErrorKind::device, std::string(name) + " lies on another device; copy it with device.array(numpy.asarray(" + name +
                                         ")), quantized weights with their to(device)");
    }
    array_->state->open();
    return;
  }
  read_tensor(object, name, local_.emplace(), state ? state->device.get() : nullptr);
  bool is_result = std::strcmp(name, "out") == 0;  // which mostly comes and goes
  if (!is_result && state && state->device && state->device->wraps_host_memory()) local_->buffer->life = life_of(object, *local_->buffer);
}

}  // namespace metalmm
