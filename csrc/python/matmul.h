// Matmuls as Python asks for them: by variant and arrays, at once, prepared, or for a batch.
#pragma once
#include "../core/matmul.h"
#include "device.h"

namespace metalmm {

struct TracedDispatch;

// The arguments of a matmul as they were given, borrowed; None where none was.
struct MatmulCall {
  nb::handle variant, a, b, bias, c, out, device;  // b: of a quantized B, its integers
  double alpha, beta;
  bool transpose_a, transpose_b, row_invariant;
  struct Quantized {
    Storage storage;
    int64_t n = 0, k = 0;
    double global_scale = 1;
    nb::object values = nb::none(), scales = nb::none(), biases = nb::none();
  } quantized;
  // The second and third B of a fused call, and what goes with them.
  struct Other {
    nb::handle b, bias, out;
    Quantized quantized;
  };
  std::vector<Other> others;
  bool swiglu = false;
  std::vector<nb::object> held;  // of lists that may be gone
  // Throws ArgumentError. `takes_device`: whether the function has that argument.
  static MatmulCall take(PyObject* const* args, Py_ssize_t count, PyObject* kwnames, bool takes_device);
  static MatmulCall take_fused(PyObject* const* args, Py_ssize_t count, PyObject* kwnames, bool takes_device);
  nb::object owner() const;  // the device that it runs on
};

// Everything that a matmul or fused call resolves to, with the objects that keep its memory alive.
struct Matmul {
  Matmul() = default;
  Matmul(const MatmulCall& call, DeviceState& state, nb::handle device);
  const Variant* variant = nullptr;
  Tiling tiling;  // a copy: a manifest that is loaded again must not change a prepared call
  Operand a, b, scales, biases, bias, c, out;
  MatmulArgs args;
  MatmulPlan plan;
  nb::object result;
  std::shared_ptr<Pipeline> pipeline;
  // The second and third B of a fused call; `plan` has the spec of all.
  struct Other {
    Operand b, scales, biases, bias, out;
    MatmulArgs args;
    MatmulPlan plan;
  };
  std::vector<std::unique_ptr<Other>> others;  // where they are: `args` points to the operands

  TracedDispatch traced() const;
  std::vector<FusedPart> parts() const;
  template <class Use>
  void each_operand(Use&& use) const {
    for (const Operand* o : {&a, &b, &scales, &biases, &bias, &c, &out}) use(*o);
    for (auto& other : others)
      for (const Operand* o : {&other->b, &other->scales, &other->biases, &other->bias, &other->out}) use(*o);
  }
  template <class Use>
  auto dispatch(Use&& use) const {
    if (!others.empty()) return with_fused_dispatch(tiling, pipeline, plan.spec, parts(), std::forward<Use>(use));
    return with_dispatch(tiling, pipeline, plan, args, *out.get(), std::forward<Use>(use));
  }
};

// Returned by Device.prepare().
class Prepared {
 public:
  Prepared(nb::object device, MatmulCall call);
  Prepared(const Prepared&) = delete;

  nb::object run();
  template <class Use>
  void encode(Use&& use) const {
    call_.dispatch(std::forward<Use>(use));
  }
  const nb::object& out() const { return call_.result; }
  const nb::object& device() const { return device_; }
  std::optional<double> device_seconds() const {  // of the last run; under the GIL
    if (last_) {
      seconds_ = last_->timing().device;
      last_.reset();
    }
    double s = seconds_;
    return s < 0 ? std::nullopt : std::optional<double>(s);
  }
  const Matmul& call() const { return call_; }

  // For the garbage collector. A NumPy array is held twice: by the object, and by the buffer that was made of it.
  template <class Visit>
  void visit(Visit&& visit) const {
    visit(device_.ptr());
    for (const nb::object& o : keep_) visit(o.ptr());
    visit(call_.result.ptr());
    call_.each_operand([&](const Operand& o) {
      if (auto* buffer = o.own_buffer()) visit(static_cast<PyObject*>((*buffer)->owner));
    });
  }
  void clear();

 private:
  nb::object device_;
  DeviceState* state_;
  std::vector<nb::object> keep_;
  Matmul call_;
  mutable double seconds_ = -1;
  mutable std::shared_ptr<Submission> last_;  // where it is the one to tell
};

double factor(PyObject* value, const char* what, double otherwise);
void bind_matmul(nb::module_& m);
void bind_spec(nb::module_& m);  // spec.cpp

}  // namespace metalmm
