// A device with memory of its own, in one file: what a new folder of csrc must have, and nothing beside. The host reaches its memory
// through read() and write() alone, and its addresses mean nothing to the host; kernels come as modules of the CPU target, with their
// arguments as Python parsed them, and run one threadgroup after another when they are submitted.
#include <dlfcn.h>

#include <cstring>

#include "../../../csrc/core/batch.h"
#include "../../../csrc/cpu/executor.h"

namespace metalmm {
namespace {

constexpr uintptr_t kFirstAddress = uintptr_t{1} << 52;  // where no pointer of the host points to

struct ToyPipeline : Pipeline {
  void* module = nullptr;
  const abi::KernelInfo* info = nullptr;
  ~ToyPipeline() override { dlclose(module); }
};

// It ran when it was made.
class ToySubmission : public Submission {
 public:
  ToySubmission(std::string failure, BatchTiming timing) : failure_(std::move(failure)), timing_(std::move(timing)) {}
  BatchTiming timing() const override { return timing_; }
  void wait() override {
    if (!failure_.empty()) throw Error(ErrorKind::kernel, failure_);
  }
  bool done() const override { return true; }

 private:
  std::string failure_;
  BatchTiming timing_;
};

class ToyDevice : public Device {
 public:
  ToyDevice() : Device("toy") {}
  ~ToyDevice() override { leave_family(); }
  Info info() const override { return {{"name", std::string("a toy")}}; }
  Limits limits() const override {
    Limits limits;
    limits.grid = {1u << 31, 65535, 65535};
    return limits;
  }

  std::shared_ptr<Buffer> new_buffer(size_t size) override {
    auto* hidden = static_cast<uint8_t*>(std::calloc(size + 64, 1));
    if (!hidden) throw Error(ErrorKind::device, "toy: cannot allocate " + std::to_string(size) + " bytes");
    uintptr_t address = next_address_.fetch_add((size + 255) / 256 * 256 + 256);
    return std::make_shared<Buffer>(nullptr, size, false, [hidden] { std::free(hidden); }, hidden, address);
  }
  void read(const Buffer& b, size_t offset, void* to, size_t size) override { std::memcpy(to, memory(b) + offset, size); }
  void write(const Buffer& b, size_t offset, const void* from, size_t size) override { std::memcpy(memory(b) + offset, from, size); }

  std::shared_ptr<Pipeline> load_pipeline(const PipelineSource& source) override {
    if (source.library) throw Error(ErrorKind::unsupported, source.name + ": device toy has no library " + source.library->name);
    auto pipeline = std::make_shared<ToyPipeline>();
    pipeline->name = source.name;
    pipeline->arguments = source.arguments;
    pipeline->module = dlopen(source.file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!pipeline->module) throw Error(ErrorKind::device, "toy: " + std::string(dlerror()));
    pipeline->info = cpu::kernel_in(pipeline->module, source.file);
    pipeline->info->bind(cpu::context_tls_offset(), &cpu::current_context);
    pipeline->static_threadgroup_bytes = pipeline->info->static_threadgroup_bytes();
    if (pipeline->info->max_threads) pipeline->max_threads = pipeline->info->max_threads;
    return pipeline;
  }

 private:
  static uint8_t* memory(const Buffer& b) { return static_cast<uint8_t*>(b.native()); }

  std::shared_ptr<Submission> start(std::shared_ptr<const DispatchList> work, bool per_dispatch) override {
    std::string failure;
    BatchTiming timing;
    timing.device = 0;
    work->for_each([&](size_t, const Dispatch& d) {
      if (!failure.empty()) return;
      auto begin = Clock::now();
      failure = run_one(d);
      double took = seconds(Clock::now() - begin);
      timing.device += took;
      if (per_dispatch) timing.dispatches.push_back(took);
    });
    return std::make_shared<ToySubmission>(failure, timing);
  }

  double execute(const Dispatch& d, std::shared_ptr<Submission>*) override {
    auto list = std::make_shared<DispatchList>();
    list->add(d);
    auto submission = submit(list, false);
    wait(*submission);
    return submission->timing().device;
  }

  // A copy stands within 16 bytes as the host's memory does: by that address it was decided which loads are aligned.
  static uint8_t* copy_of(const Buffer& b, std::vector<uint8_t>& store) {
    store.resize(b.size() + 96);
    uint8_t* at = store.data() + (-reinterpret_cast<uintptr_t>(store.data()) % 16) + b.address() % 16;
    if (b.size()) std::memcpy(at, b.host(), b.size());
    return at;
  }

  // Host memory is copied in, and back where the kernel may have written.
  std::string run_one(const Dispatch& d) {
    auto& pipeline = static_cast<const ToyPipeline&>(**d.pipeline);
    static uint8_t nothing[4096];
    uint8_t* buffers[kMaxBuffers];
    std::fill(std::begin(buffers), std::end(buffers), &nothing[0]);
    uint32_t offsets[kMaxBuffers] = {};
    std::vector<std::vector<uint8_t>> copies(d.buffer_count);
    uint8_t* places[kMaxBuffers];
    for (size_t i = 0; i < d.buffer_count; i++) {
      const Buffer& b = **d.buffers[i].buffer;
      size_t first = 0;  // that has the same memory, of which there is one copy
      while (d.buffers[first].buffer->get() != &b) first++;
      places[i] = b.native() ? memory(b) : first < i ? places[first] : copy_of(b, copies[i]);
      buffers[d.buffers[i].index] = places[i] + d.buffers[i].offset;
    }
    for (size_t i = 0; i < d.bytes_count; i++) buffers[d.bytes[i].index] = static_cast<uint8_t*>(const_cast<void*>(d.bytes[i].data));
    size_t shared = pipeline.static_threadgroup_bytes;
    for (size_t i = 0; i < d.threadgroup_memory_count; i++) {
      offsets[d.threadgroup_memory[i].index] = static_cast<uint32_t>(shared);
      shared += threadgroup_space(d.threadgroup_memory[i].size);
    }
    std::atomic<bool> abandoned{false};
    auto size = [](const Size3& s) { return abi::Uint3{s[0], s[1], s[2]}; };
    cpu::KernelCall call{};
    call.info = pipeline.info;
    call.buffers = buffers;
    call.threadgroup_offsets = offsets;
    call.threadgroup_bytes = shared;
    call.grid = size(d.grid);
    call.threadgroup = size(d.threadgroup);
    call.threads = size(d.threads);
    call.abandoned = &abandoned;
    cpu::Executor executor;
    for (uint32_t z = 0; z < d.grid[2]; z++)
      for (uint32_t y = 0; y < d.grid[1]; y++)
        for (uint32_t x = 0; x < d.grid[0]; x++)
          if (std::string failure = executor.run(call, {x, y, z}); !failure.empty()) return "kernel '" + pipeline.name + "': " + failure;
    for (size_t i = 0; i < d.buffer_count; i++) {
      const Buffer& b = **d.buffers[i].buffer;
      if (!b.native() && pipeline.writes(d.buffers[i].index)) std::memcpy(b.host(), places[i], b.size());
    }
    return {};
  }

  std::atomic<uintptr_t> next_address_{kFirstAddress};
};

[[maybe_unused]] const bool added =
    add_backend({"toy", [](const Options&) -> std::shared_ptr<Device> { return std::make_shared<ToyDevice>(); },
                 [] { return std::vector<std::string>{"a toy"}; }});

}  // namespace
}  // namespace metalmm
