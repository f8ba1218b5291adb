// Contexts, memory, streams, events and graphs; modules and launches are in fake_kernels.cpp.
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "fake.h"

namespace fake {

// -- the driver ---------------------------------------------------------------------------------------------------------

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

const std::map<Result, std::pair<const char*, const char*>> kErrors = {
    {0, {"CUDA_SUCCESS", "no error"}},
    {1, {"CUDA_ERROR_INVALID_VALUE", "invalid argument"}},
    {2, {"CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}},
    {3, {"CUDA_ERROR_NOT_INITIALIZED", "initialization error"}},
    {100, {"CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"}},
    {101, {"CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"}},
    {200, {"CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"}},
    {201, {"CUDA_ERROR_INVALID_CONTEXT", "invalid device context"}},
    {209, {"CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"}},
    {304, {"CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"}},
    {400, {"CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"}},
    {500, {"CUDA_ERROR_NOT_FOUND", "named symbol not found"}},
    {600, {"CUDA_ERROR_NOT_READY", "device not ready"}},
    {700, {"CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"}},
    {701, {"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"}},
    {709, {"CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"}},
    {719, {"CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"}},
    {801, {"CUDA_ERROR_NOT_SUPPORTED", "operation not supported"}},
    {900, {"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"}},
    {901, {"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"}},
    {903, {"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "the capture was not initiated in this stream"}},
    {907, {"CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream"}},
    {908, {"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "attempt to terminate a thread-local capture sequence from another thread"}},
};

// A stretch of device memory that a copy touches.
std::shared_ptr<Memory> range(Call& call, Address address, size_t size) {
  auto memory = memory_at(address, size);
  if (!memory)
    call.wrong(kInvalidValue, "bounds", number(size) + " bytes at " + hex(address) + " are not in live memory");
  else if (memory->context != call.context)
    call.wrong(kInvalidValue, "context", "memory of another context"), memory = nullptr;
  return memory;
}

}  // namespace

#define FAKE_CALL(...)    \
  Call call(__VA_ARGS__); \
  if (call.result) return call.result

FAKE_EXPORT Result cuInit(unsigned flags) {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { forked = world.initialized; }); });
  if (forked) return kNotInitialized;
  std::lock_guard lock(mutex);
  Result code = 0;
  if (take_fault("init", &code)) return code;
  if (flags) return violation("size", "init: flags"), kInvalidValue;
  if (settings.devices == 0) return kNoDevice;
  world.initialized = true;
  return 0;
}

FAKE_EXPORT Result cuDriverGetVersion(int* version) {
  *version = static_cast<int>(settings.driver_version);
  return 0;
}

static Result text_of(Result r, const char** out, bool name) {
  auto it = kErrors.find(r);
  *out = it == kErrors.end() ? nullptr : name ? it->second.first : it->second.second;
  return *out ? 0 : kInvalidValue;
}
FAKE_EXPORT Result cuGetErrorName(Result r, const char** out) { return text_of(r, out, true); }
FAKE_EXPORT Result cuGetErrorString(Result r, const char** out) { return text_of(r, out, false); }

FAKE_EXPORT Result cuDeviceGetCount(int* count) {
  FAKE_CALL("device_count", false);
  *count = static_cast<int>(settings.devices);
  return 0;
}

static bool is_gpu(Call& call, DeviceNumber gpu) {
  if (gpu >= 0 && gpu < settings.devices) return true;
  call.result = kInvalidDevice;
  return false;
}

FAKE_EXPORT Result cuDeviceGet(DeviceNumber* gpu, int index) {
  FAKE_CALL("device_get", false);
  if (!is_gpu(call, index)) return call.result;
  *gpu = index;
  return 0;
}

FAKE_EXPORT Result cuDeviceGetName(char* out, int size, DeviceNumber gpu) {
  FAKE_CALL("device_name", false);
  if (!is_gpu(call, gpu)) return call.result;
  std::snprintf(out, static_cast<size_t>(size), "Fake GPU %d", gpu);
  return 0;
}

FAKE_EXPORT Result cuDeviceGetAttribute(int* value, int which, DeviceNumber gpu) {
  FAKE_CALL("device_attribute", false);
  if (!is_gpu(call, gpu)) return call.result;
  int capability = static_cast<int>(settings.capability);
  const std::map<int, int> values = {{kMaxThreads, 1024},
                                     {kMaxGridX, 2147483647},
                                     {kMultiprocessors, 132},
                                     {kL2Bytes, 50 << 20},
                                     {kMostSharedBytes, static_cast<int>(most_shared_bytes())},
                                     {kCapabilityMajor, capability / 10},
                                     {kCapabilityMinor, capability % 10}};
  auto it = values.find(which);
  if (it == values.end()) return call.wrong(kInvalidValue, "size", "attribute " + std::to_string(which) + ", which the fake does not know");
  *value = it->second;
  return 0;
}

FAKE_EXPORT Result cuDeviceTotalMem_v2(size_t* bytes, DeviceNumber gpu) {
  FAKE_CALL("device_memory", false);
  if (!is_gpu(call, gpu)) return call.result;
  *bytes = static_cast<size_t>(settings.memory_bytes);
  return 0;
}

FAKE_EXPORT Result cuDevicePrimaryCtxRetain(Context* out, DeviceNumber gpu) {
  FAKE_CALL("context_retain", false);
  if (!is_gpu(call, gpu)) return call.result;
  auto& context = world.primary[gpu];
  if (!context) {
    context = std::make_shared<ContextState>();
    add(context, nullptr);
    context->gpu = gpu;
    context->null_stream = start_stream(context.get());
  }
  if (context->failed) return context->failed;  // for as long as the process lives, whatever is tried
  context->references++;
  *out = reinterpret_cast<Context>(context->handle);
  return 0;
}

FAKE_EXPORT Result cuDevicePrimaryCtxRelease_v2(DeviceNumber gpu) {
  FAKE_CALL("context_release", false);
  auto it = world.primary.find(gpu);
  if (it == world.primary.end()) return call.wrong(kInvalidContext, "context", "of a GPU whose context nobody holds");
  auto context = it->second;
  if (--context->references > 0 || context->failed) return 0;
  if (std::string left = leaks_of(*context); !left.empty()) violation("leak", "context_release: with " + left);
  destroy(context, call.lock);
  return 0;
}

FAKE_EXPORT Result cuDevicePrimaryCtxReset_v2(DeviceNumber gpu) {
  FAKE_CALL("context_reset", false);
  if (!is_gpu(call, gpu)) return call.result;
  auto it = world.primary.find(gpu);
  if (it == world.primary.end()) return 0;
  auto context = it->second;
  if (context->failed) return context->failed;
  destroy(context, call.lock);
  return 0;
}

FAKE_EXPORT Result cuCtxSetCurrent(Context context) {
  FAKE_CALL("context_set", false);
  if (context && !find(call, context, "Context")) return call.result = kInvalidContext;
  current = reinterpret_cast<uintptr_t>(context);
  return 0;
}

// -- memory

FAKE_EXPORT Result cuMemAlloc_v2(Address* out, size_t size) {
  FAKE_CALL("allocate", true, true);
  if (!size) return call.wrong(kInvalidValue, "size", "of no bytes");
  if (call.context->used + size > static_cast<size_t>(settings.memory_bytes)) return kOutOfMemory;
  auto memory = add_memory(call.context, nullptr, size);
  if (!memory) return kOutOfMemory;
  call.context->used += size;
  *out = memory->address;
  return 0;
}

// As the CPU's runtime reads it (csrc/msl/runtime/matrix.h): where the matrix is in this process's memory.
FAKE_EXPORT Result cuTensorMapEncodeTiled(void* map, int type, unsigned rank, Address address, const uint64_t* sizes,
                                          const uint64_t* pitches, const unsigned* box, const unsigned* steps, int interleave, int swizzle,
                                          int promote, int fill) {
  FAKE_CALL("encode_tiles");
  unsigned bytes = type == kTileUint8 ? 1 : type == kTileUint16 ? 2 : 0, line = box[0] * bytes;
  bool known = bytes && rank == 3 && !interleave && !fill && promote == kTilePromote256 && steps[0] == 1 && steps[1] == 1 && steps[2] == 1;
  known &= line == (16u << swizzle) && swizzle >= kSwizzle32 && swizzle <= kSwizzle128 && box[1] >= 1 && box[1] <= 256 && box[2] == 1;
  if (!known || reinterpret_cast<uintptr_t>(map) % 64)
    return call.wrong(kInvalidValue, "size", "a map that the fake does not know, or not at 64 bytes");
  if (settings.capability < 90) return kNotSupported;
  uint64_t end = sizes[0] * bytes;
  for (unsigned i = 0; i < 3; i++)
    if (!sizes[i] || sizes[i] > uint64_t{1} << 32) return call.wrong(kInvalidValue, "size", "a map of " + number(sizes[i]));
  for (unsigned i = 0; i < 2; i++) {
    if (!pitches[i] || pitches[i] % 16 || pitches[i] >> 40) return call.wrong(kInvalidValue, "size", "a pitch of " + number(pitches[i]));
    end += (sizes[i + 1] - 1) * pitches[i];
  }
  auto memory = memory_at(address, end);
  if (address % 16 || !memory)
    return call.wrong(kInvalidValue, "size", "a map of " + number(end) + " bytes at " + hex(address) + ", not in live memory");
  metalmm::abi::FakeTileMap own = {
      memory->host + (address - memory->address), {pitches[0], pitches[1]}, {sizes[0], sizes[1], sizes[2]}, {box[0], box[1]}, bytes};
  std::memcpy(map, &own, sizeof(own));
  return 0;
}

FAKE_EXPORT Result cuMemFree_v2(Address address) {
  FAKE_CALL("free", true, true);
  auto it = world.memory.find(address);
  if (it == world.memory.end() || !it->second->pages) {
    bool inside = memory_at(address) != nullptr;
    return call.wrong(kInvalidValue, "handle",
                      hex(address) + (inside ? " is not where an allocation begins" : " is freed already, or never was allocated"));
  }
  auto memory = it->second;
  if (memory->context != call.context) return call.wrong(kInvalidValue, "context", "memory of another context");
  if (memory->in_flight) violation("lifetime", "free: memory that queued work uses");
  call.context->used -= memory->size;
  remove(*memory);
  return 0;
}

FAKE_EXPORT Result cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t size, Stream s) {
  FAKE_CALL("copy_in");
  auto stream = find_stream(call, s);
  auto memory = stream ? range(call, to, size) : nullptr;
  if (!memory) return call.result;
  uint8_t* target = memory->host + (to - memory->address);
  if (stream->capture) {  // read at each launch of the graph
    push(*stream, {[=] { return std::memcpy(target, from, size), 0; }, {memory}, {}});
    return 0;
  }
  auto* bytes = static_cast<const uint8_t*>(from);
  auto staged = std::make_shared<std::vector<uint8_t>>(bytes, bytes + size);
  // At the head of a stream it needs nobody who waits: it tells a kernel on another one to stop.
  push(*stream, {[=] { return std::memcpy(target, staged->data(), size), 0; }, {memory}, {}}, true);
  return 0;
}

FAKE_EXPORT Result cuMemcpyDtoHAsync_v2(void* to, Address from, size_t size, Stream s) {
  FAKE_CALL("copy_out");
  auto stream = find_stream(call, s);
  auto memory = stream ? range(call, from, size) : nullptr;
  if (!memory) return call.result;
  const uint8_t* source = memory->host + (from - memory->address);
  push(*stream, {[=] { return std::memcpy(to, source, size), 0; }, {memory}, {}});
  return stream->capture ? 0 : drain(*stream, call.lock);  // the host's memory is pageable
}

FAKE_EXPORT Result cuMemsetD8Async(Address to, unsigned char value, size_t size, Stream s) {
  FAKE_CALL("fill");
  auto stream = find_stream(call, s);
  auto memory = stream ? range(call, to, size) : nullptr;
  if (!memory) return call.result;
  uint8_t* target = memory->host + (to - memory->address);
  push(*stream, {[=] { return std::memset(target, value, size), 0; }, {memory}, {}});
  return 0;
}

// -- streams and events

FAKE_EXPORT Result cuStreamCreate(Stream* out, unsigned flags) {
  FAKE_CALL("stream_create");
  if (flags > kStreamNonBlocking) return call.wrong(kInvalidValue, "size", "flags " + number(flags));
  auto stream = start_stream(call.context);
  *out = reinterpret_cast<Stream>(add(stream, call.context));
  return 0;
}

FAKE_EXPORT Result cuStreamDestroy_v2(Stream s) {
  FAKE_CALL("stream_destroy");
  auto stream = find<StreamState>(call, s, "Stream");
  if (!stream) return call.result;
  if (stream->capture) call.wrong(kCaptureUnsupported, "capture", "of a stream that is capturing"), world.captures.erase(stream.get());
  remove(*stream);
  end_stream(*stream, call.lock);
  return 0;
}

FAKE_EXPORT Result cuStreamSynchronize(Stream s) {
  FAKE_CALL("stream_synchronize");
  auto stream = find_stream(call, s);
  if (!stream) return call.result;
  if (stream->capture) {
    stream->capture->invalid = true;
    return call.wrong(kCaptureUnsupported, "capture", "of a stream that is capturing");
  }
  return drain(*stream, call.lock);
}

FAKE_EXPORT Result cuStreamWaitEvent(Stream s, Event e, unsigned flags) {
  FAKE_CALL("stream_wait");
  auto stream = find_stream(call, s);
  auto event = stream ? find<EventState>(call, e, "Event") : nullptr;
  if (!event) return call.result;
  if (flags) return call.wrong(kInvalidValue, "size", "flags");
  if (stream->capture || event->captured) return call.wrong(kNotSupported, "capture", "which the fake does not know");
  uint64_t through = event->recorded;
  auto wait = [=] {
    std::unique_lock lock(mutex);
    if (event->stream) event->stream->wanted = std::max(event->stream->wanted, event->place);
    changed.notify_all();
    changed.wait(lock, [&] { return event->done >= through || event->context->failed; });
    return 0;
  };
  push(*stream, {wait, {}, {}});
  return 0;
}

FAKE_EXPORT Result cuEventCreate(Event* out, unsigned flags) {
  FAKE_CALL("event_create");
  if (flags & ~7u) return call.wrong(kInvalidValue, "size", "flags " + number(flags));
  auto event = std::make_shared<EventState>();
  event->flags = flags;
  *out = reinterpret_cast<Event>(add(event, call.context));
  return 0;
}

FAKE_EXPORT Result cuEventDestroy_v2(Event e) {
  FAKE_CALL("event_destroy");
  auto event = find<EventState>(call, e, "Event");
  if (event) remove(*event);
  return call.result;
}

FAKE_EXPORT Result cuEventRecord(Event e, Stream s) {
  FAKE_CALL("event_record");
  auto event = find<EventState>(call, e, "Event");
  auto stream = event ? find_stream(call, s) : nullptr;
  if (!stream) return call.result;
  event->captured = stream->capture != nullptr;
  if (event->captured) return 0;
  uint64_t which = ++event->recorded;
  event->stream = stream;
  event->place = stream->pushed + 1;
  auto record = [=] {
    std::lock_guard lock(mutex);
    event->done = which;
    event->time = now();
    return 0;
  };
  push(*stream, {record, {}, {}, true});
  return 0;
}

// Whether it is through; where it is not, its stream gets going.
static Result ready(Call& call, EventState& event) {
  if (event.captured) return call.wrong(kCapturedEvent, "capture", "an event that was recorded in a capture");
  if (!event.recorded) {
    call.wrong(0, "event", "an event that was never recorded");
    return 0;
  }
  if (event.done == event.recorded) return 0;
  event.stream->wanted = std::max(event.stream->wanted, event.place);
  changed.notify_all();
  return kNotReady;
}

FAKE_EXPORT Result cuEventQuery(Event e) {
  FAKE_CALL("event_query", true, true);
  auto event = find<EventState>(call, e, "Event");
  return event ? ready(call, *event) : call.result;
}

FAKE_EXPORT Result cuEventElapsedTime(float* ms, Event first, Event last) {
  FAKE_CALL("event_elapsed");
  std::shared_ptr<EventState> events[] = {find<EventState>(call, first, "Event"), find<EventState>(call, last, "Event")};
  for (auto& event : events) {
    if (!event) return call.result;
    if (event->flags & kEventDisableTiming) return call.wrong(kInvalidHandle, "event", "an event without timing");
    if (!event->recorded || event->captured) return call.wrong(kInvalidHandle, "event", "an event that was never recorded");
    if (event->done != event->recorded) return call.wrong(kNotReady, "event", "an event that is not through");
  }
  *ms = static_cast<float>((events[1]->time - events[0]->time) * 1e3);
  return 0;
}

// -- graphs

FAKE_EXPORT Result cuStreamBeginCapture_v2(Stream s, int mode) {
  FAKE_CALL("capture_begin");
  if (mode < 0 || mode > 2) return call.wrong(kInvalidValue, "size", "mode " + std::to_string(mode));
  if (!s) return call.wrong(kCaptureUnsupported, "capture", "of the null stream");
  auto stream = find<StreamState>(call, s, "Stream");
  if (!stream) return call.result;
  if (stream->capture) return call.wrong(kInvalidValue, "capture", "of a stream that is capturing");
  if (mode != kCaptureThreadLocal)
    return call.wrong(kNotSupported, "capture", "in another mode than of its thread, which the fake does not know");
  stream->capture = std::make_unique<Capture>();
  stream->capture->thread = std::this_thread::get_id();
  world.captures.insert(stream.get());
  return 0;
}

FAKE_EXPORT Result cuStreamEndCapture(Stream s, Graph* out) {
  FAKE_CALL("capture_end", true, false, false);
  *out = nullptr;
  auto stream = find<StreamState>(call, s, "Stream");
  if (!stream) return call.result;
  if (!stream->capture) return call.wrong(kCaptureUnmatched, "capture", "of a stream that is not capturing");
  if (stream->capture->thread != std::this_thread::get_id())
    return call.wrong(kWrongThread, "capture", "ended by another thread than began it");
  auto capture = std::move(stream->capture);
  world.captures.erase(stream.get());
  if (take_fault("capture_end", &call.result)) return call.result;  // which ends it all the same
  if (capture->invalid) return kCaptureInvalidated;
  auto graph = std::make_shared<GraphState>("Graph");
  graph->nodes = std::move(capture->nodes);
  *out = reinterpret_cast<Graph>(add(graph, call.context));
  return 0;
}

FAKE_EXPORT Result cuGraphInstantiateWithFlags(GraphExec* out, Graph g, unsigned long long flags) {
  FAKE_CALL("graph_instantiate");
  auto graph = find<GraphState>(call, g, "Graph");
  if (!graph) return call.result;
  if (flags) return call.wrong(kInvalidValue, "size", "flags " + number(flags));
  auto made = std::make_shared<GraphState>("GraphExec");
  made->nodes = graph->nodes;
  *out = reinterpret_cast<GraphExec>(add(made, call.context));
  return 0;
}

FAKE_EXPORT Result cuGraphLaunch(GraphExec g, Stream s) {
  FAKE_CALL("graph_launch");
  auto graph = find<GraphState>(call, g, "GraphExec");
  auto stream = graph ? find_stream(call, s) : nullptr;
  if (!stream) return call.result;
  if (stream->capture) return call.wrong(kNotSupported, "capture", "of a graph, which the fake does not know");
  Uses uses = {graph};
  for (const Work& node : graph->nodes)
    for (auto& use : node.uses) {
      if (!use->alive) return call.wrong(kInvalidValue, "lifetime", std::string(use->kind) + " that the graph uses is gone");
      uses.push_back(use);
    }
  auto run = [graph = graph.get()] {
    for (const Work& node : graph->nodes)
      if (Result r = node.run()) return r;
    return 0;
  };
  push(*stream, {run, uses, {}});
  return 0;
}

FAKE_EXPORT Result cuGraphDestroy(Graph g) {
  FAKE_CALL("graph_destroy");
  auto graph = find<GraphState>(call, g, "Graph");
  if (graph) remove(*graph);
  return call.result;
}

FAKE_EXPORT Result cuGraphExecDestroy(GraphExec g) {
  FAKE_CALL("graph_exec_destroy");
  auto graph = find<GraphState>(call, g, "GraphExec");
  if (!graph) return call.result;
  if (graph->in_flight) violation("lifetime", "graph_exec_destroy: a graph in flight");
  remove(*graph);
  return 0;
}

}  // namespace fake
