// Batches and recordings as Python has them.
#pragma once
#include <deque>

#include "../core/batch.h"
#include "matmul.h"
#include "trace.h"

namespace metalmm {

// What a batch or recording holds of Python beside its device, for the garbage collector: prepared calls, and NumPy memory that
// lives for as long as the work does.
struct Held {
  std::vector<nb::object> calls;
  std::vector<std::weak_ptr<Buffer>> buffers;

  void add(const nb::object& call) {
    if (calls.empty() || !calls.back().is(call)) calls.push_back(call);
  }
  void add(const Operand& operand) {
    if (auto* buffer = operand.own_buffer()) buffers.push_back(*buffer);
  }
  template <class Visit>
  void visit(Visit&& visit) const {
    for (const nb::object& o : calls) visit(o.ptr());
    for (auto& weak : buffers)
      if (auto buffer = weak.lock()) visit(static_cast<PyObject*>(buffer->owner));
  }
  void clear() {
    auto gone = std::move(calls);
    calls.clear(), buffers.clear();
  }
};

class PyRecording {
 public:
  PyRecording(nb::object device, std::shared_ptr<Recording> recording, size_t size, Held held, TracedDispatches traced);
  void replay();
  void wait();
  BatchTiming timing() const;
  size_t size() const { return size_; }

  template <class Visit>
  void visit(Visit&& visit) const {
    visit(device_.ptr());
    held_.visit(visit);
  }
  void clear();

 private:
  static constexpr size_t kMaxPending = 32;  // whose failures it remembers
  void wait_for_first(Device& device);
  nb::object device_;
  DeviceState* state_;
  std::shared_ptr<Recording> recording_;
  Held held_;
  std::deque<std::shared_ptr<Submission>> pending_;
  std::exception_ptr failure_;
  BatchTiming last_;
  double taken_ = 0;
  size_t size_;
  TracedDispatches traced_;
};

class Batch {
 public:
  Batch(nb::object device, bool per_dispatch);
  nb::object matmul(const MatmulCall& args);
  nb::object add(nb::handle call);
  void encode(const Dispatch& d);
  void note(TracedDispatch traced) {  // of what was added last, where tracing() is
    traced.index = batch_->size() - 1;
    traced_.push_back(std::move(traced));
  }
  void hold(const Operand& operand) { held_.add(operand); }
  void submit();
  void wait();
  std::unique_ptr<PyRecording> record();
  void exit(nb::handle type, nb::handle value, nb::handle traceback);
  BatchTiming timing() const { return batch_->timing(); }
  size_t size() const { return batch_->size(); }
  const nb::object& device() const { return device_; }
  const char* state() const { return batch_->recorded() ? "recorded" : batch_->submitted() ? "submitted" : "open"; }

  template <class Visit>
  void visit(Visit&& visit) const {
    visit(device_.ptr());
    held_.visit(visit);
  }
  void clear();

 private:
  std::shared_ptr<CommandBatch> fresh() const { return std::make_shared<CommandBatch>(running_, per_dispatch_); }
  void hand_over();
  nb::object device_;
  DeviceState* state_;
  std::shared_ptr<Device> running_;
  bool per_dispatch_;
  Held held_;
  std::shared_ptr<CommandBatch> batch_;
  TracedDispatches traced_;  // what was added while somebody traced
};

void bind_batch(nb::module_& m);

}  // namespace metalmm
