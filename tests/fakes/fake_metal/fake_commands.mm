// Encoders, command queues and command buffers.
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>

#include "../../../csrc/core/error.h"
#include "fake_execution.h"

using Kind = fake::Command::Kind;

// -- encoders ----------------------------------------------------------------------------------------------------------

@interface FakeEncoder : FakeObject {
 @public
  FakeCommandBuffer* commands;
  BOOL ended;
}
- (void)endEncoding;
@end
@implementation FakeEncoder
- (void)dealloc {
  if (!ended) fake::violation("not-ended", "an encoder is deallocated without endEncoding");
  if (commands->encoder == self) commands->encoder = nil;
  [commands release];
  [super dealloc];
}
- (void)waitForFence:(id<MTLFence>)fence {
  fake::count_call();
  if (auto* c = [commands add:Kind::wait_fence from:self]) c->object = fence;
}
- (void)updateFence:(id<MTLFence>)fence {
  fake::count_call();
  if (auto* c = [commands add:Kind::update_fence from:self]) c->object = fence;
}
- (void)endEncoding {
  [commands add:Kind::end from:self];
  ended = YES;
  commands->encoder = nil;
}
@end

@interface FakeComputeEncoder : FakeEncoder <MTLComputeCommandEncoder>
@end
@implementation FakeComputeEncoder
- (fake::Command*)add:(Kind)kind {
  fake::count_call();
  return [commands add:kind from:self];
}
- (void)setComputePipelineState:(id<MTLComputePipelineState>)state {
  if (!state) fake::violation("no-pipeline", "setComputePipelineState: of nil");
  if (auto* c = [self add:Kind::pipeline]) c->object = state;
}
- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index {
  if (index > 30) return fake::violation("index", "buffer index " + std::to_string(index));
  auto* c = [self add:Kind::buffer];
  if (!c) return;
  c->object = buffer;
  c->index = index;
  c->value = offset;
  if (commands->retained) [buffer retain];
}
- (void)setBuffers:(const id<MTLBuffer>*)buffers offsets:(const NSUInteger*)offsets withRange:(NSRange)range {
  for (NSUInteger i = 0; i < range.length; i++) {
    [self setBuffer:buffers[i] offset:offsets[i] atIndex:range.location + i];
    if (i) fake::count_call(-1);
  }
}
- (void)setBytes:(const void*)bytes length:(NSUInteger)length atIndex:(NSUInteger)index {
  if (length > 4096) return fake::violation("set-bytes", "setBytes: of " + std::to_string(length) + " bytes; the limit is 4096");
  if (length == 0 || index > 30) return fake::violation("set-bytes", "setBytes: of no bytes, or past index 30");
  auto* c = [self add:Kind::bytes];
  if (!c) return;
  c->index = index;
  c->bytes.assign(static_cast<const uint8_t*>(bytes), static_cast<const uint8_t*>(bytes) + length);
}
- (void)setThreadgroupMemoryLength:(NSUInteger)length atIndex:(NSUInteger)index {
  if (length % 16) fake::violation("threadgroup-memory", "a length of " + std::to_string(length) + ", which is no multiple of 16");
  if (index > 30) return fake::violation("index", "threadgroup memory index " + std::to_string(index));
  if (auto* c = [self add:Kind::memory]) c->index = index, c->value = length;
}
- (void)memoryBarrierWithScope:(MTLBarrierScope)scope {
  if (!(scope & MTLBarrierScopeBuffers)) fake::violation("barrier", "a barrier that does not order buffers");
  [self add:Kind::barrier];
}
- (void)dispatchThreadgroups:(MTLSize)grid threadsPerThreadgroup:(MTLSize)threadgroup {
  if (auto* c = [self add:Kind::dispatch]) c->grid = grid, c->threadgroup = threadgroup;
}
- (void)dispatchThreads:(MTLSize)threads threadsPerThreadgroup:(MTLSize)threadgroup {
  if (auto* c = [self add:Kind::dispatch])
    c->grid = fake::groups_of(threads, threadgroup), c->threadgroup = threadgroup, c->threads = threads;
}
- (void)useResources:(const id<MTLResource>*)resources count:(NSUInteger)count usage:(MTLResourceUsage)usage {
  auto* c = [self add:Kind::use];
  if (!c) return;
  auto* first = reinterpret_cast<const uint8_t*>(resources);
  c->bytes.assign(first, first + count * sizeof(id));
  c->value = usage;
}
- (void)executeCommandsInBuffer:(id<MTLIndirectCommandBuffer>)indirect withRange:(NSRange)range {
  if (auto* c = [self add:Kind::execute]) c->object = indirect, c->index = range.location, c->value = range.length;
}
@end

@interface FakeBlitEncoder : FakeEncoder <MTLBlitCommandEncoder>
@end
@implementation FakeBlitEncoder
- (void)synchronizeResource:(id<MTLResource>)resource {
  if (auto* c = [commands add:Kind::synchronize from:self]) c->object = resource;
}
@end

@interface FakeIndirectCommand : FakeObject <MTLIndirectComputeCommand> {
 @public
  FakeIndirect* all;
  NSUInteger at;
}
@end
@implementation FakeIndirectCommand
- (fake::Indirect&)command {
  return (*all->commands)[at];
}
- (void)setComputePipelineState:(id<MTLComputePipelineState>)state {
  if (![state supportIndirectCommandBuffers]) fake::violation("indirect", "a pipeline made without supportIndirectCommandBuffers");
  [self command].pipeline = (FakePipeline*)state;
}
- (void)setKernelBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index {
  if (index >= all->max_buffers)
    return fake::violation("indirect", "buffer index " + std::to_string(index) + " is not below maxKernelBufferBindCount");
  [self command].bindings[index] = {(FakeBuffer*)buffer, offset, {}, buffer != nil};
}
- (void)setBarrier {
  if ([self command].filled) fake::violation("indirect", "setBarrier after the dispatch");
  [self command].barrier = true;
}
- (void)fill:(MTLSize)grid threads:(MTLSize)threads threadgroup:(MTLSize)threadgroup type:(MTLIndirectCommandType)type {
  if (![self command].pipeline) fake::violation("no-pipeline", "an indirect dispatch with no pipeline set");
  if (!(all->types & type)) fake::violation("indirect", "a dispatch of a type that its descriptor's commandTypes does not have");
  [self command].grid = grid;
  [self command].threads = threads;
  [self command].threadgroup = threadgroup;
  [self command].filled = true;
}
- (void)concurrentDispatchThreadgroups:(MTLSize)grid threadsPerThreadgroup:(MTLSize)threadgroup {
  [self fill:grid threads:{} threadgroup:threadgroup type:MTLIndirectCommandTypeConcurrentDispatch];
}
- (void)concurrentDispatchThreads:(MTLSize)threads threadsPerThreadgroup:(MTLSize)threadgroup {
  [self fill:fake::groups_of(threads, threadgroup)
          threads:threads
      threadgroup:threadgroup
             type:MTLIndirectCommandTypeConcurrentDispatchThreads];
}
@end

@implementation FakeIndirect
- (void)dealloc {
  delete commands;
  [super dealloc];
}
- (NSUInteger)size {
  return commands->size();
}
- (id<MTLIndirectComputeCommand>)indirectComputeCommandAtIndex:(NSUInteger)index {
  if (index >= commands->size()) {
    fake::violation("indirect", "command " + std::to_string(index) + " is past the end");
    return nil;
  }
  FakeIndirectCommand* c = [[[FakeIndirectCommand alloc] init] autorelease];
  c->all = self;
  c->at = index;
  return c;
}
@end

// -- command buffers ---------------------------------------------------------------------------------------------------

@implementation FakeQueue
- (FakeCommandBuffer*)make:(BOOL)retained {
  fake::spend_us(fake::settings.command_buffer_us);
  if (fake::fault("command_buffer")) return nil;
  if (++open > static_cast<long>(limit)) fake::violation("queue-full", "more command buffers than the queue has; Metal would block here");
  FakeCommandBuffer* commands = [[[FakeCommandBuffer alloc] init] autorelease];
  commands->queue = [self retain];
  commands->retained = retained;
  commands->captures = fake::captures;
  return commands;
}
- (id<MTLCommandBuffer>)commandBuffer {
  return [self make:YES];
}
- (id<MTLCommandBuffer>)commandBufferWithUnretainedReferences {
  return [self make:NO];
}
- (void)addResidencySet:(id<MTLResidencySet>)set {
  residency = (FakeResidencySet*)[set retain];
}
- (void)dealloc {
  [residency release];
  [super dealloc];
}
@end

@implementation FakeCommandBuffer
- (id)init {
  self = [super init];
  log = fake::take_log();
  return self;
}
- (void)dealloc {
  if (encoder) fake::violation("not-ended", "a command buffer is deallocated with an encoder open");
  bool told =
      !error_ && !log->empty() && log->back().kind == Kind::signal && ((FakeSharedEvent*)log->back().object)->seen >= log->back().value;
  if (status_ >= MTLCommandBufferStatusCommitted && !read && !told)
    fake::violation("unread-status", "a command buffer is deallocated, and nobody has read its status after it was done");
  for (fake::Command& c : *log)
    if ((retained && c.kind == Kind::buffer) || c.kind == Kind::signal || c.kind == Kind::wait) [c.object release];
  if (status_ < MTLCommandBufferStatusCompleted) queue->open--;
  fake::give_log(log);
  [error_ release];
  [queue release];
  [super dealloc];
}
- (BOOL)retainedReferences {
  return retained;
}
- (fake::Command*)add:(Kind)kind from:(id)from {
  if (status_ != MTLCommandBufferStatusNotEnqueued) {
    fake::violation("use-after-commit", "a call that encodes into a command buffer after its commit");
    return nullptr;
  }
  if (from && ((FakeEncoder*)from)->ended) {
    fake::violation("use-after-end", "a call of an encoder after endEncoding");
    return nullptr;
  }
  if (!from && encoder) fake::violation("encoder-open", "a command buffer is encoded into while an encoder is open");
  log->emplace_back(kind);
  return &log->back();
}
- (id)open:(Class)kind {
  if (status_ != MTLCommandBufferStatusNotEnqueued) {
    fake::violation("use-after-commit", "an encoder is asked of a command buffer after its commit");
    return nil;
  }
  if (encoder) fake::violation("encoder-open", "a second encoder is opened before endEncoding of the first");
  if (fake::fault("encoder")) return nil;
  FakeEncoder* e = [[[kind alloc] init] autorelease];
  e->commands = [self retain];
  encoder = e;
  return e;
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoderWithDispatchType:(MTLDispatchType)type {
  FakeComputeEncoder* e = [self open:[FakeComputeEncoder class]];
  if (e) [self add:Kind::begin from:e]->value = type;
  return e;
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoderWithDescriptor:(MTLComputePassDescriptor*)descriptor {
  FakeComputeEncoder* e = [self open:[FakeComputeEncoder class]];
  if (!e) return nil;
  auto* c = [self add:Kind::begin from:e];
  MTLComputePassSampleBufferAttachmentDescriptor* a = [[descriptor sampleBufferAttachments] objectAtIndexedSubscript:0];
  c->value = [descriptor dispatchType];
  c->object = [a sampleBuffer];
  c->index = [a startOfEncoderSampleIndex];
  c->more = [a endOfEncoderSampleIndex];
  if (c->object && std::max(c->index, c->more) >= [(FakeSamples*)c->object sampleCount]) {
    fake::violation("samples", "a sample index past the end of the sample buffer");
    c->object = nil;
  }
  return e;
}
- (id<MTLBlitCommandEncoder>)blitCommandEncoder {
  FakeBlitEncoder* e = [self open:[FakeBlitEncoder class]];
  if (e) [self add:Kind::begin from:e];
  return e;
}
- (void)encodeSignalEvent:(id<MTLEvent>)event value:(uint64_t)value {
  if (auto* c = [self add:Kind::signal from:nil]) c->object = [event retain], c->value = value;
}
- (void)encodeWaitForEvent:(id<MTLEvent>)event value:(uint64_t)value {
  if (auto* c = [self add:Kind::wait from:nil]) c->object = [event retain], c->value = value;
}
- (void)commit {
  if (status_ != MTLCommandBufferStatusNotEnqueued)
    return fake::violation("double-commit", "commit of a command buffer that was committed");
  if (encoder) fake::violation("not-ended", "commit before endEncoding");
  if (fake::capturing && captures != fake::captures)
    fake::violation("capture", "a command buffer of before the capture, which it will not hold");
  fake::spend_us(fake::settings.commit_us);
  [queue->residency wire:NO];
  {
    std::lock_guard lock(fake::queue_mutex);
    status_ = MTLCommandBufferStatusCommitted;
    alone = fake::pending.empty() && fake::in_hand == 0;
    fake::pending.push_back([self retain]);  // as Metal does until it is done
    fake::set_in_flight(self, true);
  }
  if (fake::settings.in_time) fake::wake_gpu();
  if (fake::settings.run_on_commit) [self waitUntilCompleted];
}
- (void)waitUntilCompleted {
  if (status_ == MTLCommandBufferStatusNotEnqueued) return fake::violation("wait", "waitUntilCompleted before commit");
  if (!fake::settings.in_time)
    while (status_ < MTLCommandBufferStatusCompleted && fake::run_next()) continue;
  std::unique_lock lock(fake::queue_mutex);
  fake::changed.wait(lock, [&] { return status_ >= MTLCommandBufferStatusCompleted; });
  lock.unlock();
  while (fake::now() < visible) std::this_thread::sleep_for(std::chrono::microseconds(50));
}
- (void)run {
  fake::spend_us(fake::settings.start_us);
  double begin = fake::now();
  int code = 0;
  if (fake::fault("command_buffer_status", &code)) {
    if (code == MTLCommandBufferErrorAccessRevoked) fake::settings.revoked = 1;
    [self fails:"injected: the GPU hung" code:code];
  }
  if (fake::settings.revoked) [self fails:"access to the GPU is revoked" code:MTLCommandBufferErrorAccessRevoked];
  fake::run_log(self);
  start = fake::settings.timestamps ? begin : 0;
  finish = fake::settings.timestamps ? fake::now() : 0;
  fake::set_in_flight(self, false);
  visible = fake::now() + fake::settings.status_lag_us * 1e-6;
  queue->open--;
}
- (void)fails:(const std::string&)text code:(NSInteger)code {
  if (error_) return;
  error_ = [fake::error(@"MTLCommandBufferErrorDomain", code, text) retain];
}
- (MTLCommandBufferStatus)status {
  if (status_ < MTLCommandBufferStatusCompleted) return status_;
  if (fake::now() < visible) return MTLCommandBufferStatusScheduled;
  read = true;
  return status_;
}
- (NSError*)error {
  return error_;
}
- (CFTimeInterval)GPUStartTime {
  return start;
}
- (CFTimeInterval)GPUEndTime {
  return finish;
}
@end
