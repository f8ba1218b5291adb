#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <thread>

#include "../../../csrc/core/error.h"
#include "fake.h"

using Kind = fake::Command::Kind;

namespace fake {
void set_in_flight(FakeCommandBuffer* commands, bool is);
bool run_next();
void wake_gpu();

namespace {

std::recursive_mutex gpu_mutex;  // held while the GPU works, whoever's thread it is
// What follows outlives the process's static objects: the GPU's own thread never ends.
auto& queue_mutex = *new std::mutex;  // held for moments
auto& changed = *new std::condition_variable;
auto& pending = *new std::deque<FakeCommandBuffer*>;
size_t in_hand = 0;  // taken from pending, and not done yet

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
std::string size_text(const MTLSize& s) {
  return "(" + std::to_string(s.width) + ", " + std::to_string(s.height) + ", " + std::to_string(s.depth) + ")";
}

// What dispatches of a concurrent encoder touched since the last barrier. Linear, unlike the library's own.
class Touched {
 public:
  bool conflicts(const uint8_t* begin, const uint8_t* end, bool written) const {
    for (auto& s : spans_)
      if (begin < s.end && s.begin < end && (written || s.written)) return true;
    return false;
  }
  void add(const uint8_t* begin, const uint8_t* end, bool written) { fresh_.push_back({begin, end, written}); }
  void next() {
    spans_.insert(spans_.end(), fresh_.begin(), fresh_.end());
    fresh_.clear();
  }
  void clear() { spans_.clear(); }

 private:
  struct Touch {
    const uint8_t *begin, *end;
    bool written;
  };
  std::vector<Touch> spans_, fresh_;
};

// What passes did to buffers that Metal does not order, and which passes come after which: a pass that comes after one neither by a
// fence nor by an event may run beside it.
struct Order {
  struct Ran {
    uint64_t number;
    Touched touched;
  };
  std::deque<Ran> recent;
  uint64_t next = 1;
  void start(const std::set<uint64_t>& before) {
    bool after_all = std::all_of(recent.begin(), recent.end(), [&](const Ran& r) { return before.count(r.number) != 0; });
    if (after_all || recent.size() > 64) recent.clear();
    recent.push_back({next++, {}});
  }
};
Order order;

// The state of the GPU while it runs one encoder.
struct Pass {
  explicit Pass(FakeCommandBuffer* commands) : commands(commands) {}
  FakeCommandBuffer* commands;
  std::set<uint64_t> before;          // passes that this one comes after
  std::set<uint64_t> commands_after;  // passes that every further one of the command buffer comes after, by an event
  uint64_t number = 0, first = 0;     // first: of the command buffer
  std::set<id> idle;                  // pipelines that were set
  bool concurrent = true;
  FakePipeline* pipeline = nil;
  Binding bindings[metalmm::kMaxBuffers];
  size_t memory[metalmm::kMaxBuffers] = {};
  std::map<id, bool> used;  // resource -> may be written
  Touched touched;
  FakeSamples* samples = nil;
  size_t end_sample = 0;
};

uint64_t nanoseconds() { return static_cast<uint64_t>(now() * 1e9); }

void begin_pass(Pass& pass) {
  pass.before = pass.commands_after;
  pass.number = order.next;
  order.start(pass.before);
}

void wait_for(Pass& pass, const std::set<uint64_t>& others) { pass.before.insert(others.begin(), others.end()); }

void touch(Pass& pass, FakeBuffer* buffer, size_t offset, bool written, const std::string& what) {
  if (![buffer untracked]) return;
  uint8_t *begin = [buffer gpu] + offset, *end = [buffer gpu] + [buffer length];
  for (Order::Ran& r : order.recent) {
    if (r.number == pass.number) r.touched.add(begin, end, written), r.touched.next();
    if (r.number != pass.number && !pass.before.count(r.number) && r.touched.conflicts(begin, end, written))
      violation("unordered", what + " is untracked, and neither a fence nor an event stands after an earlier pass that uses it");
  }
}

// The threadgroups that a number of threads makes, the last in each axis perhaps smaller.
MTLSize groups_of(MTLSize threads, MTLSize threadgroup) {
  auto groups = [](NSUInteger n, NSUInteger of) { return of ? (n + of - 1) / of : 0; };
  return MTLSizeMake(groups(threads.width, threadgroup.width), groups(threads.height, threadgroup.height),
                     groups(threads.depth, threadgroup.depth));
}

// `threads`: not zero for a dispatch of threads.
void dispatch(Pass& pass, FakePipeline* state, Binding* bindings, const size_t* memory, const MTLSize& grid, const MTLSize& threadgroup,
              const MTLSize& threads_of_grid) {
  if (!state) return violation("no-pipeline", "a dispatch with no pipeline set");
  const metalmm::Pipeline& pipeline = **state->pipeline;
  auto broken = [&](const char* rule, const std::string& what) { violation(rule, "kernel '" + pipeline.name + "': " + what); };
  if (!grid.width || !grid.height || !grid.depth) return broken("zero-grid", "a grid of " + size_text(grid) + " threadgroups");
  if (!threadgroup.width || !threadgroup.height || !threadgroup.depth)
    return broken("zero-grid", "a threadgroup of " + size_text(threadgroup));
  NSUInteger threads = threadgroup.width * threadgroup.height * threadgroup.depth, most = [state maxTotalThreadsPerThreadgroup];
  if (threads > most)
    return broken("threadgroup-limit", std::to_string(threads) + " threads in a threadgroup; the limit is " + std::to_string(most));

  std::vector<std::shared_ptr<metalmm::Buffer>> buffers;
  std::vector<metalmm::BufferBinding> bound;
  std::vector<metalmm::BytesBinding> bytes;
  std::vector<metalmm::ThreadgroupMemory> group_memory;
  buffers.reserve(metalmm::kMaxBuffers);
  size_t total = pipeline.static_threadgroup_bytes;
  for (size_t i = 0; memory && i < metalmm::kMaxBuffers; i++) total += memory[i];  // lengths set for others, too
  for (const metalmm::KernelArgument& argument : pipeline.arguments) {
    if (argument.kind == metalmm::KernelArgument::Kind::threadgroup) {
      size_t size = memory ? memory[argument.index] : 0;
      if (!size) return broken("threadgroup-memory", "no length for threadgroup memory " + std::to_string(argument.index));
      group_memory.push_back({argument.index, size});
      continue;
    }
    Binding& b = bindings[argument.index];
    std::string where = "buffer index " + std::to_string(argument.index);
    if (!b.set) return broken("unbound", "nothing is bound to " + where);
    if (!b.buffer) {
      if (b.bytes.size() < argument.bytes) return broken("too-small", std::to_string(b.bytes.size()) + " bytes at " + where);
      if (!argument.is_const) return broken("bytes-written", "bytes at " + where + ", which the kernel may write");
      bytes.push_back({argument.index, b.bytes.data(), b.bytes.size()});
      continue;
    }
    if (![FakeBuffer alive:b.buffer]) return broken("freed-in-flight", "the buffer at " + where + " is gone");
    if (b.offset > [b.buffer length] || [b.buffer length] - b.offset < argument.bytes)
      return broken("too-small", "the buffer at " + where + " holds " + std::to_string([b.buffer length]) + " bytes, less than offset " +
                                     std::to_string(b.offset) + " and " + std::to_string(argument.bytes));
    if (b.offset % alignment(argument)) return broken("misaligned", "offset " + std::to_string(b.offset) + " of " + where);
    uint8_t *begin = [b.buffer gpu] + b.offset, *end = [b.buffer gpu] + [b.buffer length];
    if (pass.concurrent && pass.touched.conflicts(begin, end, !argument.is_const))
      return broken("missing-barrier", where + " depends on an earlier dispatch of this concurrent encoder, and no barrier stands between");
    pass.touched.add(begin, end, !argument.is_const);
    touch(pass, b.buffer, b.offset, !argument.is_const, where + " of kernel '" + pipeline.name + "'");
    buffers.push_back(std::make_shared<metalmm::Buffer>([b.buffer gpu], [b.buffer length], false, nullptr));
    bound.push_back({argument.index, &buffers.back(), b.offset});
  }
  if (total > 32768) return broken("threadgroup-limit", std::to_string(total) + " bytes of threadgroup memory; the limit is 32768");
  auto size = [](const MTLSize& s) {
    return metalmm::Size3{static_cast<uint32_t>(s.width), static_cast<uint32_t>(s.height), static_cast<uint32_t>(s.depth)};
  };
  try {
    cpu().run({state->pipeline, bound.data(), bound.size(), bytes.data(), bytes.size(), group_memory.data(), group_memory.size(),
               size(grid), size(threadgroup), size(threads_of_grid)});
  } catch (const metalmm::Error& e) {
    [pass.commands fails:e.what() code:MTLCommandBufferErrorPageFault];
  }
  pass.touched.next();
}

void execute(Pass& pass, FakeIndirect* indirect, size_t first, size_t count) {
  if (!indirect || first + count > indirect->commands->size())
    return violation("indirect", "a range past the end of the indirect command buffer");
  // Before Apple9 the GPU crashes in a pipeline that the encoder did not set itself.
  for (size_t i = first; i < first + count && settings.apple_family < 9; i++)
    if (!pass.idle.count((*indirect->commands)[i].pipeline))
      return [pass.commands fails:"the GPU crashed in an indirect command" code:MTLCommandBufferErrorPageFault];
  if (!pass.used.count(indirect)) violation("not-resident", "an indirect command buffer without useResource:");
  for (size_t i = first; i < first + count; i++) {
    Indirect& command = (*indirect->commands)[i];
    if (!command.filled) {
      violation("indirect", "command " + std::to_string(i) + " was never given a dispatch");
      continue;
    }
    if (command.pipeline && !command.pipeline->indirect) {
      violation("indirect", "a pipeline made without supportIndirectCommandBuffers");
      continue;
    }
    for (const metalmm::KernelArgument& argument : (*command.pipeline->pipeline)->arguments) {
      Binding& b = command.bindings[argument.index];
      if (!b.buffer) continue;
      auto it = pass.used.find(b.buffer);
      if (it == pass.used.end() || (!argument.is_const && !it->second))
        violation("not-resident", "buffer index " + std::to_string(argument.index) +
                                      " of an indirect command is used without useResource: for " +
                                      (argument.is_const ? "reading" : "writing"));
    }
    if (command.barrier) pass.touched.clear();
    dispatch(pass, command.pipeline, command.bindings, nullptr, command.grid, command.threadgroup, command.threads);
  }
}

void step(Pass& pass, Command& c) {
  switch (c.kind) {
    case Kind::begin: {
      Pass fresh(pass.commands);
      fresh.commands_after = std::move(pass.commands_after);
      fresh.first = pass.first;
      pass = std::move(fresh);
      begin_pass(pass);
      pass.concurrent = c.value == MTLDispatchTypeConcurrent;
      pass.samples = (FakeSamples*)c.object;
      pass.end_sample = c.more;
      if (pass.samples) (*pass.samples->times)[c.index] = nanoseconds();
      return;
    }
    case Kind::wait_fence:
      return wait_for(pass, *((FakeFence*)c.object)->before);
    case Kind::update_fence: {
      std::set<uint64_t> done = pass.before;
      done.insert(pass.number);
      while (done.size() > 64) done.erase(done.begin());
      *((FakeFence*)c.object)->before = std::move(done);
      return;
    }
    case Kind::end:
      if (pass.samples) (*pass.samples->times)[pass.end_sample] = nanoseconds();
      return;
    case Kind::pipeline:
      pass.pipeline = (FakePipeline*)c.object;
      pass.idle.insert(c.object);
      return;
    case Kind::buffer:
      pass.bindings[c.index] = {(FakeBuffer*)c.object, c.value, {}, c.object != nil};
      return;
    case Kind::bytes:
      pass.bindings[c.index] = {nil, 0, c.bytes, true};
      return;
    case Kind::memory:
      pass.memory[c.index] = c.value;
      return;
    case Kind::barrier:
      pass.touched.clear();
      return;
    case Kind::use:
      for (size_t i = 0; i < c.bytes.size(); i += sizeof(id)) {
        id resource;
        std::memcpy(&resource, c.bytes.data() + i, sizeof(id));
        pass.used[resource] |= (c.value & MTLResourceUsageWrite) != 0;
      }
      return;
    case Kind::dispatch:
      if (!c.grid.width && !c.threadgroup.width && settings.apple_family < 9) return;  // sets the pipeline for indirect commands
      return dispatch(pass, pass.pipeline, pass.bindings, pass.memory, c.grid, c.threadgroup, c.threads);
    case Kind::execute:
      return execute(pass, (FakeIndirect*)c.object, c.index, c.value);
    case Kind::mps: {
      begin_pass(pass);
      for (size_t i = 0; i * sizeof(id) < c.bytes.size(); i++) {
        FakeBuffer* buffer;
        std::memcpy(&buffer, c.bytes.data() + i * sizeof(id), sizeof(id));
        if ([FakeBuffer alive:buffer]) touch(pass, buffer, 0, i == 2, "a matrix of MPS");
      }
      std::string failure = (*c.run)();
      if (!failure.empty()) [pass.commands fails:failure code:MTLCommandBufferErrorInternal];
      return;
    }
    case Kind::synchronize: {
      auto* b = (FakeBuffer*)c.object;
      touch(pass, b, 0, true, "synchronizeResource: of a buffer");
      if (!b->managed) return violation("synchronize", "synchronizeResource: of a buffer that is not managed");
      std::memcpy([b contents], [b gpu], [b length]);
      return;
    }
    case Kind::signal: {
      auto* event = (FakeSharedEvent*)c.object;
      if (&c == &pass.commands->log->back()) set_in_flight(pass.commands, false);  // the GPU is through with all of it
      if (event->value >= c.value) violation("event", "an event's value that does not rise");
      event->value = c.value;
      *event->before = pass.before;
      event->before->insert(pass.commands_after.begin(), pass.commands_after.end());
      for (const Order::Ran& r : order.recent)
        if (r.number >= pass.first) event->before->insert(r.number);
      return;
    }
    case Kind::wait: {
      auto* event = (FakeSharedEvent*)c.object;
      if (event->value < c.value) violation("event", "a wait that nothing will end");
      pass.commands_after.insert(event->before->begin(), event->before->end());
      return;
    }
  }
}

}  // namespace

// Logs are used again with the room that they have: their growth is no cost of the library's.
std::mutex logs_mutex;
std::vector<std::vector<Command>*> logs;

std::vector<Command>* take_log() {
  std::lock_guard lock(logs_mutex);
  if (logs.empty()) return new std::vector<Command>;
  auto* log = logs.back();
  logs.pop_back();
  return log;
}

void give_log(std::vector<Command>* log) {
  log->clear();
  std::lock_guard lock(logs_mutex);
  logs.push_back(log);
}

bool uses(FakeCommandBuffer* commands, FakeBuffer* buffer) {
  for (Command& c : *commands->log) {
    if (c.object == buffer) return true;
    if (c.kind != Kind::execute) continue;
    for (Indirect& i : *((FakeIndirect*)c.object)->commands)
      for (Binding& b : i.bindings)
        if (b.buffer == buffer) return true;
  }
  return false;
}

}  // namespace fake

namespace fake {

// The GPU's next piece of work, on the calling thread; whether there was one.
bool run_next() {
  std::lock_guard gpu(gpu_mutex);
  FakeCommandBuffer* next;
  {
    std::lock_guard lock(queue_mutex);
    if (pending.empty()) return false;
    next = pending.front();
    pending.pop_front();
    in_hand++;
  }
  void* pool = objc_autoreleasePoolPush();
  [next run];
  objc_autoreleasePoolPop(pool);
  {
    std::lock_guard lock(queue_mutex);
    next->status_ = next->error_ ? MTLCommandBufferStatusError : MTLCommandBufferStatusCompleted;
    in_hand--;
  }
  changed.notify_all();
  pool = objc_autoreleasePoolPush();
  [next release];
  objc_autoreleasePoolPop(pool);
  return true;
}

bool wait_for_event(std::atomic<uint64_t>& value, uint64_t wanted, uint64_t ms) {
  if (!settings.in_time)
    while (value < wanted && run_next()) continue;
  std::unique_lock lock(queue_mutex);
  return changed.wait_for(lock, std::chrono::milliseconds(ms), [&] { return value >= wanted; });
}

void wake_gpu() {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(nullptr, nullptr, [] {  // a child has no such thread, nor what it held
      settings.in_time = 0;
      in_hand = 0;
      new (&queue_mutex) std::mutex;
      new (&changed) std::condition_variable;
    });
    std::thread([] {
      for (;;) {
        {
          std::unique_lock lock(queue_mutex);
          changed.wait(lock, [] { return settings.in_time && !pending.empty(); });
        }
        run_next();
      }
    }).detach();
  });
  changed.notify_all();
}

}  // namespace fake

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
  (void)set;
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
  if (alone) fake::order.recent.clear();
  fake::Pass pass(self);
  pass.first = fake::order.next;
  if (!error_ || fake::settings.signal_on_error)
    for (fake::Command& c : *log) {
      if (error_ && (c.kind != Kind::signal || !fake::settings.signal_on_error)) continue;  // the rest of a failed one does not run
      fake::step(pass, c);
    }
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
