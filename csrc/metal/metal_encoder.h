// What a submission is made with: staging of host memory, and an encoder that binds nothing twice.
#pragma once
#include "../core/hazards.h"
#include "../core/matmul.h"
#include "metal_device.h"
#include "metal_mps.h"

namespace metalmm::metal {

constexpr size_t kMaxSetBytes = 4096;  // Metal's limit; more goes into a buffer

// What the GPU uses in place of the host memory that dispatches name: whole pages are wrapped, the rest is copied. Arrays that
// share memory share their staging buffer.
class Staging {
 public:
  Staging(MetalDevice& device, const DispatchList& list);
  Place find(const Buffer& buffer, size_t offset) const;
  void copy_in();
  void copy_out();  // what a dispatch may have written
  template <class Use>
  void for_each(Use&& use) const {
    for (const Block& b : blocks_) use(b.staging);
    if (nothing_) use(nothing_);
  }

 private:
  struct Block {
    uint8_t *begin, *end;
    bool written;
    std::shared_ptr<Buffer> staging;
    std::shared_ptr<HostLife> life;  // of an array that has the memory for itself
    size_t pad;                      // where the data begins in it
    bool copied;
  };
  void merge();
  void allocate(Block& block, bool mps);
  MetalDevice& device_;
  std::vector<Block> blocks_;        // by address
  std::shared_ptr<Buffer> nothing_;  // for arrays of no bytes
};

// Fills one command buffer. Keeps what the open compute encoder has bound, so that nothing is bound twice.
class Encoder {
 public:
  // `fence`: where Metal does not order one pass after another, what does; null elsewhere.
  Encoder(id<MTLCommandBuffer> commands, Fence* fence, uint64_t& calls) : commands_(commands), fence_(fence), calls_(calls) {}
  ~Encoder() { end(); }
  Encoder(const Encoder&) = delete;

  struct Bound {
    uint32_t index;
    Place place;
    Span span;
  };
  void dispatch(const MetalPipeline& pipeline, const Bound* buffers, size_t count, const Dispatch& d);
  void replay(id<MTLIndirectCommandBuffer> commands, size_t count, const std::vector<id<MTLResource>>& read,
              const std::vector<id<MTLResource>>& written);
  // Sets a pipeline and does nothing with it: see MetalDevice::sets_indirect_pipelines().
  void set_idle(id<MTLComputePipelineState> state);
  void sample(id<MTLCounterSampleBuffer> samples, NSUInteger first);  // times the next pass
  void touch() { compute(), end(); }                                  // a pass of nothing, for its place in the order of the fence
  void end();

 private:
  id<MTLComputeCommandEncoder> compute();
  void set_buffers(const Bound* buffers, size_t count);
  void set_one_by_one(const Bound* buffers, size_t count);
  void set_bytes(const Dispatch& d);
  void set_threadgroup_memory(const Dispatch& d);
  void forget();

  static constexpr size_t kMaxComparedBytes = 128;  // parameters that are compared before they are set again
  id<MTLCommandBuffer> commands_;
  Fence* fence_;
  uint64_t& calls_;
  id<MTLComputeCommandEncoder> encoder_ = nil;
  id<MTLCounterSampleBuffer> samples_ = nil;
  NSUInteger first_sample_ = 0;
  Hazards hazards_;
  id<MTLComputePipelineState> state_ = nil;
  id<MTLBuffer> buffers_[kMaxBuffers] = {};
  NSUInteger offsets_[kMaxBuffers] = {};
  uint32_t bytes_index_ = kMaxBuffers;
  size_t bytes_size_ = 0;
  uint8_t bytes_[kMaxComparedBytes];
  uint32_t memory_ = 0;  // bit per index of threadgroup memory that has a length
};

}  // namespace metalmm::metal
