#include "metal_submission.h"

#include <cstring>
#include <set>

namespace metalmm::metal {
namespace {

constexpr uint64_t kEventPiece = 10;      // ms
constexpr NSUInteger kMaxSamples = 4096;  // 32 KB of timestamps

[[noreturn]] void fail(const std::string& what) { throw Error(ErrorKind::device, "metal: " + what); }

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

// MPS asks that the last row has its whole pitch, too, which a slice at the end of its array does not.
bool has_pitch(const LibraryCall::Operand& at, uint64_t batch) {
  return (at.stride ? batch - 1 : 0) * at.stride + at.rows * at.ld <= at.room;
}

void check_pitch(const char* name, const Place& at, uint64_t rows, uint64_t ld, uint64_t stride, uint64_t batch, DType type) {
  if (!has_pitch({rows, ld, stride, ([at.buffer length] - at.offset) / type.size}, batch))
    throw Error(ErrorKind::layout, std::string("mps: ") + name + " is a slice whose last row ends before its distance to a next one (" +
                                       std::to_string(ld) + " elements) does; MPS reads whole rows: copy it with device.array(" + name +
                                       ")");
}

// What no later submission will get past, either.
bool is_lost(NSError* error) {
  return [error code] == MTLCommandBufferErrorAccessRevoked || [error code] == MTLCommandBufferErrorDeviceRemoved;
}

std::string sizes_of(const MatmulParams& p) {
  return "m=" + std::to_string(p.m) + " n=" + std::to_string(p.n) + " k=" + std::to_string(p.k) + ": ";
}

void check_mps_size(const MetalDevice& device, const MatmulParams& p) {
  if (!device.mps_fails_at(p.m, p.n, p.k)) return;
  throw Error(
      ErrorKind::unsupported,
      "mps: " + sizes_of(p) + "MPS gives NaN on this GPU where (m + 2k) * n * 2 reaches 2^31; use gemm_tiled/baseline, or parts of n");
}

void check_ndarray(const MetalDevice& device, const MetalPipeline& pipeline, const MatmulParams& p) {
  auto check = [](const char* name, uint64_t rows, uint64_t columns, uint64_t ld) {
    if (ld != columns && rows > 1)
      throw Error(ErrorKind::layout, std::string("mps/ndarray: rows of ") + name + " have " + std::to_string(columns) +
                                         " elements and are " + std::to_string(ld) +
                                         " apart; it takes rows without gaps: copy it with device.array(" + name + ")");
  };
  check("a", p.m, p.k, p.lda);
  check("b", pipeline.transpose_b ? p.n : p.k, pipeline.transpose_b ? p.k : p.n, p.ldb);
  std::string sizes = "mps/ndarray: " + sizes_of(p);
  if (device.ndarray_fails_at(p.m, p.n, p.k))
    throw Error(ErrorKind::unsupported,
                sizes + "it reads past its operands on this GPU where k reaches 32767 and m and n 16; use mps/baseline");
  uint64_t most = std::max({uint64_t{p.m} * p.k, uint64_t{p.k} * p.n, uint64_t{p.m} * p.n});
  if (most >= uint64_t{1} << 31)
    throw Error(ErrorKind::unsupported, sizes + "a matrix of " + std::to_string(most) + " elements; the limit is 2^31 - 1");
}

ErrorKind kind_of(NSError* error) {
  if (is_lost(error)) return ErrorKind::device;
  switch ([error code]) {
    case MTLCommandBufferErrorOutOfMemory:
    case MTLCommandBufferErrorNotPermitted:
      return ErrorKind::device;
    default:
      return ErrorKind::kernel;
  }
}

}  // namespace

void MetalSubmission::start() {
  auto begin = Clock::now();
  AutoreleasePool pool;
  device_->check_alive();
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
  list_->for_each([&](size_t i, const Dispatch& d) { check_mps(static_cast<const MetalPipeline&>(list_->pipeline(i)), d); });
  if (!device_->unified()) upload();
  list_->for_each([&](size_t i, const Dispatch& d) { encode_one(i, d); });
  if (!device_->unified()) synchronize();
  if (open_) commit(list_->size(), true);
}

void MetalSubmission::encode_one(size_t i, const Dispatch& d) {
  auto& pipeline = static_cast<const MetalPipeline&>(list_->pipeline(i));
  bool is_mps = pipeline.kind != MetalPipeline::Kind::kernel;
  if (open_) {
    size_t operations = i - parts_.back().begin, most = device_->options().max_operations;
    if (per_dispatch_) most = std::min<size_t>(most, kMaxSamples / 2);
    size_t early = device_->options().first_commit;  // the GPU begins while the rest is encoded
    if (early && parts_.size() == 1 && list_->size() >= 2 * early) most = std::min(most, early);
    // MPS's own objects are in nobody's hands but the command buffer's.
    if (operations >= most || bytes_ >= device_->options().max_bytes || (is_mps && ![open_.get() retainedReferences])) commit(i, false);
  }
  if (!open_) open(i, is_mps);
  if (per_dispatch_) encoder_->sample(parts_.back().samples.get(), 2 * (i - parts_.back().begin));
  if (is_mps) return encode_mps(pipeline, d);
  Encoder::Bound bound[kMaxBuffers];
  size_t count = bind(d, bound);
  encoder_->dispatch(pipeline, bound, count, d);
}

void MetalSubmission::open(size_t first, bool retained) {
  open_ = retained ? Handle<id<MTLCommandBuffer>>::share([device_->queue() commandBuffer]) : device_->take_commands();
  if (!open_) fail("the queue gives no command buffer");
  timing_.calls++;
  parts_.push_back({first, first, {}});
  if (per_dispatch_) {
    auto descriptor = Handle<MTLCounterSampleBufferDescriptor*>::adopt([[MTLCounterSampleBufferDescriptor alloc] init]);
    [descriptor.get() setCounterSet:device_->timestamps()];
    [descriptor.get() setStorageMode:MTLStorageModeShared];
    [descriptor.get() setSampleCount:std::min<NSUInteger>(2 * (list_->size() - first), kMaxSamples)];
    parts_.back().samples = Handle<id<MTLCounterSampleBuffer>>::adopt([device_->get() newCounterSampleBufferWithDescriptor:descriptor.get()
                                                                                                                     error:nullptr]);
    if (!parts_.back().samples) per_dispatch_ = false;  // none left; the times are then not available
    work_->owned.push_back(std::make_shared<Handle<id<MTLCounterSampleBuffer>>>(parts_.back().samples));
  }
  bool fenced = per_dispatch_ || device_->options().untracked;
  encoder_.emplace(open_.get(), fenced ? &device_->fence() : nullptr, timing_.calls);
}

void MetalSubmission::commit(size_t end, bool last) {
  encoder_.reset();
  parts_.back().end = end;
  id<MTLCommandBuffer> commands = open_.get();
  auto begin = Clock::now();
  device_->residency().commit();
  device_->residency().note_work();
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
  if (last) device_->make_commands();  // while the GPU is at work
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
    auto begin = (buffer.native() ? buffer.address() : 0) + d.buffers[i].offset;
    bound[count++] = {d.buffers[i].index, at, buffer.native() ? Span{begin, begin + size} : span_of(at, size)};
    bytes_ += size;
  }
  for (size_t i = 0; i < d.bytes_count; i++) {
    const BytesBinding& b = d.bytes[i];
    if (b.size <= kMaxSetBytes) continue;
    std::shared_ptr<Buffer> store = device_->take_pooled(b.size);
    std::memcpy(store->host(), b.data, b.size);
    if (!device_->unified()) [native_of(*store) didModifyRange:NSMakeRange(0, b.size)];
    work_->owned.push_back(store);
    Place at{native_of(*store), 0};
    bound[count++] = {b.index, at, span_of(at, b.size)};
  }
  return count;
}

bool MetalDevice::library_takes(const LibraryCall& call) const {
  return !mps_fails_at(call.m, call.n, call.k) && has_pitch(call.a, call.batch) && has_pitch(call.b, call.batch);
}

// Before anything of the batch is committed.
void MetalSubmission::check_mps(const MetalPipeline& pipeline, const Dispatch& d) {
  if (pipeline.kind == MetalPipeline::Kind::kernel) return;
  MatmulParams p;
  std::memcpy(&p, d.bytes[0].data, sizeof(p));
  if (pipeline.kind == MetalPipeline::Kind::mps_ndarray) return check_ndarray(*device_, pipeline, p);
  check_mps_size(*device_, p);
  auto at = [&](uint32_t index) { return place(**d.buffers[index].buffer, d.buffers[index].offset); };  // in index order
  check_pitch("a", at(kIndexA), pipeline.transpose_a ? p.k : p.m, p.lda, p.stride_a, p.batch, pipeline.type);
  check_pitch("b", at(kIndexB), pipeline.transpose_b ? p.n : p.k, p.ldb, p.stride_b, p.batch, pipeline.type);
}

// MPS orders itself after the encoders before it and before those that follow, by the buffers it uses; where Metal tracks none, events
// do, and passes of nothing at either side take their place in the order of the fence.
void MetalSubmission::encode_mps(const MetalPipeline& pipeline, const Dispatch& d) {
  MatmulParams p;
  std::memcpy(&p, d.bytes[0].data, sizeof(p));
  Encoder::Bound bound[kMaxBuffers];
  size_t count = bind(d, bound);
  Place out = bound[kIndexD].place, c = bound[kIndexC].place;
  bool in_place = c.buffer == out.buffer && c.offset == out.offset && p.ldc == p.ldd;
  MpsMatmul what{p, pipeline.transpose_a, pipeline.transpose_b, bound[kIndexA].place, bound[kIndexB].place, out, false, pipeline.type};
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
  bool untracked = device_->options().untracked;
  if (untracked) {
    encoder_->touch();
    device_->order_by_event(open_.get());
  }
  if (pipeline.kind == MetalPipeline::Kind::mps_ndarray)
    device_->mps().encode_ndarray(open_.get(), what, *objects);
  else if (pipeline.kind == MetalPipeline::Kind::mps_matvec)
    device_->mps().encode_matvec(open_.get(), what, *objects);
  else
    device_->mps().encode_matmul(open_.get(), what, *objects);
  if (untracked) {
    device_->order_by_event(open_.get());
    encoder_->touch();
  }
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
  Fence* fence = device_->options().untracked ? &device_->fence() : nullptr;
  if (fence) [blit waitForFence:fence->object.get()];
  list_->for_each_buffer([&](const Buffer& b) {
    if (b.native()) [blit synchronizeResource:native_of(b)];
  });
  if (staging_) staging_->for_each([&](const std::shared_ptr<Buffer>& b) { [blit synchronizeResource:native_of(*b)]; });
  if (fence) [blit updateFence:fence->object.get()];
  [blit endEncoding];
}

// -- completion -------------------------------------------------------------------------------------------------------

// The event shows first that the GPU is done; the status, which must be read, follows within microseconds.
void MetalSubmission::spin() const {
  auto end = Clock::now() + std::chrono::duration<double>(device_->options().spin);
  while (!signalled())
    if (Clock::now() >= end) return;
  if (returns_on_event()) return;
  while (!work_->done())
    if (Clock::now() >= end) return;
}

bool MetalSubmission::signalled() const { return !signaled_ || [device_->shared_event() signaledValue] >= signaled_; }

// The event stands at the end of the last command buffer, and a failed one does not signal it. Of several, those before may have
// failed alone.
bool MetalSubmission::returns_on_event() const { return device_->options().return_on_event && signaled_ && parts_.size() == 1; }

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
    // In pieces, since a failed command buffer never signals.
    while (returns_on_event() && !signalled() && !work_->done())
      [device_->shared_event() waitUntilSignaledValue:signaled_ timeoutMS:kEventPiece];
    // A later submission's value stands above ours, whether ours was ever given or not.
    bool told = returns_on_event() && [device_->shared_event() signaledValue] == signaled_;
    if (!told) work_->wait();
    for (size_t i = 0; i < parts_.size() && !told; i++) check(i);
    if (staging_ && !failure_) staging_->copy_out();
    finish(seconds(Clock::now() - begin), told);
  }
  if (failure_) throw Error(failure_->first, failure_->second);
}

// `told`: by the event that it went well, and by nothing else yet.
void MetalSubmission::finish(double waited, bool told) {
  {
    std::lock_guard lock(timing_mutex_);
    timing_.wait = waited;
    if (told)
      unread_ = work_->command_buffers;
    else
      read_times(work_->command_buffers);
  }
  staging_.reset();
  list_.reset();
  if (told)
    device_->keep_until_done(std::move(work_));
  else
    work_.reset();
  device_.reset();  // a prepared call may keep this for its time
}

void MetalSubmission::check(size_t i) {
  id<MTLCommandBuffer> commands = work_->command_buffers[i].get();
  if ([commands status] == MTLCommandBufferStatusCompleted || failure_) return;  // the first to fail is told
  NSError* error = [commands error];
  const Part& part = parts_[i];
  std::string where = "command buffer " + std::to_string(i + 1) + " of " + std::to_string(parts_.size()) + " (" +
                      std::to_string(part.end - part.begin) + " dispatches of " + names_of(*list_, part.begin, part.end) + ")";
  if (is_lost(error)) device_->lose(text_of(error));
  failure_.emplace(kind_of(error), "metal: " + where + " failed: " + text_of(error) + " (code " + std::to_string([error code]) +
                                       "); its results are not valid");
}

// The status, and with it the times, follow the event within microseconds.
BatchTiming MetalSubmission::timing() const {
  std::lock_guard lock(timing_mutex_);
  if (unread_.empty()) return timing_;
  AutoreleasePool pool;
  for (auto& commands : unread_) [commands.get() waitUntilCompleted];
  read_times(unread_);
  unread_.clear();
  return timing_;
}

void MetalSubmission::read_times(const std::vector<Handle<id<MTLCommandBuffer>>>& command_buffers) const {
  double total = 0;
  for (auto& commands : command_buffers) {
    double start = [commands.get() GPUStartTime], end = [commands.get() GPUEndTime];
    if (start <= 0 || end < start) return;  // no timestamps: n/a, not 0
    total += end - start;
  }
  timing_.device = total;
  if (!per_dispatch_) return;
  for (const Part& part : parts_) read_samples(part);
}

// Nanoseconds on Apple silicon.
void MetalSubmission::read_samples(const Part& part) const {
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
                                   const std::vector<id<MTLResource>>& written, const std::vector<id<MTLComputePipelineState>>& idle,
                                   std::shared_ptr<void> owner) {
  auto begin = Clock::now();
  AutoreleasePool pool;
  device_->check_alive();
  work_->owned.push_back(std::move(owner));
  open(0, false);
  for (id<MTLComputePipelineState> state : idle) encoder_->set_idle(state);
  encoder_->replay(commands, list_->size(), read, written);
  commit(list_->size(), true);
  timing_.encode = seconds(Clock::now() - begin) - timing_.commit;
}

std::shared_ptr<Submission> MetalDevice::start(std::shared_ptr<const DispatchList> work, bool per_dispatch) {
  auto submission =
      std::make_shared<MetalSubmission>(std::static_pointer_cast<MetalDevice>(shared_from_this()), std::move(work), per_dispatch);
  submission->start();
  return submission;
}

double MetalDevice::execute(const Dispatch& dispatch, std::shared_ptr<Submission>* later) {
  auto list = std::make_shared<DispatchList>();
  list->add(dispatch);
  auto submission = submit(std::move(list), false);
  wait(*submission);
  if (!later || !options_.return_on_event) return submission->timing().device;
  *later = std::move(submission);
  return -1;
}

}  // namespace metalmm::metal
