// Memory of the Metal device: size classes that are used again, and pages of the host.
#include <unistd.h>

#include "metal_device.h"

namespace metalmm::metal {
namespace {

constexpr size_t kMaxPooledBytes = size_t{256} << 20;
constexpr size_t kMaxPooledSize = size_t{32} << 20;  // of one buffer; larger ones come and go
constexpr size_t kMaxWraps = 1024;

// Eight classes an octave, so that at most an eighth is wasted; whole pages of memory for what is not kept.
size_t size_class(size_t size) {
  constexpr size_t kLeast = 4096;
  if (size <= kLeast) return kLeast;
  size_t octave = size_t{1} << (63 - __builtin_clzll(size - 1));  // the largest power of 2 below it
  size_t step = size > kMaxPooledSize ? kLeast * 4 : std::max(kLeast, octave / 8);
  return (size + step - 1) / step * step;
}

}  // namespace

// Metal's validation layer ends the process where a length is over the limit.
Handle<id<MTLBuffer>> MetalDevice::allocate(size_t size, size_t asked) {
  MTLResourceOptions mode = unified_ ? MTLResourceStorageModeShared : MTLResourceStorageModeManaged;
  if (options_.untracked) mode |= MTLResourceHazardTrackingModeUntracked;
  size_t most = [get() maxBufferLength];
  std::string what = "metal: cannot allocate " + std::to_string(asked) + " bytes; ";
  if (size > most) throw Error(ErrorKind::device, what + "the limit of a buffer is " + std::to_string(most));
  auto buffer = Handle<id<MTLBuffer>>::adopt([get() newBufferWithLength:size options:mode]);
  if (!buffer && empty_pool()) buffer = Handle<id<MTLBuffer>>::adopt([get() newBufferWithLength:size options:mode]);
  if (!buffer) throw Error(ErrorKind::device, what + "there is no memory left for it");
  allocations_++;
  residency_->add(buffer.get());
  return buffer;
}

Handle<id<MTLBuffer>> MetalDevice::take(size_t size) {
  size_t rounded = size_class(size);
  if (size <= kMaxPooledSize) {
    std::lock_guard lock(mutex_);
    auto it = pool_.find(rounded);
    if (it != pool_.end()) {
      Handle<id<MTLBuffer>> buffer = std::move(it->second);
      pool_.erase(it);
      pooled_bytes_ -= rounded;
      return buffer;
    }
  }
  // An array may be as long as the limit, which need not be a class.
  return allocate(rounded > [get() maxBufferLength] && size <= [get() maxBufferLength] ? size : rounded, size);
}

// Gives what nobody uses back to the system; whether there was anything.
bool MetalDevice::empty_pool() {
  AutoreleasePool pool;
  decltype(pool_) idle;
  {
    std::lock_guard lock(mutex_);
    std::swap(idle, pool_);
    pooled_bytes_ = 0;
  }
  for (auto& [size, buffer] : idle) residency_->remove(buffer.get());
  residency_->commit();
  return !idle.empty();
}

// To the pool, resident as it is, or to the system.
std::function<void()> MetalDevice::giving_back(Handle<id<MTLBuffer>> buffer) {
  return [weak = weak_from_this(), size = [buffer.get() length], buffer = std::move(buffer)]() mutable {
    std::multimap<size_t, Handle<id<MTLBuffer>>> stale;
    auto locked = weak.lock();
    auto* device = static_cast<MetalDevice*>(locked.get());
    if (!device || size > kMaxPooledSize) {
      stale.emplace(size, std::move(buffer));
    } else {
      std::lock_guard lock(device->mutex_);
      if (device->pooled_bytes_ + size > kMaxPooledBytes) {  // of sizes that nobody asks for any more
        std::swap(stale, device->pool_);
        device->pooled_bytes_ = 0;
      }
      device->pool_.emplace(size, std::move(buffer));
      device->pooled_bytes_ += size;
    }
    if (stale.empty()) return;
    AutoreleasePool pool;  // around the last releases
    for (auto& [length, old] : stale)
      if (device) device->residency_->remove(old.get());
    stale.clear();
  };
}

std::shared_ptr<Buffer> MetalDevice::new_buffer(size_t size) {
  AutoreleasePool pool;
  Handle<id<MTLBuffer>> native = take(size);
  id<MTLBuffer> object = native.get();
  auto* contents = static_cast<uint8_t*>([object contents]);
  auto release = [weak = weak_from_this(), contents, give_back = giving_back(std::move(native))]() mutable {
    if (auto device = std::static_pointer_cast<MetalDevice>(weak.lock())) {
      std::lock_guard lock(device->mutex_);
      device->native_.erase(contents);
    }
    give_back();
  };
  auto buffer = std::make_shared<Buffer>(contents, size, false, std::move(release), object);
  std::lock_guard lock(mutex_);
  native_[contents] = buffer;
  return buffer;
}

std::shared_ptr<Buffer> MetalDevice::take_pooled(size_t size) {
  Handle<id<MTLBuffer>> native = take(size);
  id<MTLBuffer> object = native.get();
  return std::make_shared<Buffer>([object contents], [object length], false, giving_back(std::move(native)), object);
}

uint64_t MetalDevice::device_address(const std::shared_ptr<Buffer>& buffer) { return [native_of(*buffer) gpuAddress]; }

std::shared_ptr<Buffer> MetalDevice::find_native(const uint8_t* data, size_t size) {
  std::shared_ptr<Buffer> buffer;  // outlives the lock: its end takes the mutex, and it may be the last to hold it
  std::lock_guard lock(mutex_);
  auto it = native_.upper_bound(data);
  if (it == native_.begin()) return nullptr;
  buffer = (--it)->second.lock();
  return buffer && data + size <= buffer->host() + buffer->size() ? buffer : nullptr;
}

void MetalDevice::take_turn() {
  finish_through(unified_ ? last_with_host_memory_ : submitted());
  last_with_host_memory_ = submitted() + 1;
}

// -- pages of the host ------------------------------------------------------------------------------------------------

// Pages are mapped whole, so the rest of the last one may belong to the buffer.
std::shared_ptr<Buffer> MetalDevice::wrap(uint8_t* data, size_t size, const std::shared_ptr<HostLife>& life) {
  auto page = static_cast<size_t>(getpagesize());
  size_t whole = (size + page - 1) / page * page;
  if (!unified_ || reinterpret_cast<uintptr_t>(data) % page || whole > [get() maxBufferLength]) return nullptr;
  if (life) {
    std::lock_guard lock(mutex_);
    auto it = wraps_.upper_bound({life.get(), data});
    bool is_before = it != wraps_.begin() && (--it)->first.first == life.get();
    if (is_before && data + whole <= it->second->host() + it->second->size()) return it->second;
  }
  MTLResourceOptions mode = MTLResourceStorageModeShared;
  if (options_.untracked) mode |= MTLResourceHazardTrackingModeUntracked;
  auto buffer = Handle<id<MTLBuffer>>::adopt([get() newBufferWithBytesNoCopy:data length:whole options:mode deallocator:nil]);
  // Memory that the GPU cannot map; virtual machines were seen to answer with an empty buffer. The caller copies.
  if (!buffer || [buffer.get() length] < whole) return nullptr;
  wrapped_++;
  if (life) residency_->add(buffer.get());
  void* native = buffer.get();
  auto release = [weak = weak_from_this(), is_kept = static_cast<bool>(life), buffer = std::move(buffer)]() mutable {
    AutoreleasePool pool;
    auto device = std::static_pointer_cast<MetalDevice>(weak.lock());
    if (device && is_kept) device->residency_->remove(buffer.get());
    buffer = {};
  };
  auto wrapped = std::make_shared<Buffer>(data, whole, false, std::move(release), native);
  if (!life) return wrapped;
  decltype(wraps_) old;  // outlives the lock: their ends take the mutex
  std::unique_lock lock(mutex_);
  if (wraps_.size() >= kMaxWraps) std::swap(old, wraps_);
  auto it = wraps_.lower_bound({life.get(), nullptr});
  bool is_known = it != wraps_.end() && it->first.first == life.get();
  while (it != wraps_.end() && it->first.first == life.get()) {  // those of one array never overlap: windows that wander keep the last
    auto next = std::next(it);
    if (it->second->host() < data + whole && data < it->second->host() + it->second->size()) old.insert(wraps_.extract(it));
    it = next;
  }
  wraps_[{life.get(), data}] = wrapped;
  lock.unlock();
  if (is_known) return wrapped;
  life->at_end([weak = weak_from_this(), life = life.get(), born = fork_generation()] {
    if (born != fork_generation()) return;  // a child has no GPU: Metal's objects stay as they are
    if (auto device = std::static_pointer_cast<MetalDevice>(weak.lock())) device->unwrap(life);
  });
  return wrapped;
}

void MetalDevice::unwrap(HostLife* life) {
  std::vector<std::shared_ptr<Buffer>> gone;  // outlives the lock
  std::lock_guard lock(mutex_);
  auto it = wraps_.lower_bound({life, nullptr});
  for (; it != wraps_.end() && it->first.first == life; it = wraps_.erase(it)) gone.push_back(std::move(it->second));
}

}  // namespace metalmm::metal
