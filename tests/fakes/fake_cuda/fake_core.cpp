// What the calls of the fake driver stand on: handles, memory, the threads of streams; and the tests' own door.
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <set>
#include <utility>

#include "fake.h"

namespace fake {

Settings settings;
// Never destroyed: streams' threads are there until the process is not.
World& world = *new World;
bool forked = false;
thread_local uintptr_t current = 0;
std::mutex& mutex = *new std::mutex;
std::condition_variable& changed = *new std::condition_variable;

namespace {

// Takes one piece of work after another, as soon as somebody wants it. A context that failed gets no more.
void work_off(const std::shared_ptr<StreamState>& stream) {
  StreamState& s = *stream;
  std::unique_lock lock(mutex);
  for (;;) {
    changed.wait(lock, [&] { return s.ends || s.context->failed || (!s.queue.empty() && (s.wanted > s.done || settings.in_time)); });
    if (s.queue.empty()) break;
    Work work = std::move(s.queue.front());
    s.queue.pop_front();
    if (!s.context->failed) {
      lock.unlock();
      Result r = work.run();
      lock.lock();
      if (r) fail(*s.context, r, world.last_error);
    }
    for (auto& use : work.uses) use->in_flight--;
    s.done++;
    changed.notify_all();
    lock.unlock();
    work = {};  // what only it kept goes without the lock
    lock.lock();
  }
  s.ended = true;
  changed.notify_all();
}

bool captures_here() {
  for (StreamState* s : world.captures)
    if (s->capture->thread == std::this_thread::get_id()) return true;
  return false;
}

}  // namespace

std::shared_ptr<StreamState> start_stream(ContextState* context) {
  auto stream = std::make_shared<StreamState>();
  stream->context = context;
  sigset_t all, before;  // signals of others are the host's; a kernel's faults come whatever is blocked
  sigfillset(&all);
  for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP}) sigdelset(&all, fault);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread(work_off, stream).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return stream;
}

void end_stream(StreamState& s, std::unique_lock<std::mutex>& lock) {
  s.ends = true;
  changed.notify_all();
  changed.wait(lock, [&] { return s.ended; });
}

// Until all that was pushed to it by now is done.
Result drain(StreamState& s, std::unique_lock<std::mutex>& lock) {
  uint64_t through = s.pushed;
  s.wanted = std::max(s.wanted, through);
  changed.notify_all();
  changed.wait(lock, [&] { return s.done >= through; });
  return s.context->failed;
}

void destroy(const std::shared_ptr<ContextState>& context, std::unique_lock<std::mutex>& lock) {
  std::vector<std::shared_ptr<Object>> own;
  for (auto& [_, object] : world.objects)
    if (object->context == context.get()) own.push_back(object);
  for (auto& [_, memory] : world.memory)
    if (memory->context == context.get()) own.push_back(memory);
  if (!context->failed) context->failed = kContextDestroyed;  // nothing that waits runs any more
  for (auto& object : own)
    if (auto* stream = dynamic_cast<StreamState*>(object.get())) {
      world.captures.erase(stream);
      end_stream(*stream, lock);
    }
  end_stream(*context->null_stream, lock);
  for (auto& object : own) remove(*object);
  remove(*context);
  // A few bytes that streams and events still point to.
  static auto* gone = new std::vector<std::shared_ptr<ContextState>>;
  gone->push_back(context);
  world.primary.erase(context->gpu);
}

std::string leaks_of(const ContextState& context) {
  std::map<std::string, int> counts;
  for (auto& [_, object] : world.objects)
    if (object->context == &context && object->kind != std::string("Function")) counts[object->kind]++;
  for (auto& [_, memory] : world.memory)
    if (memory->context == &context && memory->pages) counts[memory->kind]++;
  std::string text;
  for (auto& [kind, count] : counts) text += (text.empty() ? "" : ", ") + number(static_cast<unsigned long long>(count)) + " " + kind;
  return text;
}

std::string number(unsigned long long n) { return std::to_string(n); }
std::string hex(unsigned long long n) {
  char text[32];
  std::snprintf(text, sizeof(text), "0x%llx", n);
  return text;
}

void violation(const std::string& rule, const std::string& what) { world.violations.push_back(rule + ": " + what); }

bool take_fault(const char* name, Result* code) {
  auto [first, last] = world.faults.equal_range(name);
  for (auto it = first; it != last; ++it) {
    if (it->second.skip > 0) {
      it->second.skip--;
      continue;
    }
    *code = it->second.code;
    if (--it->second.count <= 0) world.faults.erase(it);
    return true;
  }
  return false;
}

void fail(ContextState& context, Result r, const std::string& text) {
  if (!context.failed) context.failed = r;
  world.last_error = text;
  changed.notify_all();
}

Call::Call(const char* name, bool needs_context, bool unsafe, bool fails) : name(name) {
  if (forked) {  // whoever held the lock is not here
    result = kNotInitialized;
    return;
  }
  lock = std::unique_lock(mutex);
  if (!world.initialized) {
    result = wrong(kNotInitialized, "init", "before cuInit");
    return;
  }
  if (needs_context) {
    auto it = world.objects.find(current);
    if (it == world.objects.end()) {
      result = current ? wrong(kContextDestroyed, "context", "the current context is destroyed")
                       : wrong(kInvalidContext, "context", "no current context");
      return;
    }
    context = static_cast<ContextState*>(it->second.get());
    if ((result = context->failed)) return;
  }
  if (unsafe && captures_here()) {
    result = wrong(kCaptureUnsupported, "capture", "while this thread captures a stream");
    for (StreamState* s : world.captures)
      if (s->capture->thread == std::this_thread::get_id()) s->capture->invalid = true;
    return;
  }
  if (fails && take_fault(name, &result) && context && is_sticky(result)) fail(*context, result, "injected");
}

Result Call::wrong(Result r, const std::string& rule, const std::string& what) {
  violation(rule, std::string(name) + ": " + what);
  result = r;
  return r;
}

std::shared_ptr<Object> find(Call& call, const void* handle, const char* kind) {
  auto number_of = reinterpret_cast<uintptr_t>(handle);
  auto it = world.objects.find(number_of);
  if (it != world.objects.end() && it->second->kind == std::string(kind)) {
    if (it->second->context == call.context) return it->second;
    call.wrong(kInvalidHandle, "context", std::string(kind) + " of another context");
  } else if (it != world.objects.end()) {
    call.wrong(kInvalidHandle, "handle", std::string(it->second->kind) + " where " + kind + " is due");
  } else {
    bool was = number_of >= kFirstHandle && number_of <= world.next_handle;
    call.wrong(kInvalidHandle, "handle", std::string(kind) + (was ? " that was destroyed" : " that never was one"));
  }
  return nullptr;
}

std::shared_ptr<StreamState> find_stream(Call& call, Stream stream) {
  return stream ? find<StreamState>(call, stream, "Stream") : call.context->null_stream;
}

uintptr_t add(std::shared_ptr<Object> object, ContextState* context) {
  object->handle = world.next_handle += 64;
  object->context = context;
  world.objects[object->handle] = object;
  return object->handle;
}

void remove(Object& object) {
  object.alive = false;
  if (auto* memory = dynamic_cast<Memory*>(&object))
    world.memory.erase(memory->address);
  else
    world.objects.erase(object.handle);
}

Memory::~Memory() {
  if (pages) munmap(pages, page_bytes);
}

// With a page before and one behind that are not there.
std::shared_ptr<Memory> add_memory(ContextState* context, uint8_t* host, size_t size) {
  auto memory = std::make_shared<Memory>();
  memory->context = context;
  memory->size = size;
  memory->host = host;
  if (!host) {
    size_t inner = (size + 255) / 256 * 256, whole = (inner + 4095) / 4096 * 4096;
    memory->page_bytes = whole + 2 * 4096;
    void* pages = mmap(nullptr, memory->page_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) return nullptr;
    memory->pages = pages;
    auto* first = static_cast<uint8_t*>(pages) + 4096;
    if (mprotect(first, whole, PROT_READ | PROT_WRITE)) return nullptr;
    memory->host = first + whole - inner;
    std::memset(memory->host, 0xFF, inner);  // NaN of every type
  }
  if (settings.direct) {
    memory->address = reinterpret_cast<Address>(memory->host);
  } else {
    memory->address = world.next_address;
    world.next_address += (size + 255) / 256 * 256 + 4096;
  }
  world.memory[memory->address] = memory;
  return memory;
}

std::shared_ptr<Memory> memory_at(Address address, size_t size) {
  auto it = world.memory.upper_bound(address);
  if (it == world.memory.begin()) return nullptr;
  auto& memory = (--it)->second;
  size_t offset = address - memory->address;
  return offset <= memory->size && size <= memory->size - offset ? memory : nullptr;
}

// A launch begins once each threadgroup of the one before has let it, which may itself still wait for those before it.
static void follow(Touches& running, const std::shared_ptr<Touch>& touch) {
  if (!touch || !touch->programmatic) running.clear();
  if (!touch) return;
  auto overlap = [](auto& a, auto& b) {
    for (auto& [begin, end] : a)
      for (auto& [first, last] : b)
        if (begin < last && first < end) return true;
    return false;
  };
  if (touch->beside)
    for (auto& other : running)
      if (overlap(touch->writes, other->writes) || overlap(touch->writes, other->reads) || overlap(touch->reads, other->writes))
        violation("order",
                  "launch: " + touch->name + " does not wait for " + other->name + ", which may run yet and touches the same memory");
  // What is read early stays in a multiprocessor's cache by lines of 128 bytes.
  if (touch->early) {
    world.early++;
    auto lines = touch->early_reads;
    for (auto& [begin, end] : lines) begin = begin / 128 * 128, end = (end + 127) / 128 * 128;
    for (auto& other : running)
      if (overlap(lines, other->writes))
        violation("order", "launch: " + touch->name + " reads early what " + other->name + ", which may run yet, writes");
    if (touch->beside || touch->late) violation("order", "launch: " + touch->name + " reads early, and stands beside or is late");
  }
  if (touch->beside && running.empty()) violation("order", "launch: " + touch->name + " stands beside no launch");
  if (!touch->beside && touch->late) running.clear();
  running.push_back(touch);
}

void push(StreamState& stream, Work work, bool at_once) {
  if (!stream.capture && stream.done == stream.pushed && !stream.running.empty())
    stream.running = {std::make_shared<Touch>()};  // a launch still comes before, which touches nothing any more
  if (!work.lets_by) follow(stream.capture ? stream.capture->running : stream.running, work.touch);
  if (stream.capture) {
    stream.capture->nodes.push_back(std::move(work));
    return;
  }
  for (auto& use : work.uses) use->in_flight++;
  bool idle = stream.done == stream.pushed;
  stream.queue.push_back(std::move(work));
  stream.pushed++;
  if (at_once && idle) stream.wanted = stream.pushed;
  if (stream.wanted > stream.done || settings.in_time || stream.context->failed) changed.notify_all();
}

// -- the tests' door ----------------------------------------------------------------------------------------------------

static void give(const std::string& text, char* out, size_t size) {
  size_t n = std::min(text.size(), size - 1);
  std::memcpy(out, text.data(), n);
  out[n] = 0;
}

// Rules that were broken since the last call, one a line.
FAKE_EXPORT void fake_cuda_take_violations(char* out, size_t size) {
  std::string text;
  if (!forked) {
    std::lock_guard lock(mutex);
    for (auto& v : world.violations) text += v + "\n";
    world.violations.clear();
  }
  give(text, out, size);
}

// Lines "kind count" of what is alive; what a lost context had went with it, and a function is its module's.
FAKE_EXPORT void fake_cuda_live(char* out, size_t size) {
  std::map<std::string, int> counts;
  if (!forked) {
    std::lock_guard lock(mutex);
    for (auto& [_, object] : world.objects)
      if (object->context && !object->context->failed && object->kind != std::string("Function")) counts[object->kind]++;
    for (auto& [_, memory] : world.memory)
      if (memory->pages && !memory->context->failed) counts[memory->kind]++;
  }
  std::string text;
  for (auto& [kind, count] : counts) text += kind + " " + std::to_string(count) + "\n";
  give(text, out, size);
}

// After `skip` times, the next `count` calls of driver.h's `fault` (or runs of a kernel: "kernel") fail with `code`.
FAKE_EXPORT void fake_cuda_inject(const char* fault, int count, int code, int skip) {
  std::lock_guard lock(mutex);
  world.faults.emplace(fault, Fault{skip, count, code});
}

// Launches that read their weights before those before them were through, so far; of a recording, each once.
FAKE_EXPORT long long fake_cuda_early() {
  std::lock_guard lock(mutex);
  return world.early;
}

// Faults that nobody came by; they are gone then.
FAKE_EXPORT int fake_cuda_clear_faults() {
  std::lock_guard lock(mutex);
  int count = static_cast<int>(world.faults.size());
  world.faults.clear();
  return count;
}

// What the CPU said of the last kernel that failed.
FAKE_EXPORT void fake_cuda_last_error(char* out, size_t size) {
  std::lock_guard lock(mutex);
  give(world.last_error, out, size);
}

// What it was before; the least number where there is no such setting.
FAKE_EXPORT long long fake_cuda_set(const char* name, long long value) {
  const std::map<std::string, long long*> places = {{"in_time", &settings.in_time},
                                                    {"capability", &settings.capability},
                                                    {"devices", &settings.devices},
                                                    {"driver_version", &settings.driver_version},
                                                    {"memory_bytes", &settings.memory_bytes},
                                                    {"kernel_us", &settings.kernel_us},
                                                    {"direct", &settings.direct}};
  auto it = places.find(name);
  if (it == places.end()) return -(1ll << 62);
  std::lock_guard lock(mutex);
  changed.notify_all();
  return std::exchange(*it->second, value);
}

}  // namespace fake
