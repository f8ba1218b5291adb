// NVIDIA GPUs: MSL that was lowered to CUDA C++ and compiled to machine code, launched on one stream.
#pragma once
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "../core/batch.h"
#include "../msl/runtime/cuda/arguments.h"
#include "blas.h"
#include "memory.h"
#include "order.h"

namespace metalmm::cuda {

struct CudaOptions {
  int index = 0;
  double spin = 0;
  double timeout = 0;
  bool overlap = false;
  bool debug = false;  // kernels ask before each access to memory: watch.h
  bool blas = false;   // cuBLAS was found
  size_t ahead = 0;    // the next launch's largest argument is brought to the second-level cache, if it has no more bytes
};

class CudaDevice : public Device {
 public:
  explicit CudaDevice(const CudaOptions& options);
  ~CudaDevice() override;
  Info info() const override;
  Info counters() const override;
  Limits limits() const override;
  std::shared_ptr<Buffer> new_buffer(size_t size) override;
  void read(const Buffer& buffer, size_t offset, void* to, size_t size) override;
  void write(const Buffer& buffer, size_t offset, const void* from, size_t size) override;
  std::optional<std::array<int, 2>> dlpack_place() const override { return {{2, options_.index}}; }  // kDLCUDA
  int64_t dlpack_stream() const override { return reinterpret_cast<int64_t>(stream_); }
  std::shared_ptr<Pipeline> load_pipeline(const PipelineSource& source) override;
  std::shared_ptr<Recording> record(std::shared_ptr<const DispatchList> work) override;

 private:
  friend class CudaSubmission;
  friend class CudaRecording;
  // Launches all on `stream`; what it takes of the pool is added to `kept`. in_order: none beside another, whatever they share. after(),
  // with what a debug device refused, follows each launch; settle() comes before what may block until the stream is through.
  template <class Settle, class After>
  void launch_all(const DispatchList& work, Stream stream, std::vector<Temporary>& kept, bool in_order, Settle&& settle, After&& after);
  template <class Settle>
  std::string launch(const Dispatch& d, Stream stream, std::vector<Temporary>& kept, Span next, const Order& order, Settle&& settle);
  template <class AddressOf, class Settle>
  std::string launch_kernel(const Dispatch& d, Stream stream, std::vector<Temporary>& kept, Span next, const Order& order,
                            AddressOf&& address_of, Settle&& settle);
  template <class AddressOf>
  void launch_blas(const Dispatch& d, Stream stream, AddressOf&& address_of);
  void check_here() const;
  std::shared_ptr<Submission> start(std::shared_ptr<const DispatchList> work, bool per_dispatch) override;
  double execute(const Dispatch& d, std::shared_ptr<Submission>* later) override;
  void hold_for_fork(bool hold) override;
  void forget_threads() override { forked_ = true; }

  const CudaOptions options_;
  std::shared_ptr<Home> home_;
  std::shared_ptr<Pool> pool_;
  std::shared_ptr<EventPool> events_;
  bool overlaps_ = false;  // as the options say, on a GPU that knows programmatic launches
  Stream stream_ = nullptr;
  std::optional<Temporary> nothing_;  // what an argument finds that a function constant switched off
  std::mutex workspace_mutex_;
  std::optional<Temporary> workspace_;  // cuBLAS's, of one product after another
  std::mutex record_mutex_;
  Stream record_stream_ = nullptr, stop_stream_ = nullptr;
  std::atomic<bool> forked_{false};
  std::atomic<uint32_t> stops_{0};  // how often metalmm_stop was set or cleared: what began before and ended after was cut short
};

}  // namespace metalmm::cuda
