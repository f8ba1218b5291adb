#include <cstring>

#include "metal_encoder.h"

namespace metalmm::metal {

Staging::Staging(MetalDevice& device, const DispatchList& list) : device_(device) {
  bool mps = false;
  list.for_each([&](size_t i, const Dispatch& d) {
    auto& pipeline = static_cast<const MetalPipeline&>(list.pipeline(i));
    mps |= pipeline.kind != MetalPipeline::Kind::kernel;
    for (size_t j = 0; j < d.buffer_count; j++) {
      const Buffer& b = **d.buffers[j].buffer;
      if (!b.native() && b.size() == 0 && !nothing_) nothing_ = device.take_pooled(1);
      if (b.native() || b.size() == 0) continue;
      bool written = pipeline.written >> d.buffers[j].index & 1;
      // A view of a device array is that array.
      if (std::shared_ptr<Buffer> whole = device.find_native(b.host(), b.size()))
        blocks_.push_back({whole->host(), whole->host() + whole->size(), written, whole, nullptr, 0, false});
      else
        blocks_.push_back({b.host(), b.host() + b.size(), written, nullptr, b.life, 0, false});
    }
  });
  merge();
  for (Block& b : blocks_)
    if (!b.staging) allocate(b, mps);
}

void Staging::merge() {
  std::sort(blocks_.begin(), blocks_.end(), [](auto& x, auto& y) { return x.begin < y.begin; });
  std::vector<Block> merged;
  for (Block& b : blocks_) {
    if (!merged.empty() && b.begin < merged.back().end) {
      Block& last = merged.back();
      if (last.life != b.life) last.life = nullptr;
      last.end = std::max(last.end, b.end);
      last.written |= b.written;
      if (!last.staging) last.staging = b.staging;
    } else {
      merged.push_back(std::move(b));
    }
  }
  blocks_ = std::move(merged);
}

// A copy stands within 16 bytes as the host's does: the kernels' alignment is taken from the host's address. MPS may ask that the
// last row has its whole pitch, which is never more than what lies before it.
void Staging::allocate(Block& b, bool mps) {
  auto size = static_cast<size_t>(b.end - b.begin);
  if (!mps) b.staging = device_.wrap(b.begin, size, b.life);
  if (b.staging) b.pad = static_cast<size_t>(b.begin - b.staging->host());
  if (b.staging) return;
  b.pad = reinterpret_cast<uintptr_t>(b.begin) % 16;
  b.staging = device_.take_pooled(b.pad + (mps ? 2 : 1) * size);
  b.copied = true;
}

Place Staging::find(const Buffer& buffer, size_t offset) const {
  if (buffer.size() == 0) return {native_of(*nothing_), 0};
  auto it = std::partition_point(blocks_.begin(), blocks_.end(), [&](const Block& b) { return b.end <= buffer.host(); });
  return {native_of(*it->staging), it->pad + static_cast<size_t>(buffer.host() - it->begin) + offset};
}

void Staging::copy_in() {
  for (Block& b : blocks_) {
    auto size = static_cast<size_t>(b.end - b.begin);
    if (!b.copied) continue;
    std::memcpy(b.staging->host() + b.pad, b.begin, size);
    if (!device_.unified()) [native_of(*b.staging) didModifyRange:NSMakeRange(0, b.pad + size)];
  }
}

void Staging::copy_out() {
  for (Block& b : blocks_)
    if (b.copied && b.written) std::memcpy(b.begin, b.staging->host() + b.pad, static_cast<size_t>(b.end - b.begin));
}

id<MTLComputeCommandEncoder> Encoder::compute() {
  if (encoder_) return encoder_;
  calls_++;
  if (samples_) {
    MTLComputePassDescriptor* pass = [MTLComputePassDescriptor computePassDescriptor];
    [pass setDispatchType:MTLDispatchTypeConcurrent];
    MTLComputePassSampleBufferAttachmentDescriptor* attachment = [[pass sampleBufferAttachments] objectAtIndexedSubscript:0];
    [attachment setSampleBuffer:samples_];
    [attachment setStartOfEncoderSampleIndex:first_sample_];
    [attachment setEndOfEncoderSampleIndex:first_sample_ + 1];
    encoder_ = [[commands_ computeCommandEncoderWithDescriptor:pass] retain];
    samples_ = nil;
  } else {
    encoder_ = [[commands_ computeCommandEncoderWithDispatchType:MTLDispatchTypeConcurrent] retain];
  }
  if (!encoder_) throw Error(ErrorKind::device, "metal: the command buffer gives no compute encoder");
  if (fence_ && fence_->is_updated) {
    calls_++;
    [encoder_ waitForFence:fence_->object.get()];
  }
  return encoder_;
}

void Encoder::end() {
  if (!encoder_) return;
  if (fence_) {
    calls_++;
    [encoder_ updateFence:fence_->object.get()];
    fence_->is_updated = true;
  }
  calls_++;
  [encoder_ endEncoding];
  [encoder_ release];
  encoder_ = nil;
  forget();
}

// A new encoder has nothing bound, and comes after the ones before: by Metal's own order, or by the fence.
void Encoder::forget() {
  hazards_.clear();
  state_ = nil;
  std::fill(std::begin(buffers_), std::end(buffers_), nil);
  bytes_index_ = kMaxBuffers;
  memory_ = 0;
}

void Encoder::sample(id<MTLCounterSampleBuffer> samples, NSUInteger first) {
  end();
  samples_ = samples;
  first_sample_ = first;
}

// One call for all that changed: from the first to the last such index.
void Encoder::set_buffers(const Bound* buffers, size_t count) {
  uint32_t low = kMaxBuffers, high = 0;
  for (size_t i = 0; i < count; i++) {
    uint32_t index = buffers[i].index;
    if (buffers_[index] == buffers[i].place.buffer && offsets_[index] == buffers[i].place.offset) continue;
    if (bytes_index_ == index) bytes_index_ = kMaxBuffers;
    buffers_[index] = buffers[i].place.buffer;
    offsets_[index] = buffers[i].place.offset;
    low = std::min(low, index);
    high = std::max(high, index);
  }
  if (low == kMaxBuffers) return;
  for (uint32_t i = low; i <= high; i++)
    if (!buffers_[i]) return set_one_by_one(buffers, count);
  calls_++;
  if (low == high)
    [encoder_ setBuffer:buffers_[low] offset:offsets_[low] atIndex:low];
  else
    [encoder_ setBuffers:buffers_ + low offsets:offsets_ + low withRange:NSMakeRange(low, high - low + 1)];
}

// Where bytes lie between the buffers.
void Encoder::set_one_by_one(const Bound* buffers, size_t count) {
  for (size_t i = 0; i < count; i++) {
    calls_++;
    [encoder_ setBuffer:buffers[i].place.buffer offset:buffers[i].place.offset atIndex:buffers[i].index];
  }
}

void Encoder::set_bytes(const Dispatch& d) {
  for (size_t i = 0; i < d.bytes_count; i++) {
    const BytesBinding& b = d.bytes[i];
    if (b.size == 0 || b.size > kMaxSetBytes) continue;
    if (bytes_index_ == b.index && bytes_size_ == b.size && std::memcmp(bytes_, b.data, b.size) == 0) continue;
    calls_++;
    [encoder_ setBytes:b.data length:b.size atIndex:b.index];
    buffers_[b.index] = nil;
    bytes_index_ = kMaxBuffers;
    if (b.size > kMaxComparedBytes) continue;
    bytes_index_ = b.index;
    bytes_size_ = b.size;
    std::memcpy(bytes_, b.data, b.size);
  }
}

// Metal takes multiples of 16 bytes. A length stays for the kernels that follow, and counts against their limit though they do not
// use it: a new encoder has none.
void Encoder::set_threadgroup_memory(const Dispatch& d) {
  uint32_t now = 0;
  for (size_t i = 0; i < d.threadgroup_memory_count; i++) now |= 1u << d.threadgroup_memory[i].index;
  if (memory_ & ~now) {
    end();
    compute();
  }
  memory_ |= now;
  for (size_t i = 0; i < d.threadgroup_memory_count; i++) {
    calls_++;
    [encoder_ setThreadgroupMemoryLength:threadgroup_space(d.threadgroup_memory[i].size) atIndex:d.threadgroup_memory[i].index];
  }
}

void Encoder::dispatch(const MetalPipeline& pipeline, const Bound* buffers, size_t count, const Dispatch& d) {
  compute();
  set_threadgroup_memory(d);
  if (state_ != pipeline.state.get()) {
    state_ = pipeline.state.get();
    calls_++;
    [encoder_ setComputePipelineState:state_];
  }
  set_buffers(buffers, count);
  set_bytes(d);
  for (size_t i = 0; i < count; i++) {
    if (pipeline.written >> buffers[i].index & 1)
      hazards_.write(buffers[i].span);
    else
      hazards_.read(buffers[i].span);
  }
  if (hazards_.next()) {
    calls_++;
    [encoder_ memoryBarrierWithScope:MTLBarrierScopeBuffers];
  }
  calls_++;
  MTLSize threadgroup = MTLSizeMake(d.threadgroup[0], d.threadgroup[1], d.threadgroup[2]);
  if (d.is_partial())
    [encoder_ dispatchThreads:MTLSizeMake(d.threads[0], d.threads[1], d.threads[2]) threadsPerThreadgroup:threadgroup];
  else
    [encoder_ dispatchThreadgroups:MTLSizeMake(d.grid[0], d.grid[1], d.grid[2]) threadsPerThreadgroup:threadgroup];
}

void Encoder::set_idle(id<MTLComputePipelineState> state) {
  compute();
  calls_ += 2;
  [encoder_ setComputePipelineState:state];
  [encoder_ dispatchThreadgroups:MTLSizeMake(0, 0, 0) threadsPerThreadgroup:MTLSizeMake(0, 0, 0)];
}

void Encoder::replay(id<MTLIndirectCommandBuffer> commands, size_t count, const std::vector<id<MTLResource>>& read,
                     const std::vector<id<MTLResource>>& written) {
  compute();
  if (!read.empty()) [encoder_ useResources:read.data() count:read.size() usage:MTLResourceUsageRead];
  if (!written.empty()) [encoder_ useResources:written.data() count:written.size() usage:MTLResourceUsageRead | MTLResourceUsageWrite];
  [encoder_ executeCommandsInBuffer:commands withRange:NSMakeRange(0, count)];
  calls_ += 1 + !read.empty() + !written.empty();
}

}  // namespace metalmm::metal
