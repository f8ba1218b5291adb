// Command buffers in flight, and what becomes of them.
#pragma once
#include <optional>

#include "metal_encoder.h"

namespace metalmm::metal {

// One submission, of a call, a batch or a recording: command buffers in flight and what becomes of them.
class MetalSubmission : public Submission {
 public:
  MetalSubmission(std::shared_ptr<MetalDevice> device, std::shared_ptr<const DispatchList> list, bool per_dispatch)
      : device_(std::move(device)), list_(std::move(list)), per_dispatch_(per_dispatch && device_->timestamps()) {}
  // The device drops it when it is through, unless it failed to start, with command buffers in flight.
  ~MetalSubmission() override {
    AutoreleasePool pool;
    if (work_) {
      work_->wait();
      for (size_t i = 0; i < work_->command_buffers.size(); i++) check(i);  // that the GPU is gone is noticed here, too
    }
    encoder_.reset(), open_ = {}, work_.reset(), staging_.reset(), parts_.clear(), unread_.clear(), list_.reset();  // within the pool
  }

  void start();
  // `idle`: pipelines to set before.
  void start_replay(id<MTLIndirectCommandBuffer> commands, const std::vector<id<MTLResource>>& read,
                    const std::vector<id<MTLResource>>& written, const std::vector<id<MTLComputePipelineState>>& idle,
                    std::shared_ptr<void> owner);
  void wait() override;
  bool done() const override;
  BatchTiming timing() const override;

 private:
  struct Part {  // of the list, in one command buffer
    size_t begin, end;
    Handle<id<MTLCounterSampleBuffer>> samples;
  };
  void encode();
  void encode_one(size_t i, const Dispatch& d);
  void check_mps(const MetalPipeline& pipeline, const Dispatch& d);
  void encode_mps(const MetalPipeline& pipeline, const Dispatch& d);
  Place place(const Buffer& buffer, size_t offset) const;
  size_t bind(const Dispatch& d, Encoder::Bound* bound);
  void open(size_t first, bool retained);
  void commit(size_t end, bool last);
  void synchronize();
  bool signalled() const;
  bool returns_on_event() const;
  void spin() const;
  void check(size_t i);
  void finish(double waited, bool told);
  void upload();
  void read_times(const std::vector<Handle<id<MTLCommandBuffer>>>& command_buffers) const;
  void read_samples(const Part& part) const;

  std::shared_ptr<MetalDevice> device_;
  std::shared_ptr<const DispatchList> list_;
  std::optional<Staging> staging_;
  std::unique_ptr<InFlight> work_ = std::make_unique<InFlight>();
  std::vector<Part> parts_;
  Handle<id<MTLCommandBuffer>> open_;
  std::optional<Encoder> encoder_;  // of open_: it ends first
  uint64_t bytes_ = 0;
  bool per_dispatch_;
  uint64_t signaled_ = 0;
  // Two threads may wait for one batch. Whoever asks for its timing holds the GIL, and must not wait for that.
  mutable std::mutex wait_mutex_;
  mutable std::mutex timing_mutex_;
  mutable BatchTiming timing_;                                // after start(), changed in wait() and by who asks first
  mutable std::vector<Handle<id<MTLCommandBuffer>>> unread_;  // whose times nobody has asked for
  std::optional<std::pair<ErrorKind, std::string>> failure_;  // thrown anew each time: threads may share a submission
};

}  // namespace metalmm::metal
