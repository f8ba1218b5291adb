// All that a device must provide.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "../msl/runtime/abi.h"
#include "dtype.h"
#include "error.h"

namespace metalmm {

// How long the host's object lives whose memory a buffer is. A device that keeps something made of that memory lets it go with it.
class HostLife {
 public:
  ~HostLife() {
    for (auto& end : ends_) end();
  }
  void at_end(std::function<void()> end) {
    std::lock_guard lock(mutex_);
    ends_.push_back(std::move(end));
  }

 private:
  std::mutex mutex_;
  std::vector<std::function<void()>> ends_;
};

// Memory that kernels can be given. Either a device's own (then `native` is the device's object for it) or the host's;
// `release` lets go of it.
class Buffer {
 public:
  // `host`: where the host reads and writes it, null for memory that only the device reaches, which then says its `address`.
  Buffer(void* host, size_t size, bool read_only, std::function<void()> release, void* native = nullptr, uintptr_t address = 0)
      : host_(static_cast<uint8_t*>(host)),
        address_(host ? reinterpret_cast<uintptr_t>(host) : address),
        size_(size),
        read_only_(read_only),
        native_(native),
        release_(std::move(release)) {}
  ~Buffer() {
    life.reset();  // the memory's end ends it, and what was made of the memory goes first
    if (release_) release_();
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  uint8_t* host() const { return host_; }         // may be null: Device::read and write copy
  uintptr_t address() const { return address_; }  // tells buffers apart, and says how they are aligned and overlap
  size_t size() const { return size_; }
  bool read_only() const { return read_only_; }
  void* native() const { return native_; }

  // Somebody may have written since the device's copy of it (or a converted one) was made: it is a result, or Python has a view.
  mutable std::atomic<bool> mutable_since{false};
  void* owner = nullptr;           // the Python object that host memory belongs to, for the garbage collector
  std::shared_ptr<HostLife> life;  // of that object, where it is known

 private:
  uint8_t* host_;
  uintptr_t address_;
  size_t size_;
  bool read_only_;
  void* native_;
  std::function<void()> release_;
};

using Size3 = std::array<uint32_t, 3>;

constexpr uint32_t kMaxBuffers = 31;  // as in Metal
constexpr uint32_t kMapsIndex = 8;

// One buffer, or one dynamic piece of threadgroup memory, that a kernel takes.
struct KernelArgument {
  enum class Kind { buffer, threadgroup } kind;
  uint32_t index;
  bool is_const;
  size_t bytes;      // least size
  std::string type;  // MSL's name of what it points to, such as uint; empty where nobody said it
  size_t alignment = 1;
};

struct ThreadgroupMemory {
  uint32_t index;
  size_t size;
};

class Pipeline {
 public:
  virtual ~Pipeline() = default;
  std::string name;
  std::vector<KernelArgument> arguments;  // by increasing index; those that function constants switch off are left out
  uint32_t declared = ~0u;                // bits of the buffer indices in its source, those included; all where that is not known
  uint32_t max_threads = 1024;
  size_t static_threadgroup_bytes = 0;

  std::vector<ThreadgroupMemory> threadgroup_memory;  // of pieces whose type says what they take: what a matmul's kernel gets

  void take(const KernelArgument& argument) {
    arguments.push_back(argument);
    if (argument.kind == KernelArgument::Kind::threadgroup && argument.bytes)
      threadgroup_memory.push_back({argument.index, argument.bytes});
  }
  bool writes(uint32_t index) const {
    auto is = [&](const KernelArgument& a) { return a.kind == KernelArgument::Kind::buffer && a.index == index && !a.is_const; };
    return std::any_of(arguments.begin(), arguments.end(), is);
  }
  // A matmul's kernel that wants an abi::TileMaps has it last.
  bool takes_maps() const {
    return !arguments.empty() && arguments.back().index == kMapsIndex && arguments.back().bytes == sizeof(abi::TileMaps);
  }
  // A module has what its compiler knew of the arguments: all but the names of types.
  void take_types(const std::vector<KernelArgument>& said);
};

// What a device allows of any kernel; a pipeline may allow less.
struct Limits {
  uint32_t threads = 1024;                            // of a threadgroup
  Size3 grid = {UINT32_MAX, UINT32_MAX, UINT32_MAX};  // threadgroups in each axis
  size_t threadgroup_memory = 32 * 1024;              // bytes
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
  Size3 threads = {0, 0, 0};  // not zero: of the grid, whose last threadgroups in each axis are then smaller

  bool is_partial() const { return threads[0] != 0; }
};

// Seconds. A device that cannot tell its own time leaves `device` negative and `dispatches` empty.
struct BatchTiming {
  double encode = 0, commit = 0, wait = 0;
  double device = -1;
  std::vector<double> dispatches;
  uint64_t calls = 0;  // of the encoder's methods
};

class DispatchList;

// What a device was handed. Holds everything that the device may still touch. Whoever made it may drop it: the device keeps it
// until it is through.
class Submission {
 public:
  virtual ~Submission() = default;
  virtual BatchTiming timing() const = 0;

 protected:
  friend class Device;
  // Until its work is done; throws what went wrong, the same each time. Those made before are through when this is called.
  virtual void wait() = 0;
  virtual bool done() const = 0;  // wait() would not block

 private:
  uint64_t number_ = 0;  // in the device's order
};

class Recording {
 public:
  virtual ~Recording() = default;

 protected:
  friend class Device;
  virtual std::shared_ptr<Submission> start() = 0;
};

struct FunctionConstant {
  std::string name;  // empty: by index
  uint32_t index = 0;
  std::variant<bool, int64_t, double> value;
};

// A matmul that a library computes in place of a kernel, all operands of one type.
struct LibraryMatmul {
  std::string name;  // mps_matmul, mps_matvec, mps_ndarray, blas
  bool transpose_a = false, transpose_b = false;
  DType type;
};

// Operands of such a matmul: how they lie.
struct LibraryCall {
  struct Operand {
    uint64_t rows, ld, stride, room;  // in elements; room: from the first to the end of the memory
  };
  uint64_t m, n, k, batch;
  Operand a, b;
};

// What a pipeline is made of.
struct PipelineSource {
  std::string name;    // for messages
  std::string kernel;  // host name
  std::string text;    // what the device's own compiler takes; empty where there is none of it to do
  std::string file;    // where its machine code lies, or is to be kept; may be empty
  std::vector<FunctionConstant> constants;
  std::vector<KernelArgument> arguments;  // as its source says them, for a device whose compiler does not tell
  std::optional<LibraryMatmul> library;   // the kernel is then the epilogue that the library lacks, if anything
};

using Info = std::vector<std::pair<std::string, std::variant<bool, int64_t, std::string>>>;

// Runs its submissions in the order in which they were made, as if one after another: whatever reads memory (waiting, a view, a
// matmul, the device's end) comes after all that was submitted before. A submission that nobody waits for runs all the same.
class Device : public std::enable_shared_from_this<Device> {
 public:
  explicit Device(const std::string& name);
  virtual ~Device();
  const std::string& name() const { return name_; }
  uint32_t name_bit() const { return name_bit_; }  // name_bit(name())
  virtual Info info() const = 0;
  virtual Info counters() const { return {}; }
  virtual Limits limits() const = 0;
  const std::vector<std::string>& lacking() const { return lacking_; }  // features of MSL, or libraries, that others of its kind have
  virtual std::shared_ptr<Buffer> new_buffer(size_t size) = 0;
  // Copies from and to a buffer of this device. After all that was submitted: the caller finishes first.
  virtual void read(const Buffer& buffer, size_t offset, void* to, size_t size);
  virtual void write(const Buffer& buffer, size_t offset, const void* from, size_t size);
  // For kernels that are given pointers.
  virtual uint64_t device_address(const std::shared_ptr<Buffer>& buffer) { return buffer->address(); }
  virtual bool wraps_host_memory() const { return false; }  // whole pages of it are used in place, and kept for as long as Buffer::life
  // Where DLPack says that its memory lies, its kind of device and number, if other libraries reach it there; and the stream that its
  // work is on, as DLPack has it.
  virtual std::optional<std::array<int, 2>> dlpack_place() const { return {}; }
  virtual int64_t dlpack_stream() const { return 0; }
  virtual bool poisons() const { return false; }  // fresh memory holds NaN, to show what a kernel leaves unwritten
  // Whether its libraries multiply what lies so. Their pipelines throw where not.
  virtual bool library_takes(const LibraryCall&) const { return true; }
  // Throws UnsupportedError for a library that it does not have.
  virtual std::shared_ptr<Pipeline> load_pipeline(const PipelineSource& source) = 0;
  // Dispatches run in order, each as if after the one before. `per_dispatch`: time each, at the cost of their overlap.
  std::shared_ptr<Submission> submit(std::shared_ptr<const DispatchList> work, bool per_dispatch);
  std::shared_ptr<Submission> submit(Recording& recording);
  virtual std::shared_ptr<Recording> record(std::shared_ptr<const DispatchList> work);
  void wait(Submission& submission);  // throws what went wrong with it
  bool idle() const { return retired_ == pushed_; }
  void finish();  // all that was submitted so far; what went wrong is a warning
  // One dispatch, run before this returns; the seconds that the device worked, negative where it cannot tell.
  // `later`: where given, a device that learns the seconds only after the work is done may answer with the submission that will tell.
  double run(const Dispatch& dispatch, std::shared_ptr<Submission>* later = nullptr);
  // Host names of the kernels in MSL source, sorted.
  virtual std::vector<std::string> kernel_names(const std::string& code);
  virtual void start_capture(const std::string& path);
  virtual void stop_capture() {}
  // From now on kernels count their writes to [begin, end), one count for each two bytes.
  virtual void watch(uint8_t* begin, uint8_t* end, uint8_t* counts);
  struct Finding {
    std::string text;
    std::vector<std::string> places;  // file:line of each that the text tells
    bool is_sure;                     // false: only if results are not the same in another run
  };
  // What debug mode found since the last call that said go_on. go_on: from now on kernels go on where they can, else they end at the first.
  virtual std::vector<Finding> take_findings(bool go_on);
  virtual void count_accesses();  // of kernels to memory, from zero, in counters()
  // What went wrong and was mended, or had nobody to be told, in words, once.
  std::vector<std::string> take_warnings();
  bool has_warnings() const { return has_warnings_.load(std::memory_order_relaxed); }
  // Around fork(): see device.cpp.
  void before_fork();
  void after_fork(bool in_child);

 protected:
  void warn(const std::string& text);
  uint64_t submitted() const { return pushed_; }  // the number of the last submission
  void finish_through(uint64_t number);
  std::unique_lock<std::mutex> hold_starts() { return std::unique_lock(*start_mutex_); }  // no submission starts meanwhile
  void leave_family();                // first in the destructor of what overrides the hooks around fork
  std::vector<std::string> lacking_;  // by the constructor alone

 private:
  virtual std::shared_ptr<Submission> start(std::shared_ptr<const DispatchList> work, bool per_dispatch) = 0;
  virtual double execute(const Dispatch& checked, std::shared_ptr<Submission>* later) = 0;  // in its turn: after all that was submitted
  virtual void hold_for_fork(bool) {}  // takes the device's own momentary locks, and gives them back
  virtual void forget_threads() {}     // in a child of fork(), which has none of them nor what they were at
  friend class ListRecording;
  std::shared_ptr<Submission> push(std::shared_ptr<Submission> submission);
  void make_room();
  bool retire(const Submission& submission);

  const std::string name_;
  const uint32_t name_bit_;
  // Held while a submission starts: numbers rise in the order in which the device sees them. On its own, so that a child of fork()
  // can leave behind one that a thread of the parent holds.
  std::unique_ptr<std::mutex> start_mutex_ = std::make_unique<std::mutex>();
  std::atomic<uint64_t> pushed_{0}, retired_{0};
  std::atomic<bool> has_warnings_{false};
  std::mutex order_mutex_;  // what follows; held for moments, never while waiting
  std::deque<std::shared_ptr<Submission>> pending_;
  std::vector<std::string> warnings_;
};

// How often this process is a child of fork(): what was made under another number had threads and locks that are not here.
uint32_t fork_generation();

// What the host wants to do now and then while it waits for a device, such as act on Ctrl-C; it may throw. May be null.
extern std::atomic<void (*)()> host_poll;

// What Metal's validation layer would say of a dispatch; throws before anything runs.
void check_dispatch(const Dispatch& dispatch, const Limits& limits);

// One bit for each name of a device, given out as they are asked for: what a variant is restricted to is compared as bits.
uint32_t name_bit(const std::string& name);

// -- what there is ------------------------------------------------------------------------------------------------------

using Option = std::variant<bool, int64_t, double>;
using Options = std::map<std::string, Option>;  // checked by the backend's Python file, all of them there

// Each device's folder adds its own, from a static initializer.
struct Backend {
  std::string name;
  std::shared_ptr<Device> (*make)(const Options& options);
  std::vector<std::string> (*device_names)();  // on this machine
  void (*end)() = nullptr;                     // before the process ends: what cannot be called afterwards is not, by any thread
};
bool add_backend(const Backend& backend);
const Backend* find_backend(const std::string& name);  // null: not in this build
void end_backends();

// T of an option that is there.
template <class T>
T option(const Options& options, const char* name) {
  return std::visit([](auto v) { return static_cast<T>(v); }, options.at(name));
}

}  // namespace metalmm
