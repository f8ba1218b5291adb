#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <thread>

#include "../../../csrc/core/error.h"
#include "fake_execution.h"

using Kind = fake::Command::Kind;

namespace fake {

// What follows outlives the process's static objects: the GPU's own thread never ends.
auto& queue_mutex = *new std::mutex;  // held for moments
auto& changed = *new std::condition_variable;
auto& pending = *new std::deque<FakeCommandBuffer*>;
size_t in_hand = 0;  // taken from pending, and not done yet

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// The threadgroups that a number of threads makes, the last in each axis perhaps smaller.
MTLSize groups_of(MTLSize threads, MTLSize threadgroup) {
  auto groups = [](NSUInteger n, NSUInteger of) { return of ? (n + of - 1) / of : 0; };
  return MTLSizeMake(groups(threads.width, threadgroup.width), groups(threads.height, threadgroup.height),
                     groups(threads.depth, threadgroup.depth));
}

namespace {

std::recursive_mutex gpu_mutex;  // held while the GPU works, whoever's thread it is
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

void run_log(FakeCommandBuffer* commands) {
  if (commands->alone) order.recent.clear();
  Pass pass(commands);
  pass.first = order.next;
  if (!commands->error_ || settings.signal_on_error)
    for (Command& c : *commands->log) {
      if (commands->error_ && (c.kind != Kind::signal || !settings.signal_on_error)) continue;  // the rest of a failed one does not run
      step(pass, c);
    }
}

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
