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

  // work() on this thread and, as they wake up, on the others; returns when all that began have ended. It takes its
  // share from a counter of its own, so a worker that comes late finds nothing left.
  void run(const std::function<void()>& work);

 private:
  void loop();
  std::mutex run_mutex_;  // one loop at a time
  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::atomic<uint64_t> generation_{0};
  const std::function<void()>* work_ = nullptr;
  unsigned active_ = 0, asleep_ = 0;
  bool stop_ = false;
  const int owner_;  // the process that has the threads
  std::vector<std::thread> workers_;
};

}  // namespace metalmm::cpu
