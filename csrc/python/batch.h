// Batches and recordings as Python has them.
#pragma once
#include <deque>

#include "../core/batch.h"
#include "matmul.h"

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
  PyRecording(nb::object device, std::shared_ptr<Recording> recording, size_t size, Held held)
      : device_(std::move(device)), state_(&state_of(device_)), recording_(std::move(recording)), held_(std::move(held)), size_(size) {}

  void replay() {
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
  void wait() {
    std::shared_ptr<Device> device = state_->open();
    while (!pending_.empty()) wait_for_first(*device);
    give_warnings(*device);
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }
  BatchTiming timing() const {
    BatchTiming t = pending_.empty() ? last_ : pending_.back()->timing();
    t.encode = taken_ - t.commit;
    return t;
  }
  size_t size() const { return size_; }

  template <class Visit>
  void visit(Visit&& visit) const {
    visit(device_.ptr());
    held_.visit(visit);
  }
  void clear() {
    state_ = closed_state();
    held_.clear();
    device_.reset();
  }

 private:
  static constexpr size_t kMaxPending = 32;  // whose failures it remembers
  // Stays in the list until it is done: another thread may wait, too.
  void wait_for_first(Device& device) {
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
  }
  nb::object device_;
  DeviceState* state_;
  std::shared_ptr<Recording> recording_;
  Held held_;
  std::deque<std::shared_ptr<Submission>> pending_;
  std::exception_ptr failure_;
  BatchTiming last_;
  double taken_ = 0;
  size_t size_;
};

class Batch {
 public:
  Batch(nb::object device, bool per_dispatch)
      : device_(std::move(device)), state_(&state_of(device_)), running_(state_->open()), per_dispatch_(per_dispatch), batch_(fresh()) {}

  nb::object matmul(const MatmulCall& args) {
    state_->open();
    Matmul call(args, *state_, device_);
    call.dispatch([&](const Dispatch& d) {
      batch_->encode(d);
      return 0;
    });
    for (const Operand* o : {&call.a, &call.b, &call.bias, &call.c, &call.out}) held_.add(*o);
    return std::move(call.result);
  }

  nb::object add(nb::handle handle) {
    if (!nb::isinstance<Prepared>(handle) || !nb::inst_ready(handle))
      throw Error(ErrorKind::argument, "batch.add: call is " + repr_of(handle) + "; it takes what Device.prepare() gives");
    const Prepared& call = *nb::inst_ptr<Prepared>(handle);
    if (!call.device().is(device_)) throw Error(ErrorKind::device, "the call was prepared for another device");
    call.encode([&](const Dispatch& d) {
      encode(d);
      return 0;
    });
    held_.add(nb::borrow(handle));
    return call.out();
  }

  void encode(const Dispatch& d) {
    state_->open();
    batch_->encode(d);
  }
  void hold(const Operand& operand) { held_.add(operand); }
  void submit() {
    hand_over();
    give_warnings(*running_);
  }
  void wait() {
    state_->open();
    std::shared_ptr<CommandBatch> batch = batch_;
    {
      Unlocked unlocked;
      batch->wait();
    }
    give_warnings(*running_);
  }
  std::unique_ptr<PyRecording> record() {
    state_->open();
    size_t size = batch_->size();
    auto recording = batch_->record();
    return std::make_unique<PyRecording>(device_, std::move(recording), size, std::exchange(held_, {}));
  }
  void exit(nb::handle type, nb::handle, nb::handle) {
    if (!type.is_none()) {
      batch_ = fresh();  // dropped: nothing of it will run that was not submitted
      held_.clear();
      return;
    }
    if (batch_->recorded()) return;
    if (!batch_->submitted()) hand_over();
    wait();
  }
  BatchTiming timing() const { return batch_->timing(); }
  size_t size() const { return batch_->size(); }
  const nb::object& device() const { return device_; }
  const char* state() const { return batch_->recorded() ? "recorded" : batch_->submitted() ? "submitted" : "open"; }

  template <class Visit>
  void visit(Visit&& visit) const {
    visit(device_.ptr());
    held_.visit(visit);
  }
  void clear() {
    state_ = closed_state();
    batch_ = fresh();
    held_.clear();
    device_.reset();
  }

 private:
  std::shared_ptr<CommandBatch> fresh() const { return std::make_shared<CommandBatch>(running_, per_dispatch_); }
  void hand_over() {
    state_->open();
    std::shared_ptr<CommandBatch> batch = batch_;
    batch->close();
    Unlocked unlocked;
    batch->submit();
  }
  nb::object device_;
  DeviceState* state_;
  std::shared_ptr<Device> running_;
  bool per_dispatch_;
  Held held_;
  std::shared_ptr<CommandBatch> batch_;
};

void bind_batch(nb::module_& m);

}  // namespace metalmm
