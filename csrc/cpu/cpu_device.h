// The device that runs compiled MSL kernels on the machine's own cores.
#pragma once
#include <mutex>

#include "../core/batch.h"
#include "executor.h"
#include "thread_pool.h"

namespace metalmm::cpu {

struct CpuOptions {
  unsigned threads = 0;  // 0: the CPUs this process may use
  size_t threadgroup_memory_limit = 32 * 1024;
  bool lenient_barriers = false;
  bool debug = false;  // threadgroups and simdgroups in another order each time; kernels compiled for it count their writes
};

class CpuDevice : public Device {
 public:
  explicit CpuDevice(const CpuOptions& options);
  ~CpuDevice() override;
  DeviceKind kind() const override { return kCpu; }
  unsigned threads() const { return pool_->threads(); }
  std::shared_ptr<Buffer> new_buffer(size_t size) override;
  std::shared_ptr<Pipeline> load_pipeline(const PipelineSource& source) override;
  std::shared_ptr<Submission> submit(std::shared_ptr<const DispatchList> work, bool per_dispatch) override;
  double run(const Dispatch& dispatch) override;
  Info info() const override;
  Info counters() const override {
    return {{"barriers", static_cast<int64_t>(barriers_)}, {"threadgroups", static_cast<int64_t>(threadgroups_)}};
  }
  size_t threadgroup_memory_limit() const override { return options_.threadgroup_memory_limit; }
  double execute(const Dispatch& dispatch);  // one that was checked
  // From now on kernels of a debug device count their writes to [begin, end), one count for each two bytes.
  void watch(uint8_t* begin, uint8_t* end, uint8_t* counts) { watched_ = {begin, end, counts}; }

 private:
  struct Watched {
    uint8_t *begin = nullptr, *end = nullptr, *counts = nullptr;
  };
  void run_threadgroups(const Pipeline& pipeline, const KernelCall& call);
  std::unique_ptr<Executor> take_executor();
  void give_executor(std::unique_ptr<Executor> executor);

  CpuOptions options_;
  Watched watched_;
  std::atomic<uint32_t> order_{0};
  std::atomic<uint64_t> barriers_{0}, threadgroups_{0};
  std::mutex mutex_;
  std::vector<std::unique_ptr<Executor>> idle_;
  std::unique_ptr<ThreadPool> pool_;
};

}  // namespace metalmm::cpu
