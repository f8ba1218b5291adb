// OS threads that share one loop at a time with the thread that starts it.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace metalmm::cpu {

class ThreadPool {
 public:
  explicit ThreadPool(unsigned threads);  // the caller of run() is one of them
  ~ThreadPool();
  bool forked() const;  // in a child of fork(): it works alone, and must not destroy this
  unsigned threads() const { return static_cast<unsigned>(workers_.size()) + 1; }

  // work(true) on this thread and, as they wake up, work(false) on the others; returns when all that began have ended. It takes its
  // share from a counter of its own, so a worker that comes late finds nothing left. `meanwhile` is called now and then while this
  // thread waits for the others. From one thread at a time.
  using Work = std::function<void(bool is_caller)>;
  void run(const Work& work, const std::function<void()>& meanwhile);

 private:
  void loop();
  void stop();
  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::atomic<uint64_t> generation_{0};
  const Work* work_ = nullptr;
  std::atomic<unsigned> active_{0};  // written under the mutex
  unsigned asleep_ = 0;
  bool stop_ = false;
  const uint32_t owner_;  // fork_generation() of the process that has the threads
  std::vector<std::thread> workers_;
};

}  // namespace metalmm::cpu
