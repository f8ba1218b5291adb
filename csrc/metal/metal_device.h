// The Metal device, for the files of this folder.
#pragma once
#import <Metal/Metal.h>

#include <map>
#include <mutex>
#include <unordered_map>

#include "../core/batch.h"
#include "handle.h"
#include "metal_residency.h"

namespace metalmm::metal {

class MpsCache;

struct MetalOptions {
  int64_t index = -1;  // the system's default device
  double spin = 50e-6;
  uint32_t max_operations = 512;  // in a command buffer
  uint64_t max_bytes = uint64_t{4} << 30;
  // What only hardware can decide; the defaults are the safe choices.
  uint32_t first_commit = 0;     // so many dispatches of a long batch go out while the rest is encoded; 0: none does
  bool untracked = false;        // Metal does not order what uses one buffer; our fences do
  bool return_on_event = false;  // a signalled event is success; status and times are read when somebody asks
  int64_t indirect = -1;         // recordings as indirect commands: -1 from Apple9 on, 0 never, 1 before Apple9, too
  double keep_resident = 0;      // seconds: see Residency
};

inline id<MTLBuffer> native_of(const Buffer& buffer) { return static_cast<id<MTLBuffer>>(buffer.native()); }

// A compiled kernel, or one of MPS's matmuls with the kernel that finishes it.
struct MetalPipeline : Pipeline {
  ~MetalPipeline() override {
    AutoreleasePool pool;
    state = {};
  }
  enum class Kind { kernel, mps_matmul, mps_matvec, mps_ndarray };
  Kind kind = Kind::kernel;
  DType type;  // of MPS's operands
  Handle<id<MTLComputePipelineState>> state;
  uint32_t written = 0;  // bit per buffer index that the kernel may write
  bool transpose_a = false, transpose_b = false;
};

// Orders passes: each waits for the one before, and updates it at its end. Where one submission starts at a time.
struct Fence {
  Handle<id<MTLFence>> object;
  bool is_updated = false;  // by some pass; nobody says what waiting for one that no pass updates does
};

// What the GPU may still touch. Whoever holds it last must know that the GPU is done.
struct InFlight {
  std::vector<Handle<id<MTLCommandBuffer>>> command_buffers;
  std::vector<std::shared_ptr<void>> owned;
  bool done() const;
  void wait() const;
};

class MetalDevice : public Device {
 public:
  MetalDevice(Handle<id<MTLDevice>> device, const MetalOptions& options);
  ~MetalDevice() override;

  Info info() const override;
  Info counters() const override;
  Limits limits() const override { return limits_; }
  bool library_takes(const LibraryCall& call) const override;
  uint64_t device_address(const std::shared_ptr<Buffer>& buffer) override;
  bool wraps_host_memory() const override { return unified_; }
  std::shared_ptr<Buffer> new_buffer(size_t size) override;
  std::shared_ptr<Pipeline> load_pipeline(const PipelineSource& source) override;
  std::shared_ptr<Recording> record(std::shared_ptr<const DispatchList> work) override;
  std::vector<std::string> kernel_names(const std::string& code) override;
  void start_capture(const std::string& path) override;
  void stop_capture() override;

  id<MTLDevice> get() const { return device_.get(); }
  id<MTLCommandQueue> queue() const { return queue_.get(); }
  const MetalOptions& options() const { return options_; }
  bool unified() const { return unified_; }
  bool indirect() const { return indirect_; }
  bool sets_indirect_pipelines() const { return !apple9_; }           // each with the encoder, before the commands that use it
  id<MTLCounterSet> timestamps() const { return timestamps_.get(); }  // nil: no counter sampling between passes
  MpsCache& mps() { return *mps_; }

  // Shared or managed memory of at least `size` bytes from the pool; goes back there when the last holder lets go.
  std::shared_ptr<Buffer> take_pooled(size_t size);
  // The host's memory itself as a buffer, or null where that is not possible: it must lie on whole pages. Kept for the next time for
  // as long as `life`, where there is one.
  std::shared_ptr<Buffer> wrap(uint8_t* data, size_t size, const std::shared_ptr<HostLife>& life);
  // The device array that this memory lies in, if any.
  std::shared_ptr<Buffer> find_native(const uint8_t* data, size_t size);
  // Host memory is read when a submission starts and written when it is waited for: the one before must be through, so they take
  // turns. Nor does Metal know that two buffers wrap the same pages. What the host has of managed memory must be what the GPU last
  // wrote. Called by the submission that starts.
  void take_turn();
  Residency& residency() { return *residency_; }
  // A command buffer that retains nothing, made beforehand if there was time. Where one submission starts at a time.
  Handle<id<MTLCommandBuffer>> take_commands();
  void make_commands();  // for the next who asks
  uint64_t next_event_value() { return ++event_value_; }
  id<MTLSharedEvent> shared_event() const { return shared_event_.get(); }
  Fence& fence() { return fence_; }  // what orders passes that Metal does not
  // Of a submission that is known to have gone well before Metal says that it is done.
  void keep_until_done(std::unique_ptr<InFlight> work);
  // Between passes of which one is not ours, in one command buffer.
  void order_by_event(id<MTLCommandBuffer> commands);
  std::mutex& commit_mutex() { return commit_mutex_; }
  // The GPU is gone, or will do no more for this process: what is submitted from here on fails at once.
  void lose(const std::string& why);
  void check_alive() const;
  // Up to Apple8 MPSNDArray reads past its operands (PyTorch, issues 177116, 183535 and 195163).
  bool ndarray_fails_at(uint64_t m, uint64_t n, uint64_t k) const { return !apple9_ && k >= 32767 && m >= 16 && n >= 16; }
  // Up to Apple8 MPS gives NaN where its operands pass 2 GiB together (Metal.jl, issue 381).
  bool mps_fails_at(uint64_t m, uint64_t n, uint64_t k) const { return !apple9_ && (m + 2 * k) * n * 2 >= uint64_t{1} << 31; }

 private:
  std::shared_ptr<Submission> start(std::shared_ptr<const DispatchList> work, bool per_dispatch) override;
  void hold_for_fork(bool hold) override;
  void forget_threads() override { residency_->forget_thread(); }
  double execute(const Dispatch& dispatch, std::shared_ptr<Submission>* later) override;
  void find_features();
  bool has_tensors();
  Handle<id<MTLBuffer>> allocate(size_t size, size_t asked);
  Handle<id<MTLBuffer>> take(size_t size);  // of a size class, from the pool where it has one
  std::function<void()> giving_back(Handle<id<MTLBuffer>> buffer);
  void unwrap(HostLife* life);
  bool empty_pool();
  Handle<id<MTLLibrary>> library(const std::string& code, const std::string& what);
  Handle<id<MTLFunction>> function(id<MTLLibrary> library, const PipelineSource& source);
  void build_state(MetalPipeline& pipeline, id<MTLFunction> function, const std::string& archive,
                   MTLComputePipelineReflection** reflection);
  Handle<id<MTLComputePipelineState>> from_archive(MTLComputePipelineDescriptor* descriptor, const std::string& path,
                                                   MTLComputePipelineReflection** reflection);
  void save_archive(MTLComputePipelineDescriptor* descriptor, const std::string& path);

  MetalOptions options_;
  Handle<id<MTLDevice>> device_;
  Handle<id<MTLCommandQueue>> queue_;
  Handle<id<MTLSharedEvent>> shared_event_;
  Handle<id<MTLCounterSet>> timestamps_;
  std::unique_ptr<Residency> residency_;
  Fence fence_;
  Handle<id<MTLEvent>> order_event_;
  bool unified_, apple9_ = false, indirect_ = false, archives_ = true;
  Limits limits_;
  std::atomic<uint64_t> event_value_{0}, order_value_{0};
  std::atomic<int64_t> archive_hits_{0}, archive_misses_{0}, allocations_{0}, wrapped_{0};
  std::unique_ptr<MpsCache> mps_;

  Handle<id<MTLCommandBuffer>> next_commands_;  // one submission starts at a time
  uint64_t last_with_host_memory_ = 0;          // its number; one submission starts at a time
  std::mutex commit_mutex_;
  mutable std::mutex mutex_;  // all that follows
  std::string lost_;
  std::vector<std::unique_ptr<InFlight>> not_done_;  // told by the event, not yet by their status
  std::multimap<size_t, Handle<id<MTLBuffer>>> pool_;
  size_t pooled_bytes_ = 0;
  std::map<const uint8_t*, std::weak_ptr<Buffer>> native_;  // by address
  std::map<std::pair<HostLife*, const uint8_t*>, std::shared_ptr<Buffer>> wraps_;
  std::unordered_map<std::string, Handle<id<MTLLibrary>>> libraries_;
};

}  // namespace metalmm::metal
