// How Python's calls arrive: arguments by place or name, errors that name the argument, and C++ exceptions on their way back.
#pragma once
// All of nanobind's type casters that are used anywhere: a file that lacked one would make another of the same name.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "gil.h"

namespace metalmm {

using namespace nb::literals;

// What Python supplies.
struct Hooks {
  nb::object build_pipeline;   // (device, variant id, specialization) -> PipelineSource as a tuple: see source_of()
  nb::object add_variant;      // (id that no one registered) -> "", and it is, or why not
  nb::object default_device;   // () -> Device
  nb::object pack_number;      // (number, its MSL type, what for) -> bytes
  nb::object choose_variant;   // (device, MatmulSpec) -> the variant id that "auto" stands for
  nb::object quantized_array;  // the class QuantizedArray
  std::vector<nb::object> exceptions;
};
Hooks& hooks();

void set_error(const Error& e);  // as a Python exception

// The result of `call` as a new reference, or null with the exception set.
template <class Call>
PyObject* guarded(Call&& call) noexcept {
  try {
    return nb::object(call()).release().ptr();
  } catch (const Error& e) {
    set_error(e);
  } catch (nb::python_error& e) {
    e.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  }
  return nullptr;
}

// The parameters of a function: the first `required` must be given, those from `keyword_only` on by name.
class Parameters {
 public:
  Parameters(const char* function, std::vector<const char*> names, size_t required, size_t keyword_only);
  // values[i]: the argument of names[i], borrowed, null where it is not given. Throws ArgumentError.
  void take(PyObject* const* args, Py_ssize_t count, PyObject* kwnames, PyObject** values) const;
  void take(const nb::tuple& args, const nb::dict& kwargs, PyObject** values) const;

 private:
  size_t place(PyObject* name) const;
  void check(PyObject* const* values, size_t positional) const;
  const char* function_;
  std::vector<PyObject*> names_;  // interned
  size_t required_, keyword_only_;
};

[[noreturn]] void bad_argument(const std::string& what);
std::string repr_of(nb::handle value);  // shortened
std::string text_of(nb::handle text);   // of a str, lone surrogates escaped
bool flag(PyObject* value, const char* what, bool otherwise);
double real(PyObject* value, const char* what, double otherwise);

// A whole number of Python or NumPy as T, or an error that names the argument.
template <class T>
T number(nb::handle value, const char* name, ErrorKind kind) {
  auto whole = nb::steal(PyNumber_Index(value.ptr()));
  if (!whole.is_valid()) PyErr_Clear();
  T result;
  if (!whole.is_valid() || !nb::try_cast(whole, result))
    throw Error(kind, std::string(name) + ": " + repr_of(value) + " is not a whole number in range");
  return result;
}

// use(item) for each of an iterable; anything else is taken as one item.
template <class Use>
void for_each_size(nb::handle value, Use&& use) {
  bool is_text = PyUnicode_Check(value.ptr()) || PyBytes_Check(value.ptr());
  auto items = is_text ? nb::object() : nb::steal(PyObject_GetIter(value.ptr()));
  if (!items.is_valid()) {
    PyErr_Clear();
    return use(value);
  }
  while (auto item = nb::steal(PyIter_Next(items.ptr()))) use(item);
  if (PyErr_Occurred()) throw nb::python_error();
}

// A method or function of Python's own calling convention: no tuple and no dictionary are made, and a wrong call names its argument.
using FastCall = PyObject* (*)(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* kwnames);
inline PyMethodDef fast_method(const char* name, FastCall call, const char* doc) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)), METH_FASTCALL | METH_KEYWORDS, doc};
}

// The C++ object of `self`.
template <class T>
T& self_of(PyObject* self) {
  if (!nb::inst_ready(self)) throw Error(ErrorKind::closed, std::string(Py_TYPE(self)->tp_name) + ": it was not made by metalmm");
  return *nb::inst_ptr<T>(self);
}

// A method of T without arguments.
template <class T, auto Method>
PyObject* call_plain(PyObject* self, PyObject*) {
  return guarded([&]() -> nb::object {
    T& object = self_of<T>(self);
    if constexpr (std::is_void_v<decltype((object.*Method)())>) {
      (object.*Method)();
      return nb::none();
    } else {
      return nb::cast((object.*Method)());
    }
  });
}
template <class T, auto Method>
PyMethodDef plain_method(const char* name, const char* doc) {
  return {name, &call_plain<T, Method>, METH_NOARGS, doc};
}

// What the garbage collector asks of a class: T::visit(use) calls use(PyObject*) for each reference that an object holds, T::clear()
// drops them. `methods`: ended by an empty one; `call`: for objects that are called.
template <class T>
PyType_Slot* collected(PyMethodDef* methods, ternaryfunc call = nullptr) {
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
                                {Py_tp_methods, methods},
                                {call ? Py_tp_call : 0, reinterpret_cast<void*>(call)},
                                {0, nullptr}};
  return slots;
}

}  // namespace metalmm
