// The GIL, and threads that outlive Python.
#pragma once
#include <nanobind/nanobind.h>
#include <pthread.h>
#include <unistd.h>

#include "../core/device.h"

namespace metalmm {

namespace nb = nanobind;

// Once the interpreter is going, taking the GIL ends a thread by pthread_exit(), which unwinds through our frames and aborts at
// the first destructor. A daemon thread that comes back from a kernel then stops where it is, until the process has gone.
template <class Take>
auto or_stop(Take&& take) noexcept {
  try {
    return take();
  } catch (...) {
    for (;;) pause();
  }
}

// Python code from here: where it comes back to an interpreter that is going, the thread must stop before our objects are let go.
template <class... Args>
nb::object call_python(nb::handle function, Args&&... args) {
  nb::tuple all = nb::make_tuple(std::forward<Args>(args)...);
  auto result = nb::steal(or_stop([&] { return PyObject_Call(function.ptr(), all.ptr(), nullptr); }));
  if (!result.is_valid()) throw nb::python_error();
  return result;
}

class Gil {
 public:
  Gil() : state_(or_stop([] { return PyGILState_Ensure(); })) {}
  ~Gil() { PyGILState_Release(state_); }
  Gil(const Gil&) = delete;

 private:
  PyGILState_STATE state_;
};

// What a thread without the GIL lets go of waits for who takes it next. Not at once: its end may run Python code of any kind, which
// must not happen under our locks.
void let_go_later(std::function<void()> release);
void let_go();  // of all that waits; under the GIL, and under no lock of ours

class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() {
    or_stop([this] { PyEval_RestoreThread(state_); });
    let_go();
  }
  Unlocked(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

// Python acts on signals in its main thread alone, and only where that asks; what a handler raises ends the wait.
inline void check_signals() {
#if defined(__linux__)
  if (getpid() != gettid()) return;
#elif defined(__APPLE__)
  if (!pthread_main_np()) return;
#endif
  Gil gil;
  if (or_stop([] { return PyErr_CheckSignals(); }) != 0) throw nb::python_error();
}

inline void give_warnings(Device& device) {
  if (!device.has_warnings()) return;
  for (const std::string& text : device.take_warnings())
    if (or_stop([&] { return PyErr_WarnEx(PyExc_RuntimeWarning, text.c_str(), 2); }) != 0) throw nb::python_error();
}

// What reads memory comes after all that was submitted.
inline void finish(std::shared_ptr<Device> device) {  // by value: another thread may close it meanwhile
  if (!device->idle()) {
    Unlocked unlocked;
    device->finish();
  }
  give_warnings(*device);
}

}  // namespace metalmm
