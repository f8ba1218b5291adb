#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <sstream>

#include "../../../csrc/core/error.h"
#include "fake.h"

namespace fake {
namespace {

std::mutex mutex;
std::vector<std::string> violations;
std::map<std::string, std::pair<int, int>> faults;  // name -> how many, code
struct Live {
  std::atomic<void*> kind{nullptr};  // Class
  std::atomic<long> count{0};
} live[64];  // without a lock: the time of the library's calls is measured through this
std::atomic<long> calls{0};

using CompileFunction = int (*)(const char* source, const char* kernel, const char* constants, char* out, size_t size);
CompileFunction compile_function = nullptr;

std::string ask_compiler(const std::string& source, const char* kernel, const std::string& constants) {
  if (!compile_function)
    throw metalmm::Error(metalmm::ErrorKind::device, "fake Metal: no compiler was given; run through tests/fakes/on_fake_metal.py");
  std::vector<char> out(1 << 20);
  int failed = compile_function(source.c_str(), kernel, constants.c_str(), out.data(), out.size());
  if (failed) throw metalmm::Error(metalmm::ErrorKind::compile, out.data());
  return out.data();
}

size_t copy_out(const std::string& text, char* out, size_t size) {
  size_t count = std::min(text.size(), size - 1);
  std::memcpy(out, text.data(), count);
  out[count] = 0;
  return text.size();
}

}  // namespace

Settings settings;
std::atomic<int> captures{0};
std::atomic<long> waited_for{0};
std::atomic<bool> capturing{false};

void violation(const std::string& rule, const std::string& what) {
  if (settings.validation) {
    std::fprintf(stderr, "-[FakeMetal %s] failed assertion: %s\n", rule.c_str(), what.c_str());
    std::abort();
  }
  std::lock_guard lock(mutex);
  violations.push_back(rule + ": " + what);
}

void spend(double seconds) {
  auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (std::chrono::steady_clock::now() < end) continue;
}

bool fault(const char* name, int* code) {
  std::lock_guard lock(mutex);
  auto it = faults.find(name);
  if (it == faults.end() || it->second.first == 0) return false;
  it->second.first--;
  if (code) *code = it->second.second;
  return true;
}

void count_call(long n) {
  calls.fetch_add(n, std::memory_order_relaxed);
  if (settings.call_ns && n > 0) spend(settings.call_ns * 1e-9);
}

void count(id object, int change) {
  void* kind = object_getClass(object);
  for (size_t i = reinterpret_cast<uintptr_t>(kind) / 64;; i++) {
    Live& l = live[i % 64];
    void* none = nullptr;
    if (l.kind == kind || l.kind.compare_exchange_strong(none, kind) || none == kind) {
      l.count += change;
      return;
    }
  }
}

NSError* error(NSString* domain, NSInteger code, const std::string& text) {
  NSString* description = [NSString stringWithUTF8String:text.c_str()];
  return [NSError errorWithDomain:domain
                             code:code
                         userInfo:[NSDictionary dictionaryWithObject:description forKey:NSLocalizedDescriptionKey]];
}

std::string text(NSString* s) { return s ? [s UTF8String] : ""; }

metalmm::cpu::CpuDevice& cpu() {
  static auto* device = new std::shared_ptr<metalmm::cpu::CpuDevice>(std::make_shared<metalmm::cpu::CpuDevice>([] {
    metalmm::cpu::CpuOptions options;
    if (const char* threads = std::getenv("METALMM_CPU_THREADS")) options.threads = static_cast<unsigned>(std::atoi(threads));
    return options;
  }()));
  return **device;
}

std::shared_ptr<metalmm::Buffer> new_pages(size_t size) {
  auto page = static_cast<size_t>(getpagesize());
  std::shared_ptr<metalmm::Buffer> all = cpu().new_buffer(size + page);
  uint8_t* first = all->host() + (page - reinterpret_cast<uintptr_t>(all->host()) % page) % page;
  std::memset(first + size, 0xff, static_cast<size_t>(all->host() + all->size() - (first + size)));
  return std::make_shared<metalmm::Buffer>(first, size, false, [all] {});
}

std::shared_ptr<metalmm::Pipeline> compile(const Kernel& kernel) {
  metalmm::PipelineSource source;
  source.name = kernel.name;
  std::istringstream answer(
      ask_compiler(kernel.source, kernel.name.c_str(), kernel.constants));  // the module, then "INDEX TYPE" of buffers
  std::getline(answer, source.file);
  uint32_t index;
  for (std::string type; answer >> index && std::getline(answer >> std::ws, type);)
    source.arguments.push_back({metalmm::KernelArgument::Kind::buffer, index, false, 0, type});
  return cpu().load_pipeline(source);
}

std::vector<std::string> describe(const std::string& source) {
  static auto* known = new std::map<std::string, std::vector<std::string>>;
  {
    std::lock_guard lock(mutex);
    if (auto it = known->find(source); it != known->end()) return it->second;
  }
  std::vector<std::string> lines;
  std::string all = ask_compiler(source, nullptr, "");
  for (size_t at = 0; at < all.size();) {
    size_t end = std::min(all.find('\n', at), all.size());
    lines.push_back(all.substr(at, end - at));
    at = end + 1;
  }
  std::lock_guard lock(mutex);
  (*known)[source] = lines;
  return lines;
}

}  // namespace fake

// What Python's ctypes sees; tests/fakes/on_fake_metal.py.
#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void fake_metal_set_compiler(fake::CompileFunction function) { fake::compile_function = function; }

EXPORT size_t fake_metal_take_violations(char* out, size_t size) {
  std::lock_guard lock(fake::mutex);
  std::string all;
  for (auto& v : fake::violations) all += v + "\n";
  fake::violations.clear();
  return fake::copy_out(all, out, size);
}

// Lines "CLASS COUNT" of the objects that are alive.
EXPORT size_t fake_metal_live(char* out, size_t size) {
  std::lock_guard lock(fake::mutex);
  std::string all;
  for (auto& l : fake::live)
    if (l.count) all += std::string(class_getName(static_cast<Class>(l.kind.load()))) + " " + std::to_string(l.count) + "\n";
  return fake::copy_out(all, out, size);
}

EXPORT void fake_metal_inject(const char* name, int count, int code) {
  std::lock_guard lock(fake::mutex);
  fake::faults[name] = {count, code};
}

EXPORT int fake_metal_set(const char* name, int value) {
  fake::Settings& s = fake::settings;
#define SETTING(name) {#name, &s.name}
  std::map<std::string, int*> known = {SETTING(unified_memory),    SETTING(counters),      SETTING(residency_sets),
                                       SETTING(timestamps),        SETTING(apple_family),  SETTING(mps),
                                       SETTING(mps_ndarray),       SETTING(max_threads),   SETTING(max_buffer_mb),
                                       SETTING(working_set_mb),    SETTING(run_on_commit), SETTING(in_time),
                                       SETTING(validation),        SETTING(no_copy_zero),  SETTING(signal_on_error),
                                       SETTING(revoked),           SETTING(call_ns),       SETTING(commit_us),
                                       SETTING(command_buffer_us), SETTING(allocate_us),   SETTING(residency_us),
                                       SETTING(start_us),          SETTING(status_lag_us), SETTING(unwire_ms),
                                       SETTING(low_power)};
  auto it = known.find(name);
  if (it == known.end()) return INT32_MIN;
  return std::exchange(*it->second, value);
}

// As the run time of Objective-C on macOS has them.
extern "C" void* objc_autoreleasePoolPush() { return [[NSAutoreleasePool alloc] init]; }
extern "C" void objc_autoreleasePoolPop(void* pool) { [static_cast<NSAutoreleasePool*>(pool) drain]; }

EXPORT long fake_metal_take_calls() { return fake::calls.exchange(0); }
EXPORT long fake_metal_take_waited_for() { return fake::waited_for.exchange(0); }

@implementation FakeObject
- (id)init {
  self = [super init];
  fake::count(self, 1);
  return self;
}
- (void)dealloc {
  fake::count(self, -1);
  [label_ release];
  [super dealloc];
}
- (NSString*)label {
  return label_;
}
- (void)setLabel:(NSString*)label {
  [label_ autorelease];
  label_ = [label copy];
}
- (id<MTLDevice>)device {
  return [MTLCreateSystemDefaultDevice() autorelease];
}
@end
