// The Python module.
#include "batch.h"
#include "blas.h"

namespace metalmm {

void bind_kernel(nb::module_& m);

namespace {

void translate(const std::exception_ptr& p, void*) {
  try {
    std::rethrow_exception(p);
  } catch (const Error& e) {
    set_error(e);
  }
}

void refuse_subinterpreter() {
  if (PyInterpreterState_Get() == PyInterpreterState_Main()) return;
  PyErr_SetString(PyExc_ImportError, "metalmm works in the main interpreter alone, not in a subinterpreter");
  throw nb::python_error();
}

}  // namespace

NB_MODULE(_core, m) {
  refuse_subinterpreter();
  nb::set_leak_warnings(false);  // pipelines and the default device live as long as the process
  nb::register_exception_translator(translate, nullptr);
  host_poll = &check_signals;
  m.def("_set_hooks", [](nb::object build_pipeline, nb::object add_variant, nb::object default_device, nb::object pack_number,
                         nb::object choose_variant, nb::object quantized_array, nb::list exceptions) {
    refuse_subinterpreter();  // a second interpreter may share the module of the first
    if (exceptions.size() != static_cast<size_t>(ErrorKind::count)) throw std::runtime_error("metalmm: errors.py and error.h differ");
    hooks() = {std::move(build_pipeline),
               std::move(add_variant),
               std::move(default_device),
               std::move(pack_number),
               std::move(choose_variant),
               std::move(quantized_array),
               {}};
    for (nb::handle e : exceptions) hooks().exceptions.push_back(nb::borrow(e));
  });
  add_blas();
  bind_array(m);
  bind_device(m);
  bind_matmul(m);
  bind_batch(m);
  bind_kernel(m);
  bind_trace(m);
}

}  // namespace metalmm
