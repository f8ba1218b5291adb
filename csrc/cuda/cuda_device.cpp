#include "cuda_device.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "pipeline.h"
#include "tile_maps.h"

namespace metalmm::cuda {
namespace {

constexpr auto kPoll = std::chrono::milliseconds(20);
constexpr uint32_t kGridX = (1u << 31) - 8, kGridYZ = 65535;  // along x whole clusters
constexpr size_t kNothing = 4096;
constexpr size_t kLeastAhead = 64 << 10;  // less is not worth the asking

}  // namespace

CudaDevice::CudaDevice(const CudaOptions& options)
    : Device("cuda"),
      options_(options),
      home_(home_of(options.index)),
      pool_(std::make_shared<Pool>(home_)),
      events_(std::make_shared<EventPool>(home_)) {
  home_->enter();
  const Driver& cu = driver();
  int capability = 0, minor = 0;
  home_->check(cu.device_attribute(&capability, kCapabilityMajor, home_->gpu), "asking what the GPU is");
  home_->check(cu.device_attribute(&minor, kCapabilityMinor, home_->gpu), "asking what the GPU is");
  overlaps_ = options_.overlap && capability >= 9 && !options_.debug;
  // What stops a kernel does so lane by lane; wgmma waits for ever for the lanes of its four simdgroups that have left.
  if (capability != 9 || minor != 0 || options_.timeout > 0) lacking_.push_back("wgmma");
  if (!options_.blas) lacking_.push_back("blas");
  try {
    home_->check(cu.stream_create(&stream_, kStreamNonBlocking), "making a stream");
    home_->check(cu.stream_create(&record_stream_, kStreamNonBlocking), "making a stream");
    home_->check(cu.stream_create(&stop_stream_, kStreamNonBlocking), "making a stream");
    nothing_.emplace(pool_, kNothing);
    home_->check(cu.fill(nothing_->address(), 0, kNothing, stream_), "filling memory");
  } catch (...) {
    nothing_.reset();
    for (Stream s : {stream_, record_stream_, stop_stream_})
      if (s) cu.stream_destroy(s);
    throw;
  }
}

CudaDevice::~CudaDevice() {
  leave_family();
  if (home_->lost || forked_) {
    nothing_.reset();
    workspace_.reset();
    return;
  }
  home_->enter();
  driver().stream_synchronize(stream_);
  nothing_.reset();
  workspace_.reset();
  driver().stream_destroy(stream_);
  driver().stream_destroy(record_stream_);
  driver().stream_destroy(stop_stream_);
}

void CudaDevice::hold_for_fork(bool hold) {
  for (std::mutex* m : {&pool_->lock_for_fork(), &events_->lock_for_fork()}) hold ? m->lock() : m->unlock();
}

void CudaDevice::check_here() const {
  if (forked_)
    throw Error(ErrorKind::device,
                "cuda: this device was made before the process was forked, and CUDA does not go with a fork; start processes with spawn");
  if (home_->lost) {
    std::lock_guard lock(home_->mutex);
    throw Error(ErrorKind::device,
                "cuda: the GPU's context was lost (" + home_->why + "); this process cannot use it any more, start another");
  }
  home_->enter();
}

Info CudaDevice::info() const {
  const Driver& cu = driver();
  char name[256] = {};
  int version = 0;
  size_t memory = 0;
  auto attribute = [&](int which) {
    int value = 0;
    cu.device_attribute(&value, which, home_->gpu);
    return int64_t{value};
  };
  cu.device_name(name, sizeof(name), home_->gpu);
  cu.driver_version(&version);
  cu.device_memory(&memory, home_->gpu);
  return {{"name", std::string(name)},
          {"compute_capability", attribute(kCapabilityMajor) * 10 + attribute(kCapabilityMinor)},
          {"driver", std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10)},
          {"multiprocessors", attribute(kMultiprocessors)},
          {"l2_bytes", attribute(kL2Bytes)},
          {"memory_bytes", static_cast<int64_t>(memory)},
          {"max_total_threads_per_threadgroup", attribute(kMaxThreads)},
          {"max_threadgroup_memory_length", static_cast<int64_t>(limits().threadgroup_memory)},
          {"unified_memory", false}};
}

Info CudaDevice::counters() const { return {{"allocations", static_cast<int64_t>(pool_->allocations())}}; }

// Grids of any size: larger ones are more than one launch.
Limits CudaDevice::limits() const {
  Limits limits;
  limits.threadgroup_memory = static_cast<size_t>(home_->most_shared_bytes) - kMaxBarrier;
  return limits;
}

std::shared_ptr<Buffer> CudaDevice::new_buffer(size_t size) {
  check_here();
  auto memory = std::make_shared<Temporary>(pool_, size);
  Address address = memory->address();
  return std::make_shared<Buffer>(nullptr, size, false, [memory] {}, reinterpret_cast<void*>(address), address);
}

void CudaDevice::read(const Buffer& b, size_t offset, void* to, size_t size) {
  if (!size) return;
  check_here();
  home_->check(driver().copy_out(to, b.address() + offset, size, stream_), "copying from the GPU");
  home_->check(driver().stream_synchronize(stream_), "copying from the GPU");
}

void CudaDevice::write(const Buffer& b, size_t offset, const void* from, size_t size) {
  if (!size) return;
  check_here();
  home_->check(driver().copy_in(b.address() + offset, from, size, stream_), "copying to the GPU");
  home_->check(driver().stream_synchronize(stream_), "copying to the GPU");
}

std::shared_ptr<Pipeline> CudaDevice::load_pipeline(const PipelineSource& source) {
  check_here();
  if (source.library) {  // here, for nothing is allocated while a recording is made
    std::lock_guard lock(workspace_mutex_);
    if (!workspace_) workspace_.emplace(pool_, BlasMatmul::kWorkspace);
  }
  return std::make_shared<CudaPipeline>(home_, source);
}

template <class Settle, class After>
void CudaDevice::launch_all(const DispatchList& work, Stream stream, std::vector<Temporary>& kept, bool in_order, Settle&& settle,
                            After&& after) {
  std::vector<Order> orders(work.size() + 1);
  if (overlaps_) find_orders(work, options_.ahead, in_order, orders);
  work.for_each([&](size_t i, const Dispatch& d) {
    Span next = orders[i + 1].reads;
    if (next.begin == orders[i].reads.begin) next = {0, 0};  // it is being read already
    after(launch(d, stream, kept, next, orders[i], settle));
  });
}

template <class Settle>
std::string CudaDevice::launch(const Dispatch& d, Stream stream, std::vector<Temporary>& kept, Span next, const Order& order,
                               Settle&& settle) {
  auto& pipeline = static_cast<const CudaPipeline&>(**d.pipeline);
  const Driver& cu = driver();
  // What the host holds is copied in, and back where the kernel may have written. A copy stands within 256 bytes as the original
  // does: by that address it was decided which loads are aligned.
  struct Copied {
    const uint8_t *begin, *end;  // of the host
    Address address;
    bool written;
  };
  std::vector<Copied> copies;  // arrays that share memory share their copy
  for (size_t i = 0; i < d.buffer_count; i++) {
    const Buffer& b = **d.buffers[i].buffer;
    if (b.native() || !b.size()) continue;
    Copied c{b.host(), b.host() + b.size(), 0, pipeline.writes(d.buffers[i].index)};
    for (auto it = copies.begin(); it != copies.end();) {
      if (it->end <= c.begin || c.end <= it->begin) {
        ++it;
        continue;
      }
      c = {std::min(c.begin, it->begin), std::max(c.end, it->end), 0, c.written || it->written};
      it = copies.erase(it);
    }
    copies.push_back(c);
  }
  if (!copies.empty()) settle();
  for (Copied& c : copies) {
    size_t size = static_cast<size_t>(c.end - c.begin);
    kept.emplace_back(pool_, size + 256);
    c.address = kept.back().address() + reinterpret_cast<uintptr_t>(c.begin) % 256;
    home_->check(cu.copy_in(c.address, c.begin, size, stream), "copying to the GPU");
  }
  auto address_of = [&](const BufferBinding& b) -> Address {
    const Buffer& buffer = **b.buffer;
    if (buffer.native()) return buffer.address() + b.offset;
    for (const Copied& c : copies)
      if (buffer.size() && c.begin <= buffer.host() && buffer.host() < c.end)
        return c.address + static_cast<size_t>(buffer.host() - c.begin) + b.offset;
    return nothing_->address();
  };
  std::string refused;
  if (pipeline.blas)
    launch_blas(d, stream, address_of);
  else
    refused = launch_kernel(d, stream, kept, next, order, address_of, settle);
  if (!copies.empty()) settle();
  for (const Copied& c : copies)
    if (c.written)
      home_->check(cu.copy_out(const_cast<uint8_t*>(c.begin), c.address, static_cast<size_t>(c.end - c.begin), stream),
                   ("copying what kernel '" + pipeline.name + "' wrote").c_str());
  return refused;
}

template <class AddressOf>
void CudaDevice::launch_blas(const Dispatch& d, Stream stream, AddressOf&& address_of) {
  auto& pipeline = static_cast<const CudaPipeline&>(**d.pipeline);
  MatmulParams p;
  std::memcpy(&p, d.bytes[0].data, sizeof(p));
  auto address = [&](uint32_t index) { return address_of(d.buffers[index]); };  // in index order
  BlasOperands o{address(kIndexA), address(kIndexB), address(kIndexD), address(kIndexC), address(kIndexBias)};
  pipeline.blas->launch(p, o, stream, workspace_->address());
}

// Of a matmul, which has A and B first, and its parameters.
template <class AddressOf>
void put_maps(const Dispatch& d, uint8_t* to, AddressOf&& address_of) {
  MatmulParams p;
  std::memcpy(&p, d.bytes[0].data, sizeof(p));
  auto& maps = *reinterpret_cast<abi::TileMaps*>(to);
  // A threadgroup's results are a part of the columns that it loads.
  maps.rows_of_b *= static_cast<const CudaPipeline&>(**d.pipeline).table.cluster;
  make_maps(maps, p, d.buffer_count > kIndexScales, address_of(d.buffers[kIndexA]), address_of(d.buffers[kIndexB]));
}

template <class AddressOf, class Settle>
std::string CudaDevice::launch_kernel(const Dispatch& d, Stream stream, std::vector<Temporary>& kept, Span next, const Order& order,
                                      AddressOf&& address_of, Settle&& settle) {
  auto& pipeline = static_cast<const CudaPipeline&>(**d.pipeline);
  const KernelTable& table = pipeline.table;
  const Driver& cu = driver();
  alignas(kBlockAt) uint8_t block[4096];
  auto put_word = [&](const ArgumentRow& row, unsigned long long word) { std::memcpy(block + row.word, &word, sizeof(word)); };
  size_t shared = 0;
  std::vector<Bound> bound;
  auto put_memory = [&](const ArgumentRow& row, Address address, size_t size) {
    put_word(row, address);
    if (pipeline.watched) bound.push_back({row.index, reinterpret_cast<uint8_t*>(address), reinterpret_cast<uint8_t*>(address) + size});
  };
  for (uint32_t i = 0; i < table.count; i++) {
    const ArgumentRow& row = table.rows[i];
    auto kind = static_cast<abi::ArgKind>(row.kind);
    if (kind == abi::ArgKind::threadgroup) {
      size_t size = 0;
      for (size_t j = 0; j < d.threadgroup_memory_count; j++)
        if (d.threadgroup_memory[j].index == row.index) size = d.threadgroup_memory[j].size;
      put_word(row, shared);
      if (row.enabled) shared += threadgroup_space(size);
      continue;
    }
    if (kind != abi::ArgKind::buffer) continue;
    if (!row.enabled) {
      put_memory(row, nothing_->address(), kNothing);
      if (row.inlined) std::memset(block + row.inlined, 0, row.bytes);
      continue;
    }
    for (size_t j = 0; j < d.buffer_count; j++)
      if (d.buffers[j].index == row.index) put_memory(row, address_of(d.buffers[j]), (**d.buffers[j].buffer).size() - d.buffers[j].offset);
    for (size_t j = 0; j < d.bytes_count; j++) {
      const BytesBinding& b = d.bytes[j];
      if (b.index != row.index) continue;
      if (row.inlined) {
        std::memcpy(block + row.inlined, b.data, row.bytes);
        put_word(row, 0);
        if (row.only_inlined && row.index == kIndexMaps && pipeline.takes_maps()) put_maps(d, block + row.inlined, address_of);
      } else {
        kept.emplace_back(pool_, std::max<size_t>(b.size, 1));
        if (b.size) home_->check(cu.copy_in(kept.back().address(), b.data, b.size, stream), "copying numbers to the GPU");
        put_memory(row, kept.back().address(), b.size);
      }
    }
  }
  auto* head = reinterpret_cast<LaunchHead*>(block);
  auto triple = [](const Size3& s) { return abi::Uint3{s[0], s[1], s[2]}; };
  Size3 grid = d.grid;
  grid[0] = (grid[0] + table.cluster - 1) / table.cluster * table.cluster;
  *head = {{0, 0, 0}, triple(grid), triple(d.threadgroup), triple(d.threads), 0, 0, 0, order.beside, order.late, order.early, 0};
  uint64_t groups = uint64_t{grid[0]} * grid[1] * grid[2];
  if (size_t bytes = next.end - next.begin; bytes >= kLeastAhead) {
    size_t share = std::max<size_t>(bytes / groups / 128 * 128, 2048);
    head->ahead = next.begin;
    head->ahead_bytes = static_cast<uint32_t>(share);
    head->ahead_groups = static_cast<uint32_t>(std::min<uint64_t>(bytes / share, groups));
  }
  void* parameters[] = {block};  // where the kernel has it is the driver's to know: it stands on 64 bytes
  LaunchConfig config{};
  config.block[0] = d.threadgroup[0] * d.threadgroup[1] * d.threadgroup[2], config.block[1] = config.block[2] = 1;
  uint32_t of_masks = table.masks ? 4 * config.block[0] : 0;
  config.shared_bytes = static_cast<unsigned>(shared) + of_masks;
  config.stream = stream;
  LaunchAttribute attributes[2]{};
  config.attributes = attributes;
  if (overlaps_) {
    LaunchAttribute& overlap = attributes[config.attribute_count++];
    overlap.id = kAttributeProgrammaticSerialization;
    overlap.number = 1;
  }
  if (table.cluster > 1) {
    LaunchAttribute& cluster = attributes[config.attribute_count++];
    cluster.id = kAttributeCluster;
    cluster.sizes[0] = table.cluster, cluster.sizes[1] = cluster.sizes[2] = 1;
  }
  for (uint32_t z = 0; z < grid[2]; z += std::min(kGridYZ, grid[2] - z))
    for (uint32_t y = 0; y < grid[1]; y += std::min(kGridYZ, grid[1] - y))
      for (uint32_t x = 0; x < grid[0]; x += std::min(kGridX, grid[0] - x)) {
        head->origin = {x, y, z};
        config.grid[0] = std::min(kGridX, grid[0] - x);
        config.grid[1] = std::min(kGridYZ, grid[1] - y);
        config.grid[2] = std::min(kGridYZ, grid[2] - z);
        if (pipeline.watched) pipeline.watched->allow(*home_, bound, of_masks, stream);
        if (Result r = cu.launch(&config, pipeline.function, parameters, nullptr))
          home_->check(r, ("launching kernel '" + pipeline.name + "'").c_str());
        if (!pipeline.watched) continue;
        settle();
        if (std::string refused = pipeline.watched->refused(*home_, bound, *head, stream); !refused.empty())
          return "kernel '" + pipeline.name + "': " + refused;
      }
  return {};
}

// -- submissions --------------------------------------------------------------------------------------------------------

class CudaSubmission : public Submission {
 public:
  CudaSubmission(std::shared_ptr<CudaDevice> device, std::shared_ptr<const DispatchList> work)
      : device_(std::move(device)), work_(std::move(work)) {}
  ~CudaSubmission() override { let_go(); }

  // Under the device's order; what it began is on the stream when it returns.
  void launch(bool per_dispatch) {
    per_dispatch_ = per_dispatch;
    begin([&] {
      device_->launch_all(
          *work_, device_->stream_, kept_, per_dispatch, [&] { settle(); },
          [&](const std::string& refused) {
            if (refused_.empty()) refused_ = refused;
            if (per_dispatch) mark();
          });
    });
  }
  void replay(GraphExec graph, std::shared_ptr<void> owner) {
    owner_ = std::move(owner);
    begin([&] { device_->home_->check(driver().graph_launch(graph, device_->stream_), "launching a recording"); });
  }

  bool done() const override {
    std::lock_guard lock(mutex_);
    return is_done();
  }
  BatchTiming timing() const override {
    std::lock_guard lock(mutex_);
    return timing_;
  }
  void wait() override {
    auto begin = Clock::now();
    auto polled = begin;
    for (;;) {
      {
        std::lock_guard lock(mutex_);
        if (is_done()) {
          if (finished_) break;
          finish(seconds(Clock::now() - begin));
          break;
        }
      }
      auto now = Clock::now();
      if (seconds(now - begin) > device_->options_.spin) usleep(seconds(now - begin) > 0.01 ? 500 : 30);
      if (now - polled > kPoll) {
        polled = now;
        if (device_->options_.timeout > 0 && seconds(now - begin) > device_->options_.timeout) {
          std::lock_guard lock(mutex_);
          if (!finished_) stop();
        }
        if (auto* poll = host_poll.load(std::memory_order_relaxed)) poll();
      }
    }
    std::lock_guard lock(mutex_);
    if (failure_) throw Error(*failure_);
  }

 private:
  template <class Work>
  void begin(Work&& work) {
    auto start = Clock::now();
    try {
      mark();
      work();
      if (!per_dispatch_) mark();
    } catch (...) {  // what it began uses what goes with it
      driver().stream_synchronize(device_->stream_);
      throw;
    }
    timing_.commit = seconds(Clock::now() - start);
  }
  // A copy to the host's memory blocks in the driver, where nobody would see the timeout pass.
  void settle() {
    if (device_->options_.timeout <= 0) return;
    Event event = device_->events_->take();
    Result r = driver().event_record(event, device_->stream_);
    for (auto begin = Clock::now(); !r && (r = driver().event_query(event)) == kNotReady; r = 0) {
      if (seconds(Clock::now() - begin) > device_->options_.timeout) stop();
      usleep(seconds(Clock::now() - begin) > 0.01 ? 500 : 30);
    }
    device_->events_->give_back(event);
    device_->home_->check(r, "waiting for a kernel");
  }
  void mark() {
    events_.push_back(device_->events_->take());
    device_->home_->check(driver().event_record(events_.back(), device_->stream_), "recording an event");
  }
  bool is_done() const {
    if (finished_ || device_->forked_) return true;
    device_->home_->enter();
    status_ = driver().event_query(events_.back());
    return status_ != kNotReady;
  }
  void finish(double waited) {
    finished_ = true;
    timing_.wait = waited;
    if (device_->forked_) {
      failure_.emplace(ErrorKind::device, "cuda: this was submitted before the process was forked; it runs in the parent alone");
    } else if (status_) {
      std::string text = names() + ": " + driver().text(status_);
      device_->home_->lose(text);
      failure_.emplace(ErrorKind::kernel, text + kEnd);
    } else if (!refused_.empty()) {
      failure_.emplace(ErrorKind::kernel, refused_);
    } else if (stopped_) {
      set_stop(0);
      failure_.emplace(ErrorKind::kernel, names() + ": it was ended after " + seconds_text(device_->options_.timeout) + ", its timeout");
    } else if (born_ != device_->stops_) {
      failure_.emplace(ErrorKind::kernel, names() + ": it was cut short with a kernel before it, which was ended at its timeout");
    } else {
      float ms = 0;
      if (!driver().event_elapsed(&ms, events_.front(), events_.back())) timing_.device = ms * 1e-3;
      for (size_t i = 1; per_dispatch_ && i < events_.size(); i++)
        if (!driver().event_elapsed(&ms, events_[i - 1], events_[i])) timing_.dispatches.push_back(ms * 1e-3);
    }
    let_go();
  }
  std::string names() const {
    std::string text;
    size_t count = 0;
    work_->for_each([&](size_t, const Dispatch& d) {
      std::string one = "'" + (*d.pipeline)->name + "'";
      if (text.find(one) == std::string::npos && count++ < 5) text += (text.empty() ? "" : ", ") + one;
    });
    return (count == 1 ? "kernel " : "one of the kernels ") + text;
  }
  // Kernels of a device with a timeout look at a word of memory in every loop, and leave it where that is not 0.
  void set_stop(const uint32_t& value) {
    device_->stops_++;
    work_->for_each([&](size_t, const Dispatch& d) {
      auto& pipeline = static_cast<const CudaPipeline&>(**d.pipeline);
      if (pipeline.stop) driver().copy_in(pipeline.stop, &value, sizeof(value), device_->stop_stream_);
    });
    driver().stream_synchronize(device_->stop_stream_);
    device_->stops_++;  // what began meanwhile may have seen either
  }
  void stop() {  // under the lock, or before anybody else has this
    if (stopped_) return;
    stopped_ = true;
    set_stop(1);
  }
  void let_go() {
    for (Event e : events_) device_->events_->give_back(e);
    events_.clear();
    kept_.clear();
    work_.reset();
    owner_.reset();
  }

  std::shared_ptr<CudaDevice> device_;
  std::shared_ptr<const DispatchList> work_;
  std::shared_ptr<void> owner_;
  std::vector<Temporary> kept_;
  std::vector<Event> events_;
  mutable std::mutex mutex_;
  mutable Result status_ = kNotReady;
  std::string refused_;  // what the first kernel was refused that was refused something
  bool per_dispatch_ = false, finished_ = false, stopped_ = false;
  const uint32_t born_ = device_->stops_;
  BatchTiming timing_;
  std::optional<Error> failure_;
};

std::shared_ptr<Submission> CudaDevice::start(std::shared_ptr<const DispatchList> work, bool per_dispatch) {
  check_here();
  // Copies block until what was submitted before is through: each of that has a timeout of its own.
  if (options_.timeout > 0 && work->has_host_memory()) finish();
  auto submission = std::make_shared<CudaSubmission>(std::static_pointer_cast<CudaDevice>(shared_from_this()), std::move(work));
  submission->launch(per_dispatch);
  return submission;
}

double CudaDevice::execute(const Dispatch& d, std::shared_ptr<Submission>*) {
  auto list = std::make_shared<DispatchList>();
  list->add(d);
  auto submission = submit(std::move(list), false);
  wait(*submission);
  return submission->timing().device;
}

// -- recordings ---------------------------------------------------------------------------------------------------------

// A graph of the launches, with all that they touch; owned by the recording and by what is in flight.
struct Captured {
  std::shared_ptr<Home> home;
  std::shared_ptr<const DispatchList> list;
  std::vector<Temporary> kept;
  GraphExec graph = nullptr;
  ~Captured() {
    if (!graph || home->lost) return;
    home->enter();
    driver().graph_exec_destroy(graph);
  }
};

class CudaRecording : public Recording {
 public:
  CudaRecording(std::shared_ptr<CudaDevice> device, std::shared_ptr<Captured> captured)
      : device_(std::move(device)), captured_(std::move(captured)) {}

 private:
  std::shared_ptr<Submission> start() override {
    device_->check_here();
    auto submission = std::make_shared<CudaSubmission>(device_, captured_->list);
    submission->replay(captured_->graph, captured_);
    return submission;
  }
  std::shared_ptr<CudaDevice> device_;
  std::shared_ptr<Captured> captured_;
};

// Host memory is copied at each run, so that a graph would save nothing; debug mode looks after each launch.
std::shared_ptr<Recording> CudaDevice::record(std::shared_ptr<const DispatchList> work) {
  bool inlined = true;
  work->for_each([&](size_t, const Dispatch& d) {
    for (size_t i = 0; i < d.bytes_count; i++) inlined &= static_cast<const CudaPipeline&>(**d.pipeline).inlines(d.bytes[i].index);
  });
  if (options_.debug || work->has_host_memory() || work->size() == 0 || !inlined) return Device::record(std::move(work));
  check_here();
  const Driver& cu = driver();
  auto captured = std::make_shared<Captured>();
  captured->home = home_;
  captured->list = work;
  Graph graph = nullptr;
  std::lock_guard lock(record_mutex_);
  home_->check(cu.capture_begin(record_stream_, kCaptureThreadLocal), "beginning a recording");
  try {
    launch_all(*work, record_stream_, captured->kept, false, [] {}, [](const std::string&) {});
  } catch (...) {
    cu.capture_end(record_stream_, &graph);
    if (graph) cu.graph_destroy(graph);
    throw;
  }
  home_->check(cu.capture_end(record_stream_, &graph), "ending a recording");
  Result r = cu.graph_instantiate(&captured->graph, graph, 0);
  cu.graph_destroy(graph);
  home_->check(r, "making a graph of a recording");
  return std::make_shared<CudaRecording>(std::static_pointer_cast<CudaDevice>(shared_from_this()), std::move(captured));
}

namespace {

std::shared_ptr<Device> make(const Options& options) {
  const Driver& cu = driver();
  if (!cu.missing.empty()) throw Error(ErrorKind::device, "cuda: " + cu.missing);
  CudaOptions o;
  o.index = option<int>(options, "index");
  o.spin = option<double>(options, "spin");
  o.timeout = option<double>(options, "timeout");
  o.overlap = option<bool>(options, "overlap");
  o.debug = option<bool>(options, "debug");
  o.blas = option<bool>(options, "blas");
  o.ahead = option<size_t>(options, "ahead");
  return std::make_shared<CudaDevice>(o);
}

[[maybe_unused]] const bool added = add_backend({"cuda", &make, &gpu_names, &end_blas});

}  // namespace
}  // namespace metalmm::cuda
