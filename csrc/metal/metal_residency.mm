#include "metal_residency.h"

#include <chrono>
#include <condition_variable>
#include <thread>

namespace metalmm::metal {
namespace {

using Clock = std::chrono::system_clock;                 // ThreadSanitizer does not know the waits of the other
constexpr uint64_t kRemovedAtOnce = uint64_t{64} << 20;  // memory that must not wait for the next commit
constexpr auto kBeat = std::chrono::milliseconds(500);   // llama.cpp's, whose measurements say that a second is too long

}  // namespace

struct Residency::Heart {
  std::thread thread;
  std::condition_variable woken;
  bool is_idle = false, ends = false;
  Clock::time_point last_work = Clock::now();
};

Residency::Residency(id<MTLDevice> device, id<MTLCommandQueue> queue, double keep) : keep_(keep) {
  if (@available(macOS 15.0, *)) {
    if (![device respondsToSelector:@selector(newResidencySetWithDescriptor:error:)]) return;
    auto descriptor = Handle<MTLResidencySetDescriptor*>::adopt([[MTLResidencySetDescriptor alloc] init]);
    auto set = Handle<id<MTLResidencySet>>::adopt([device newResidencySetWithDescriptor:descriptor.get() error:nullptr]);
    if (!set) return;
    [queue addResidencySet:set.get()];
    set_ = Handle<id>::share(set.get());
    budget_ = [device recommendedMaxWorkingSetSize] / 8 * 7;  // others need memory, too
    if (keep_ <= 0) return;
    heart_ = std::make_unique<Heart>();
    heart_->thread = std::thread([this] { beat(); });
  }
}

Residency::~Residency() {
  if (heart_) {
    {
      std::lock_guard lock(mutex_);
      heart_->ends = true;
    }
    heart_->woken.notify_one();
    heart_->thread.join();
  }
  if (!set_) return;
  if (@available(macOS 15.0, *)) [static_cast<id<MTLResidencySet>>(set_.get()) endResidency];
}

// Not ended: its condition variable would wait for a thread that is not here.
void Residency::forget_thread() { (void)heart_.release(); }

void Residency::add(id<MTLBuffer> buffer) {
  if (!set_) return;
  if (@available(macOS 15.0, *)) {
    std::lock_guard lock(mutex_);
    uint64_t size = [buffer length];
    if (bytes_ + size > budget_) return;
    held_.insert(buffer);
    bytes_ += size;
    [static_cast<id<MTLResidencySet>>(set_.get()) addAllocation:buffer];
    added_ = true;
    calls_++;
  }
}

void Residency::remove(id<MTLBuffer> buffer) {
  if (!set_) return;
  if (@available(macOS 15.0, *)) {
    std::lock_guard lock(mutex_);
    if (!held_.erase(buffer)) return;
    uint64_t size = [buffer length];
    bytes_ -= size;
    removed_bytes_ += size;
    [static_cast<id<MTLResidencySet>>(set_.get()) removeAllocation:buffer];
    removed_ = true;
    calls_++;
    if (removed_bytes_ >= kRemovedAtOnce) commit_locked();
  }
}

void Residency::commit() {
  if (!set_) return;
  std::lock_guard lock(mutex_);
  if (added_ || removed_) commit_locked();
}

void Residency::commit_locked() {
  if (@available(macOS 15.0, *)) {
    id<MTLResidencySet> set = set_.get();
    [set commit];
    if (added_) [set requestResidency];
    calls_ += added_ ? 2 : 1;
    added_ = removed_ = false;
    removed_bytes_ = 0;
  }
}

void Residency::note_work() {
  if (!heart_) return;
  std::unique_lock lock(mutex_);
  heart_->last_work = Clock::now();
  if (!heart_->is_idle) return;
  lock.unlock();
  heart_->woken.notify_one();
}

void Residency::beat() {
  std::unique_lock lock(mutex_);
  Heart& heart = *heart_;
  while (!heart.ends) {
    heart.is_idle = std::chrono::duration<double>(Clock::now() - heart.last_work).count() > keep_;
    if (heart.is_idle)
      heart.woken.wait(lock);
    else
      heart.woken.wait_until(lock, Clock::now() + kBeat);
    if (heart.ends) break;
    if (@available(macOS 15.0, *)) {
      AutoreleasePool pool;
      [static_cast<id<MTLResidencySet>>(set_.get()) requestResidency];
    }
    calls_++;
  }
}

}  // namespace metalmm::metal
