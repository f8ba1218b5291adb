// All that a device must provide.
#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "error.h"

namespace metalmm {

// Memory that kernels can be given. Either the device's own or somebody's, released with them by `release`.
class Buffer {
 public:
  Buffer(void* data, size_t size, bool read_only, std::function<void()> release)
      : data_(static_cast<uint8_t*>(data)), size_(size), read_only_(read_only), release_(std::move(release)) {}
  ~Buffer() {
    if (release_) release_();
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  bool read_only() const { return read_only_; }

 private:
  uint8_t* data_;
  size_t size_;
  bool read_only_;
  std::function<void()> release_;
};

using Size3 = std::array<uint32_t, 3>;

constexpr uint32_t kMaxBuffers = 31;  // as in Metal

// One buffer, or one dynamic piece of threadgroup memory, that a kernel takes.
struct KernelArgument {
  enum class Kind { buffer, threadgroup } kind;
  uint32_t index;
  bool is_const;
  size_t bytes;  // least size
};

class Pipeline {
 public:
  virtual ~Pipeline() = default;
  std::string name;
  std::vector<KernelArgument> arguments;  // by increasing index; those that function constants switch off are left out
  uint32_t max_threads = 1024;
  size_t static_threadgroup_bytes = 0;
};

struct BufferBinding {
  uint32_t index;
  const std::shared_ptr<Buffer>* buffer;
  size_t offset;
};
struct BytesBinding {
  uint32_t index;
  const void* data;
  size_t size;
};
struct ThreadgroupMemory {
  uint32_t index;
  size_t size;
};

// Each piece of threadgroup memory starts at a multiple of 16 bytes.
inline size_t threadgroup_space(size_t size) { return (size + 15) & ~size_t{15}; }

struct Dispatch {
  const std::shared_ptr<Pipeline>* pipeline;
  const BufferBinding* buffers;
  size_t buffer_count;
  const BytesBinding* bytes;
  size_t bytes_count;
  const ThreadgroupMemory* threadgroup_memory;
  size_t threadgroup_memory_count;
  Size3 grid;  // threadgroups
  Size3 threadgroup;
};

struct BatchTiming {
  double encode = 0, submit = 0, wait = 0;
  double device = -1;  // negative: the device cannot tell
};

// Any number of dispatches, submitted once, run in order. Holds every buffer until they are done.
class CommandBatch {
 public:
  virtual ~CommandBatch() = default;
  virtual void encode(const Dispatch& dispatch) = 0;
  virtual void submit() = 0;
  virtual void wait() = 0;  // throws what went wrong; the batch is over either way
  virtual bool submitted() const = 0;
  virtual BatchTiming timing() const = 0;
  virtual size_t size() const = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;
  virtual std::shared_ptr<Buffer> new_buffer(size_t size) = 0;
  virtual std::shared_ptr<Pipeline> load_pipeline(const std::string& path, const std::string& kernel) = 0;
  virtual std::unique_ptr<CommandBatch> new_batch() = 0;
  // One dispatch, run before this returns; the seconds that the device worked.
  virtual double run(const Dispatch& dispatch) = 0;
};

// What Metal's validation layer would say of a dispatch; throws before anything runs.
void check_dispatch(const Dispatch& dispatch, size_t threadgroup_memory_limit);

}  // namespace metalmm
