// A GPU's context, its memory and events, which are kept for the next who asks.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "driver.h"

namespace metalmm::cuda {

inline constexpr const char* kEnd = "; this process cannot use the GPU any more, which is CUDA's rule: start another";

// The context that all of this process's CUDA shares on one GPU (torch's, too). A kernel's fault ends it; the next one is another.
struct Home {
  DeviceNumber gpu = 0;
  Context context = nullptr;
  int most_shared_bytes = 0;  // of a threadgroup, where a kernel asks for more than 48 KB
  std::atomic<bool> lost{false};
  std::mutex mutex;
  std::string why;  // it was lost
  void enter() const;
  void lose(const std::string& text);
  void check(Result r, const char* what);  // a fault of a kernel turns up at any call
};

// The context of that GPU. Throws DeviceError where it is lost.
std::shared_ptr<Home> home_of(int index);

// The GPU's memory, kept for the next of its size: what is given back was used by work before that next one's, on the same stream.
class Pool {
 public:
  explicit Pool(std::shared_ptr<Home> home) : home_(std::move(home)) {}
  ~Pool();
  Address take(size_t size);
  void give_back(Address address, size_t size);
  std::mutex& lock_for_fork() { return mutex_; }
  uint64_t allocations() const { return allocations_; }

 private:
  static size_t space(size_t size);
  std::shared_ptr<Home> home_;
  std::mutex mutex_;
  std::map<size_t, std::vector<Address>> free_;
  std::atomic<uint64_t> allocations_{0};
};

// Memory of a pool for as long as this lives.
class Temporary {
 public:
  Temporary(std::shared_ptr<Pool> pool, size_t size) : pool_(std::move(pool)), size_(size), address_(pool_->take(size)) {}
  Temporary(Temporary&& t) : pool_(std::move(t.pool_)), size_(t.size_), address_(t.address_) {}
  ~Temporary() {
    if (pool_) pool_->give_back(address_, size_);
  }
  Address address() const { return address_; }

 private:
  std::shared_ptr<Pool> pool_;
  size_t size_;
  Address address_;
};

class EventPool {
 public:
  explicit EventPool(std::shared_ptr<Home> home) : home_(std::move(home)) {}
  ~EventPool();
  Event take();
  void give_back(Event event);
  std::mutex& lock_for_fork() { return mutex_; }

 private:
  std::shared_ptr<Home> home_;
  std::mutex mutex_;
  std::vector<Event> free_;
};

}  // namespace metalmm::cuda
