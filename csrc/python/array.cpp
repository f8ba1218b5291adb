#include "array.h"

#include <algorithm>
#include <cstring>

namespace metalmm {

const Array* array_of(nb::handle object) {
  if (!nb::inst_check(object) || !nb::isinstance<Array>(object)) return nullptr;
  return &self_of<Array>(object.ptr());
}

DeviceState* closed_state() {
  static DeviceState* state = new DeviceState;
  return state;
}

// NumPy's dtype of what has one, or of what NumPy makes of it: of a memoryview, say.
nb::object dtype_object(nb::handle array) {
  if (nb::hasattr(array, "dtype")) return array.attr("dtype");
  return call_python(nb::module_::import_("numpy").attr("asarray"), nb::borrow(array)).attr("dtype");
}

nb::object numpy_dtype(DType dtype) {
  static auto* known = new std::map<std::pair<int, uint32_t>, nb::object>;  // under the GIL
  auto key = std::pair<int, uint32_t>(dtype.kind, dtype.size);
  auto it = known->find(key);
  if (it != known->end()) return it->second;
  nb::object made;
  try {
    nb::object name = nb::cast(dtype.name());
    if (dtype == kBFloat16) name = nb::module_::import_("ml_dtypes").attr("bfloat16");
    made = call_python(nb::module_::import_("numpy").attr("dtype"), name);
  } catch (nb::python_error& e) {
    if (!e.matches(PyExc_ImportError)) throw;
    throw Error(ErrorKind::dtype, "NumPy has no bfloat16 of its own; install ml_dtypes (pip install ml_dtypes), or pass out=");
  }
  return (*known)[key] = made;
}

DType dtype_of(nb::handle dtype, nb::object* structured) {
  if (nb::isinstance<nb::str>(dtype) && text_of(dtype) == "bfloat16") return kBFloat16;              // without ml_dtypes, too
  if (dtype.is_none()) throw Error(ErrorKind::dtype, "dtype is None; name one, such as 'float16'");  // NumPy's float64
  nb::object d;
  try {
    d = call_python(nb::module_::import_("numpy").attr("dtype"), nb::borrow(dtype));
  } catch (nb::python_error&) {
    throw Error(ErrorKind::dtype, "NumPy knows no dtype " + repr_of(dtype));
  }
  auto kind = text_of(nb::str(d.attr("kind")));
  auto size = nb::cast<uint32_t>(nb::int_(d.attr("itemsize")));
  bool native = nb::cast<bool>(d.attr("isnative")), has_objects = nb::cast<bool>(d.attr("hasobject"));
  bool is_bfloat = text_of(nb::str(d.attr("name"))) == "bfloat16";
  size_t at = is_bfloat ? size_t{DType::kBFloat} : std::string("iuf\0V\0cb", 8).find(kind);
  constexpr DType::Kind kinds[] = {DType::kInt,    DType::kUInt,   DType::kFloat,   DType::kOpaque,
                                   DType::kOpaque, DType::kOpaque, DType::kComplex, DType::kBool};
  DType found{is_bfloat ? DType::kBFloat : at < 8 ? kinds[at] : DType::kOpaque, size};
  if (!native || has_objects || at == std::string::npos || !is_known(found))
    throw Error(ErrorKind::dtype, repr_of(d) + " is not supported; use a plain little-endian number type");
  if (found.kind == DType::kOpaque) *structured = d;
  return found;
}

// -- making arrays ----------------------------------------------------------------------------------------------------

Array empty_array(nb::object owner, DeviceState* state, int ndim, const int64_t* shape, DType dtype, nb::object structured) {
  Array a;
  size_t bytes = dtype.size;
  bool fits = true;
  a.tensor.ndim = ndim;
  a.tensor.dtype = dtype;
  for (int i = 0; i < ndim; i++) {
    a.tensor.shape[i] = shape[i];
    fits &= !__builtin_mul_overflow(bytes, static_cast<size_t>(shape[i]), &bytes);
  }
  if (!fits || bytes > SIZE_MAX / 64) throw Error(ErrorKind::shape, "an array of more bytes than memory can have");
  a.tensor.make_contiguous();
  a.tensor.buffer = state->open()->new_buffer(bytes);
  a.owner = std::move(owner);
  a.state = state;
  a.structured = std::move(structured);
  return a;
}

namespace {

// All elements in C order.
void gather(const Tensor& from, uint8_t* to) {
  size_t element = from.dtype.size;
  int last = from.ndim - 1;
  int64_t index[kMaxDims] = {}, left = from.count();
  for (; left > 0; left -= from.shape[last]) {
    int64_t first = 0;
    for (int i = 0; i < last; i++) first += index[i] * from.strides[i];
    for (int64_t j = 0; j < from.shape[last]; j++, to += element)
      std::memcpy(to, from.buffer->host() + (first + j * from.strides[last]) * static_cast<int64_t>(element), element);
    for (int i = last - 1; i >= 0 && ++index[i] == from.shape[i]; i--) index[i] = 0;
  }
}

}  // namespace

namespace {

// The same where the host reaches it: of another library's memory on the device, a copy.
Tensor on_host(DeviceState& state, const Tensor& t) {
  if (t.buffer->host() || !t.buffer->size()) return t;
  auto bytes = std::make_shared<std::vector<uint8_t>>(t.buffer->size());
  state.open()->read(*t.buffer, 0, bytes->data(), bytes->size());
  Tensor copy = t;
  copy.buffer = std::make_shared<Buffer>(bytes->data(), bytes->size(), true, [bytes] {});
  return copy;
}

// An array of the host, of another library on the device, or another Array, read where the host reaches it.
struct Source {
  Source(DeviceState& state, nb::handle object) : held(nb::borrow(object)) {
    if (const Array* array = array_of(object)) held = to_numpy(*array);
    read_tensor(held, "array", tensor, state.open().get());
    tensor = on_host(state, tensor);
  }
  size_t size() const { return static_cast<size_t>(tensor.count()) * tensor.dtype.size; }
  // All elements in C order; valid while this lives.
  const uint8_t* bytes() {
    if (tensor.contiguous() || !size()) return tensor.buffer->host() + tensor.offset;
    gathered.resize(size());
    gather(tensor, gathered.data());
    return gathered.data();
  }
  nb::object held;
  Tensor tensor;
  std::vector<uint8_t> gathered;
};

}  // namespace

Array array_from(nb::object owner, DeviceState* state, nb::handle source) {
  Source given(*state, source);
  const Tensor& from = given.tensor;
  nb::object structured;
  if (from.dtype.kind == DType::kOpaque) dtype_of(dtype_object(given.held), &structured);
  Array to = empty_array(std::move(owner), state, from.ndim, from.shape, from.dtype, std::move(structured));
  state->open()->write(*to.tensor.buffer, 0, given.bytes(), given.size());
  return to;
}

namespace {

PyObject* write(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* kwnames) {
  return guarded([&] {
    static const auto* parameters = new Parameters("write", {"array"}, 1, 1);
    PyObject* values[1];
    parameters->take(args, count, kwnames, values);
    const Array& array = self_of<Array>(self);
    Source given(*array.state, values[0]);
    const Tensor &from = given.tensor, &to = array.tensor;
    if (from.ndim != to.ndim || !std::equal(from.shape, from.shape + from.ndim, to.shape))
      throw Error(ErrorKind::shape, "write: array is " + from.shape_text() + ", and this Array " + to.shape_text());
    if (from.dtype != to.dtype)
      throw Error(ErrorKind::dtype, "write: array is " + from.dtype.name() + ", and this Array " + to.dtype.name());
    if (!to.contiguous()) throw Error(ErrorKind::layout, "write: this Array is a view of memory that is not contiguous");
    const uint8_t* bytes = given.bytes();
    finish(array.state->open());
    to.buffer->mutable_since = true;
    array.state->open()->write(*to.buffer, to.offset, bytes, given.size());
    return nb::none();
  });
}

PyObject* reshape(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* kwnames) {
  return guarded([&] {
    static const auto* parameters = new Parameters("reshape", {"shape"}, 1, 1);
    PyObject* values[1];
    parameters->take(args, count, kwnames, values);
    const Array& array = self_of<Array>(self);
    array.state->open();
    Array view{array.tensor, array.owner, array.state, array.structured};
    Tensor& t = view.tensor;
    if (!t.contiguous()) throw Error(ErrorKind::layout, "reshape: this Array is a view of memory that is not contiguous");
    int64_t elements = 1;
    bool fits = true;
    t.ndim = 0;
    for_each_size(values[0], [&](nb::handle item) {
      if (t.ndim == kMaxDims) throw Error(ErrorKind::shape, "reshape: an array has 1 to 8 dimensions");
      int64_t size = number<int64_t>(item, "reshape: shape", ErrorKind::shape);
      fits &= size >= 0 && !__builtin_mul_overflow(elements, size, &elements);
      t.shape[t.ndim++] = size;
    });
    if (!fits || t.ndim == 0 || elements != array.tensor.count())
      throw Error(ErrorKind::shape, "reshape: this Array of " + array.tensor.shape_text() + " has " + std::to_string(array.tensor.count()) +
                                        " elements, and the shape asked for others");
    t.make_contiguous();
    return nb::cast(std::move(view));
  });
}

// What NumPy makes no view of by itself: elements of another package's type or of no type at all, and a copy of memory that the
// host does not reach, which nobody writes to in vain.
nb::object numpy_of_bytes(const Array& array, nb::object dtype) {
  const Tensor& t = array.tensor;
  bool reached = t.buffer->host() != nullptr;
  size_t size = span_of(t);
  nb::object numpy = nb::module_::import_("numpy"), bytes, self = nb::find(array);
  if (reached) {
    nb::ndarray<nb::numpy, uint8_t> view(t.buffer->host() + t.offset, {size}, self);
    bytes = nb::cast(view);
  } else {
    bytes = call_python(numpy.attr("empty"), size, "uint8");
    Tensor to = tensor_of(bytes, "array");
    array.state->open()->read(*t.buffer, t.offset, to.buffer->host(), size);
  }
  nb::list shape, strides;
  for (int i = 0; i < t.ndim; i++) shape.append(t.shape[i]), strides.append(t.strides[i] * static_cast<int64_t>(t.dtype.size));
  nb::object result = call_python(numpy.attr("ndarray"), nb::tuple(shape), dtype, bytes, 0, nb::tuple(strides));
  if (!reached) result.attr("flags").attr("writeable") = false;
  return result;
}

}  // namespace

namespace {

// The same memory as nanobind hands it to a Framework.
template <class... Framework>
nb::object view_for(const Array& array, std::array<int, 2> place = {1, 0}) {
  const Tensor& t = array.tensor;
  void* data = t.buffer->host() ? t.buffer->host() + t.offset : reinterpret_cast<void*>(t.buffer->address() + t.offset);
  size_t shape[kMaxDims];
  for (int i = 0; i < t.ndim; i++) shape[i] = static_cast<size_t>(t.shape[i]);
  nb::object self = nb::find(array);
  return nb::cast(nb::ndarray<Framework...>(data, static_cast<size_t>(t.ndim), shape, self, t.strides,
                                            nb::dlpack::dtype{t.dtype.kind, static_cast<uint8_t>(t.dtype.size * 8), 1}, place[0],
                                            place[1]));
}

}  // namespace

nb::object to_numpy(const Array& array) {
  finish(array.state->open());
  array.state->open();  // a warning's handler may have closed it
  const Tensor& t = array.tensor;
  t.buffer->mutable_since = true;  // through the view
  if (array.structured.is_valid()) return numpy_of_bytes(array, array.structured);
  if (t.dtype == kBFloat16 || !t.buffer->host()) return numpy_of_bytes(array, numpy_dtype(t.dtype));
  return view_for<nb::numpy>(array);
}

nb::object empty_numpy(int ndim, const int64_t* shape, DType dtype) {
  static nb::object* empty = nullptr;  // no initializers: see blas.cpp
  static nb::object* dtypes[kOperandTypeCount] = {};
  nb::object*& known = dtypes[operand_type(dtype)];
  if (!empty || !known) {
    nb::object made = numpy_dtype(dtype), function = nb::module_::import_("numpy").attr("empty");
    if (!known) known = new nb::object(std::move(made));
    if (!empty) empty = new nb::object(std::move(function));
  }
  nb::object size = ndim == 2 ? nb::make_tuple(shape[0], shape[1]) : nb::make_tuple(shape[0], shape[1], shape[2]);
  return call_python(*empty, size, *known);
}

// -- the class --------------------------------------------------------------------------------------------------------

namespace {

nb::tuple shape_of(const Tensor& t) {
  nb::list shape;
  for (int i = 0; i < t.ndim; i++) shape.append(t.shape[i]);
  return nb::tuple(shape);
}

[[noreturn]] void bad_index(const Array& a, nb::handle index) {
  std::string text = "an Array of shape " + a.tensor.shape_text() + " takes whole numbers, slices of positive step and one ..., " +
                     std::to_string(a.tensor.ndim) + " at most, as index, not " + repr_of(index);
  PyErr_SetString(PyExc_IndexError, text.c_str());
  throw nb::python_error();
}

int64_t index_of(const Array& a, nb::handle item, int axis) {
  int64_t size = a.tensor.shape[axis], i = PyNumber_AsSsize_t(item.ptr(), PyExc_IndexError);
  if (i == -1 && PyErr_Occurred()) throw nb::python_error();
  if (i < -size || i >= size) {
    std::string text = "index " + std::to_string(i) + " is outside axis " + std::to_string(axis) + " of size " + std::to_string(size);
    PyErr_SetString(PyExc_IndexError, text.c_str());
    throw nb::python_error();
  }
  return i < 0 ? i + size : i;
}

// Whole numbers and slices: the same memory, another view of it.
Array item(const Array& a, nb::handle index) {
  a.state->open();
  nb::tuple items = nb::isinstance<nb::tuple>(index) ? nb::borrow<nb::tuple>(index) : nb::make_tuple(nb::borrow(index));
  size_t given = 0;
  for (nb::handle i : items) given += !i.is(nb::handle(Py_Ellipsis));
  if (given > static_cast<size_t>(a.tensor.ndim) || items.size() > given + 1) bad_index(a, index);
  Array view{a.tensor, a.owner, a.state, a.structured};
  Tensor& t = view.tensor;
  t.ndim = 0;
  int axis = 0;
  int64_t offset = 0;
  auto keep = [&](int64_t size, int64_t stride) { t.shape[t.ndim] = size, t.strides[t.ndim++] = stride; };
  for (nb::handle i : items) {
    if (i.is(nb::handle(Py_Ellipsis))) {
      for (auto left = static_cast<size_t>(a.tensor.ndim) - given; left > 0; left--, axis++)
        keep(a.tensor.shape[axis], a.tensor.strides[axis]);
      continue;
    }
    int64_t stride = a.tensor.strides[axis];
    if (PySlice_Check(i.ptr())) {
      Py_ssize_t start, stop, step;
      if (PySlice_Unpack(i.ptr(), &start, &stop, &step) < 0) {
        PyErr_Clear();
        bad_index(a, index);
      }
      Py_ssize_t size = PySlice_AdjustIndices(a.tensor.shape[axis], &start, &stop, step);
      if (step < 1) bad_index(a, index);
      offset += size ? start * stride : 0;
      keep(size, stride * step);
    } else if (PyIndex_Check(i.ptr()) && !PyBool_Check(i.ptr()) && !PySequence_Check(i.ptr())) {
      offset += index_of(a, i, axis) * stride;
    } else {
      bad_index(a, index);
    }
    axis++;
  }
  for (; axis < a.tensor.ndim; axis++) keep(a.tensor.shape[axis], a.tensor.strides[axis]);
  t.offset += static_cast<size_t>(offset) * t.dtype.size;
  return view;
}

nb::object as_array(const Array& a, nb::handle dtype, nb::handle copy) {
  nb::object view = to_numpy(a);
  if (!dtype.is_none() && !view.attr("dtype").equal(call_python(nb::module_::import_("numpy").attr("dtype"), nb::borrow(dtype)))) {
    if (!copy.is_none() && !nb::cast<bool>(copy)) throw nb::value_error("metalmm.Array: another dtype needs a copy");
    return call_python(view.attr("astype"), nb::borrow(dtype));
  }
  return !copy.is_none() && nb::cast<bool>(copy) ? call_python(view.attr("copy")) : view;
}

// For DLPack: of memory that the host does not reach, where the device says that it lies; the host's view of other.
std::array<int, 2> place_of(const Array& a) {
  auto place = a.state->open()->dlpack_place();
  return place && !a.tensor.buffer->host() ? *place : std::array<int, 2>{1, 0};
}

// NumPy does not export bfloat16; DLPack has it.
nb::object to_dlpack(const Array& a, const nb::kwargs& options) {
  const Tensor& t = a.tensor;
  std::array<int, 2> place = place_of(a);
  if (place[0] == 1 && (t.dtype != kBFloat16 || !t.buffer->host())) return to_numpy(a).attr("__dlpack__")(**options);
  static const auto* parameters = new Parameters("__dlpack__", {"stream", "max_version", "dl_device", "copy"}, 0, 0);
  PyObject* v[4];
  parameters->take(nb::make_tuple(), options, v);
  bool elsewhere = v[2] && v[2] != Py_None && !nb::handle(v[2]).equal(nb::make_tuple(place[0], place[1]));
  if (elsewhere || (v[3] && v[3] != Py_None && PyObject_IsTrue(v[3])) || a.structured.is_valid()) {
    PyErr_SetString(PyExc_BufferError, place[0] == 1
                                           ? "metalmm.Array: it hands over its own memory of bfloat16, on the CPU and without a copy"
                                           : "metalmm.Array: it hands over its own memory on the GPU, without a copy; numpy() copies");
    throw nb::python_error();
  }
  finish(a.state->open());  // all of it: whatever stream the consumer is on comes after
  t.buffer->mutable_since = true;
  return view_for<>(a, place);  // a capsule of before versions, which every consumer takes
}

std::string dtype_text(const Array& a) {
  return a.structured.is_valid() ? nb::cast<std::string>(nb::str(a.structured)) : a.tensor.dtype.name();
}

}  // namespace

void bind_array(nb::module_& m) {
  static PyMethodDef methods[] = {
      {"numpy", [](PyObject* self, PyObject*) { return guarded([&] { return to_numpy(self_of<Array>(self)); }); }, METH_NOARGS,
       "numpy($self)\n--\n\n"
       "The same memory as a NumPy array, without a copy; of a device whose memory the host does not reach, a read-only copy.\n\n"
       "Comes after all that was submitted. Raises ClosedError after the device's end, DTypeError as dtype does."},
      fast_method("reshape", &reshape,
                  "reshape($self, shape)\n--\n\n"
                  "The same memory in another shape, of as many elements; of a C-contiguous Array. Raises ShapeError, LayoutError."),
      fast_method(
          "write", &write,
          "write($self, array)\n--\n\n"
          "Copies an array of the same shape and type into this one's memory, after all that was submitted: what numpy() cannot do on a\n"
          "device whose memory the host does not reach. Raises ShapeError, DTypeError, LayoutError, ClosedError."),
      {}};
  nb::class_<Array>(m, "Array", nb::type_slots(collected<Array>(methods)),
                    "An array in a device's memory. Made by Device.array, Device.empty and matmul. Indexing with whole numbers and slices\n"
                    "gives an Array of the same memory.")
      .def_prop_ro(
          "shape", [](const Array& a) { return shape_of(a.tensor); }, "Elements along each axis.")
      .def_prop_ro(
          "ndim", [](const Array& a) { return a.tensor.ndim; }, "Number of axes.")
      .def_prop_ro(
          "size", [](const Array& a) { return a.tensor.count(); }, "Number of elements.")
      .def_prop_ro(
          "dtype", [](const Array& a) { return a.structured.is_valid() ? a.structured : numpy_dtype(a.tensor.dtype); },
          "NumPy's dtype; of bfloat16 that of ml_dtypes, and a DTypeError where that is not installed.")
      .def_prop_ro(
          "itemsize", [](const Array& a) { return a.tensor.dtype.size; }, "Bytes of an element.")
      .def_prop_ro(
          "nbytes", [](const Array& a) { return a.tensor.count() * a.tensor.dtype.size; }, "Bytes of all elements.")
      .def_prop_ro(
          "device", [](const Array& a) { return a.owner; }, "The Device that it lies on.")
      .def_prop_ro(
          "device_address",
          [](const Array& a) {
            a.tensor.buffer->mutable_since = true;  // through the pointer
            return a.state->open()->device_address(a.tensor.buffer) + a.tensor.offset;
          },
          "Where the device's kernels find the first element, as a number, for a kernel that takes pointers in a struct. The array must\n"
          "live until such a kernel is through; see docs/architecture.md for what Metal asks beside.")
      .def("__array__", &as_array, "dtype"_a = nb::none(), "copy"_a = nb::none())
      .def("__dlpack__", &to_dlpack)
      .def("__dlpack_device__",
           [](const Array& a) {
             std::array<int, 2> place = place_of(a);
             return nb::make_tuple(place[0], place[1]);
           })
      .def("__getitem__", &item, "index"_a.none())
      .def("__iter__", [](nb::handle self) { return nb::steal(PySeqIter_New(self.ptr())); })
      .def("__bool__",
           [](const Array& a) -> bool {
             throw nb::type_error(
                 ("the truth of an Array of shape " + a.tensor.shape_text() + " is that of its elements: ask numpy()").c_str());
           })
      .def("__len__",
           [](const Array& a) {
             if (a.tensor.ndim == 0) throw nb::type_error("an Array without dimensions has no len()");
             return a.tensor.shape[0];
           })
      .def("__repr__", [](const Array& a) {
        std::string device = a.state->device ? a.state->device->name() : "closed";
        return "metalmm.Array(shape=" + nb::cast<std::string>(nb::str(shape_of(a.tensor))) + ", dtype=" + dtype_text(a) +
               ", device=" + device + ")";
      });
}

}  // namespace metalmm
