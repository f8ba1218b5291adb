#include "crew.h"

#include <algorithm>

#include "executor.h"

namespace metalmm::cpu {

void Crew::join() {
  std::lock_guard lock(mutex_);
  threads_.push_back(pthread_self());
}

void Crew::leave() {
  std::lock_guard lock(mutex_);
  for (pthread_t& t : threads_) {
    if (!pthread_equal(t, pthread_self())) continue;
    t = threads_.back();
    threads_.pop_back();
    return;
  }
}

void Crew::abandon() {
  abandoned_ = true;
  hold_abandon_signal();
  std::lock_guard lock(mutex_);  // a member is alive
  for (pthread_t t : threads_) pthread_kill(t, kAbandonSignal);
}

Watchdog::Watchdog(Crew& crew, double seconds) : crew_(crew), seconds_(seconds), thread_([this] { loop(); }) {}

Watchdog::~Watchdog() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void Watchdog::arm() {
  std::lock_guard lock(mutex_);
  since_ = Clock::now();
  armed_ = true;
  expired_ = false;
}

bool Watchdog::disarm() {
  std::lock_guard lock(mutex_);
  armed_ = false;
  return expired_;
}

// It looks at the clock now and then, so that arming it costs a dispatch no wake-up.
void Watchdog::loop() {
  auto limit = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds_));
  auto look = std::clamp<Clock::duration>(limit / 8, std::chrono::milliseconds(1), std::chrono::milliseconds(100));
  std::unique_lock lock(mutex_);
  while (!stop_) {
    wake_.wait_for(lock, expired_ && armed_ ? std::chrono::milliseconds(2) : look);
    if (!armed_ || Clock::now() - since_ < limit) continue;
    expired_ = true;
    crew_.abandon();
  }
}

}  // namespace metalmm::cpu
