#include "call.h"

namespace metalmm {

namespace {
struct Waiting {
  std::function<void()> release;
  Waiting* next;
};
std::atomic<Waiting*> waiting{nullptr};  // last first; without a lock, which a child of fork() could find taken
}  // namespace

void let_go_later(std::function<void()> release) {
  Waiting* before = waiting.load();
  auto* w = new Waiting{std::move(release), nullptr};
  do w->next = before;
  while (!waiting.compare_exchange_weak(before, w));  // and `w` is whose who takes it next
  if (!before) Py_AddPendingCall([](void*) { return let_go(), 0; }, nullptr);  // where nobody of ours comes by
}

void let_go() {
  if (!waiting.load(std::memory_order_relaxed)) return;
  nb::error_scope pending;
  for (Waiting* w = waiting.exchange(nullptr); w;) {
    w->release();
    delete std::exchange(w, w->next);
  }
}

Hooks& hooks() {
  static Hooks* h = new Hooks;  // outlives the interpreter's own clean-up
  return *h;
}

void set_error(const Error& e) { PyErr_SetString(hooks().exceptions.at(static_cast<size_t>(e.kind)).ptr(), e.what()); }

void bad_argument(const std::string& what) { throw Error(ErrorKind::argument, what); }

std::string text_of(nb::handle text) {
  auto bytes = nb::steal(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
  if (!bytes.is_valid()) throw nb::python_error();
  return {PyBytes_AS_STRING(bytes.ptr()), static_cast<size_t>(PyBytes_GET_SIZE(bytes.ptr()))};
}

std::string repr_of(nb::handle value) {
  if (nb::inst_check(value) && !nb::inst_ready(value)) return std::string("a ") + Py_TYPE(value.ptr())->tp_name + " that was never made";
  auto text = nb::steal(or_stop([&] { return PyObject_Repr(value.ptr()); }));
  if (!text.is_valid()) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) throw nb::python_error();  // Ctrl-C
    PyErr_Clear();
    return std::string("a ") + Py_TYPE(value.ptr())->tp_name;
  }
  constexpr Py_ssize_t kMost = 80;
  if (PyUnicode_GET_LENGTH(text.ptr()) <= kMost) return text_of(text);
  return text_of(nb::steal(PyUnicode_Substring(text.ptr(), 0, kMost - 3))) + "...";
}

Parameters::Parameters(const char* function, std::vector<const char*> names, size_t required, size_t keyword_only)
    : function_(function), required_(required), keyword_only_(keyword_only) {
  for (const char* name : names) names_.push_back(PyUnicode_InternFromString(name));
}

// Names in a caller's code are interned, so that most are found by their address.
size_t Parameters::place(PyObject* name) const {
  for (size_t i = 0; i < names_.size(); i++)
    if (names_[i] == name) return i;
  for (size_t i = 0; i < names_.size(); i++)
    if (PyUnicode_Compare(names_[i], name) == 0) return i;
  nb::list known;
  for (PyObject* n : names_) known.append(nb::handle(n));
  nb::object near = call_python(nb::module_::import_("difflib").attr("get_close_matches"), nb::handle(name), known, 1, 0.5);
  std::string what = std::string(function_) + ": it has no argument " + repr_of(name);
  if (nb::len(near)) bad_argument(what + "; did you mean '" + text_of(nb::object(near[0])) + "'?");
  std::string list;
  for (PyObject* n : names_) list += (list.empty() ? "" : ", ") + text_of(n);
  bad_argument(what + "; it has " + list);
}

void Parameters::check(PyObject* const* values, size_t positional) const {
  if (positional > keyword_only_)
    bad_argument(std::string(function_) + ": " + std::to_string(positional) + " arguments by position; it takes " +
                 std::to_string(keyword_only_) + ", the others by name");
  for (size_t i = 0; i < required_; i++)
    if (!values[i]) bad_argument(std::string(function_) + ": argument " + repr_of(names_[i]) + " is missing");
}

void Parameters::take(PyObject* const* args, Py_ssize_t count, PyObject* kwnames, PyObject** values) const {
  auto positional = static_cast<size_t>(count);
  for (size_t i = 0; i < names_.size(); i++) values[i] = i < positional ? args[i] : nullptr;
  for (Py_ssize_t i = 0; kwnames && i < PyTuple_GET_SIZE(kwnames); i++) {
    size_t at = place(PyTuple_GET_ITEM(kwnames, i));
    if (values[at]) bad_argument(std::string(function_) + ": argument " + repr_of(names_[at]) + " is given twice");
    values[at] = args[count + i];
  }
  check(values, positional);
}

void Parameters::take(const nb::tuple& args, const nb::dict& kwargs, PyObject** values) const {
  for (size_t i = 0; i < names_.size(); i++) values[i] = i < args.size() ? PyTuple_GET_ITEM(args.ptr(), i) : nullptr;
  for (auto [name, value] : kwargs) {
    size_t at = place(name.ptr());
    if (values[at]) bad_argument(std::string(function_) + ": argument " + repr_of(names_[at]) + " is given twice");
    values[at] = value.ptr();  // the dictionary holds it
  }
  check(values, args.size());
}

bool flag(PyObject* value, const char* what, bool otherwise) {
  if (!value) return otherwise;
  if (value == Py_True || value == Py_False) return value == Py_True;
  if (std::string(Py_TYPE(value)->tp_name).rfind("numpy.bool", 0) == 0) return PyObject_IsTrue(value) == 1;
  bad_argument(std::string(what) + " is " + repr_of(value) + "; it takes True or False");
}

double real(PyObject* value, const char* what, double otherwise) {
  if (!value) return otherwise;
  double x = PyFloat_AsDouble(value);
  if (x == -1.0 && PyErr_Occurred()) {
    PyErr_Clear();
    bad_argument(std::string(what) + " is " + repr_of(value) + "; it takes a number");
  }
  return x;
}

}  // namespace metalmm
