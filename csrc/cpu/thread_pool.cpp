#include "thread_pool.h"

#include <unistd.h>

#include <chrono>

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

}  // namespace

ThreadPool::ThreadPool(unsigned threads) : owner_(getpid()) {
  for (unsigned i = 1; i < threads; i++) workers_.emplace_back([this] { loop(); });
}

// A child of fork() has the pool and not its threads; what its mutexes hold nobody will release.
bool ThreadPool::forked() const { return getpid() != owner_; }

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    generation_++;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(const std::function<void()>& work) {
  if (forked()) return work();
  std::lock_guard one(run_mutex_);
  bool notify;
  {
    std::lock_guard lock(mutex_);
    work_ = &work;
    generation_++;
    notify = asleep_ > 0;
  }
  if (notify) wake_.notify_all();
  work();
  std::unique_lock lock(mutex_);
  work_ = nullptr;
  idle_.wait(lock, [this] { return active_ == 0; });
}

void ThreadPool::loop() {
  uint64_t seen = 0;
  for (;;) {
    auto deadline = std::chrono::steady_clock::now() + kSpin;
    while (generation_.load(std::memory_order_acquire) == seen && std::chrono::steady_clock::now() < deadline) pause();
    std::unique_lock lock(mutex_);
    asleep_++;
    wake_.wait(lock, [&] { return generation_.load() != seen; });
    asleep_--;
    seen = generation_.load();
    if (stop_) return;
    if (!work_) continue;
    active_++;
    const std::function<void()>* work = work_;
    lock.unlock();
    (*work)();
    lock.lock();
    if (--active_ == 0) idle_.notify_all();
  }
}

}  // namespace metalmm::cpu
