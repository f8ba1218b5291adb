#include "cpu_device.h"

#include <dlfcn.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>

namespace metalmm::cpu {
namespace {

unsigned available_cpus() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return static_cast<unsigned>(CPU_COUNT(&set));
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

// What an argument finds that a function constant switched off: public kernels load from it and drop the value.
alignas(64) uint8_t nothing[4096];

class CpuPipeline : public Pipeline {
 public:
  CpuPipeline(const std::string& path, const std::string& kernel) {
    name = kernel;
    module_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!module_) throw Error(ErrorKind::device, "kernel '" + kernel + "': cannot load " + path + ": " + dlerror());
    auto* described = static_cast<const abi::KernelInfo*>(dlsym(module_, "metalmm_kernel"));
    if (!described || described->version != abi::kVersion) {
      dlclose(module_);
      throw Error(ErrorKind::device, "kernel '" + kernel + "': " + path + " was built for another version of metalmm");
    }
    info = described;
    watch = reinterpret_cast<decltype(watch)>(dlsym(module_, "metalmm_watch"));
    info->bind(context_tls_offset(), &current_context);
    static_threadgroup_bytes = info->static_threadgroup_bytes();
    if (info->max_threads) max_threads = std::min(max_threads, info->max_threads);
    for (uint32_t i = 0; i < info->arg_count; i++) add(info->args[i]);
    std::sort(arguments.begin(), arguments.end(), [](auto& a, auto& b) { return a.index < b.index; });
  }
  ~CpuPipeline() override {
    if (module_) dlclose(module_);
  }
  const abi::KernelInfo* info = nullptr;
  void (*watch)(uint8_t* begin, uint8_t* end, uint8_t* counts) = nullptr;  // of a module compiled for a debug device
  uint8_t* buffers[kMaxBuffers] = {};                                      // before anything is bound

 private:
  void add(const abi::ArgInfo& arg) {
    bool is_buffer = arg.kind == abi::ArgKind::buffer;
    if (!is_buffer && arg.kind != abi::ArgKind::threadgroup) return;
    if (!arg.enabled) {
      if (is_buffer) buffers[arg.index] = nothing;
      return;
    }
    auto kind = is_buffer ? KernelArgument::Kind::buffer : KernelArgument::Kind::threadgroup;
    arguments.push_back({kind, arg.index, arg.is_const, arg.bytes});
  }
  void* module_ = nullptr;
};

// There is no device beside the host's own cores: the thread that waits does the work.
class CpuSubmission : public Submission {
 public:
  CpuSubmission(std::shared_ptr<CpuDevice> device, std::shared_ptr<const DispatchList> work, bool per_dispatch)
      : device_(std::move(device)), work_(std::move(work)), per_dispatch_(per_dispatch) {}

  void wait() override {
    std::lock_guard one(wait_mutex_);
    if (work_) run();
    work_.reset();
    if (failure_) std::rethrow_exception(failure_);
  }
  BatchTiming timing() const override {
    std::lock_guard lock(timing_mutex_);
    return timing_;
  }

 private:
  void run() {
    auto start = Clock::now();
    BatchTiming timing;
    try {
      work_->for_each([&](size_t, const Dispatch& d) {
        double took = device_->execute(d);
        if (per_dispatch_) timing.dispatches.push_back(took);
      });
      timing.device = timing.wait = seconds(Clock::now() - start);
    } catch (...) {
      failure_ = std::current_exception();
    }
    std::lock_guard lock(timing_mutex_);
    timing_ = std::move(timing);
  }

  std::shared_ptr<CpuDevice> device_;
  std::shared_ptr<const DispatchList> work_;
  bool per_dispatch_;
  // Two threads may wait for one batch. Whoever asks for its timing holds the GIL, and must not wait for that.
  std::mutex wait_mutex_;
  mutable std::mutex timing_mutex_;
  BatchTiming timing_;
  std::exception_ptr failure_;
};

}  // namespace

CpuDevice::CpuDevice(const CpuOptions& options)
    : options_(options), pool_(std::make_unique<ThreadPool>(options.threads ? options.threads : available_cpus())) {}

CpuDevice::~CpuDevice() {
  if (pool_->forked()) (void)pool_.release();  // its condition variables wait for threads that are not here
}

// Slack behind the end holds NaN, so that a read past the end shows in the result. Large buffers ask for huge pages: a
// kernel that walks down 128 rows at once has 56 small pages in use, and page walks cost a virtual machine most.
std::shared_ptr<Buffer> CpuDevice::new_buffer(size_t size) {
  constexpr size_t kSlack = 128, kHugePage = 2 << 20;
  size_t alignment = size >= kHugePage ? kHugePage : 128;
  size_t bytes = (size + kSlack + alignment - 1) / alignment * alignment;
  void* data = std::aligned_alloc(alignment, bytes);
#if defined(MADV_HUGEPAGE)
  if (data && size >= kHugePage) madvise(data, bytes, MADV_HUGEPAGE);
#endif
  if (!data) throw Error(ErrorKind::device, "cpu: cannot allocate " + std::to_string(size) + " bytes");
  std::memset(static_cast<uint8_t*>(data) + size, 0xff, std::min(bytes - size, kSlack));
  return std::make_shared<Buffer>(data, size, false, [data] { std::free(data); }, data);
}

std::shared_ptr<Pipeline> CpuDevice::load_pipeline(const PipelineSource& source) {
  return std::make_shared<CpuPipeline>(source.code, source.name);
}

Info CpuDevice::info() const {
  return {{"max_total_threads_per_threadgroup", int64_t{1024}},
          {"max_threadgroup_memory_length", static_cast<int64_t>(options_.threadgroup_memory_limit)},
          {"unified_memory", true}};
}

std::shared_ptr<Submission> CpuDevice::submit(std::shared_ptr<const DispatchList> work, bool per_dispatch) {
  return std::make_shared<CpuSubmission>(std::static_pointer_cast<CpuDevice>(shared_from_this()), std::move(work), per_dispatch);
}

double CpuDevice::run(const Dispatch& d) {
  check_dispatch(d, options_.threadgroup_memory_limit);
  return execute(d);
}

double CpuDevice::execute(const Dispatch& d) {
  auto start = Clock::now();
  if ((*d.pipeline)->host) {
    (*d.pipeline)->host(d);
    return seconds(Clock::now() - start);
  }
  auto& pipeline = static_cast<const CpuPipeline&>(**d.pipeline);
  if (pipeline.watch) pipeline.watch(watched_.begin, watched_.end, watched_.counts);
  uint8_t* buffers[kMaxBuffers];
  std::copy(std::begin(pipeline.buffers), std::end(pipeline.buffers), buffers);
  uint32_t offsets[kMaxBuffers] = {};
  for (size_t i = 0; i < d.buffer_count; i++) buffers[d.buffers[i].index] = (*d.buffers[i].buffer)->data() + d.buffers[i].offset;
  for (size_t i = 0; i < d.bytes_count; i++) {
    // Kernels only read bytes: check_dispatch refuses them for an argument that is not const.
    buffers[d.bytes[i].index] = static_cast<uint8_t*>(const_cast<void*>(d.bytes[i].data));
  }
  size_t threadgroup_bytes = pipeline.static_threadgroup_bytes;
  for (size_t i = 0; i < d.threadgroup_memory_count; i++) {
    offsets[d.threadgroup_memory[i].index] = static_cast<uint32_t>(threadgroup_bytes);
    threadgroup_bytes += threadgroup_space(d.threadgroup_memory[i].size);
  }
  run_threadgroups(pipeline, {pipeline.info,
                              buffers,
                              offsets,
                              threadgroup_bytes,
                              {d.grid[0], d.grid[1], d.grid[2]},
                              {d.threadgroup[0], d.threadgroup[1], d.threadgroup[2]},
                              options_.lenient_barriers,
                              options_.debug ? order_.load() : 0});
  return seconds(Clock::now() - start);
}

std::unique_ptr<Executor> CpuDevice::take_executor() {
  {
    std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      auto executor = std::move(idle_.back());
      idle_.pop_back();
      return executor;
    }
  }
  return std::make_unique<Executor>();
}

void CpuDevice::give_executor(std::unique_ptr<Executor> executor) {
  std::lock_guard lock(mutex_);
  idle_.push_back(std::move(executor));
}

// Threadgroups in x, then y, then z order, a few at a time to each thread.
void CpuDevice::run_threadgroups(const Pipeline& pipeline, const KernelCall& call) {
  uint64_t total = static_cast<uint64_t>(call.grid.x) * call.grid.y * call.grid.z;
  threadgroups_.fetch_add(total, std::memory_order_relaxed);
  // A step that has no common factor with the number of threadgroups visits each once.
  uint64_t step = 1, offset = 0;
  if (options_.debug) {
    uint64_t seed = (order_ += 0x9e3779b9u);
    offset = seed % total;
    for (step = seed % total | 1; std::gcd(step, total) != 1;) step += 2;
  }
  uint64_t chunk = std::max<uint64_t>(1, total / (pool_->threads() * 8));
  std::atomic<uint64_t> next{0};
  std::mutex error_mutex;
  std::string error;
  auto fail = [&](const std::string& failure) {
    next = total;
    std::lock_guard lock(error_mutex);
    if (error.empty()) error = failure;
  };
  auto run_some = [&] {
    if (next.load(std::memory_order_relaxed) >= total) return;
    std::unique_ptr<Executor> executor = take_executor();
    for (;;) {
      uint64_t begin = next.fetch_add(chunk);
      if (begin >= total) break;
      for (uint64_t j = begin; j < std::min(begin + chunk, total); j++) {
        uint64_t i = options_.debug ? (j * step + offset) % total : j;
        abi::Uint3 position = {static_cast<uint32_t>(i % call.grid.x), static_cast<uint32_t>(i / call.grid.x % call.grid.y),
                               static_cast<uint32_t>(i / call.grid.x / call.grid.y)};
        std::string failure = executor->run(call, position);
        if (failure.empty()) continue;
        fail(failure);
        break;
      }
    }
    barriers_ += executor->take_barriers();
    give_executor(std::move(executor));
  };
  // Nothing may leave a worker thread: there is nobody to catch it.
  auto work = [&] {
    try {
      run_some();
    } catch (const std::exception& e) {
      fail(std::string("no memory for its threads (") + e.what() + ")");
    }
  };
  if (total == 1 || pool_->threads() == 1)
    work();
  else
    pool_->run(work);
  if (!error.empty()) throw Error(ErrorKind::kernel, "kernel '" + pipeline.name + "': " + error);
}

}  // namespace metalmm::cpu
