// Batches that run again and again: an indirect command buffer, where one can hold them.
#include <cstring>

#include "metal_submission.h"

namespace metalmm::metal {
namespace {

constexpr size_t kParamsAlignment = 256;  // what every Metal GPU accepts as an offset of constants
constexpr size_t kMaxIndirect = 16384;
constexpr uint64_t kMaxIndirectOffset = uint64_t{1} << 32;  // of a buffer in an indirect command; others are encoded anew

[[noreturn]] void fail(const std::string& what) { throw Error(ErrorKind::device, "metal: " + what); }

// What the bytes of an indirect command take of their buffer.
size_t params_space(size_t size) { return (size + kParamsAlignment - 1) / kParamsAlignment * kParamsAlignment; }

// The dispatches as an indirect command buffer, with all that it uses; owned by the recording and by what is in flight.
struct Indirect {
  std::shared_ptr<const DispatchList> list;
  Handle<id<MTLIndirectCommandBuffer>> commands;
  std::shared_ptr<Buffer> bytes;  // an indirect command takes no setBytes
  std::vector<id<MTLResource>> read, written;
  std::vector<id<MTLComputePipelineState>> idle;  // to be set before; the list owns them
  ~Indirect() {
    AutoreleasePool pool;
    commands = {};
  }
};

class MetalRecording : public Recording {
 public:
  MetalRecording(std::shared_ptr<MetalDevice> device, std::shared_ptr<const DispatchList> list) : device_(std::move(device)) {
    AutoreleasePool pool;
    indirect_->list = std::move(list);
    create();
    indirect_->list->for_each([&](size_t i, const Dispatch& d) { add(i, d); });
    for (auto& [buffer, is_written] : used_) (is_written ? indirect_->written : indirect_->read).push_back(buffer);
    indirect_->read.push_back(indirect_->commands.get());
    if (!device_->sets_indirect_pipelines()) indirect_->idle.clear();
  }
  static bool possible(const MetalDevice& device, const DispatchList& list);

 private:
  std::shared_ptr<Submission> start() override {
    auto submission = std::make_shared<MetalSubmission>(device_, indirect_->list, false);
    submission->start_replay(indirect_->commands.get(), indirect_->read, indirect_->written, indirect_->idle, indirect_);
    return submission;
  }
  void create();
  void add(size_t i, const Dispatch& d);

  std::shared_ptr<MetalDevice> device_;
  std::shared_ptr<Indirect> indirect_ = std::make_shared<Indirect>();
  size_t bytes_used_ = 0;
  Hazards hazards_;
  std::map<id<MTLBuffer>, bool> used_;  // and whether written
};

// Host memory is copied at each run, so that replaying it would save nothing.
bool MetalRecording::possible(const MetalDevice& device, const DispatchList& list) {
  if (!device.indirect() || list.size() == 0 || list.size() > kMaxIndirect || list.has_host_memory()) return false;
  bool simple = true;
  list.for_each([&](size_t i, const Dispatch& d) {
    auto& pipeline = static_cast<const MetalPipeline&>(list.pipeline(i));
    simple &= pipeline.kind == MetalPipeline::Kind::kernel && d.threadgroup_memory_count == 0;
    for (size_t j = 0; j < d.buffer_count; j++) simple &= d.buffers[j].offset < kMaxIndirectOffset;
  });
  return simple;
}

void MetalRecording::create() {
  size_t bytes = 0;
  NSUInteger max_buffers = 1;
  indirect_->list->for_each([&](size_t, const Dispatch& d) {
    for (size_t i = 0; i < d.buffer_count; i++) max_buffers = std::max<NSUInteger>(max_buffers, d.buffers[i].index + 1);
    for (size_t i = 0; i < d.bytes_count; i++) {
      max_buffers = std::max<NSUInteger>(max_buffers, d.bytes[i].index + 1);
      bytes += params_space(d.bytes[i].size);
    }
  });
  indirect_->bytes = device_->take_pooled(bytes);
  auto descriptor = Handle<MTLIndirectCommandBufferDescriptor*>::adopt([[MTLIndirectCommandBufferDescriptor alloc] init]);
  // Metal tells grids of threadgroups from grids of threads, and a command must be of a type that was asked for.
  MTLIndirectCommandType types = 0;
  indirect_->list->for_each([&](size_t, const Dispatch& d) {
    types |= d.is_partial() ? MTLIndirectCommandTypeConcurrentDispatchThreads : MTLIndirectCommandTypeConcurrentDispatch;
  });
  [descriptor.get() setCommandTypes:types];
  [descriptor.get() setInheritPipelineState:NO];
  [descriptor.get() setInheritBuffers:NO];
  [descriptor.get() setMaxKernelBufferBindCount:max_buffers];
  indirect_->commands =
      Handle<id<MTLIndirectCommandBuffer>>::adopt([device_->get() newIndirectCommandBufferWithDescriptor:descriptor.get()
                                                                                         maxCommandCount:indirect_->list->size()
                                                                                                 options:MTLResourceStorageModeShared]);
  if (!indirect_->commands) fail("no indirect command buffer of " + std::to_string(indirect_->list->size()) + " commands");
}

void MetalRecording::add(size_t i, const Dispatch& d) {
  auto& pipeline = static_cast<const MetalPipeline&>(indirect_->list->pipeline(i));
  id<MTLIndirectComputeCommand> command = [indirect_->commands.get() indirectComputeCommandAtIndex:i];
  [command setComputePipelineState:pipeline.state.get()];
  auto& idle = indirect_->idle;
  if (std::find(idle.begin(), idle.end(), pipeline.state.get()) == idle.end()) idle.push_back(pipeline.state.get());
  for (size_t j = 0; j < d.buffer_count; j++) {
    const BufferBinding& b = d.buffers[j];
    const Buffer& buffer = **b.buffer;
    auto native = native_of(buffer);
    bool written = pipeline.written >> b.index & 1;
    [command setKernelBuffer:native offset:b.offset atIndex:b.index];
    used_[native] |= written;
    auto begin = buffer.address();
    Span span{begin + b.offset, begin + buffer.size()};
    written ? hazards_.write(span) : hazards_.read(span);
  }
  auto store = native_of(*indirect_->bytes);
  for (size_t j = 0; j < d.bytes_count; j++) {
    std::memcpy(indirect_->bytes->host() + bytes_used_, d.bytes[j].data, d.bytes[j].size);
    [command setKernelBuffer:store offset:bytes_used_ atIndex:d.bytes[j].index];
    used_[store] |= false;
    bytes_used_ += params_space(d.bytes[j].size);
  }
  if (hazards_.next()) [command setBarrier];
  MTLSize threadgroup = MTLSizeMake(d.threadgroup[0], d.threadgroup[1], d.threadgroup[2]);
  if (d.is_partial())
    [command concurrentDispatchThreads:MTLSizeMake(d.threads[0], d.threads[1], d.threads[2]) threadsPerThreadgroup:threadgroup];
  else
    [command concurrentDispatchThreadgroups:MTLSizeMake(d.grid[0], d.grid[1], d.grid[2]) threadsPerThreadgroup:threadgroup];
}

}  // namespace

std::shared_ptr<Recording> MetalDevice::record(std::shared_ptr<const DispatchList> work) {
  if (!MetalRecording::possible(*this, *work)) return Device::record(std::move(work));
  auto self = std::static_pointer_cast<MetalDevice>(shared_from_this());
  return std::make_shared<MetalRecording>(self, std::move(work));
}

}  // namespace metalmm::metal
