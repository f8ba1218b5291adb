// A kernel's machine code on the GPU, and what its table says of its arguments; or a library's matmul.
#pragma once
#include "../core/batch.h"
#include "../core/hazards.h"
#include "../msl/runtime/cuda/arguments.h"
#include "blas.h"
#include "memory.h"
#include "watch.h"

namespace metalmm::cuda {

class CudaPipeline : public Pipeline {
 public:
  CudaPipeline(std::shared_ptr<Home> home, const PipelineSource& source);
  ~CudaPipeline() override;
  bool writes(uint32_t index) const { return written_ >> index & 1; }
  // What wait.h says a kernel reads before it waits: of what it only reads, B and what belongs to it, and bias.
  bool reads_early(uint32_t index) const { return !writes(index) && index != kIndexA && index != kIndexC; }
  // Of what a dispatch only reads of the GPU's memory, if that is no more than `most` bytes; else nothing.
  Span largest_read(const Dispatch& d, size_t most) const;
  bool inlines(uint32_t index) const { return inlined_ >> index & 1; }  // numbers there travel with the launch

  Function function = nullptr;
  Address stop = 0;  // its metalmm_stop, where it looks at one
  KernelTable table{};
  std::unique_ptr<BlasMatmul> blas;  // in place of a function
  std::unique_ptr<Watched> watched;  // of a debug device

 private:
  void take_library(const PipelineSource& source);
  void read_table();
  void add(const ArgumentRow& row);
  std::shared_ptr<Home> home_;
  Module module_ = nullptr;
  uint32_t written_ = 0, inlined_ = 0;
};

}  // namespace metalmm::cuda
