// A CUDA driver whose GPU is the CPU, and which is strict: every broken rule is recorded, and a test fails on any record that it does not
// expect. Handles and addresses are numbers that are never given out twice. Work stays in its stream's queue until somebody asks for it,
// so that what is in flight is in flight for certain; or, as `in_time` says, runs at once on the stream's own thread.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../../../csrc/cuda/driver.h"
#include "../../../csrc/msl/runtime/cuda/arguments.h"

#define FAKE_EXPORT extern "C" __attribute__((visibility("default")))

// What the product looks for has these types.
#define FAKE_DECLARE(name, symbol, parameters) FAKE_EXPORT metalmm::cuda::Result symbol parameters;
namespace fake_api {
using namespace metalmm::cuda;
METALMM_CUDA_FUNCTIONS(FAKE_DECLARE)
}  // namespace fake_api
#undef FAKE_DECLARE

namespace fake {

using namespace metalmm::cuda;

// CUresult
constexpr Result kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3, kNoDevice = 100, kInvalidDevice = 101, kInvalidImage = 200,
                 kInvalidContext = 201, kWrongArchitecture = 209, kInvalidHandle = 400, kNotFound = 500, kIllegalAddress = 700,
                 kOutOfResources = 701, kContextDestroyed = 709, kLaunchFailed = 719, kNotSupported = 801, kCaptureUnsupported = 900,
                 kCaptureInvalidated = 901, kCaptureUnmatched = 903, kCapturedEvent = 907, kWrongThread = 908;
inline bool is_sticky(Result r) { return r == kIllegalAddress || r == 702 || r == 710 || (r >= 713 && r <= kLaunchFailed); }

struct Settings {
  long long in_time = 0;  // streams run at once
  long long capability = 90, devices = 1, driver_version = 13000;
  long long memory_bytes = 8ll << 30;  // of each GPU
  long long kernel_us = 0;             // that every launch takes at least
  long long direct = 0;                // addresses of fresh memory are the host's: for kernels that follow pointers in memory
};
extern Settings settings;
inline unsigned most_shared_bytes() { return settings.capability == 90 ? 232448 : 166912; }  // of a kernel that asks for it
extern std::mutex& mutex;                                                                    // guards all that follows
extern std::condition_variable& changed;

void violation(const std::string& rule, const std::string& what);

struct ContextState;

struct Object {
  explicit Object(const char* kind) : kind(kind) {}
  virtual ~Object() = default;
  const char* kind;
  uintptr_t handle = 0;
  ContextState* context = nullptr;
  int in_flight = 0;  // pieces of queued work that use it
  bool alive = true;
};
using Uses = std::vector<std::shared_ptr<Object>>;

// What a launch touches, and how it stands to those before it on its stream (programmatic dependent launch).
struct Touch {
  std::string name;
  std::vector<std::pair<Address, Address>> reads, writes, early_reads;
  bool programmatic = false, beside = false, late = false, early = false;
};
using Touches = std::vector<std::shared_ptr<Touch>>;

// A piece of work. A graph's is run again and again.
struct Work {
  std::function<Result()> run;  // without the lock
  Uses uses;
  std::shared_ptr<Touch> touch;  // of a launch
  bool lets_by = false;          // nothing says that a launch behind it begins only when what is before it is through
};

struct Memory : Object {
  Memory() : Object("Memory") {}
  ~Memory() override;
  Address address = 0;
  size_t size = 0;
  uint8_t* host = nullptr;
  void* pages = nullptr;  // of its own; null: a module's
  size_t page_bytes = 0;
};

struct Capture {
  std::thread::id thread;
  std::vector<Work> nodes;
  bool invalid = false;
  Touches running;
};

struct StreamState : Object {
  StreamState() : Object("Stream") {}
  std::deque<Work> queue;
  uint64_t pushed = 0, done = 0, wanted = 0;  // wanted: somebody waits for work up to it
  bool ends = false, ended = false;
  std::unique_ptr<Capture> capture;
  Touches running;  // launches that may still run when the next launch begins
};

struct EventState : Object {
  EventState() : Object("Event") {}
  unsigned flags = 0;
  uint64_t recorded = 0, done = 0;  // records of it
  uint64_t place = 0;               // in its stream, of the last record
  std::shared_ptr<StreamState> stream;
  bool captured = false;
  double time = 0;
};

struct GraphState : Object {
  explicit GraphState(const char* kind) : Object(kind) {}
  std::vector<Work> nodes;
};

struct ModuleState : Object {
  ModuleState() : Object("Module") {}
  ~ModuleState() override;
  void* library = nullptr;
  const metalmm::abi::KernelInfo* info = nullptr;
  KernelTable table{};
  std::shared_ptr<Object> function;
  metalmm::cuda::Watch* watch = nullptr;  // of a kernel in debug mode
  std::map<std::string, std::shared_ptr<Memory>> globals;
};
struct FunctionState : Object {
  FunctionState() : Object("Function") {}
  std::weak_ptr<ModuleState> module;
  unsigned shared_limit = 48 * 1024;  // until it asks for more
};

struct ContextState : Object {
  ContextState() : Object("Context") {}
  int gpu = 0, references = 0;
  Result failed = 0;
  size_t used = 0;
  std::shared_ptr<StreamState> null_stream;
};

constexpr Address kFirstAddress = Address{1} << 52;  // where no pointer of the host points to
constexpr uintptr_t kFirstHandle = uintptr_t{1} << 53;

struct Fault {
  int skip, count;
  Result code;
};

struct World {
  bool initialized = false;
  std::map<uintptr_t, std::shared_ptr<Object>> objects;
  std::map<Address, std::shared_ptr<Memory>> memory;
  std::map<int, std::shared_ptr<ContextState>> primary;
  uintptr_t next_handle = kFirstHandle;
  Address next_address = kFirstAddress;
  std::vector<std::string> violations;
  long long early = 0;  // launches
  std::multimap<std::string, Fault> faults;
  std::string last_error;
  std::set<StreamState*> captures;
};
extern World& world;
extern bool forked;  // this process is a child of one that had called cuInit
extern thread_local uintptr_t current;

// One call of the API: holds the lock, and says whether it goes on.
struct Call {
  // unsafe: not while this thread captures a stream. fails: here, where a fault is injected.
  explicit Call(const char* name, bool needs_context = true, bool unsafe = false, bool fails = true);
  Result wrong(Result r, const std::string& rule, const std::string& what);  // records, and gives r back
  const char* name;
  std::unique_lock<std::mutex> lock;
  Result result = 0;
  ContextState* context = nullptr;
};

std::shared_ptr<Object> find(Call& call, const void* handle, const char* kind);
template <class T>
std::shared_ptr<T> find(Call& call, const void* handle, const char* kind) {
  return std::static_pointer_cast<T>(find(call, handle, kind));
}
std::shared_ptr<StreamState> find_stream(Call& call, Stream stream);
uintptr_t add(std::shared_ptr<Object> object, ContextState* context);
void remove(Object& object);
std::shared_ptr<Memory> add_memory(ContextState* context, uint8_t* host, size_t size);
std::shared_ptr<Memory> memory_at(Address address, size_t size = 1);  // that holds all of it, or null
std::shared_ptr<StreamState> start_stream(ContextState* context);
void end_stream(StreamState& s, std::unique_lock<std::mutex>& lock);
Result drain(StreamState& s, std::unique_lock<std::mutex>& lock);  // until all that was pushed to it by now is done
void destroy(const std::shared_ptr<ContextState>& context, std::unique_lock<std::mutex>& lock);
std::string leaks_of(const ContextState& context);
void push(StreamState& stream, Work work, bool at_once = false);
void fail(ContextState& context, Result r, const std::string& text);
bool take_fault(const char* name, Result* code);
std::string number(unsigned long long n);
std::string hex(unsigned long long n);

}  // namespace fake
