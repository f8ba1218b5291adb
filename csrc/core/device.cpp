#include "device.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace metalmm {
namespace {

constexpr size_t kMaxPending = 32;  // submissions that nobody waited for, far below what a queue of Metal has

[[noreturn]] void fail(const Pipeline& pipeline, const std::string& what) {
  throw Error(ErrorKind::kernel, "kernel '" + pipeline.name + "': " + what);
}

std::string text(const Size3& s) { return "(" + std::to_string(s[0]) + ", " + std::to_string(s[1]) + ", " + std::to_string(s[2]) + ")"; }

void check_threads(const Dispatch& d, const Limits& limits) {
  const Pipeline& p = **d.pipeline;
  uint64_t threads = 1, groups = 1;
  for (int i = 0; i < 3; i++) {
    threads *= d.threadgroup[i];
    groups *= d.grid[i];
    if (groups > UINT32_MAX || threads > UINT32_MAX) fail(p, "grid " + text(d.grid) + " has more than 2^32 threadgroups");
    if (d.grid[i] > limits.grid[i])
      fail(p, "grid " + text(d.grid) + " has " + std::to_string(d.grid[i]) + " threadgroups in axis " + std::string(1, "xyz"[i]) +
                  "; the limit of the device is " + std::to_string(limits.grid[i]));
  }
  if (groups == 0) fail(p, "grid " + text(d.grid) + " is empty; every axis must be at least 1");
  if (threads == 0) fail(p, "threadgroup " + text(d.threadgroup) + " is empty; every axis must be at least 1");
  uint32_t limit = std::min(p.max_threads, limits.threads);
  if (threads > limit)
    fail(p, "threadgroup " + text(d.threadgroup) + " has " + std::to_string(threads) + " threads; the limit of this kernel is " +
                std::to_string(limit));
}

void check_buffer(const Dispatch& d, const KernelArgument& arg) {
  const Pipeline& p = **d.pipeline;
  auto index = [&] { return std::to_string(arg.index); };
  for (size_t i = 0; i < d.buffer_count; i++) {
    const BufferBinding& b = d.buffers[i];
    if (b.index != arg.index) continue;
    size_t left = (*b.buffer)->size() - b.offset;
    if (left < arg.bytes)
      fail(p, "buffer " + index() + " holds " + std::to_string(left) + " bytes; the argument takes at least " + std::to_string(arg.bytes));
    if (arg.alignment > 1 && ((*b.buffer)->address() + b.offset) % arg.alignment)
      fail(p, "buffer " + index() + " begins at an address that is no multiple of " + std::to_string(arg.alignment) +
                  ", as its argument's type must; copy it with device.array()");
    if ((*b.buffer)->read_only() && !arg.is_const)
      fail(p, "buffer " + index() + " is read-only memory and the kernel's argument is not const");
    return;
  }
  for (size_t i = 0; i < d.bytes_count; i++) {
    const BytesBinding& b = d.bytes[i];
    if (b.index != arg.index) continue;
    if (!arg.is_const) fail(p, "argument " + index() + " is not const; bind a buffer, not bytes");
    if (b.size < arg.bytes)
      fail(p,
           "bytes at index " + index() + " are " + std::to_string(b.size) + "; the argument takes at least " + std::to_string(arg.bytes));
    return;
  }
  fail(p, "nothing is bound to buffer index " + index() + "; bind a buffer, or None for one that the kernel will not touch");
}

}  // namespace

// -- order ------------------------------------------------------------------------------------------------------------

std::atomic<void (*)()> host_poll{nullptr};

void Pipeline::take_types(const std::vector<KernelArgument>& said) {
  for (KernelArgument& own : arguments)
    for (const KernelArgument& other : said)
      if (own.kind == other.kind && own.index == other.index) own.type = other.type;
}

std::shared_ptr<Submission> Device::push(std::shared_ptr<Submission> submission) {
  std::lock_guard lock(order_mutex_);
  submission->number_ = ++pushed_;
  pending_.push_back(submission);
  return submission;
}

// Lets go of what is through, and waits for the oldest where too many are not.
void Device::make_room() {
  for (;;) {
    uint64_t oldest;
    {
      std::lock_guard lock(order_mutex_);
      if (pending_.empty() || (pending_.size() < kMaxPending && !pending_.front()->done())) return;
      oldest = pending_.front()->number_;
    }
    finish_through(oldest);
  }
}

std::shared_ptr<Submission> Device::submit(std::shared_ptr<const DispatchList> work, bool per_dispatch) {
  make_room();
  std::lock_guard lock(*start_mutex_);
  return push(start(std::move(work), per_dispatch));
}

std::shared_ptr<Submission> Device::submit(Recording& recording) {
  make_room();
  std::lock_guard lock(*start_mutex_);
  return push(recording.start());
}

// Whether it was this call that took it off the list.
bool Device::retire(const Submission& submission) {
  std::shared_ptr<Submission> last;  // let go of outside the lock: that may release NumPy memory, which takes the GIL
  std::lock_guard lock(order_mutex_);
  if (pending_.empty() || pending_.front().get() != &submission) return false;
  last = std::move(pending_.front());
  pending_.pop_front();
  retired_ = last->number_;
  return true;
}

void Device::finish_through(uint64_t number) {
  while (retired_.load(std::memory_order_acquire) < number) {
    std::shared_ptr<Submission> first;
    {
      std::lock_guard lock(order_mutex_);
      if (pending_.empty() || pending_.front()->number_ > number) return;
      first = pending_.front();
    }
    std::string failure;
    try {
      first->wait();
    } catch (const Error& e) {
      if (!first->done()) throw;  // it could not be waited for
      failure = e.what();
    } catch (...) {  // not the work's failure, but the waiting thread's: Ctrl-C
      if (first->done()) retire(*first);
      throw;
    }
    if (retire(*first) && !failure.empty()) warn("a submission that nobody waited for failed: " + failure);
  }
}

void Device::wait(Submission& submission) {
  finish_through(submission.number_ - 1);
  try {
    submission.wait();
  } catch (...) {
    if (submission.done()) retire(submission);  // else it still has to run
    throw;
  }
  retire(submission);
}

void Device::finish() { finish_through(pushed_); }

double Device::run(const Dispatch& dispatch, std::shared_ptr<Submission>* later) {
  check_dispatch(dispatch, limits());
  return execute(dispatch, later);
}

void Device::warn(const std::string& text) {
  std::lock_guard lock(order_mutex_);
  warnings_.push_back("metalmm: " + text);
  has_warnings_ = true;
}

std::vector<std::string> Device::take_warnings() {
  std::lock_guard lock(order_mutex_);
  has_warnings_ = false;
  return std::exchange(warnings_, {});
}

// -- fork -------------------------------------------------------------------------------------------------------------
//
// A child has the memory and one thread. Locks that are held for moments are taken around the fork, so that what they guard is
// whole in the child; locks that are held while a kernel runs are left behind there, with the work under them.

namespace {

struct Family {
  std::mutex mutex;
  std::vector<Device*> devices;
  std::atomic<uint32_t> generation{0};
};
Family& family() {
  static Family* f = new Family;
  return *f;
}

void hold_family() {
  family().mutex.lock();
  for (Device* d : family().devices) d->before_fork();
}
void let_family_go(bool in_child) {
  if (in_child) family().generation++;
  for (Device* d : family().devices) d->after_fork(in_child);
  family().mutex.unlock();
}

}  // namespace

uint32_t fork_generation() { return family().generation.load(std::memory_order_relaxed); }

Device::Device(const std::string& name) : name_(name), name_bit_(metalmm::name_bit(name)) {
  static const int registered = pthread_atfork(&hold_family, [] { let_family_go(false); }, [] { let_family_go(true); });
  (void)registered;
  std::lock_guard lock(family().mutex);
  family().devices.push_back(this);
}

Device::~Device() { leave_family(); }

void Device::leave_family() {
  std::lock_guard lock(family().mutex);
  auto& all = family().devices;
  all.erase(std::remove(all.begin(), all.end(), this), all.end());
}

void Device::before_fork() {
  order_mutex_.lock();
  hold_for_fork(true);
}

void Device::after_fork(bool in_child) {
  if (in_child) {
    (void)start_mutex_.release();
    start_mutex_ = std::make_unique<std::mutex>();
    // Not let go of: their ends could wait for threads that are not here. The parent runs them.
    (void)new std::deque<std::shared_ptr<Submission>>(std::exchange(pending_, {}));
    retired_ = pushed_.load();
    forget_threads();
  }
  hold_for_fork(false);
  order_mutex_.unlock();
}

// -- the rest ---------------------------------------------------------------------------------------------------------

std::vector<std::string> Device::kernel_names(const std::string&) {
  throw Error(ErrorKind::device, name() + ": it compiles no source text");
}

void Device::start_capture(const std::string&) {
  throw Error(ErrorKind::device, "capture: device " + name() + " has no GPU capture; a device on a GPU of Apple has");
}

std::vector<Device::Finding> Device::take_findings(bool) {
  throw Error(ErrorKind::device, "device " + name() + " finds no races; device cpu does, made by Device('cpu', debug=True)");
}

void Device::count_accesses() {
  throw Error(ErrorKind::device, "device " + name() + " counts no accesses; device cpu does, made by Device('cpu', debug=True)");
}

void Device::watch(uint8_t*, uint8_t*, uint8_t*) { throw Error(ErrorKind::device, "device " + name() + " counts no writes"); }

void Device::read(const Buffer& buffer, size_t offset, void* to, size_t size) {
  if (size) std::memcpy(to, buffer.host() + offset, size);
}

void Device::write(const Buffer& buffer, size_t offset, const void* from, size_t size) {
  if (size) std::memcpy(buffer.host() + offset, from, size);
}

namespace {
struct Known {
  std::mutex mutex;
  std::vector<std::string> names;
  std::vector<Backend> backends;
};
Known& known() {
  static Known* k = new Known;
  return *k;
}
}  // namespace

uint32_t name_bit(const std::string& name) {
  Known& k = known();
  std::lock_guard lock(k.mutex);
  size_t at = static_cast<size_t>(std::find(k.names.begin(), k.names.end(), name) - k.names.begin());
  if (at == k.names.size()) k.names.push_back(name);
  if (at >= 32) throw Error(ErrorKind::device, "more than 32 names of devices");
  return 1u << at;
}

bool add_backend(const Backend& backend) {
  known().backends.push_back(backend);
  return true;
}

const Backend* find_backend(const std::string& name) {
  for (const Backend& b : known().backends)
    if (b.name == name) return &b;
  return nullptr;
}

void end_backends() {
  for (const Backend& b : known().backends)
    if (b.end) b.end();
}

void check_dispatch(const Dispatch& d, const Limits& limits) {
  check_threads(d, limits);
  size_t limit = limits.threadgroup_memory;
  const Pipeline& p = **d.pipeline;
  size_t total = p.static_threadgroup_bytes;
  for (size_t i = 0; i < d.threadgroup_memory_count; i++) {
    const ThreadgroupMemory& m = d.threadgroup_memory[i];
    if (m.index >= kMaxBuffers) fail(p, "threadgroup memory index " + std::to_string(m.index) + " is not in 0 to 30");
    // Before it is rounded up: a size near the largest would wrap to nothing.
    if (m.size > limit) fail(p, std::to_string(m.size) + " bytes of threadgroup memory; the limit is " + std::to_string(limit));
    total += threadgroup_space(m.size);
  }
  if (total > limit) fail(p, std::to_string(total) + " bytes of threadgroup memory; the limit is " + std::to_string(limit));
  for (const KernelArgument& arg : p.arguments) {
    if (arg.kind == KernelArgument::Kind::buffer) {
      check_buffer(d, arg);
      continue;
    }
    bool found = false;
    for (size_t i = 0; i < d.threadgroup_memory_count; i++) found |= d.threadgroup_memory[i].index == arg.index;
    if (!found) fail(p, "no size is given for threadgroup memory " + std::to_string(arg.index));
  }
}

}  // namespace metalmm
