#include "metal_device.h"

#include <sys/mman.h>
#include <unistd.h>

#include "metal_mps.h"

namespace metalmm::metal {
namespace {

constexpr size_t kMaxPooledBytes = size_t{256} << 20;
constexpr size_t kMaxPooledSize = size_t{32} << 20;  // of one buffer; larger ones come and go
constexpr NSUInteger kMaxCommandBuffers = 1024;      // Metal's own limit of 64 blocks whoever takes the next, for good if none is committed

const std::pair<MTLGPUFamily, const char*> kFamilies[] = {
    {MTLGPUFamilyApple7, "apple7"}, {MTLGPUFamilyApple8, "apple8"}, {MTLGPUFamilyApple9, "apple9"}, {MTLGPUFamilyApple10, "apple10"},
    {MTLGPUFamilyMac2, "mac2"},     {MTLGPUFamilyMetal3, "metal3"}, {MTLGPUFamilyMetal4, "metal4"},
};

[[noreturn]] void fail(const std::string& what) { throw Error(ErrorKind::device, "metal: " + what); }

Handle<NSArray*> all_devices() { return Handle<NSArray*>::adopt(MTLCopyAllDevices()); }

Handle<id<MTLDevice>> find_device(int64_t index) {
  if (index < 0) return Handle<id<MTLDevice>>::adopt(MTLCreateSystemDefaultDevice());
  Handle<NSArray*> all = all_devices();
  if (index >= static_cast<int64_t>([all.get() count])) return {};
  return Handle<id<MTLDevice>>::share([all.get() objectAtIndex:static_cast<NSUInteger>(index)]);
}

Handle<id<MTLCounterSet>> timestamp_counters(id<MTLDevice> device) {
  if (![device supportsCounterSampling:MTLCounterSamplingPointAtStageBoundary]) return {};
  for (id<MTLCounterSet> set in [device counterSets])
    if ([[set name] isEqualToString:MTLCommonCounterSetTimestamp]) return Handle<id<MTLCounterSet>>::share(set);
  return {};
}

Handle<id> new_residency_set(id<MTLDevice> device, id<MTLCommandQueue> queue) {
  if (@available(macOS 15.0, *)) {
    if (![device respondsToSelector:@selector(newResidencySetWithDescriptor:error:)]) return {};
    auto descriptor = Handle<MTLResidencySetDescriptor*>::adopt([[MTLResidencySetDescriptor alloc] init]);
    auto set = Handle<id<MTLResidencySet>>::adopt([device newResidencySetWithDescriptor:descriptor.get() error:nullptr]);
    if (!set) return {};
    [queue addResidencySet:set.get()];
    return Handle<id>::share(set.get());
  }
  return {};
}

}  // namespace

bool InFlight::done() const {
  for (auto& b : command_buffers)
    if ([b.get() status] < MTLCommandBufferStatusCompleted) return false;
  return true;
}

void InFlight::wait() const {
  for (auto& b : command_buffers) [b.get() waitUntilCompleted];
}

namespace {

std::vector<std::string> device_names() {
  AutoreleasePool pool;
  std::vector<std::string> names;
  Handle<NSArray*> all = all_devices();
  for (id<MTLDevice> device in all.get()) names.push_back(text_of([device name]));
  return names;
}

std::shared_ptr<Device> make_device(const Options& o) {
  AutoreleasePool pool;
  MetalOptions options{option<int64_t>(o, "index"), option<double>(o, "spin"), option<uint32_t>(o, "max_operations"),
                       option<uint64_t>(o, "max_bytes")};
  Handle<id<MTLDevice>> device = find_device(options.index);
  if (!device) fail("there is no device " + (options.index < 0 ? "on this machine" : std::to_string(options.index)));
  return std::make_shared<MetalDevice>(std::move(device), options);
}
[[maybe_unused]] const bool added = add_backend({"metal", &make_device, &device_names});

}  // namespace

MetalDevice::MetalDevice(Handle<id<MTLDevice>> device, const MetalOptions& options)
    : Device("metal"), options_(options), device_(std::move(device)) {
  queue_ = Handle<id<MTLCommandQueue>>::adopt([get() newCommandQueueWithMaxCommandBufferCount:kMaxCommandBuffers]);
  shared_event_ = Handle<id<MTLSharedEvent>>::adopt([get() newSharedEvent]);
  if (!queue_ || !shared_event_) fail(text_of([get() name]) + " gives no command queue or event");
  unified_ = [get() hasUnifiedMemory];
  limits_.threadgroup_memory = [get() maxThreadgroupMemoryLength];
  limits_.threads = static_cast<uint32_t>([get() maxThreadsPerThreadgroup].width);
  // Apple7 and Apple8 crash in compute commands whose pipelines the encoder did not set itself (tinygrad, runtime/graph/metal.py).
  indirect_ = unified_ && [get() supportsFamily:MTLGPUFamilyApple9];
  timestamps_ = timestamp_counters(get());
  residency_ = new_residency_set(get(), queue());
  mps_ = std::make_unique<MpsCache>(get());
}

MetalDevice::~MetalDevice() = default;

Info MetalDevice::info() const {
  AutoreleasePool pool;
  id<MTLDevice> d = get();
  std::string families;
  for (auto& [family, name] : kFamilies)
    if ([d supportsFamily:family]) families += (families.empty() ? "" : " ") + std::string(name);
  return {{"name", text_of([d name])},
          {"os", text_of([[NSProcessInfo processInfo] operatingSystemVersionString])},
          {"registry_id", static_cast<int64_t>([d registryID])},
          {"families", families},
          {"unified_memory", unified_},
          {"max_total_threads_per_threadgroup", static_cast<int64_t>(limits_.threads)},
          {"max_threadgroup_memory_length", static_cast<int64_t>(limits_.threadgroup_memory)},
          {"max_buffer_length", static_cast<int64_t>([d maxBufferLength])},
          {"recommended_max_working_set_size", static_cast<int64_t>([d recommendedMaxWorkingSetSize])},
          {"per_dispatch_times", static_cast<bool>(timestamps_)},
          {"indirect_command_buffers", indirect_},
          {"residency_sets", static_cast<bool>(residency_)}};
}

Info MetalDevice::counters() const {
  std::lock_guard lock(mutex_);
  return {{"archive_hits", archive_hits_.load()},
          {"archive_misses", archive_misses_.load()},
          {"pooled_bytes", static_cast<int64_t>(pooled_bytes_)},
          {"mps_kernels", static_cast<int64_t>(mps_->size())}};
}

// -- memory -----------------------------------------------------------------------------------------------------------

Handle<id<MTLBuffer>> MetalDevice::allocate(size_t size) {
  MTLResourceOptions mode = unified_ ? MTLResourceStorageModeShared : MTLResourceStorageModeManaged;
  auto buffer = Handle<id<MTLBuffer>>::adopt([get() newBufferWithLength:std::max<size_t>(size, 16) options:mode]);
  if (!buffer)
    fail("cannot allocate " + std::to_string(size) + " bytes; the limit of a buffer is " + std::to_string([get() maxBufferLength]));
  make_resident(buffer.get(), true);
  return buffer;
}

std::shared_ptr<Buffer> MetalDevice::new_buffer(size_t size) {
  AutoreleasePool pool;
  Handle<id<MTLBuffer>> native = allocate(size);
  auto* contents = static_cast<uint8_t*>([native.get() contents]);
  std::weak_ptr<Device> weak = weak_from_this();
  auto release = [weak, contents, native] {
    auto device = std::static_pointer_cast<MetalDevice>(weak.lock());
    if (!device) return;
    device->make_resident(native.get(), false);
    std::lock_guard lock(device->mutex_);
    device->native_.erase(contents);
  };
  auto buffer = std::make_shared<Buffer>(contents, size, false, std::move(release), native.get());
  std::lock_guard lock(mutex_);
  native_[contents] = buffer;
  return buffer;
}

uint64_t MetalDevice::device_address(const Buffer& buffer) { return [native_of(buffer) gpuAddress]; }

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

std::shared_ptr<Buffer> MetalDevice::take_pooled(size_t size) {
  size_t rounded = 4096;
  while (rounded < size && rounded < kMaxPooledSize) rounded *= 2;
  if (rounded < size) return new_buffer(size);
  Handle<id<MTLBuffer>> buffer;
  {
    std::lock_guard lock(mutex_);
    auto it = pool_.find(rounded);
    if (it != pool_.end()) {
      buffer = std::move(it->second);
      pool_.erase(it);
      pooled_bytes_ -= rounded;
    }
  }
  if (!buffer) buffer = allocate(rounded);
  void* native = buffer.get();
  void* contents = [buffer.get() contents];
  std::weak_ptr<Device> weak = weak_from_this();
  auto give_back = [weak, rounded, buffer = std::move(buffer)] {
    auto locked = weak.lock();
    if (!locked) return;
    auto& device = static_cast<MetalDevice&>(*locked);
    std::multimap<size_t, Handle<id<MTLBuffer>>> stale;
    std::unique_lock lock(device.mutex_);
    if (device.pooled_bytes_ + rounded > kMaxPooledBytes) {  // of sizes that nobody asks for any more
      std::swap(stale, device.pool_);
      device.pooled_bytes_ = 0;
    }
    device.pool_.emplace(rounded, buffer);
    device.pooled_bytes_ += rounded;
    lock.unlock();
    for (auto& [size, old] : stale) device.make_resident(old.get(), false);
  };
  return std::make_shared<Buffer>(contents, rounded, false, std::move(give_back), native);
}

// Pages are mapped whole, so the rest of the last one may belong to the buffer.
std::shared_ptr<Buffer> MetalDevice::wrap(uint8_t* data, size_t size) {
  auto page = static_cast<size_t>(getpagesize());
  if (!unified_ || reinterpret_cast<uintptr_t>(data) % page) return nullptr;
  size_t whole = (size + page - 1) / page * page;
  auto buffer = Handle<id<MTLBuffer>>::adopt([get() newBufferWithBytesNoCopy:data
                                                                      length:whole
                                                                     options:MTLResourceStorageModeShared
                                                                 deallocator:nil]);
  if (!buffer) return nullptr;  // memory that the GPU cannot map: the caller copies
  void* native = buffer.get();
  return std::make_shared<Buffer>(data, whole, false, [buffer = std::move(buffer)] {}, native);
}

void MetalDevice::make_resident(id<MTLBuffer> buffer, bool add) {
  if (!residency_) return;
  if (@available(macOS 15.0, *)) {
    std::lock_guard lock(mutex_);
    id<MTLResidencySet> set = residency_.get();
    if (add)
      [set addAllocation:buffer];
    else
      [set removeAllocation:buffer];
    residency_changed_ = true;
  }
}

void MetalDevice::commit_residency() {
  if (!residency_) return;
  if (@available(macOS 15.0, *)) {
    std::lock_guard lock(mutex_);
    if (!residency_changed_) return;
    [static_cast<id<MTLResidencySet>>(residency_.get()) commit];
    residency_changed_ = false;
  }
}

// -- capture ----------------------------------------------------------------------------------------------------------

void MetalDevice::start_capture(const std::string& path) {
  AutoreleasePool pool;
  MTLCaptureManager* manager = [MTLCaptureManager sharedCaptureManager];
  if (![manager supportsDestination:MTLCaptureDestinationGPUTraceDocument])
    fail("capture: this process may not write GPU traces; start it with METAL_CAPTURE_ENABLED=1 in its environment");
  if (access(path.c_str(), F_OK) == 0) fail("capture: " + path + " exists; name a new .gputrace");
  auto descriptor = Handle<MTLCaptureDescriptor*>::adopt([[MTLCaptureDescriptor alloc] init]);
  [descriptor.get() setCaptureObject:get()];
  [descriptor.get() setDestination:MTLCaptureDestinationGPUTraceDocument];
  [descriptor.get() setOutputURL:[NSURL fileURLWithPath:ns_string(path)]];
  NSError* error = nil;
  if (![manager startCaptureWithDescriptor:descriptor.get() error:&error]) fail("capture: " + path + ": " + text_of(error));
}

void MetalDevice::stop_capture() {
  AutoreleasePool pool;
  [[MTLCaptureManager sharedCaptureManager] stopCapture];
}

}  // namespace metalmm::metal
