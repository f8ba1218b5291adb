#include "batch.h"

#include <cstdio>
#include <cstring>

namespace metalmm {

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g s", seconds);
  return text;
}

class ListRecording : public Recording {
 public:
  ListRecording(std::shared_ptr<Device> device, std::shared_ptr<const DispatchList> list)
      : device_(std::move(device)), list_(std::move(list)) {}

 private:
  std::shared_ptr<Submission> start() override { return device_->start(list_, false); }
  std::shared_ptr<Device> device_;
  std::shared_ptr<const DispatchList> list_;
};

std::shared_ptr<Recording> Device::record(std::shared_ptr<const DispatchList> work) {
  return std::make_shared<ListRecording>(shared_from_this(), std::move(work));
}

// Arguments that are not there repeat an earlier buffer, and neighbours in a batch share inputs: those are kept once.
uint32_t DispatchList::keep(const Dispatch& d, size_t which, uint32_t first) {
  const std::shared_ptr<Buffer>& buffer = *d.buffers[which].buffer;
  for (uint32_t i = 0; i < which; i++)
    if (buffer == *d.buffers[i].buffer) return buffers_[first + i].kept;
  if (!entries_.empty() && which < entries_.back().buffer_count) {
    uint32_t before = buffers_[entries_.back().first_buffer + which].kept;
    if (kept_[before] == buffer) return before;
  }
  kept_.push_back(buffer);
  has_host_memory_ |= !buffer->native();
  return static_cast<uint32_t>(kept_.size() - 1);
}

void DispatchList::add(const Dispatch& d) {
  auto size = [](auto& v) { return static_cast<uint32_t>(v.size()); };
  Entry e{*d.pipeline,
          size(buffers_),
          static_cast<uint32_t>(d.buffer_count),
          size(bytes_),
          static_cast<uint32_t>(d.bytes_count),
          size(memory_),
          static_cast<uint32_t>(d.threadgroup_memory_count),
          d.grid,
          d.threadgroup,
          d.threads};
  for (size_t i = 0; i < d.buffer_count; i++) buffers_.push_back({d.buffers[i].index, keep(d, i, e.first_buffer), d.buffers[i].offset});
  for (size_t i = 0; i < d.bytes_count; i++) {
    const BytesBinding& b = d.bytes[i];
    size_t at = (storage_.size() + 15) & ~size_t{15};
    storage_.resize(at + b.size);
    if (b.size) std::memcpy(storage_.data() + at, b.data, b.size);
    bytes_.push_back({b.index, at, b.size});
  }
  memory_.insert(memory_.end(), d.threadgroup_memory, d.threadgroup_memory + d.threadgroup_memory_count);
  entries_.push_back(std::move(e));
}

CommandBatch::CommandBatch(std::shared_ptr<Device> device, bool per_dispatch) : device_(std::move(device)), per_dispatch_(per_dispatch) {}

void CommandBatch::encode(const Dispatch& d) {
  if (closed_) throw Error(ErrorKind::closed, "batch: it was submitted or recorded already; open a new one");
  check_dispatch(d, device_->limits());
  list_->add(d);
  size_++;
}

void CommandBatch::close() {
  if (closed_) throw Error(ErrorKind::closed, "batch: it was submitted or recorded already");
  closed_ = true;
  filled_ = seconds(Clock::now() - opened_);
}

void CommandBatch::submit() {
  std::shared_ptr<Submission> submission = device_->submit(std::move(list_), per_dispatch_);
  std::lock_guard lock(mutex_);
  submission_ = std::move(submission);
}

std::shared_ptr<Recording> CommandBatch::record() {
  close();
  recorded_ = true;
  return device_->record(std::move(list_));
}

void CommandBatch::wait() {
  std::unique_lock lock(mutex_);
  std::shared_ptr<Submission> submission = submission_;
  lock.unlock();
  if (!submission) throw Error(ErrorKind::closed, closed_ ? "batch: it was not submitted" : "batch: wait() before submit()");
  device_->wait(*submission);
}

BatchTiming CommandBatch::timing() const {
  std::lock_guard lock(mutex_);
  BatchTiming t = submission_ ? submission_->timing() : BatchTiming{};
  t.encode += filled_;
  return t;
}

}  // namespace metalmm
