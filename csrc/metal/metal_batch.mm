#include "metal_batch.h"

#include <cstring>
#include <optional>
#include <set>

namespace metalmm::metal {
namespace {

constexpr NSUInteger kMostSamples = 4096;  // 32 KB of timestamps
constexpr size_t kParamsAlignment = 256;   // what every Metal GPU accepts as an offset of constants
constexpr size_t kMostIndirect = 16384;

[[noreturn]] void fail(const std::string& what) { throw Error(ErrorKind::device, "metal: " + what); }

// What the bytes of an indirect command take of their buffer.
size_t params_space(size_t size) { return (size + kParamsAlignment - 1) / kParamsAlignment * kParamsAlignment; }

Span span_of(const Place& p, size_t size) {
  auto begin = reinterpret_cast<uintptr_t>([p.buffer contents]) + p.offset;
  return {begin, begin + size};
}

// The distinct kernels of some dispatches, for messages.
std::string names_of(const DispatchList& list, size_t begin, size_t end) {
  std::string names;
  std::set<std::string> seen;
  for (size_t i = begin; i < end && seen.size() < 8; i++)
    if (seen.insert(list.pipeline(i).name).second) names += (names.empty() ? "" : ", ") + list.pipeline(i).name;
  return names;
}

ErrorKind kind_of(NSError* error) {
  switch ([error code]) {
    case MTLCommandBufferErrorOutOfMemory:
    case MTLCommandBufferErrorNotPermitted:
    case MTLCommandBufferErrorDeviceRemoved:
      return ErrorKind::device;
    default:
      return ErrorKind::kernel;
  }
}

// One submission of a batch or a recording: command buffers in flight and what becomes of them.
class MetalSubmission : public Submission {
 public:
  MetalSubmission(std::shared_ptr<MetalDevice> device, std::shared_ptr<const DispatchList> list, bool per_dispatch)
      : device_(std::move(device)), list_(std::move(list)), per_dispatch_(per_dispatch && device_->timestamps()) {}
  // The device drops it when it is through, unless it failed to start, with command buffers in flight.
  ~MetalSubmission() override {
    AutoreleasePool pool;
    if (work_) work_->wait();
  }

  void start();
  void start_replay(id<MTLIndirectCommandBuffer> commands, const std::vector<id<MTLResource>>& read,
                    const std::vector<id<MTLResource>>& written, std::shared_ptr<void> owner);
  void wait() override;
  bool done() const override;
  BatchTiming timing() const override {
    std::lock_guard lock(timing_mutex_);
    return timing_;
  }

 private:
  struct Part {  // of the list, in one command buffer
    size_t begin, end;
    Handle<id<MTLCounterSampleBuffer>> samples;
  };
  void encode();
  void encode_one(size_t i, const Dispatch& d);
  void encode_mps(const MetalPipeline& pipeline, const Dispatch& d);
  Place place(const Buffer& buffer, size_t offset) const;
  size_t bind(const Dispatch& d, Encoder::Bound* bound);
  void open(size_t first, bool retained);
  void commit(size_t end, bool last);
  void synchronize();
  void spin() const;
  void check(size_t i);
  void finish(double waited);
  void upload();
  void read_times();
  void read_samples(const Part& part);

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
  BatchTiming timing_;                                        // after start(), changed in wait() alone
  std::optional<std::pair<ErrorKind, std::string>> failure_;  // thrown anew each time: threads may share a submission
};

void MetalSubmission::start() {
  auto begin = Clock::now();
  AutoreleasePool pool;
  if (list_->has_host_memory() || !device_->unified()) device_->take_turn();
  work_->owned.push_back(std::const_pointer_cast<DispatchList>(list_));
  encode();
  timing_.encode = seconds(Clock::now() - begin) - timing_.commit;
}

void MetalSubmission::encode() {
  if (list_->has_host_memory()) {
    staging_.emplace(*device_, *list_);
    staging_->copy_in();
    staging_->for_each([&](const std::shared_ptr<Buffer>& b) { work_->owned.push_back(b); });
  }
  if (!device_->unified()) upload();
  list_->for_each([&](size_t i, const Dispatch& d) { encode_one(i, d); });
  if (!device_->unified()) synchronize();
  if (open_) commit(list_->size(), true);
}

void MetalSubmission::encode_one(size_t i, const Dispatch& d) {
  auto& pipeline = static_cast<const MetalPipeline&>(list_->pipeline(i));
  bool is_mps = pipeline.kind != MetalPipeline::Kind::kernel;
  if (open_) {
    size_t operations = i - parts_.back().begin, most = device_->options().most_operations;
    if (per_dispatch_) most = std::min<size_t>(most, kMostSamples / 2);
    // MPS's own objects are in nobody's hands but the command buffer's.
    if (operations >= most || bytes_ >= device_->options().most_bytes || (is_mps && ![open_.get() retainedReferences])) commit(i, false);
  }
  if (!open_) open(i, is_mps);
  if (per_dispatch_) encoder_->sample(parts_.back().samples.get(), 2 * (i - parts_.back().begin));
  if (is_mps) return encode_mps(pipeline, d);
  Encoder::Bound bound[kMaxBuffers];
  size_t count = bind(d, bound);
  encoder_->dispatch(pipeline, bound, count, d);
}

void MetalSubmission::open(size_t first, bool retained) {
  id<MTLCommandBuffer> commands = retained ? [device_->queue() commandBuffer] : [device_->queue() commandBufferWithUnretainedReferences];
  if (!commands) fail("the queue gives no command buffer");
  timing_.calls++;
  open_ = Handle<id<MTLCommandBuffer>>::share(commands);
  parts_.push_back({first, first, {}});
  if (per_dispatch_) {
    auto descriptor = Handle<MTLCounterSampleBufferDescriptor*>::adopt([[MTLCounterSampleBufferDescriptor alloc] init]);
    [descriptor.get() setCounterSet:device_->timestamps()];
    [descriptor.get() setStorageMode:MTLStorageModeShared];
    [descriptor.get() setSampleCount:std::min<NSUInteger>(2 * (list_->size() - first), kMostSamples)];
    parts_.back().samples = Handle<id<MTLCounterSampleBuffer>>::adopt([device_->get() newCounterSampleBufferWithDescriptor:descriptor.get()
                                                                                                                     error:nullptr]);
    if (!parts_.back().samples) per_dispatch_ = false;  // none left; the times are then not available
    work_->owned.push_back(std::make_shared<Handle<id<MTLCounterSampleBuffer>>>(parts_.back().samples));
  }
  encoder_.emplace(commands, timing_.calls);
}

void MetalSubmission::commit(size_t end, bool last) {
  encoder_.reset();
  parts_.back().end = end;
  id<MTLCommandBuffer> commands = open_.get();
  auto begin = Clock::now();
  device_->commit_residency();
  {
    std::lock_guard lock(device_->commit_mutex());  // values of the event rise in the order of commits
    if (last) {
      signaled_ = device_->next_event_value();
      [commands encodeSignalEvent:device_->shared_event() value:signaled_];
    }
    work_->command_buffers.push_back(std::move(open_));
    [commands commit];
  }
  timing_.calls += last ? 2 : 1;
  timing_.commit += seconds(Clock::now() - begin);
  bytes_ = 0;
}

Place MetalSubmission::place(const Buffer& buffer, size_t offset) const {
  if (buffer.native()) return {native_of(buffer), offset};
  return staging_->find(buffer, offset);
}

size_t MetalSubmission::bind(const Dispatch& d, Encoder::Bound* bound) {
  size_t count = 0;
  for (size_t i = 0; i < d.buffer_count; i++) {
    const Buffer& buffer = **d.buffers[i].buffer;
    Place at = place(buffer, d.buffers[i].offset);
    size_t size = buffer.size() - d.buffers[i].offset;
    auto begin = reinterpret_cast<uintptr_t>(buffer.native() ? buffer.data() : nullptr) + d.buffers[i].offset;
    bound[count++] = {d.buffers[i].index, at, buffer.native() ? Span{begin, begin + size} : span_of(at, size)};
    bytes_ += size;
  }
  for (size_t i = 0; i < d.bytes_count; i++) {
    const BytesBinding& b = d.bytes[i];
    if (b.size <= kMostSetBytes) continue;
    std::shared_ptr<Buffer> store = device_->take_pooled(b.size);
    std::memcpy(store->data(), b.data, b.size);
    if (!device_->unified()) [native_of(*store) didModifyRange:NSMakeRange(0, b.size)];
    work_->owned.push_back(store);
    Place at{native_of(*store), 0};
    bound[count++] = {b.index, at, span_of(at, b.size)};
  }
  return count;
}

// MPS orders itself after the encoders before it and before those that follow, by the buffers it uses.
void MetalSubmission::encode_mps(const MetalPipeline& pipeline, const Dispatch& d) {
  MatmulParams p;
  std::memcpy(&p, d.bytes[0].data, sizeof(p));
  Encoder::Bound bound[kMaxBuffers];
  size_t count = bind(d, bound);
  Place out = bound[kIndexD].place, c = bound[kIndexC].place;
  bool in_place = c.buffer == out.buffer && c.offset == out.offset && p.ldc == p.ldd;
  MpsMatmul what{p, pipeline.transpose_a, pipeline.transpose_b, bound[kIndexA].place, bound[kIndexB].place, out, false};
  what.to_float = p.has_bias || (p.has_c && !in_place);
  std::shared_ptr<Buffer> product;
  if (what.to_float) {  // in float: rounded to half twice, a sum that cancels would be off by more than the bound
    product = device_->take_pooled(size_t{4} * p.batch * p.m * p.n);
    work_->owned.push_back(product);
    what.d = {native_of(*product), 0};
  }
  auto objects = std::make_shared<std::vector<Handle<id>>>();
  work_->owned.push_back(objects);
  encoder_->sample(nil, 0);  // MPS makes its own pass, so that the time of the epilogue alone would be taken for the whole
  timing_.calls++;
  if (pipeline.kind == MetalPipeline::Kind::mps_matvec)
    device_->mps().encode_matvec(open_.get(), what, *objects);
  else
    device_->mps().encode_matmul(open_.get(), what, *objects);
  if (!what.to_float) return;
  bound[kIndexA] = {kIndexA, what.d, span_of(what.d, product->size())};
  encoder_->dispatch(pipeline, bound, count, d);
}

// -- memory that the GPU has a copy of --------------------------------------------------------------------------------

void MetalSubmission::upload() {
  list_->for_each_buffer([&](const Buffer& b) {
    if (b.native() && b.size()) [native_of(b) didModifyRange:NSMakeRange(0, b.size())];
  });
}

void MetalSubmission::synchronize() {
  if (!open_) return;
  encoder_->end();
  id<MTLBlitCommandEncoder> blit = [open_.get() blitCommandEncoder];
  list_->for_each_buffer([&](const Buffer& b) {
    if (b.native()) [blit synchronizeResource:native_of(b)];
  });
  if (staging_) staging_->for_each([&](const std::shared_ptr<Buffer>& b) { [blit synchronizeResource:native_of(*b)]; });
  [blit endEncoding];
}

// -- completion -------------------------------------------------------------------------------------------------------

// The event shows first that the GPU is done; the status, which must be read, follows within microseconds.
void MetalSubmission::spin() const {
  auto end = Clock::now() + std::chrono::duration<double>(device_->options().spin);
  id<MTLSharedEvent> event = device_->shared_event();
  while (signaled_ && [event signaledValue] < signaled_)
    if (Clock::now() >= end) return;
  while (!work_->done())
    if (Clock::now() >= end) return;
}

bool MetalSubmission::done() const {
  AutoreleasePool pool;
  std::unique_lock one(wait_mutex_, std::try_to_lock);
  return one && (!work_ || work_->done());
}

void MetalSubmission::wait() {
  std::lock_guard one(wait_mutex_);
  if (work_) {
    auto begin = Clock::now();
    AutoreleasePool pool;
    spin();
    work_->wait();
    for (size_t i = 0; i < parts_.size(); i++) check(i);
    if (staging_ && !failure_) staging_->copy_out();
    finish(seconds(Clock::now() - begin));
  }
  if (failure_) throw Error(failure_->first, failure_->second);
}

void MetalSubmission::finish(double waited) {
  {
    std::lock_guard lock(timing_mutex_);
    timing_.wait = waited;
    read_times();
  }
  work_.reset();
  staging_.reset();
  list_.reset();
}

void MetalSubmission::check(size_t i) {
  id<MTLCommandBuffer> commands = work_->command_buffers[i].get();
  if ([commands status] == MTLCommandBufferStatusCompleted || failure_) return;  // the first to fail is told
  NSError* error = [commands error];
  const Part& part = parts_[i];
  std::string where = "command buffer " + std::to_string(i + 1) + " of " + std::to_string(parts_.size()) + " (" +
                      std::to_string(part.end - part.begin) + " dispatches of " + names_of(*list_, part.begin, part.end) + ")";
  failure_.emplace(kind_of(error), "metal: " + where + " failed: " + text_of(error) + " (code " + std::to_string([error code]) +
                                       "); its results are not valid");
}

void MetalSubmission::read_times() {
  double total = 0;
  for (auto& commands : work_->command_buffers) {
    double start = [commands.get() GPUStartTime], end = [commands.get() GPUEndTime];
    if (start <= 0 || end < start) return;  // no timestamps: n/a, not 0
    total += end - start;
  }
  timing_.device = total;
  if (!per_dispatch_) return;
  for (const Part& part : parts_) read_samples(part);
}

// Nanoseconds on Apple silicon.
void MetalSubmission::read_samples(const Part& part) {
  NSUInteger count = 2 * (part.end - part.begin);
  NSData* data = [part.samples.get() resolveCounterRange:NSMakeRange(0, count)];
  if (!data || [data length] < count * sizeof(MTLCounterResultTimestamp)) {
    timing_.dispatches.resize(part.end, -1);
    return;
  }
  auto* times = static_cast<const MTLCounterResultTimestamp*>([data bytes]);
  for (NSUInteger i = 0; i < count; i += 2) {
    uint64_t start = times[i].timestamp, end = times[i + 1].timestamp;
    bool valid = start && start != MTLCounterErrorValue && end != MTLCounterErrorValue && end >= start;
    timing_.dispatches.push_back(valid ? static_cast<double>(end - start) * 1e-9 : -1);
  }
}

// -- replay -----------------------------------------------------------------------------------------------------------

void MetalSubmission::start_replay(id<MTLIndirectCommandBuffer> commands, const std::vector<id<MTLResource>>& read,
                                   const std::vector<id<MTLResource>>& written, std::shared_ptr<void> owner) {
  auto begin = Clock::now();
  AutoreleasePool pool;
  work_->owned.push_back(std::move(owner));
  open(0, false);
  encoder_->replay(commands, list_->size(), read, written);
  commit(list_->size(), true);
  timing_.encode = seconds(Clock::now() - begin) - timing_.commit;
}

// The dispatches as an indirect command buffer, with all that it uses; owned by the recording and by what is in flight.
struct Indirect {
  std::shared_ptr<const DispatchList> list;
  Handle<id<MTLIndirectCommandBuffer>> commands;
  std::shared_ptr<Buffer> bytes;  // an indirect command takes no setBytes
  std::vector<id<MTLResource>> read, written;
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
  }
  static bool possible(const MetalDevice& device, const DispatchList& list);

 private:
  std::shared_ptr<Submission> start() override {
    auto submission = std::make_shared<MetalSubmission>(device_, indirect_->list, false);
    submission->start_replay(indirect_->commands.get(), indirect_->read, indirect_->written, indirect_);
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
  if (!device.indirect() || list.size() == 0 || list.size() > kMostIndirect || list.has_host_memory()) return false;
  bool simple = true;
  list.for_each([&](size_t i, const Dispatch& d) {
    auto& pipeline = static_cast<const MetalPipeline&>(list.pipeline(i));
    simple &= pipeline.kind == MetalPipeline::Kind::kernel && d.threadgroup_memory_count == 0;
  });
  return simple;
}

void MetalRecording::create() {
  size_t bytes = 0;
  NSUInteger most_buffers = 1;
  indirect_->list->for_each([&](size_t, const Dispatch& d) {
    for (size_t i = 0; i < d.buffer_count; i++) most_buffers = std::max<NSUInteger>(most_buffers, d.buffers[i].index + 1);
    for (size_t i = 0; i < d.bytes_count; i++) {
      most_buffers = std::max<NSUInteger>(most_buffers, d.bytes[i].index + 1);
      bytes += params_space(d.bytes[i].size);
    }
  });
  indirect_->bytes = device_->take_pooled(bytes);
  auto descriptor = Handle<MTLIndirectCommandBufferDescriptor*>::adopt([[MTLIndirectCommandBufferDescriptor alloc] init]);
  [descriptor.get() setCommandTypes:MTLIndirectCommandTypeConcurrentDispatch];
  [descriptor.get() setInheritPipelineState:NO];
  [descriptor.get() setInheritBuffers:NO];
  [descriptor.get() setMaxKernelBufferBindCount:most_buffers];
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
  for (size_t j = 0; j < d.buffer_count; j++) {
    const BufferBinding& b = d.buffers[j];
    const Buffer& buffer = **b.buffer;
    auto native = native_of(buffer);
    bool written = pipeline.written >> b.index & 1;
    [command setKernelBuffer:native offset:b.offset atIndex:b.index];
    used_[native] |= written;
    auto begin = reinterpret_cast<uintptr_t>(buffer.data());
    Span span{begin + b.offset, begin + buffer.size()};
    written ? hazards_.write(span) : hazards_.read(span);
  }
  auto store = native_of(*indirect_->bytes);
  for (size_t j = 0; j < d.bytes_count; j++) {
    std::memcpy(indirect_->bytes->data() + bytes_used_, d.bytes[j].data, d.bytes[j].size);
    [command setKernelBuffer:store offset:bytes_used_ atIndex:d.bytes[j].index];
    used_[store] |= false;
    bytes_used_ += params_space(d.bytes[j].size);
  }
  if (hazards_.next()) [command setBarrier];
  [command concurrentDispatchThreadgroups:MTLSizeMake(d.grid[0], d.grid[1], d.grid[2])
                    threadsPerThreadgroup:MTLSizeMake(d.threadgroup[0], d.threadgroup[1], d.threadgroup[2])];
}

}  // namespace

std::shared_ptr<Submission> MetalDevice::start(std::shared_ptr<const DispatchList> work, bool per_dispatch) {
  auto submission =
      std::make_shared<MetalSubmission>(std::static_pointer_cast<MetalDevice>(shared_from_this()), std::move(work), per_dispatch);
  submission->start();
  return submission;
}

std::shared_ptr<Recording> MetalDevice::record(std::shared_ptr<const DispatchList> work) {
  if (!MetalRecording::possible(*this, *work)) return Device::record(std::move(work));
  auto self = std::static_pointer_cast<MetalDevice>(shared_from_this());
  return std::make_shared<MetalRecording>(self, std::move(work));
}

double MetalDevice::execute(const Dispatch& dispatch) {
  auto list = std::make_shared<DispatchList>();
  list->add(dispatch);
  auto submission = submit(std::move(list), false);
  wait(*submission);
  return submission->timing().device;
}

}  // namespace metalmm::metal
