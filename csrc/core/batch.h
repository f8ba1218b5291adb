// Dispatches that are kept until they are submitted: what batches and recordings are made of, on every device.
#pragma once
#include <chrono>
#include <mutex>

#include "device.h"

namespace metalmm {

using Clock = std::chrono::steady_clock;
inline double seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }
std::string seconds_text(double seconds);  // 0.5 s

// Copies of dispatches with everything they point to; owns their buffers and pipelines.
class DispatchList {
 public:
  void add(const Dispatch& dispatch);
  size_t size() const { return entries_.size(); }
  const Pipeline& pipeline(size_t i) const { return *entries_[i].pipeline; }

  bool has_host_memory() const { return has_host_memory_; }
  template <class Use>
  void for_each_buffer(Use&& use) const {
    for (const std::shared_ptr<Buffer>& b : kept_) use(*b);
  }

  // use(i, dispatch) for each, in order; what the dispatch points to lives until `use` returns.
  template <class Use>
  void for_each(Use&& use) const {
    BufferBinding buffers[kMaxBuffers];
    BytesBinding bytes[kMaxBuffers];
    for (size_t i = 0; i < entries_.size(); i++) {
      const Entry& e = entries_[i];
      for (uint32_t j = 0; j < e.buffer_count; j++) {
        const KeptBuffer& b = buffers_[e.first_buffer + j];
        buffers[j] = {b.index, &kept_[b.kept], b.offset};
      }
      for (uint32_t j = 0; j < e.bytes_count; j++) {
        const KeptBytes& b = bytes_[e.first_bytes + j];
        bytes[j] = {b.index, storage_.data() + b.at, b.size};
      }
      use(i, Dispatch{&e.pipeline, buffers, e.buffer_count, bytes, e.bytes_count, memory_.data() + e.first_memory, e.memory_count, e.grid,
                      e.threadgroup, e.threads});
    }
  }

 private:
  struct Entry {
    std::shared_ptr<Pipeline> pipeline;
    uint32_t first_buffer, buffer_count, first_bytes, bytes_count, first_memory, memory_count;
    Size3 grid, threadgroup, threads;
  };
  struct KeptBuffer {
    uint32_t index, kept;
    size_t offset;
  };
  struct KeptBytes {
    uint32_t index;
    size_t at, size;
  };
  uint32_t keep(const Dispatch& d, size_t which, uint32_t first);

  std::vector<Entry> entries_;
  std::vector<KeptBuffer> buffers_;
  std::vector<KeptBytes> bytes_;
  std::vector<ThreadgroupMemory> memory_;
  std::vector<uint8_t> storage_;
  std::vector<std::shared_ptr<Buffer>> kept_;
  bool has_host_memory_ = false;
};

// Any number of dispatches, submitted once, run in order.
class CommandBatch {
 public:
  CommandBatch(std::shared_ptr<Device> device, bool per_dispatch);
  void encode(const Dispatch& dispatch);
  // No more is encoded from here on. Under the GIL, as encode(); submit() follows without it.
  void close();
  void submit();
  void wait();  // throws what went wrong; the batch is over either way
  std::shared_ptr<Recording> record();
  bool submitted() const { return closed_ && !recorded_; }
  bool recorded() const { return recorded_; }
  size_t size() const { return size_; }
  BatchTiming timing() const;

 private:
  std::shared_ptr<Device> device_;
  std::shared_ptr<DispatchList> list_ = std::make_shared<DispatchList>();  // the submission's or recording's, once there is one
  mutable std::mutex mutex_;                                               // guards submission_: one thread may submit while another waits
  std::shared_ptr<Submission> submission_;
  Clock::time_point opened_ = Clock::now();
  size_t size_ = 0;
  double filled_ = 0;  // seconds from opening to submit()
  bool per_dispatch_, closed_ = false, recorded_ = false;
};

}  // namespace metalmm
