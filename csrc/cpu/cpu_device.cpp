#include "cpu_device.h"

#include <cxxabi.h>
#include <dlfcn.h>
#if defined(__linux__)
#include <link.h>
#endif
#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <optional>
#include <system_error>

#include "memory.h"
#include "source_lines.h"

namespace metalmm::cpu {
namespace {

unsigned available_cpus() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return static_cast<unsigned>(CPU_COUNT(&set));
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

// Of the module that the address is in. Where nobody says it, all of memory.
Bound image_of([[maybe_unused]] const void* inside) {
  Bound found{0, nullptr, reinterpret_cast<const uint8_t*>(UINTPTR_MAX)};
#if defined(__linux__)
  struct Search {
    uintptr_t inside;
    Bound* found;
  } search{reinterpret_cast<uintptr_t>(inside), &found};
  dl_iterate_phdr(
      [](dl_phdr_info* object, size_t, void* given) {
        auto& s = *static_cast<Search*>(given);
        uintptr_t begin = UINTPTR_MAX, end = 0;
        for (int i = 0; i < object->dlpi_phnum; i++) {
          const auto& part = object->dlpi_phdr[i];
          if (part.p_type != PT_LOAD) continue;
          begin = std::min<uintptr_t>(begin, object->dlpi_addr + part.p_vaddr);
          end = std::max<uintptr_t>(end, object->dlpi_addr + part.p_vaddr + part.p_memsz);
        }
        if (s.inside < begin || s.inside >= end) return 0;
        *s.found = {0, reinterpret_cast<const uint8_t*>(begin), reinterpret_cast<const uint8_t*>(end)};
        return 1;
      },
      &search);
#endif
  return found;
}

// What an argument finds that a function constant switched off: public kernels load from it and drop the value.
alignas(64) uint8_t nothing[4096];

}  // namespace

std::map<std::string, HostLibrary>& host_libraries() {
  static auto* all = new std::map<std::string, HostLibrary>;
  return *all;
}

// A function that is declared and nowhere defined is found missing here.
[[noreturn]] static void not_loaded(const std::string& kernel, const std::string& path, const std::string& why) {
  static const std::string kUndefined = "undefined symbol: ";
  size_t at = why.find(kUndefined);
  if (at == std::string::npos) throw Error(ErrorKind::device, "kernel '" + kernel + "': cannot load " + path + ": " + why);
  std::string symbol = why.substr(at + kUndefined.size());
  std::unique_ptr<char, decltype(&std::free)> name(::abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, nullptr), &std::free);
  throw Error(ErrorKind::compile,
              "kernel '" + kernel + "': it calls " + (name ? name.get() : symbol) + ", which is declared and not defined");
}

class CpuPipeline : public Pipeline {
 public:
  explicit CpuPipeline(const PipelineSource& source) : what(*source.library) {
    name = source.name;
    auto it = host_libraries().find(what.name);
    if (it == host_libraries().end()) throw Error(ErrorKind::unsupported, name + ": device cpu has no library " + what.name);
    if (!it->second.takes(what.type)) throw Error(ErrorKind::unsupported, name + ": " + what.name + " multiplies no " + what.type.name());
    library = it->second.run;
  }
  CpuPipeline(const std::string& path, const std::string& kernel) {
    name = kernel;
    module_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!module_) not_loaded(kernel, path, dlerror());
    auto* described = kernel_in(module_, path);
    if (!described || described->version != abi::kVersion) {
      dlclose(module_);
      throw Error(ErrorKind::device, "kernel '" + kernel + "': " + path + " was built for another version of metalmm");
    }
    info = described;
    watch = reinterpret_cast<decltype(watch)>(dlsym(module_, "metalmm_watch"));
    take_misaligned = reinterpret_cast<decltype(take_misaligned)>(dlsym(module_, "metalmm_take_misaligned"));
    image = image_of(info);
    info->bind(context_tls_offset(), &current_context);
    static_threadgroup_bytes = info->static_threadgroup_bytes();
    if (info->max_threads) max_threads = std::min(max_threads, info->max_threads);
    declared = 0;
    for (uint32_t i = 0; i < info->arg_count; i++) add(info->args[i]);
    std::sort(arguments.begin(), arguments.end(), [](auto& a, auto& b) { return a.index < b.index; });
    for (size_t i = 1; i < arguments.size(); i++)
      if (arguments[i].index == arguments[i - 1].index && arguments[i].kind == arguments[i - 1].kind)
        throw Error(ErrorKind::compile, "kernel '" + kernel + "': two arguments at index " + std::to_string(arguments[i].index));
  }
  ~CpuPipeline() override {
    if (module_) dlclose(module_);
  }
  HostMatmul library;  // what runs where there is no module
  LibraryMatmul what;
  const abi::KernelInfo* info = nullptr;
  // Of a module compiled for a debug device: where it counts writes; the alignment of the first access since the last call that did
  // not have it, or 0.
  void (*watch)(uint8_t* begin, uint8_t* end, uint8_t* counts) = nullptr;
  unsigned (*take_misaligned)(const uint8_t** address, const char** file, uint32_t* line) = nullptr;
  Bound image{};                       // of its module
  uint8_t* buffers[kMaxBuffers] = {};  // before anything is bound

 private:
  void add(const abi::ArgInfo& arg) {
    bool is_buffer = arg.kind == abi::ArgKind::buffer;
    if (!is_buffer && arg.kind != abi::ArgKind::threadgroup) return;
    if (is_buffer) declared |= 1u << arg.index;
    if (!arg.enabled) {
      if (is_buffer) buffers[arg.index] = nothing;
      return;
    }
    auto kind = is_buffer ? KernelArgument::Kind::buffer : KernelArgument::Kind::threadgroup;
    take({kind, arg.index, arg.is_const, arg.bytes, {}});
  }
  void* module_ = nullptr;
};

// The turn of whoever runs kernels.
class TakenTurn {
 public:
  explicit TakenTurn(Turn& turn) : turn_(turn) { turn_.take(); }
  ~TakenTurn() { turn_.give_back(); }
  TakenTurn(const TakenTurn&) = delete;

 private:
  Turn& turn_;
};

constexpr auto kPoll = std::chrono::milliseconds(20);

void poll_host() {
  if (auto* poll = host_poll.load(std::memory_order_relaxed)) poll();
}

void Turn::take() {
  std::unique_lock lock(mutex_);
  while (taken_) {
    if (pthread_equal(owner_, pthread_self()))
      throw Error(ErrorKind::device,
                  "cpu: the device is at work for this very thread; what runs meanwhile, such as a signal's handler, cannot use it");
    if (free_.wait_for(lock, kPoll, [this] { return !taken_; })) break;
    lock.unlock();
    poll_host();
    lock.lock();
  }
  taken_ = true;
  owner_ = pthread_self();
}

void Turn::give_back() {
  {
    std::lock_guard lock(mutex_);
    taken_ = false;
  }
  free_.notify_one();
}

// There is no device beside the host's own cores: the thread that waits does the work.
class CpuSubmission : public Submission {
 public:
  CpuSubmission(std::shared_ptr<CpuDevice> device, std::shared_ptr<const DispatchList> work, bool per_dispatch)
      : device_(std::move(device)), work_(std::move(work)), per_dispatch_(per_dispatch) {}

  bool done() const override { return done_; }
  void wait() override {
    if (!done_ && born_ != fork_generation())
      throw Error(ErrorKind::device, "cpu: this was submitted before the process was forked; it runs in the parent alone");
    if (!done_) {
      TakenTurn turn(*device_->turn_);
      if (!done_) run();
    }
    if (failure_) throw Error(*failure_);  // anew for each thread that waits
  }
  BatchTiming timing() const override {
    std::lock_guard lock(timing_mutex_);
    return timing_;
  }

 private:
  void run() {
    auto start = device_->polled_ = Clock::now();
    BatchTiming timing;
    std::exception_ptr interrupted;
    double worked = 0;  // without what guards cost
    try {
      work_->for_each([&](size_t, const Dispatch& d) {
        double took = device_->run_dispatch(d);
        worked += took;
        if (per_dispatch_) timing.dispatches.push_back(took);
      });
      timing.device = worked;
      timing.wait = seconds(Clock::now() - start);
    } catch (const Error& e) {
      failure_ = e;
    } catch (...) {
      interrupted = std::current_exception();
      failure_.emplace(ErrorKind::kernel, "cpu: it was interrupted; its results are not valid");
    }
    {
      std::lock_guard lock(timing_mutex_);
      timing_ = std::move(timing);
    }
    work_.reset();
    done_ = true;
    if (interrupted) std::rethrow_exception(interrupted);
  }

  std::shared_ptr<CpuDevice> device_;
  std::shared_ptr<const DispatchList> work_;
  bool per_dispatch_;
  const uint32_t born_ = fork_generation();
  std::atomic<bool> done_{false};
  mutable std::mutex timing_mutex_;  // whoever asks for the timing holds the GIL, and must not wait for the work
  BatchTiming timing_;
  std::optional<Error> failure_;  // set before done_
};

CpuDevice::CpuDevice(const CpuOptions& options) : Device("cpu"), options_(options) {
  catch_faults();  // before lint is asked: its LLVM gives signals back at the first Ctrl-C, as they were when it took them
  pool_ = std::make_unique<ThreadPool>(options.threads ? options.threads : available_cpus());
  try {
    if (options.timeout > 0) watchdog_ = std::make_unique<Watchdog>(*crew_, options.timeout);
  } catch (const std::system_error& e) {
    throw Error(ErrorKind::device, std::string("cpu: cannot start the thread that watches the timeout: ") + e.what());
  }
}

CpuDevice::~CpuDevice() {
  leave_family();
  if (pool_->forked()) (void)pool_.release();  // its condition variables wait for threads that are not here
}

void CpuDevice::hold_for_fork(bool hold) { hold ? mutex_.lock() : mutex_.unlock(); }

// Executors that were at work are lost with their threads.
void CpuDevice::forget_threads() {
  (void)turn_.release();
  turn_ = std::make_unique<Turn>();
  (void)crew_.release();
  crew_ = std::make_unique<Crew>();
  (void)watchdog_.release();  // made again at the next dispatch
}

std::shared_ptr<Buffer> CpuDevice::new_buffer(size_t size) { return options_.guards ? new_guarded_buffer(size) : new_plain_buffer(size); }

uint64_t CpuDevice::device_address(const std::shared_ptr<Buffer>& buffer) {
  if (options_.debug) {
    std::lock_guard lock(mutex_);
    for (auto it = pointed_at_.begin(); it != pointed_at_.end();) it = it->second.expired() ? pointed_at_.erase(it) : std::next(it);
    pointed_at_[buffer->host()] = buffer;
  }
  return Device::device_address(buffer);
}

bool CpuDevice::is_pointed_at(const uint8_t* begin, const uint8_t* end) {
  std::lock_guard lock(mutex_);
  auto it = pointed_at_.upper_bound(begin);
  auto array = it == pointed_at_.begin() ? nullptr : std::prev(it)->second.lock();
  return array && end <= array->host() + array->size();
}

std::shared_ptr<Pipeline> CpuDevice::load_pipeline(const PipelineSource& source) {
  if (source.library) return std::make_shared<CpuPipeline>(source);
  auto pipeline = std::make_shared<CpuPipeline>(source.file, source.name);
  pipeline->take_types(source.arguments);
  return pipeline;
}

Limits CpuDevice::limits() const {
  Limits limits;
  limits.threadgroup_memory = options_.threadgroup_memory_limit;
  return limits;
}

Info CpuDevice::info() const {
  return {{"threads", static_cast<int64_t>(pool_->threads())},
          {"max_total_threads_per_threadgroup", int64_t{1024}},
          {"max_threadgroup_memory_length", static_cast<int64_t>(options_.threadgroup_memory_limit)},
          {"unified_memory", true}};
}

// In its turn: a dispatch that runs still counts into what the caller is about to let go of.
void CpuDevice::watch(uint8_t* begin, uint8_t* end, uint8_t* counts) {
  if (!options_.debug) throw Error(ErrorKind::device, "cpu: writes are counted on a device made by Device('cpu', debug=True)");
  TakenTurn turn(*turn_);
  watched_ = {begin, end, counts};
}

std::vector<Device::Finding> CpuDevice::take_findings(bool go_on) {
  if (!options_.debug) return Device::take_findings(go_on);
  TakenTurn turn(*turn_);
  std::vector<Finding> found;
  if (findings_)
    for (const auto& [text, is_sure] : findings_->texts) {
      Finding& one = found.emplace_back();
      one.is_sure = is_sure;
      one.text = with_lines(text, &one.places);
    }
  findings_ = go_on ? std::make_unique<Findings>() : nullptr;
  return found;
}

Info CpuDevice::counters() const {
  Info all{{"barriers", static_cast<int64_t>(barriers_)}, {"threadgroups", static_cast<int64_t>(threadgroups_)}};
  if (!options_.debug) return all;
  TakenTurn turn(*turn_);
  if (counts_)
    for (const auto& [name, count] : counts_->all()) all.emplace_back(name, static_cast<int64_t>(count));
  return all;
}

void CpuDevice::count_accesses() {
  if (!options_.debug) return Device::count_accesses();
  TakenTurn turn(*turn_);
  counts_ = std::make_unique<Counts>();
}

std::shared_ptr<Submission> CpuDevice::start(std::shared_ptr<const DispatchList> work, bool per_dispatch) {
  return std::make_shared<CpuSubmission>(std::static_pointer_cast<CpuDevice>(shared_from_this()), std::move(work), per_dispatch);
}

double CpuDevice::execute(const Dispatch& d, std::shared_ptr<Submission>*) {
  finish();
  TakenTurn turn(*turn_);
  polled_ = Clock::now();
  return run_dispatch(d);
}

double CpuDevice::run_dispatch(const Dispatch& d) {
  auto& pipeline = static_cast<const CpuPipeline&>(**d.pipeline);
  if (pipeline.library) {
    auto start = Clock::now();
    pipeline.library(d, pipeline.what);
    return seconds(Clock::now() - start);
  }
  return options_.guards ? launch_guarded(d) : launch_kernel(pipeline, d, {});
}

// Zones are looked at before, too: what broke one then was not this kernel.
double CpuDevice::launch_guarded(const Dispatch& given) {
  Staged staged(given);
  const Dispatch& d = staged.dispatch();
  std::string name = "kernel '" + (*d.pipeline)->name + "': ";
  auto check = [&](const char* when) {
    std::string damage;
    for (size_t i = 0; i < d.buffer_count; i++) {
      std::string one = take_damage(**d.buffers[i].buffer);
      if (!one.empty()) damage += (damage.empty() ? "" : "; ") + std::string("buffer ") + std::to_string(d.buffers[i].index) + when + one;
    }
    return damage;
  };
  std::string before = check(" had been written to ");
  if (!before.empty())
    throw Error(ErrorKind::kernel, name + "before it ran, " + before + ": by a kernel that does not have this buffer, or by the host");
  Watched watched = watched_;
  if (watched.begin != watched.end) staged.translate(watched.begin, watched.end, watched.counts);
  double took;
  try {
    took = launch_kernel(static_cast<const CpuPipeline&>(**d.pipeline), d, watched);
  } catch (const Error& e) {
    std::string damage = check(" was written to ");
    throw Error(e.kind, e.what() + (damage.empty() ? "" : "; " + damage));
  }
  std::string damage = check(" was written to ");
  if (!damage.empty()) throw Error(ErrorKind::kernel, name + damage);
  staged.copy_back();
  return took;
}

double CpuDevice::launch_kernel(const CpuPipeline& pipeline, const Dispatch& d, const Watched& watched) {
  auto start = Clock::now();
  if (pipeline.watch) pipeline.watch(watched.begin, watched.end, watched.counts);
  uint8_t* buffers[kMaxBuffers];
  Bound bound[2 * kMaxBuffers];
  std::copy(std::begin(pipeline.buffers), std::end(pipeline.buffers), buffers);
  uint32_t offsets[kMaxBuffers] = {};
  for (size_t i = 0; i < d.buffer_count; i++) {
    const Buffer& b = **d.buffers[i].buffer;
    buffers[d.buffers[i].index] = b.host() + d.buffers[i].offset;
    bound[i] = {d.buffers[i].index, b.host(), b.host() + b.size(), pipeline.writes(d.buffers[i].index)};
  }
  for (size_t i = 0; i < d.bytes_count; i++) {
    // Kernels only read bytes: check_dispatch refuses them for an argument that is not const.
    buffers[d.bytes[i].index] = static_cast<uint8_t*>(const_cast<void*>(d.bytes[i].data));
    bound[d.buffer_count + i] = {d.bytes[i].index, buffers[d.bytes[i].index], buffers[d.bytes[i].index] + d.bytes[i].size, false, true};
  }
  size_t threadgroup_bytes = pipeline.static_threadgroup_bytes;
  for (size_t i = 0; i < d.threadgroup_memory_count; i++) {
    offsets[d.threadgroup_memory[i].index] = static_cast<uint32_t>(threadgroup_bytes);
    threadgroup_bytes += threadgroup_space(d.threadgroup_memory[i].size);
  }
  KernelCall call{pipeline.info,
                  buffers,
                  offsets,
                  threadgroup_bytes,
                  {d.grid[0], d.grid[1], d.grid[2]},
                  {d.threadgroup[0], d.threadgroup[1], d.threadgroup[2]},
                  {d.threads[0], d.threads[1], d.threads[2]},
                  options_.lenient_barriers,
                  options_.debug ? order_ : 0,
                  options_.guards,
                  options_.debug,
                  bound,
                  d.buffer_count + d.bytes_count,
                  pipeline.image,
                  &crew_->abandoned(),
                  {},
                  &shared_,
                  findings_.get(),
                  counts_.get()};
  if (options_.debug) shared_.begin(Executor::take_number());
  if (options_.debug)
    call.is_reachable = [this](const uint8_t* begin, const uint8_t* end, abi::Access kind) {
      return (kind == abi::Access::load && begin >= nothing && end <= nothing + sizeof(nothing)) || is_pointed_at(begin, end);
    };
  std::exception_ptr failure;
  try {
    run_threadgroups(pipeline, call);
  } catch (const Error&) {
    failure = std::current_exception();
  }
  const uint8_t* address = nullptr;
  abi::Site site{};
  if (unsigned size = pipeline.take_misaligned ? pipeline.take_misaligned(&address, &site.file, &site.line) : 0) {
    std::string where = place_of(address, bound, call.bound_count);  // said also where it was what faulted
    std::string text = text_of_misalignment(*site.file ? marked(site) : "", size) + ", " + (where.empty() ? "in memory of its own" : where);
    if (findings_) findings_->add(text);
    throw Error(ErrorKind::kernel, "kernel '" + pipeline.name + "': " + with_lines(text));
  }
  if (failure) std::rethrow_exception(failure);
  return seconds(Clock::now() - start);
}

std::unique_ptr<Executor> CpuDevice::take_executor() {
  {
    std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      auto executor = std::move(idle_.back());
      idle_.pop_back();
      return executor;
    }
  }
  return std::make_unique<Executor>();
}

void CpuDevice::give_executor(std::unique_ptr<Executor> executor) {
  std::lock_guard lock(mutex_);
  idle_.push_back(std::move(executor));
}

// The threadgroups of a dispatch, and what became of them.
struct CpuDevice::Run {
  const KernelCall& call;
  uint64_t total;
  uint64_t step = 1, offset = 0;  // a step that has no common factor with the number of threadgroups visits each once
  std::atomic<uint64_t> next{0};
  std::mutex mutex{};
  std::string error{};
  std::exception_ptr interrupted{};  // of the thread that waits

  // Shares shrink as the work does: long runs of neighbours first, and at the end nobody waits for more than one threadgroup.
  std::pair<uint64_t, uint64_t> take(unsigned threads) {
    uint64_t begin = next.load(std::memory_order_relaxed), end = begin;
    do {
      if (begin >= total) return {begin, begin};
      end = begin + std::max<uint64_t>(1, (total - begin) / (threads * 4));
    } while (!next.compare_exchange_weak(begin, end));
    return {begin, end};
  }
  void fail(const std::string& failure) {
    next = total;
    std::lock_guard lock(mutex);
    if (error.empty()) error = failure;
  }
};

// Lets the host act on what came in meanwhile. What it throws ends the dispatch, whose other threads still use `run`.
void CpuDevice::poll(Run& run) {
  if (run.interrupted) return crew_->abandon();
  auto now = Clock::now();
  if (now - polled_ < kPoll) return;
  polled_ = now;
  uint32_t generation = fork_generation();
  try {
    poll_host();
    if (generation != fork_generation())  // in a handler: the threads that had a part of this are not here
      throw Error(ErrorKind::device, "cpu: the process was forked while this ran; it goes on in the parent alone");
  } catch (...) {
    run.interrupted = std::current_exception();
    run.next = run.total;
    crew_->abandon();
  }
}

void CpuDevice::run_some(Run& run, bool is_caller) {
  const KernelCall& call = run.call;
  if (run.next.load(std::memory_order_relaxed) >= run.total) return;
  std::unique_ptr<Executor> executor = take_executor();
  if (options_.timeout > 0) let_abandon_signal_in();
  Crew::Member member(*crew_);
  for (;;) {
    auto [begin, end] = run.take(pool_->threads());
    if (begin >= run.total) break;
    for (uint64_t j = begin; j < end; j++) {
      if (is_caller) poll(run);
      if (crew_->abandoned().load(std::memory_order_relaxed)) break;
      uint64_t i = options_.debug ? (j * run.step + run.offset) % run.total : j;
      abi::Uint3 position = {static_cast<uint32_t>(i % call.grid.x), static_cast<uint32_t>(i / call.grid.x % call.grid.y),
                             static_cast<uint32_t>(i / call.grid.x / call.grid.y)};
      std::string failure = executor->run(call, position);
      if (failure.empty()) continue;
      run.fail(failure);
      break;
    }
  }
  barriers_ += executor->take_barriers();
  give_executor(std::move(executor));
}

// Threadgroups in x, then y, then z order, a few at a time to each thread.
void CpuDevice::run_threadgroups(const Pipeline& pipeline, const KernelCall& call) {
  uint64_t total = static_cast<uint64_t>(call.grid.x) * call.grid.y * call.grid.z;
  threadgroups_.fetch_add(total, std::memory_order_relaxed);
  Run run{call, total};
  if (options_.debug) {
    uint64_t seed = (order_ += 0x9e3779b9u);
    run.offset = seed % total;
    for (run.step = seed % total | 1; std::gcd(run.step, total) != 1;) run.step += 2;
  }
  // Nothing may leave a worker thread: there is nobody to catch it.
  auto work = [&](bool is_caller) {
    try {
      run_some(run, is_caller);
    } catch (const std::exception& e) {
      run.fail(std::string("no memory for its threads (") + e.what() + ")");
    }
  };
  if (options_.timeout > 0 && !watchdog_) watchdog_ = std::make_unique<Watchdog>(*crew_, options_.timeout);
  crew_->begin();
  if (watchdog_) watchdog_->arm();
  if (total == 1 || pool_->threads() == 1 || options_.debug)  // who wrote what before whom is then known
    work(true);
  else
    pool_->run(work, [&] { poll(run); });
  bool late = watchdog_ && watchdog_->disarm();
  if (run.interrupted) std::rethrow_exception(run.interrupted);
  std::string after;
  if (late)
    after = (run.error.empty() ? "stopped" : "") + std::string(": it took longer than the device's timeout of ") +
            seconds_text(options_.timeout);
  if (late || !run.error.empty()) throw Error(ErrorKind::kernel, "kernel '" + pipeline.name + "': " + run.error + after);
}

namespace {

std::shared_ptr<Device> make_device(const Options& o) {
  CpuOptions options;
  options.threads = option<unsigned>(o, "threads");
  options.threadgroup_memory_limit = option<size_t>(o, "threadgroup_memory_limit");
  options.lenient_barriers = option<bool>(o, "lenient_barriers");
  options.debug = option<bool>(o, "debug");
  options.guards = options.debug || option<bool>(o, "guards");
  options.timeout = option<double>(o, "timeout");
  return std::make_shared<CpuDevice>(options);
}
std::vector<std::string> device_names() { return {"cpu"}; }
[[maybe_unused]] const bool added = add_backend({"cpu", &make_device, &device_names});

}  // namespace

}  // namespace metalmm::cpu
