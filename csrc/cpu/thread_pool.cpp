#include "thread_pool.h"

#include <chrono>
#include <system_error>

#include "../core/device.h"

namespace metalmm::cpu {
namespace {

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waking a sleeping thread takes 5 to 50 us, as long as a small matmul; the next one often comes sooner.
constexpr auto kSpin = std::chrono::microseconds(50);

template <class Done>
void spin(const Done& done) {
  auto deadline = std::chrono::steady_clock::now() + kSpin;
  while (!done() && std::chrono::steady_clock::now() < deadline) pause();
}

}  // namespace

ThreadPool::ThreadPool(unsigned threads) : owner_(fork_generation()) {
  try {
    for (unsigned i = 1; i < threads; i++) workers_.emplace_back([this] { loop(); });
  } catch (const std::system_error& e) {
    size_t made = workers_.size() + 1;
    stop();
    throw Error(ErrorKind::device, "cpu: the system gives no more than " + std::to_string(made) + " of " + std::to_string(threads) +
                                       " threads (" + e.what() + "); make the device with threads=" + std::to_string(made) + " or fewer");
  } catch (...) {
    stop();
    throw;
  }
}

// A child of fork() has the pool and not its threads; what its mutexes hold nobody will release.
bool ThreadPool::forked() const { return fork_generation() != owner_; }

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    generation_++;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
}

void ThreadPool::run(const Work& work, const std::function<void()>& meanwhile) {
  if (forked()) return work(true);
  bool notify;
  {
    std::lock_guard lock(mutex_);
    work_ = &work;
    generation_++;
    notify = asleep_ > 0;
  }
  if (notify) wake_.notify_all();
  work(true);
  if (forked()) return;  // meanwhile, in a signal's handler: nobody will come
  {
    std::lock_guard lock(mutex_);
    work_ = nullptr;
  }
  // The others have no more than their last share left: most often they end before a sleep would.
  spin([this] { return active_.load(std::memory_order_acquire) == 0; });
  std::unique_lock lock(mutex_);
  while (!idle_.wait_for(lock, std::chrono::milliseconds(20), [this] { return active_ == 0; })) {
    lock.unlock();
    meanwhile();
    if (forked()) return;
    lock.lock();
  }
}

void ThreadPool::loop() {
  uint64_t seen = 0;
  for (;;) {
    spin([&] { return generation_.load(std::memory_order_acquire) != seen; });
    std::unique_lock lock(mutex_);
    asleep_++;
    wake_.wait(lock, [&] { return generation_.load() != seen; });
    asleep_--;
    seen = generation_.load();
    if (stop_) return;
    if (!work_) continue;
    active_++;
    const Work* work = work_;
    lock.unlock();
    (*work)(false);
    lock.lock();
    if (--active_ == 0) idle_.notify_all();
  }
}

}  // namespace metalmm::cpu
