#include "cpu_device.h"

#include <dlfcn.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>

namespace metalmm::cpu {
namespace {

using Clock = std::chrono::steady_clock;

double seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

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
  uint8_t* buffers[kMaxBuffers] = {};  // before anything is bound

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

// Dispatches in the form that the executor takes; pointers and bytes live in the batch.
struct Record {
  std::shared_ptr<Pipeline> pipeline;
  size_t first_pointer, pointer_count;
  size_t threadgroup_bytes;
  abi::Uint3 grid, threadgroup;
};

class CpuBatch : public CommandBatch {
 public:
  explicit CpuBatch(CpuDevice* device) : device_(device), opened_(Clock::now()) {}

  void encode(const Dispatch& d) override {
    if (submitted_) throw Error(ErrorKind::closed, "batch: it was submitted already; open a new one");
    check_dispatch(d, device_->options().threadgroup_memory_limit);
    records_.push_back(make_record(d));
  }

  void submit() override {
    if (submitted_) throw Error(ErrorKind::closed, "batch: it was submitted already");
    auto start = Clock::now();
    timing_.encode = seconds(start - opened_);
    submitted_ = true;
    timing_.submit = seconds(Clock::now() - start);
  }

  // There is no device beside the host's own cores: the thread that waits does the work.
  void wait() override {
    std::lock_guard one(wait_mutex_);
    if (!submitted_) throw Error(ErrorKind::closed, "batch: wait() before submit()");
    if (!done_) {
      auto start = Clock::now();
      try {
        for (const Record& record : records_) device_->execute(*record.pipeline, call_of(record));
        timing_.device = timing_.wait = seconds(Clock::now() - start);
      } catch (...) {
        failure_ = std::current_exception();
      }
      done_ = true;
      release();
    }
    if (failure_) std::rethrow_exception(failure_);
  }

  bool submitted() const override { return submitted_; }
  BatchTiming timing() const override { return timing_; }
  size_t size() const override { return count_; }

 private:
  Record make_record(const Dispatch& d) {
    Record r{
        *d.pipeline, pointers_.size(), 0, 0, {d.grid[0], d.grid[1], d.grid[2]}, {d.threadgroup[0], d.threadgroup[1], d.threadgroup[2]}};
    auto slot = [&](uint32_t index) -> Pointer& {
      if (index >= r.pointer_count) {
        r.pointer_count = index + 1;
        pointers_.resize(r.first_pointer + r.pointer_count);
      }
      return pointers_[r.first_pointer + index];
    };
    for (size_t i = 0; i < d.buffer_count; i++) {
      const BufferBinding& b = d.buffers[i];
      slot(b.index).buffer = (*b.buffer)->data() + b.offset;
      if (i == 0 || b.buffer->get() != d.buffers[0].buffer->get()) retained_.push_back(*b.buffer);  // stand-ins repeat the first
    }
    for (size_t i = 0; i < d.bytes_count; i++) {
      const BytesBinding& b = d.bytes[i];
      size_t at = (bytes_.size() + 15) & ~size_t{15};
      bytes_.resize(at + b.size);
      std::memcpy(bytes_.data() + at, b.data, b.size);
      slot(b.index).bytes_at = at;
    }
    size_t offset = (*d.pipeline)->static_threadgroup_bytes;
    for (size_t i = 0; i < d.threadgroup_memory_count; i++) {
      const ThreadgroupMemory& m = d.threadgroup_memory[i];
      slot(m.index).threadgroup_offset = static_cast<uint32_t>(offset);
      offset += threadgroup_space(m.size);
    }
    r.threadgroup_bytes = offset;
    count_++;
    return r;
  }

  KernelCall call_of(const Record& r) {
    auto& pipeline = static_cast<const CpuPipeline&>(*r.pipeline);
    std::copy(std::begin(pipeline.buffers), std::end(pipeline.buffers), buffers_);
    for (size_t i = 0; i < r.pointer_count; i++) {
      const Pointer& p = pointers_[r.first_pointer + i];
      if (p.buffer)
        buffers_[i] = p.buffer;
      else if (p.bytes_at != kNone)
        buffers_[i] = bytes_.data() + p.bytes_at;
      offsets_[i] = p.threadgroup_offset;
    }
    return {pipeline.info, buffers_, offsets_, r.threadgroup_bytes, r.grid, r.threadgroup, device_->options().lenient_barriers};
  }

  void release() {
    retained_.clear();
    records_.clear();
  }

  static constexpr size_t kNone = ~size_t{0};
  struct Pointer {
    uint8_t* buffer = nullptr;
    size_t bytes_at = kNone;
    uint32_t threadgroup_offset = 0;
  };
  CpuDevice* device_;
  Clock::time_point opened_;
  std::vector<Record> records_;
  std::vector<Pointer> pointers_;
  std::vector<uint8_t> bytes_;
  std::vector<std::shared_ptr<Buffer>> retained_;
  uint8_t* buffers_[kMaxBuffers];
  uint32_t offsets_[kMaxBuffers];
  BatchTiming timing_;
  size_t count_ = 0;
  bool submitted_ = false, done_ = false;
  std::mutex wait_mutex_;  // two threads may wait for one batch
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
  return std::make_shared<Buffer>(data, size, false, [data] { std::free(data); });
}

std::shared_ptr<Pipeline> CpuDevice::load_pipeline(const std::string& path, const std::string& kernel) {
  return std::make_shared<CpuPipeline>(path, kernel);
}

std::unique_ptr<CommandBatch> CpuDevice::new_batch() { return std::make_unique<CpuBatch>(this); }

double CpuDevice::run(const Dispatch& d) {
  check_dispatch(d, options_.threadgroup_memory_limit);
  auto& pipeline = static_cast<const CpuPipeline&>(**d.pipeline);
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
  auto start = Clock::now();
  execute(pipeline, {pipeline.info,
                     buffers,
                     offsets,
                     threadgroup_bytes,
                     {d.grid[0], d.grid[1], d.grid[2]},
                     {d.threadgroup[0], d.threadgroup[1], d.threadgroup[2]},
                     options_.lenient_barriers});
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
void CpuDevice::execute(const Pipeline& pipeline, const KernelCall& call) {
  uint64_t total = static_cast<uint64_t>(call.grid.x) * call.grid.y * call.grid.z;
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
      for (uint64_t i = begin; i < std::min(begin + chunk, total); i++) {
        abi::Uint3 position = {static_cast<uint32_t>(i % call.grid.x), static_cast<uint32_t>(i / call.grid.x % call.grid.y),
                               static_cast<uint32_t>(i / call.grid.x / call.grid.y)};
        std::string failure = executor->run(call, position);
        if (failure.empty()) continue;
        fail(failure);
        break;
      }
    }
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
