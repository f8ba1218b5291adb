// What stays in the GPU's reach between command buffers: one residency set of the queue, where the system has those (macOS 15).
#pragma once
#import <Metal/Metal.h>

#include <memory>
#include <mutex>
#include <unordered_set>

#include "handle.h"

namespace metalmm::metal {

// What is in the set is resident before a command buffer asks for it. What does not fit the budget is left to Metal, which makes
// resident what an encoder binds.
class Residency {
 public:
  // keep: so many seconds after the last work a thread asks again that the set be resident, for the system lets go of what is idle. 0: no
  // thread.
  Residency(id<MTLDevice> device, id<MTLCommandQueue> queue, double keep);
  ~Residency();

  explicit operator bool() const { return static_cast<bool>(set_); }
  void add(id<MTLBuffer> buffer);
  void remove(id<MTLBuffer> buffer);
  void commit();  // what was added and removed since; asks for what was added
  void note_work();
  void forget_thread();                           // in a child of fork(), which does not have it
  std::mutex& lock_for_fork() { return mutex_; }  // and for the numbers that follow
  uint64_t bytes() const { return bytes_; }
  uint64_t budget() const { return budget_; }
  int64_t calls() const { return calls_; }

 private:
  struct Heart;
  void commit_locked();
  void beat();

  Handle<id> set_;  // id<MTLResidencySet>
  std::mutex mutex_;
  bool added_ = false, removed_ = false;  // since the last commit
  std::unordered_set<void*> held_;
  uint64_t bytes_ = 0, removed_bytes_ = 0, budget_ = 0;
  int64_t calls_ = 0;
  const double keep_;
  std::unique_ptr<Heart> heart_;
};

}  // namespace metalmm::metal
