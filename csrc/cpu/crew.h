// The threads that run a dispatch, and how it is ended from outside.
#pragma once
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace metalmm::cpu {

// Threads look at the flag between threadgroups; one inside a threadgroup gets a signal, whose handler leaves the kernel
// (executor.cpp).
class Crew {
 public:
  class Member {
   public:
    explicit Member(Crew& crew) : crew_(crew) { crew_.join(); }
    ~Member() { crew_.leave(); }
    Member(const Member&) = delete;

   private:
    Crew& crew_;
  };
  void begin() { abandoned_ = false; }
  // Again and again, until nobody is left: a signal that comes while a thread changes threadgroups is lost.
  void abandon();
  const std::atomic<bool>& abandoned() const { return abandoned_; }

 private:
  void join();
  void leave();
  std::mutex mutex_;
  std::vector<pthread_t> threads_;
  std::atomic<bool> abandoned_{false};
};

// Ends a dispatch that takes longer than `seconds`.
class Watchdog {
 public:
  Watchdog(Crew& crew, double seconds);
  ~Watchdog();
  void arm();
  bool disarm();  // whether time ran out
  double seconds() const { return seconds_; }

 private:
  using Clock = std::chrono::steady_clock;
  void loop();
  Crew& crew_;
  double seconds_;
  std::mutex mutex_;
  std::condition_variable wake_;
  Clock::time_point since_{};
  bool armed_ = false, expired_ = false, stop_ = false;
  std::thread thread_;
};

}  // namespace metalmm::cpu
