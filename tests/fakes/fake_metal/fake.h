// A Metal that runs on the CPU device and is as strict as Apple's validation layer: every broken rule is recorded, and a test
// fails on any record that it does not expect. Work runs in the order of commits: when somebody waits for it, so that the
// encoders' calls cost little and what is in flight is in flight for certain; or, as `in_time` says, at once on a thread of its own.
#pragma once
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>
#import <MetalPerformanceShaders/MetalPerformanceShaders.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "../../../csrc/cpu/cpu_device.h"

extern "C" void* objc_autoreleasePoolPush();
extern "C" void objc_autoreleasePoolPop(void* pool);

namespace fake {

void violation(const std::string& rule, const std::string& what);
bool fault(const char* name, int* code = nullptr);  // whether one is to be injected here
void count_call(long n = 1);
void count(id object, int change);
NSError* error(NSString* domain, NSInteger code, const std::string& text);
std::string text(NSString* s);
extern std::atomic<int> captures;  // begun; the present one is not, where nobody captures
extern std::atomic<bool> capturing;
size_t alignment(const metalmm::KernelArgument& argument);  // of the type that a buffer is of
bool uses_matrices(const std::string& source);

// What the hardware is like, and what it costs; by name in fake_core.mm.
struct Settings {
  int unified_memory = 1, counters = 1, residency_sets = 1, timestamps = 1, apple_family = 9, mps = 1, mps_ndarray = 1;
  int max_threads = 1024;  // of a pipeline's threadgroup
  int max_buffer_mb = 1 << 14, working_set_mb = 1 << 14;
  int run_on_commit = 0;    // the GPU is done at once
  int in_time = 0;          // the GPU is a thread of its own
  int validation = 0;       // a broken rule ends the process, as Metal's API validation does
  int no_copy_zero = 0;     // newBufferWithBytesNoCopy: gives a buffer of no bytes, as in virtual machines
  int signal_on_error = 0;  // the event of a command buffer that failed
  int revoked = 0;          // every command buffer fails, as after too many time-outs
  int low_power = 0;        // the system's low-power mode
  int unwire_ms = 0;        // so long without work or a request, and what a residency set holds is out of the GPU's reach
  // Costs, all of the calling thread but the last two: of a call of an encoder, ns; of commit, a command buffer, an allocation, a change
  // or commit of a residency set, us; of the GPU before it begins, and of the status behind the event, us.
  int call_ns = 0, commit_us = 0, command_buffer_us = 0, allocate_us = 0, residency_us = 0, start_us = 0, status_lag_us = 0;
};
extern Settings settings;
void spend(double seconds);
extern std::atomic<long> waited_for;  // buffers of residency sets that a command buffer found out of reach
inline void spend_us(int us) {
  if (us) spend(us * 1e-6);
}
metalmm::cpu::CpuDevice& cpu();
// Of the fake's GPU, on a page of its own, as Metal's are: none in a page of the host that newBufferWithBytesNoCopy wraps.
std::shared_ptr<metalmm::Buffer> new_pages(size_t size);

// What a function was made of; compiled through Python.
struct Kernel {
  std::string source, name, constants;
};
std::shared_ptr<metalmm::Pipeline> compile(const Kernel& kernel);  // throws metalmm::Error
std::vector<std::string> describe(const std::string& source);      // "kernel NAME" and "constant NAME INDEX TYPE" lines

}  // namespace fake

// Classes of Metal whose interface is not ours keep their state behind one pointer, and are counted like the others.
namespace fake {
template <class T>
T& state(void*& p) {
  if (!p) p = new T;
  return *static_cast<T*>(p);
}
}  // namespace fake
#define FAKE_LIFE(State)                   \
  -(id)init {                              \
    self = [super init];                   \
    fake::count(self, 1);                  \
    return self;                           \
  }                                        \
  -(void)dealloc {                         \
    delete static_cast<State*>(fakeState); \
    fake::count(self, -1);                 \
    [super dealloc];                       \
  }

@interface FakeObject : NSObject {
  NSString* label_;
}
- (NSString*)label;
- (void)setLabel:(NSString*)label;
- (id<MTLDevice>)device;
@end

@class FakeQueue, FakeCommandBuffer;

@interface FakeDevice : FakeObject <MTLDevice>
@end

@interface FakeBuffer : FakeObject <MTLBuffer> {
 @public
  std::shared_ptr<metalmm::Buffer>*memory, *managed;  // managed: the GPU's own copy
  NSUInteger length_, options_;
}
- (bool)untracked;
- (uint8_t*)gpu;
+ (bool)alive:(id)buffer;
@end

@interface FakeFunction : FakeObject <MTLFunction> {
 @public
  fake::Kernel* kernel;
}
@end

@interface FakePipeline : FakeObject <MTLComputePipelineState> {
 @public
  std::shared_ptr<metalmm::Pipeline>* pipeline;
  BOOL indirect;
}
@end

@interface FakeSharedEvent : FakeObject <MTLSharedEvent> {
 @public
  std::atomic<uint64_t> value, seen;  // seen: what the host was told
  std::set<uint64_t>* before;         // passes that its last signal comes after
}
@end

@interface FakeFence : FakeObject <MTLFence> {
 @public
  std::set<uint64_t>* before;  // passes that its last update comes after
}
@end

@interface FakeSamples : FakeObject <MTLCounterSampleBuffer> {
 @public
  std::vector<uint64_t>* times;
}
@end

@interface FakeResidencySet : FakeObject <MTLResidencySet> {
 @public
  std::set<id>*added, *committed, *wired;
  double touched;
}
- (void)wire:(BOOL)asked;  // what is committed; unless somebody asked, a command buffer waits for it
@end

namespace fake {

struct Binding {
  FakeBuffer* buffer = nil;
  size_t offset = 0;
  std::vector<uint8_t> bytes;
  bool set = false;
};

// One call of an encoder, kept until the GPU gets there.
struct Command {
  enum class Kind {
    begin,
    pipeline,
    buffer,
    bytes,
    memory,
    barrier,
    dispatch,
    use,
    execute,
    end,
    mps,
    synchronize,
    signal,
    wait,
    wait_fence,
    update_fence
  } kind;
  explicit Command(Kind kind) : kind(kind) {}
  id object = nil;
  size_t index = 0, value = 0, more = 0;
  std::vector<uint8_t> bytes;
  MTLSize grid = {}, threadgroup = {}, threads = {};
  std::shared_ptr<std::function<std::string()>> run;  // mps; says what went wrong
};

struct Indirect {
  FakePipeline* pipeline = nil;
  Binding bindings[metalmm::kMaxBuffers];
  bool barrier = false, filled = false;
  MTLSize grid = {}, threadgroup = {}, threads = {};
};

bool wait_for_event(std::atomic<uint64_t>& value, uint64_t wanted, uint64_t ms);
bool uses(FakeCommandBuffer* commands, FakeBuffer* buffer);

}  // namespace fake

@interface FakeIndirect : FakeObject <MTLIndirectCommandBuffer> {
 @public
  std::vector<fake::Indirect>* commands;
  MTLIndirectCommandType types;
  NSUInteger max_buffers, max_memory;
}
@end

@interface FakeQueue : FakeObject <MTLCommandQueue> {
 @public
  FakeResidencySet* residency;  // retained
  NSUInteger limit;
  std::atomic<long> open;
}
@end

@interface FakeCommandBuffer : FakeObject <MTLCommandBuffer> {
 @public
  FakeQueue* queue;
  BOOL retained;
  std::vector<fake::Command>* log;
  id encoder;  // the open one, not retained
  std::atomic<MTLCommandBufferStatus> status_;
  NSError* error_;
  double start, finish;
  std::atomic<double> visible;  // when its status is told
  std::atomic<bool> read;       // its status, once it was done
  bool alone;                   // nothing was in flight when it was committed
  int captures;                 // how many had begun when it was made
}
- (void)run;
- (fake::Command*)add:(fake::Command::Kind)kind from:(id)encoder;
- (void)fails:(const std::string&)text code:(NSInteger)code;
@end
