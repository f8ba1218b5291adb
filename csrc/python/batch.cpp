#include "batch.h"

namespace metalmm {

// -- recordings -------------------------------------------------------------------------------------------------------

PyRecording::PyRecording(nb::object device, std::shared_ptr<Recording> recording, size_t size, Held held, TracedDispatches traced)
    : device_(std::move(device)),
      state_(&state_of(device_)),
      recording_(std::move(recording)),
      held_(std::move(held)),
      size_(size),
      traced_(std::move(traced)) {}

void PyRecording::replay() {
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

void PyRecording::wait() {
  std::shared_ptr<Device> device = state_->open();
  while (!pending_.empty()) wait_for_first(*device);
  give_warnings(*device);
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

BatchTiming PyRecording::timing() const {
  BatchTiming t = pending_.empty() ? last_ : pending_.back()->timing();
  t.encode = taken_ - t.commit;
  return t;
}

void PyRecording::clear() {
  state_ = closed_state();
  held_.clear();
  device_.reset();
}

// Stays in the list until it is done: another thread may wait, too.
void PyRecording::wait_for_first(Device& device) {
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
  if (tracing() && !failure) trace("replay", traced_, last_);
}

// -- batches ----------------------------------------------------------------------------------------------------------

Batch::Batch(nb::object device, bool per_dispatch)
    : device_(std::move(device)),
      state_(&state_of(device_)),
      running_(state_->open()),
      per_dispatch_(per_dispatch || tracing()),
      batch_(fresh()) {}

nb::object Batch::matmul(const MatmulCall& args) {
  state_->open();
  Matmul call(args, *state_, device_);
  call.dispatch([&](const Dispatch& d) {
    batch_->encode(d);
    return 0;
  });
  if (tracing()) note(call.traced());
  call.each_operand([&](const Operand& o) { held_.add(o); });
  return std::move(call.result);
}

nb::object Batch::add(nb::handle handle) {
  if (!nb::isinstance<Prepared>(handle) || !nb::inst_ready(handle))
    bad_argument("batch.add: call is " + repr_of(handle) + "; it takes what Device.prepare() gives");
  const Prepared& call = *nb::inst_ptr<Prepared>(handle);
  if (!call.device().is(device_)) throw Error(ErrorKind::device, "the call was prepared for another device");
  call.encode([&](const Dispatch& d) {
    encode(d);
    return 0;
  });
  if (tracing()) note(call.call().traced());
  held_.add(nb::borrow(handle));
  return call.out();
}

void Batch::encode(const Dispatch& d) {
  state_->open();
  batch_->encode(d);
}

void Batch::submit() {
  hand_over();
  give_warnings(*running_);
}

void Batch::wait() {
  state_->open();
  std::shared_ptr<CommandBatch> batch = batch_;
  {
    Unlocked unlocked;
    batch->wait();
  }
  give_warnings(*running_);
  if (tracing() && batch == batch_ && !traced_.empty()) trace("batch", std::exchange(traced_, {}), batch->timing());
}

std::unique_ptr<PyRecording> Batch::record() {
  state_->open();
  size_t size = batch_->size();
  auto recording = batch_->record();
  return std::make_unique<PyRecording>(device_, std::move(recording), size, std::exchange(held_, {}), std::exchange(traced_, {}));
}

void Batch::exit(nb::handle type, nb::handle, nb::handle) {
  if (!type.is_none()) {
    batch_ = fresh();  // dropped: nothing of it will run that was not submitted
    traced_.clear();
    held_.clear();
    return;
  }
  if (batch_->recorded()) return;
  if (!batch_->submitted()) hand_over();
  wait();
}

void Batch::clear() {
  state_ = closed_state();
  batch_ = fresh();
  held_.clear();
  device_.reset();
}

void Batch::hand_over() {
  state_->open();
  std::shared_ptr<CommandBatch> batch = batch_;
  batch->close();
  Unlocked unlocked;
  batch->submit();
}

namespace {

PyObject* add_matmul(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* kwnames) {
  return guarded([&] { return self_of<Batch>(self).matmul(MatmulCall::take(args, count, kwnames, false)); });
}

PyObject* add_matmul_fused(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* kwnames) {
  return guarded([&] { return self_of<Batch>(self).matmul(MatmulCall::take_fused(args, count, kwnames, false)); });
}

PyObject* add(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* kwnames) {
  return guarded([&] {
    static const auto* parameters = new Parameters("batch.add", {"call"}, 1, 1);
    PyObject* values[1];
    parameters->take(args, count, kwnames, values);
    return self_of<Batch>(self).add(values[0]);
  });
}

PyMethodDef methods[] = {
    fast_method("matmul", &add_matmul,
                "matmul($self, variant, a, b, *, bias=None, c=None, alpha=1.0, beta=0.0, transpose_a=False, transpose_b=False, out=None,\n"
                "row_invariant=False)\n--\n\nAdds a matmul; arguments and errors as metalmm.matmul. Returns the result, not yet filled."),
    fast_method("matmul_fused", &add_matmul_fused,
                "matmul_fused($self, variant, a, weights, *, bias=None, activation=None, out=None, row_invariant=False)\n--\n\n"
                "Adds a fused matmul; arguments and errors as metalmm.matmul_fused. Returns its results, not yet filled."),
    fast_method("add", &add, "add($self, call)\n--\n\nAdds a prepared call. Returns its out, not yet filled."),
    plain_method<Batch, &Batch::submit>("submit", "submit($self)\n--\n\nHands the batch to the device."),
    plain_method<Batch, &Batch::record>(
        "record",
        "record($self)\n--\n\n"
        "Ends the batch without running it: a Recording, which runs it any number of times at a cost that hardly depends on its size."),
    plain_method<Batch, &Batch::wait>("wait", "wait($self)\n--\n\nWaits until it is done. Raises what went wrong, naming the kernel."),
    {}};

PyMethodDef recording_methods[] = {
    plain_method<PyRecording, &PyRecording::replay>(
        "replay", "replay($self)\n--\n\nHands it to the device once more, after all that was submitted before."),
    plain_method<PyRecording, &PyRecording::wait>("wait",
                                                  "wait($self)\n--\n\nWaits until every replay is done. Raises what went wrong first."),
    {}};

}  // namespace

void bind_batch(nb::module_& m) {
  nb::class_<BatchTiming>(m, "BatchTiming", "Seconds that a batch took, apart; see docs/method.md.")
      .def_ro("encode", &BatchTiming::encode,
              "From opening the batch until all is encoded, the caller's own Python up to submit() included.")
      .def_ro("commit", &BatchTiming::commit, "Handing what was encoded to the device.")
      .def_ro("wait", &BatchTiming::wait, "From wait() to the host seeing completion. On the CPU device the waiting thread does the work.")
      .def_prop_ro(
          "device", [](const BatchTiming& t) { return t.device < 0 ? std::nullopt : std::optional<double>(t.device); },
          "The device's own work; None where it cannot tell.")
      .def_prop_ro(
          "dispatches",
          [](const BatchTiming& t) {
            std::vector<std::optional<double>> all;
            for (double s : t.dispatches) all.push_back(s < 0 ? std::nullopt : std::optional<double>(s));
            return all;
          },
          "The device's own work on each dispatch, of a batch with per_dispatch=True; empty where it cannot tell.")
      .def_ro("calls", &BatchTiming::calls, "Calls of the device's encoder that the batch made; 0 on the CPU device.")
      .def("__repr__", [](const BatchTiming& t) {
        auto us = [](double s) { return std::to_string(s * 1e6) + "us"; };
        return "BatchTiming(encode=" + us(t.encode) + ", commit=" + us(t.commit) + ", wait=" + us(t.wait) +
               ", device=" + (t.device < 0 ? "n/a" : us(t.device)) + ")";
      });

  nb::class_<Batch>(
      m, "Batch", nb::type_slots(collected<Batch>(methods)),
      "Any number of matmuls, submitted once and run in order. A context manager: leaving it submits and waits; leaving it by an\n"
      "exception drops it. Results are valid after wait(); arrays are read when the batch runs.")
      .def("__enter__", [](nb::handle self) { return nb::borrow(self); })
      .def("__exit__", &Batch::exit, "type"_a.none(), "value"_a.none(), "traceback"_a.none())
      .def_prop_ro("timing", &Batch::timing, "A BatchTiming, whole after wait().")
      .def("__len__", &Batch::size)
      .def("__repr__", [](const Batch& b) {
        return "metalmm.Batch(" + std::to_string(b.size()) + " dispatches, " + b.state() + ", on " + device_text(b.device()) + ")";
      });

  nb::class_<PyRecording>(m, "Recording", nb::type_slots(collected<PyRecording>(recording_methods)),
                          "A batch that can be run again and again. Arrays are read and results written anew each time; they are fixed,\n"
                          "as are shapes and epilogues.")
      .def_prop_ro("timing", &PyRecording::timing, "Of the last replay.")
      .def("__len__", &PyRecording::size)
      .def("__repr__", [](const PyRecording& r) { return "metalmm.Recording(" + std::to_string(r.size()) + " dispatches)"; });
}

}  // namespace metalmm
