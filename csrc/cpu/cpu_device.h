// The device that runs compiled MSL kernels on the machine's own cores.
#pragma once
#include <condition_variable>

#include "../core/batch.h"
#include "crew.h"
#include "executor.h"
#include "thread_pool.h"

namespace metalmm::cpu {

struct CpuOptions {
  unsigned threads = 0;  // 0: the CPUs this process may use
  size_t threadgroup_memory_limit = 32 * 1024;
  bool lenient_barriers = false;
  bool debug = false;   // threadgroups and simdgroups in another order each time; kernels compiled for it count their writes
  bool guards = false;  // zones of poison around all memory that kernels are given, checked after each dispatch
  double timeout = 0;   // seconds that a dispatch may take; 0: any
};

class CpuPipeline;

// A matmul that the host computes in place of a kernel, on arguments bound as a kernel's.
using HostMatmul = std::function<void(const Dispatch& dispatch, const LibraryMatmul& what)>;
struct HostLibrary {
  HostMatmul run;
  bool (*takes)(DType type);
};
// By name, for all CPU devices.
std::map<std::string, HostLibrary>& host_libraries();

// One thread at a time runs dispatches. Waiting for it, the host polls.
class Turn {
 public:
  void take();
  void give_back();

 private:
  std::mutex mutex_;
  std::condition_variable free_;
  bool taken_ = false;
  pthread_t owner_{};
};

class CpuDevice : public Device {
 public:
  explicit CpuDevice(const CpuOptions& options);
  ~CpuDevice() override;
  std::shared_ptr<Buffer> new_buffer(size_t size) override;
  bool poisons() const override { return options_.guards; }
  std::shared_ptr<Pipeline> load_pipeline(const PipelineSource& source) override;
  Info info() const override;
  Info counters() const override;
  Limits limits() const override;
  void watch(uint8_t* begin, uint8_t* end, uint8_t* counts) override;
  std::vector<Finding> take_findings(bool go_on) override;
  void count_accesses() override;
  uint64_t device_address(const std::shared_ptr<Buffer>& buffer) override;

 private:
  friend class CpuSubmission;
  struct Watched {
    uint8_t *begin = nullptr, *end = nullptr, *counts = nullptr;
  };
  struct Run;
  std::shared_ptr<Submission> start(std::shared_ptr<const DispatchList> work, bool per_dispatch) override;
  double execute(const Dispatch& dispatch, std::shared_ptr<Submission>*) override;
  void hold_for_fork(bool hold) override;
  void forget_threads() override;
  // The rest with the turn taken.
  double run_dispatch(const Dispatch& dispatch);
  double launch_guarded(const Dispatch& dispatch);
  double launch_kernel(const CpuPipeline& pipeline, const Dispatch& dispatch, const Watched& watched);
  void run_threadgroups(const Pipeline& pipeline, const KernelCall& call);
  void run_some(Run& run, bool is_caller);
  void poll(Run& run);
  std::unique_ptr<Executor> take_executor();
  void give_executor(std::unique_ptr<Executor> executor);
  bool is_pointed_at(const uint8_t* begin, const uint8_t* end);

  CpuOptions options_;
  std::unique_ptr<Turn> turn_ = std::make_unique<Turn>();  // as Device's start_mutex_: a child of fork() leaves it behind
  std::unique_ptr<Crew> crew_ = std::make_unique<Crew>();
  std::unique_ptr<Watchdog> watchdog_;
  Clock::time_point polled_;
  uint32_t order_ = 0;
  std::atomic<uint64_t> barriers_{0}, threadgroups_{0};
  Watched watched_;  // with the turn
  Shadow shared_{true};
  std::unique_ptr<Findings> findings_;
  std::unique_ptr<Counts> counts_;
  std::mutex mutex_;  // what follows
  std::vector<std::unique_ptr<Executor>> idle_;
  std::map<const uint8_t*, std::weak_ptr<Buffer>> pointed_at_;  // of a debug device: arrays whose address somebody asked for
  std::unique_ptr<ThreadPool> pool_;
};

}  // namespace metalmm::cpu
