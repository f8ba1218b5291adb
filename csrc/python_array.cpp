#include "python_array.h"

#include <cstring>

namespace metalmm {
namespace {

DTypeCode dtype_of(const char* format, Py_ssize_t itemsize) {
  if (!format) format = "B";
  if (*format == '<' || *format == '=' || *format == '@') format++;
  auto bits = static_cast<uint8_t>(itemsize * 8);
  if (format[0] && format[1] == '\0') {
    if (std::strchr("efd", *format)) return {2, bits};
    if (std::strchr("bhilq", *format)) return {0, bits};
    if (std::strchr("BHILQ", *format)) return {1, bits};
    if (*format == '?') return {6, bits};
  }
  throw Error(ErrorKind::dtype, std::string("arrays of format '") + format + "' are not supported; use a plain little-endian number type");
}

const char* class_name(nb::handle object) { return Py_TYPE(object.ptr())->tp_name; }

}  // namespace

Tensor tensor_of(nb::handle object, const char* name) {
  auto view = std::make_unique<Py_buffer>();
  if (PyObject_GetBuffer(object.ptr(), view.get(), PyBUF_RECORDS_RO) != 0) {
    PyErr_Clear();
    bool is_number = PyLong_Check(object.ptr()) || PyFloat_Check(object.ptr());
    throw Error(ErrorKind::dtype, std::string(name) + " is " + class_name(object) + "; pass a numpy array or a metalmm.Array" +
                                      (is_number ? ", or a number whose type says its size, such as numpy.int32(5)" : ""));
  }
  // The deleter runs wherever the last user lets go, with or without the GIL.
  Py_buffer* raw = view.release();
  auto release = [raw] {
    if (!Py_IsInitialized()) return;  // the memory goes with the process
    Gil gil;
    PyBuffer_Release(raw);
    delete raw;
  };
  size_t span = static_cast<size_t>(raw->itemsize);
  for (int i = 0; i < raw->ndim; i++)
    if (raw->shape[i] > 0 && raw->strides[i] > 0) span += static_cast<size_t>((raw->shape[i] - 1) * raw->strides[i]);
  Tensor t;
  t.buffer = std::make_shared<Buffer>(raw->buf, raw->len ? span : 0, raw->readonly != 0, release);
  t.buffer->owner = raw->obj;
  t.ndim = raw->ndim;
  t.dtype = dtype_of(raw->format, raw->itemsize);
  if (raw->ndim > kMaxDims) {
    throw Error(ErrorKind::shape,
                std::string(name) + " has " + std::to_string(raw->ndim) + " dimensions; the limit is " + std::to_string(kMaxDims));
  }
  for (int i = 0; i < raw->ndim; i++) {
    t.shape[i] = raw->shape[i];
    if (raw->strides[i] % raw->itemsize)
      throw Error(ErrorKind::layout, std::string(name) + " has strides that are no multiple of its elements");
    t.strides[i] = raw->strides[i] / raw->itemsize;
  }
  return t;
}

Operand::Operand(nb::handle object, const char* name, DeviceState* state) {
  if (object.is_none()) return;
  if (nb::inst_check(object) && nb::isinstance<Array>(object)) {
    array_ = nb::inst_ptr<Array>(object);
    if (state && array_->state != state) {
      throw Error(ErrorKind::device, std::string(name) + " lies on another device; copy it with device.array(numpy.asarray(" + name + "))");
    }
    array_->state->open();
    return;
  }
  local_ = tensor_of(object, name);
}

Array empty_array(nb::object owner, DeviceState* state, int ndim, const int64_t* shape, DTypeCode dtype) {
  Array a;
  size_t count = 1;
  a.tensor.ndim = ndim;
  a.tensor.dtype = dtype;
  for (int i = ndim - 1; i >= 0; i--) {
    a.tensor.shape[i] = shape[i];
    a.tensor.strides[i] = static_cast<int64_t>(count);
    if (__builtin_mul_overflow(count, static_cast<size_t>(shape[i]), &count) || count > SIZE_MAX / 64)
      throw Error(ErrorKind::shape, "an array of more bytes than memory can have");
  }
  a.tensor.buffer = state->open()->new_buffer(count * dtype.bits / 8);
  a.owner = std::move(owner);
  a.state = state;
  return a;
}

nb::object to_numpy(const Array& array) {
  finish(array.state->open());
  array.state->open();  // a warning's handler may have closed it
  const Tensor& t = array.tensor;
  t.buffer->mutable_since = true;  // through the view
  size_t shape[kMaxDims];
  for (int i = 0; i < t.ndim; i++) shape[i] = static_cast<size_t>(t.shape[i]);
  nb::object self = nb::find(array);
  nb::ndarray<nb::numpy> view(t.buffer->data() + t.offset, static_cast<size_t>(t.ndim), shape, self, t.strides,
                              nb::dlpack::dtype{t.dtype.code, t.dtype.bits, 1});
  return nb::cast(view);
}

nb::object empty_numpy(int ndim, const int64_t* shape) {
  static nb::object *empty = nullptr, *half = nullptr;  // no initializers: see blas.cpp
  if (!empty || !half) {
    nb::object numpy = nb::module_::import_("numpy");
    nb::object dtype = call_python(numpy.attr("dtype"), "float16"), function = numpy.attr("empty");
    if (!half) half = new nb::object(std::move(dtype));
    if (!empty) empty = new nb::object(std::move(function));
  }
  nb::object size = ndim == 2 ? nb::make_tuple(shape[0], shape[1]) : nb::make_tuple(shape[0], shape[1], shape[2]);
  return call_python(*empty, size, *half);
}

}  // namespace metalmm
