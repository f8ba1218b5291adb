#include "memory.h"

#include <algorithm>

#include "../core/error.h"

namespace metalmm::cuda {

// One for each GPU. A lost one stays lost: measured on driver 580, neither resetting the primary context nor making one of our own gives
// another, each returns the fault's error, as CUDA's manual says.
std::shared_ptr<Home> home_of(int index) {
  static auto* mutex = new std::mutex;
  static auto* homes = new std::map<int, std::shared_ptr<Home>>;
  std::lock_guard lock(*mutex);
  std::shared_ptr<Home>& home = (*homes)[index];
  const Driver& cu = driver();
  if (home && home->lost) {
    std::lock_guard inner(home->mutex);
    throw Error(ErrorKind::device,
                "cuda: after a kernel's fault (" + home->why + ") CUDA gives this process no context any more; start another process");
  }
  if (!home) {
    auto made = std::make_shared<Home>();
    cu.check(cu.device_get(&made->gpu, index), "looking for the GPU");
    cu.check(cu.context_retain(&made->context, made->gpu), "making a context");
    cu.check(cu.device_attribute(&made->most_shared_bytes, kMostSharedBytes, made->gpu), "asking what the GPU is");
    home = std::move(made);
  }
  return home;
}

namespace {

// Whether it is of a kernel and ends the context, whichever call it turns up at.
bool is_fault(Result r) { return r == 700 || r == 702 || r == 709 || r == 710 || (r >= 713 && r <= 719); }

}  // namespace

void Home::enter() const { driver().context_set(context); }

void Home::lose(const std::string& text) {
  std::lock_guard lock(mutex);
  if (!lost) why = text;
  lost = true;
}

void Home::check(Result r, const char* what) {
  if (!r) return;
  std::string text = std::string("cuda: ") + what + ": " + driver().text(r);
  if (!is_fault(r)) throw Error(ErrorKind::device, text);  // of this call alone; the context goes on
  lose(text);
  throw Error(ErrorKind::kernel, text + kEnd);
}

// A multiple of a power of two that goes into it four to eight times.
size_t Pool::space(size_t size) {
  if (size <= 512) return 512;
  size_t step = 512;
  while (step * 8 < size) step *= 2;
  return (size + step - 1) / step * step;
}

Address Pool::take(size_t size) {
  size_t bytes = space(size);
  {
    std::lock_guard lock(mutex_);
    auto it = free_.find(bytes);
    if (it != free_.end() && !it->second.empty()) {
      Address address = it->second.back();
      it->second.pop_back();
      return address;
    }
  }
  home_->enter();
  Address address = 0;
  Result r = driver().allocate(&address, bytes);
  if (r == 2) {  // out of memory: what lies idle may be enough
    std::lock_guard lock(mutex_);
    for (auto& [_, list] : free_)
      for (Address a : list) driver().free(a);
    free_.clear();
    r = driver().allocate(&address, bytes);
  }
  if (r == 2) throw Error(ErrorKind::device, "cuda: the GPU has no " + std::to_string(bytes) + " bytes left");
  home_->check(r, "allocating memory");
  allocations_++;
  return address;
}

void Pool::give_back(Address address, size_t size) {
  std::lock_guard lock(mutex_);
  free_[space(size)].push_back(address);
}

Pool::~Pool() {
  if (home_->lost) return;  // it went with the context
  home_->enter();
  for (auto& [_, list] : free_)
    for (Address a : list) driver().free(a);
}

Event EventPool::take() {
  {
    std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      Event e = free_.back();
      free_.pop_back();
      return e;
    }
  }
  Event e = nullptr;
  home_->check(driver().event_create(&e, 0), "making an event");
  return e;
}

void EventPool::give_back(Event event) {
  std::lock_guard lock(mutex_);
  free_.push_back(event);
}

EventPool::~EventPool() {
  if (home_->lost) return;
  home_->enter();
  for (Event e : free_) driver().event_destroy(e);
}

}  // namespace metalmm::cuda
