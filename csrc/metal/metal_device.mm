#include "metal_device.h"

#include <stdlib.h>
#include <unistd.h>

#include "metal_mps.h"

namespace metalmm::metal {
namespace {

constexpr NSUInteger kMaxCommandBuffers = 1024;  // Metal's own limit of 64 blocks whoever takes the next, for good if none is committed

// By its number, as Metal4: the SDK of macOS 15 has no names for them.
constexpr auto kApple10 = MTLGPUFamily(1010);
const std::pair<MTLGPUFamily, const char*> kFamilies[] = {
    {MTLGPUFamilyApple4, "apple4"}, {MTLGPUFamilyApple5, "apple5"}, {MTLGPUFamilyApple6, "apple6"}, {MTLGPUFamilyApple7, "apple7"},
    {MTLGPUFamilyApple8, "apple8"}, {MTLGPUFamilyApple9, "apple9"}, {kApple10, "apple10"},          {MTLGPUFamilyMac2, "mac2"},
    {MTLGPUFamilyMetal3, "metal3"}, {MTLGPUFamily(5002), "metal4"},
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

constexpr const char* kTensorProbe = R"(
#include <metal_stdlib>
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
kernel void probe(device half* a [[buffer(0)]], device half* b [[buffer(1)]], device float* c [[buffer(2)]]) {
  typedef tensor<device half, dextents<int, 2>, tensor_inline> Halves;
  Halves left(a, dextents<int, 2>(32, 32)), right(b, dextents<int, 2>(32, 32));
  tensor<device float, dextents<int, 2>, tensor_inline> to(c, dextents<int, 2>(32, 32));
  constexpr auto product = mpp::tensor_ops::matmul2d_descriptor(32, 32, int(dynamic_extent));
  mpp::tensor_ops::matmul2d<product, execution_simdgroups<4>> op;
  auto sums = op.get_destination_cooperative_tensor<Halves, Halves, float>();
  op.run(left, right, sums);
  sums.store(to);
})";

std::shared_ptr<Device> make_device(const Options& o) {
  AutoreleasePool pool;
  MetalOptions options{option<int64_t>(o, "index"),        option<double>(o, "spin"),           option<uint32_t>(o, "max_operations"),
                       option<uint64_t>(o, "max_bytes"),   option<uint32_t>(o, "first_commit"), option<bool>(o, "untracked"),
                       option<bool>(o, "return_on_event"), option<int64_t>(o, "indirect"),      option<double>(o, "keep_resident")};
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
  timestamps_ = timestamp_counters(get());
  residency_ = std::make_unique<Residency>(get(), queue(), options_.keep_resident);
  if (options_.untracked || timestamps_) fence_.object = Handle<id<MTLFence>>::adopt([get() newFence]);
  if (options_.untracked) {
    order_event_ = Handle<id<MTLEvent>>::adopt([get() newEvent]);
    if (!fence_.object || !order_event_) fail(text_of([get() name]) + " gives no fence or event for untracked=True");
  }
  find_features();
  mps_ = std::make_unique<MpsCache>(get());
}

void MetalDevice::find_features() {
  bool apple7 = [get() supportsFamily:MTLGPUFamilyApple7];
  if (!apple7) lacking_.push_back("simdgroup_matrix");
  if (!apple7 && ![get() supportsFamily:MTLGPUFamilyMac2]) lacking_.push_back("simd_sum");
  if (!MPSSupportsMTLDevice(get())) lacking_.push_back("mps");
  if (!has_ndarrays()) lacking_.push_back("mps_ndarray");
  if (!has_tensors()) lacking_.push_back("tensor_ops");
  // Apple7 and Apple8 crash in compute commands whose pipelines the encoder did not set itself (tinygrad, runtime/graph/metal.py).
  apple9_ = [get() supportsFamily:MTLGPUFamilyApple9];
  indirect_ = unified_ && options_.indirect != 0 && (apple9_ || (options_.indirect == 1 && apple7));
  const char* validation = getenv("MTL_SHADER_VALIDATION");
  archives_ = !validation || !*validation || *validation == '0';  // its pipelines are others than an archive holds
}

// GPUs of M5 have them in hardware; others gain nothing. Before macOS 26.2 the compiler made wrong code of some. Whether this system's
// takes them, a small product says.
bool MetalDevice::has_tensors() {
  if (![get() supportsFamily:kApple10]) return false;
  if (@available(macOS 26.2, *)) {
    try {
      PipelineSource probe;
      probe.name = probe.kernel = "probe";
      probe.text = kTensorProbe;
      load_pipeline(probe);
      return true;
    } catch (const Error&) {}
  }
  return false;
}

void MetalDevice::hold_for_fork(bool hold) {
  for (std::mutex* m : {&mutex_, &residency_->lock_for_fork()}) hold ? m->lock() : m->unlock();
}

MetalDevice::~MetalDevice() {
  leave_family();
  AutoreleasePool pool;  // around the last releases
  for (auto& work : not_done_) work->wait();
  not_done_.clear();
  std::unordered_map<std::string, Handle<id<MTLLibrary>>>().swap(libraries_);
  wraps_.clear();
  pool_.clear();
  mps_.reset();
  next_commands_ = {};
  residency_.reset();
  timestamps_ = {}, shared_event_ = {}, fence_.object = {}, order_event_ = {}, queue_ = {}, device_ = {};
}

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
          {"architecture", text_of([[d architecture] name])},
          {"low_power_mode", static_cast<bool>([[NSProcessInfo processInfo] isLowPowerModeEnabled])},
          {"unified_memory", unified_},
          {"max_total_threads_per_threadgroup", static_cast<int64_t>(limits_.threads)},
          {"max_threadgroup_memory_length", static_cast<int64_t>(limits_.threadgroup_memory)},
          {"max_buffer_length", static_cast<int64_t>([d maxBufferLength])},
          {"recommended_max_working_set_size", static_cast<int64_t>([d recommendedMaxWorkingSetSize])},
          {"per_dispatch_times", static_cast<bool>(timestamps_)},
          {"indirect_command_buffers", indirect_},
          {"residency_sets", static_cast<bool>(*residency_)},
          {"residency_budget", static_cast<int64_t>(residency_->budget())},
          {"binary_archives", archives_}};
}

Info MetalDevice::counters() const {
  std::scoped_lock lock(mutex_, residency_->lock_for_fork());
  return {{"archive_hits", archive_hits_.load()},
          {"archive_misses", archive_misses_.load()},
          {"pooled_bytes", static_cast<int64_t>(pooled_bytes_)},
          {"allocations", allocations_.load()},
          {"wrapped", wrapped_.load()},
          {"residency_calls", residency_->calls()},
          {"resident_bytes", static_cast<int64_t>(residency_->bytes())},
          {"mps_kernels", static_cast<int64_t>(mps_->size())}};
}

void MetalDevice::lose(const std::string& why) {
  std::lock_guard lock(mutex_);
  lost_ = why;
}

void MetalDevice::check_alive() const {
  std::lock_guard lock(mutex_);
  if (!lost_.empty()) fail("the GPU does no more for this device (" + lost_ + "); make a new metalmm.Device");
}

void MetalDevice::keep_until_done(std::unique_ptr<InFlight> work) {
  std::vector<std::unique_ptr<InFlight>> done;  // let go of outside the lock: their buffers go back to the pool under it
  std::lock_guard lock(mutex_);
  not_done_.push_back(std::move(work));
  for (auto& w : not_done_)
    if (w->done()) done.push_back(std::move(w));
  not_done_.erase(std::remove(not_done_.begin(), not_done_.end(), nullptr), not_done_.end());
}

void MetalDevice::make_commands() {
  if (!next_commands_) next_commands_ = Handle<id<MTLCommandBuffer>>::share([queue() commandBufferWithUnretainedReferences]);
}

Handle<id<MTLCommandBuffer>> MetalDevice::take_commands() {
  if (!next_commands_) make_commands();
  return std::exchange(next_commands_, {});
}

void MetalDevice::order_by_event(id<MTLCommandBuffer> commands) {
  uint64_t value = ++order_value_;
  [commands encodeSignalEvent:order_event_.get() value:value];
  [commands encodeWaitForEvent:order_event_.get() value:value];
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
  auto none_starts = hold_starts();
  if (![manager startCaptureWithDescriptor:descriptor.get() error:&error]) fail("capture: " + path + ": " + text_of(error));
  next_commands_ = {};  // of before, which Metal does not capture
}

void MetalDevice::stop_capture() {
  AutoreleasePool pool;
  [[MTLCaptureManager sharedCaptureManager] stopCapture];
}

}  // namespace metalmm::metal
