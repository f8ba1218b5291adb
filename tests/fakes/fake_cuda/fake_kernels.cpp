// Modules, which are shared objects of fake_nvrtc.cpp, and launches of their kernels.
#include <dlfcn.h>
#include <elf.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "../../../csrc/cpu/executor.h"
#include "fake.h"

namespace metalmm::cpu {
// Of guarded memory, which no call of this asks for: neither guards nor debug mode.
std::shared_ptr<Buffer> new_guarded_buffer(size_t, size_t) { return nullptr; }
void poison(uint8_t*, uint8_t*) {}
const uint8_t* first_broken(const uint8_t*, const uint8_t*) { return nullptr; }
}  // namespace metalmm::cpu

namespace fake {

using metalmm::abi::ArgInfo;
using metalmm::abi::ArgKind;
using metalmm::abi::Uint3;

ModuleState::~ModuleState() {
  if (library) dlclose(library);
}

namespace {

constexpr std::chrono::microseconds us(long long n) { return std::chrono::microseconds(n); }

// As Signature::table in csrc/msl/runtime/cuda/kernel.h lays it out. numbers: of each argument that is a reference that may travel in
// the block where it begins there, at a multiple; else 0.
KernelTable table_of(const metalmm::abi::KernelInfo& info, const uint8_t* numbers, bool only_inlined, bool stops) {
  KernelTable table{};
  table.version = kArgumentsVersion;
  table.max_threads = info.max_threads;
  table.count = info.arg_count;
  table.stop = stops;
  table.cluster = numbers[info.arg_count];
  uint32_t at = sizeof(LaunchHead) + 8 * info.arg_count, inlined = 0;
  for (uint32_t i = 0; i < info.arg_count; i++) {
    const ArgInfo& arg = info.args[i];
    ArgumentRow& row = table.rows[i];
    row = {static_cast<uint32_t>(arg.kind),
           arg.index,
           arg.enabled,
           arg.is_const,
           arg.bytes,
           static_cast<uint32_t>(sizeof(LaunchHead) + 8 * i),
           0,
           0};
    if (arg.kind != ArgKind::buffer || !numbers[i] || inlined + arg.bytes + numbers[i] > kMaxInline) continue;
    at = (at + numbers[i] - 1) / numbers[i] * numbers[i];
    row.inlined = at;
    row.only_inlined = only_inlined;
    at += arg.bytes;
    inlined += (arg.bytes + numbers[i] - 1) / numbers[i] * numbers[i];
  }
  table.size = (at + 15) / 16 * 16;
  return table;
}

// A shared object's size, from its own header: its table of sections stands at its end.
size_t image_bytes(const void* image) {
  if (std::memcmp(image, ELFMAG, SELFMAG)) return 0;
  auto* head = static_cast<const Elf64_Ehdr*>(image);
  return head->e_shoff + size_t{head->e_shentsize} * head->e_shnum;
}

std::shared_ptr<ModuleState> open_image(Call& call, const void* image) {
  if (!std::memcmp(image, ".version", 8)) image = std::strchr(static_cast<const char*>(image), '\n') + 1;  // as debug mode makes of it
  size_t size = image_bytes(image);
  if (!size) return call.result = kInvalidImage, nullptr;
  const char* folder = getenv("TMPDIR");
  std::string path = std::string(folder && *folder ? folder : "/tmp") + "/fake-cubin-XXXXXX";
  int file = mkstemp(path.data());
  auto* bytes = static_cast<const char*>(image);
  for (size_t done = 0; done < size;) {
    ssize_t n = write(file, bytes + done, size - done);
    if (n <= 0) return call.result = 304, nullptr;
    done += static_cast<size_t>(n);
  }
  close(file);
  auto module = std::make_shared<ModuleState>();
  module->library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  unlink(path.c_str());
  auto symbol = [&](const char* name) { return module->library ? dlsym(module->library, name) : nullptr; };
  module->info = static_cast<const metalmm::abi::KernelInfo*>(symbol("metalmm_kernel"));
  auto** numbers = static_cast<const uint8_t**>(symbol("metalmm_fake_numbers"));
  auto* options = static_cast<const char*>(symbol("metalmm_fake_options"));
  if (!module->info || !numbers || !options) return call.result = kInvalidImage, nullptr;
  std::string given = options;
  std::string own = " -arch=sm_" + std::to_string(settings.capability);
  if (given.find(own + " ") == std::string::npos && (settings.capability != 90 || given.find(own + "a ") == std::string::npos))
    return call.result = kWrongArchitecture, nullptr;
  if (module->info->arg_count > kMaxArguments) return call.result = kInvalidImage, nullptr;
  module->info->bind(metalmm::cpu::context_tls_offset(), &metalmm::cpu::current_context);
  void* stop = symbol("metalmm_stop");
  module->table = table_of(*module->info, *numbers, given.find(" -DMETALMM_MATMUL ") != std::string::npos, stop);
  module->table.early = given.find(" -DMETALMM_EARLY ") != std::string::npos;
  auto add_global = [&](const char* name, void* at, size_t size) {
    module->globals[name] = add_memory(call.context, static_cast<uint8_t*>(at), size);
  };
  add_global("metalmm_table", &module->table, sizeof(module->table));
  if (stop) add_global("metalmm_stop", stop, 4);
  if (void* watch = symbol("metalmm_watch")) {
    module->watch = static_cast<metalmm::cuda::Watch*>(watch);
    module->table.watched = 1;
    auto* files = static_cast<char*>(symbol("metalmm_files"));
    add_global("metalmm_watch", watch, sizeof(metalmm::cuda::Watch));
    add_global("metalmm_own", symbol("metalmm_own"), 8);
    add_global("metalmm_files", files, std::strlen(files) + 1);
  }
  return module;
}

// A launch as it runs: with pointers of the CPU.
struct Launch {
  std::shared_ptr<ModuleState> module;
  LaunchHead head;
  unsigned grid[3];
  size_t shared;
  std::vector<uint8_t*> buffers;
  uint32_t offsets[64] = {};
  alignas(metalmm::cuda::kBlockAt) uint8_t block[4096];

  Result run() {
    Result injected = 0, refused = 0;
    {
      std::lock_guard lock(mutex);
      take_fault("kernel", &injected);
      if (module->watch && take_fault("access", &refused)) refuse(*module->watch, refused);
    }
    auto begin = std::chrono::steady_clock::now();
    std::string wrong = injected ? "injected" : execute();
    while (settings.kernel_us && std::chrono::steady_clock::now() - begin < us(settings.kernel_us)) usleep(20);
    if (wrong.empty()) return 0;
    std::lock_guard lock(mutex);
    Result r = injected ? injected : wrong.find("a memory access at") != std::string::npos ? kIllegalAddress : kLaunchFailed;
    fail(*module->context, r, wrong);
    return r;
  }
  // As if thread 5 had stored 16 bytes at line 7, so many bytes beyond what the first buffer has.
  void refuse(metalmm::cuda::Watch& watch, Result beyond) {
    watch.refused++;
    watch.access = 16 | 1 << 8, watch.site = 7, watch.thread = 5;
    watch.group = {head.groups.x - 1, 0, 0};
    watch.at = watch.end[0] + static_cast<uint64_t>(beyond);
  }
  std::string execute() {
    static const std::atomic<bool> abandoned{false};
    metalmm::cpu::KernelCall call{};
    call.info = module->info;
    call.buffers = buffers.data();
    call.threadgroup_offsets = offsets;
    call.threadgroup_bytes = shared + module->info->static_threadgroup_bytes();
    call.grid = head.groups;
    call.threadgroup = head.group;
    call.threads = head.threads;
    call.abandoned = &abandoned;
    thread_local metalmm::cpu::Executor executor;
    for (uint32_t z = 0; z < grid[2]; z++)
      for (uint32_t y = 0; y < grid[1]; y++)
        for (uint32_t x = 0; x < grid[0]; x++)
          if (std::string wrong = executor.run(call, {x + head.origin.x, y + head.origin.y, z + head.origin.z}); !wrong.empty())
            return wrong;
    return {};
  }
};

// Where the words of the block lead. False: a rule is broken.
bool resolve(Call& call, Launch& launch, size_t shared, Uses& uses, Touch& touch) {
  static uint8_t nothing[4096];
  const KernelTable& table = launch.module->table;
  auto fixed = static_cast<uint32_t>(launch.module->info->static_threadgroup_bytes());
  launch.buffers.assign(256, nothing);
  size_t threadgroup = 0;
  for (bool enabled : {false, true})  // an argument that is there comes last: it may have the index of one that is not
    for (uint32_t i = 0; i < table.count; i++) {
      const ArgumentRow& row = table.rows[i];
      if ((row.enabled != 0) != enabled) continue;
      unsigned long long word = 0;
      std::memcpy(&word, launch.block + row.word, sizeof(word));
      std::string of = "argument " + std::to_string(i) + " (index " + std::to_string(row.index) + ")";
      if (static_cast<ArgKind>(row.kind) == ArgKind::threadgroup) {
        if (enabled && (word % 16 || word < threadgroup || word >= std::max<size_t>(shared, 1)))
          return call.wrong(kInvalidValue, "launch", of + ": threadgroup memory at " + hex(word) + " of " + number(shared) + " bytes"),
                 false;
        if (enabled) threadgroup = word + 16;
        launch.offsets[row.index % 64] = fixed + static_cast<uint32_t>(word);
        continue;
      }
      if (static_cast<ArgKind>(row.kind) != ArgKind::buffer) continue;
      if (row.inlined && (row.only_inlined || !word)) {
        launch.buffers[row.index] = launch.block + row.inlined;
        continue;
      }
      auto memory = memory_at(word, row.bytes);
      if (!memory || !memory->pages)
        return call.wrong(kInvalidValue, "launch", of + ": " + number(row.bytes) + " bytes at " + hex(word) + " are not in live memory"),
               false;
      if (memory->context != call.context) return call.wrong(kInvalidValue, "context", of + ": memory of another context"), false;
      launch.buffers[row.index] = memory->host + (word - memory->address);
      uses.push_back(memory);
      if (enabled) (row.is_const ? touch.reads : touch.writes).emplace_back(word, memory->address + memory->size);
      if (enabled && row.is_const && row.index != 0 && row.index != 3)  // A and C: kernels/include/wait.h
        touch.early_reads.emplace_back(word, memory->address + memory->size);
    }
  return true;
}

// Empty, or what is wrong with what is to be brought to the cache beforehand.
std::string wrong_ahead(const LaunchHead& head) {
  if (!head.ahead_groups) return {};
  uint64_t bytes = uint64_t{head.ahead_groups} * head.ahead_bytes;
  if (head.ahead % 16 || head.ahead_bytes % 16 || !bytes)
    return "ahead of it " + number(head.ahead_bytes) + " bytes at " + hex(head.ahead) + ", which are not 16 and 16";
  return memory_at(head.ahead, bytes) ? ""
                                      : "ahead of it " + number(bytes) + " bytes at " + hex(head.ahead) + ", which are not in live memory";
}

// Empty, or what is wrong with how many threads there are.
std::string wrong_shape(const LaunchConfig& c, const LaunchHead& head, const KernelTable& table) {
  const uint32_t origin[] = {head.origin.x, head.origin.y, head.origin.z}, groups[] = {head.groups.x, head.groups.y, head.groups.z},
                 group[] = {head.group.x, head.group.y, head.group.z}, threads[] = {head.threads.x, head.threads.y, head.threads.z};
  const uint32_t limits[] = {(1u << 31) - 1, 65535, 65535};
  uint64_t count = 1;
  for (int i = 0; i < 3; i++) {
    std::string axis = std::string(" in axis ") + "xyz"[i];
    if (c.grid[i] == 0 || c.grid[i] > limits[i]) return "a grid of " + number(c.grid[i]) + axis;
    if (uint64_t{origin[i]} + c.grid[i] > groups[i]) return "it goes beyond the " + number(groups[i]) + " threadgroups" + axis;
    if (!group[i]) return "no threads" + axis;
    count *= group[i];
    uint64_t whole = (uint64_t{threads[i]} + group[i] - 1) / group[i];
    if (head.threads.x && whole != groups[i]) return number(groups[i]) + " threadgroups for " + number(threads[i]) + " threads" + axis;
  }
  if (c.block[0] != count || c.block[1] != 1 || c.block[2] != 1)
    return "a block of " + number(c.block[0]) + " threads for threadgroups of " + number(count);
  uint32_t most = table.max_threads ? table.max_threads : 1024;
  return count > most ? number(count) + " threads in a block; the kernel takes " + number(most) : "";
}

}  // namespace

FAKE_EXPORT Result cuModuleLoadData(Module* out, const void* image) {
  Call call("module_load", true, true);
  if (call.result) return call.result;
  auto module = open_image(call, image);
  if (!module) return call.result;
  *out = reinterpret_cast<Module>(add(module, call.context));
  return 0;
}

FAKE_EXPORT Result cuModuleUnload(Module m) {
  Call call("module_unload", true, true);
  if (call.result) return call.result;
  auto module = find<ModuleState>(call, m, "Module");
  if (!module) return call.result;
  if (module->in_flight) violation("lifetime", "module_unload: a module whose kernel is queued");
  if (module->function) remove(*module->function);
  for (auto& [name, memory] : module->globals) remove(*memory);
  remove(*module);
  return 0;
}

FAKE_EXPORT Result cuModuleGetFunction(Function* out, Module m, const char* name) {
  Call call("module_function");
  if (call.result) return call.result;
  auto module = find<ModuleState>(call, m, "Module");
  if (!module) return call.result;
  if (std::strcmp(name, "metalmm_kernel")) return kNotFound;
  if (!module->function) {
    auto function = std::make_shared<FunctionState>();
    function->module = module;
    module->function = function;
    add(function, call.context);
  }
  *out = reinterpret_cast<Function>(module->function->handle);
  return 0;
}

FAKE_EXPORT Result cuModuleGetGlobal_v2(Address* address, size_t* size, Module m, const char* name) {
  Call call("module_global");
  if (call.result) return call.result;
  auto module = find<ModuleState>(call, m, "Module");
  if (!module) return call.result;
  auto found = module->globals.find(name);
  if (found == module->globals.end()) return kNotFound;
  *address = found->second->address;
  *size = found->second->size;
  return 0;
}

FAKE_EXPORT Result cuFuncGetAttribute(int* value, int which, Function f) {
  Call call("function_attribute");
  if (call.result) return call.result;
  auto function = find<FunctionState>(call, f, "Function");
  if (!function) return call.result;
  auto module = function->module.lock();
  switch (which) {
    case kFunctionMaxThreads:
      return *value = module->info->max_threads ? static_cast<int>(module->info->max_threads) : 1024, 0;
    case kFunctionSharedBytes:
      return *value = static_cast<int>(module->info->static_threadgroup_bytes()), 0;
    case kFunctionLocalBytes:
      return *value = 0, 0;
    case kFunctionRegisters:
      return *value = 32, 0;
  }
  return call.wrong(kInvalidValue, "size", "attribute " + std::to_string(which) + ", which the fake does not know");
}

FAKE_EXPORT Result cuFuncSetAttribute(Function f, int which, int value) {
  Call call("set_function_attribute");
  if (call.result) return call.result;
  auto function = find<FunctionState>(call, f, "Function");
  if (!function) return call.result;
  unsigned own = function->module.lock()->info->static_threadgroup_bytes();
  if (which != kFunctionMaxDynamicSharedBytes || value < 0 || own + static_cast<unsigned>(value) > most_shared_bytes())
    return call.wrong(kInvalidValue, "size", "attribute " + std::to_string(which) + " of a function set to " + std::to_string(value));
  function->shared_limit = own + static_cast<unsigned>(value);
  return 0;
}

FAKE_EXPORT Result cuLaunchKernelEx(const LaunchConfig* config, Function f, void** params, void** extra) {
  Call call("launch");
  if (call.result) return call.result;
  auto function = find<FunctionState>(call, f, "Function");
  auto stream = function ? find_stream(call, config->stream) : nullptr;
  if (!stream) return call.result;
  for (unsigned i = 0; i < config->attribute_count; i++) {
    const LaunchAttribute& a = config->attributes[i];
    if (a.id == kAttributeCluster) {
      if (a.sizes[0] < 2 || a.sizes[0] > 8 || a.sizes[1] != 1 || a.sizes[2] != 1 || config->grid[0] % a.sizes[0] ||
          settings.capability < 90)
        return call.wrong(kInvalidValue, "launch", "clusters of " + std::to_string(a.sizes[0]) + " of " + std::to_string(config->grid[0]));
      continue;
    }
    if (a.id != kAttributeProgrammaticSerialization || a.number < 0 || a.number > 1)
      return call.wrong(kInvalidValue, "launch", "attribute " + std::to_string(a.id) + " with " + std::to_string(a.number));
    if (a.number && settings.capability < 90)
      return call.wrong(kNotSupported, "launch", "programmatic launches need compute capability 9.0");
  }
  auto launch = std::make_shared<Launch>();
  launch->module = function->module.lock();
  const KernelTable& table = launch->module->table;
  if (!params || !params[0] || extra) return call.wrong(kInvalidValue, "launch", "arguments otherwise than as one block, in `params`");
  std::memcpy(launch->block, params[0], table.size);
  std::memcpy(&launch->head, params[0], sizeof(LaunchHead));
  std::copy(config->grid, config->grid + 3, launch->grid);
  launch->shared = config->shared_bytes;
  if (std::string wrong = wrong_shape(*config, launch->head, table); !wrong.empty()) return call.wrong(kInvalidValue, "launch", wrong);
  if (std::string wrong = wrong_ahead(launch->head); !wrong.empty()) return call.wrong(kInvalidValue, "launch", wrong);
  if (config->shared_bytes + launch->module->info->static_threadgroup_bytes() > function->shared_limit || config->shared_bytes % 16)
    return call.wrong(kInvalidValue, "launch", number(config->shared_bytes) + " bytes of shared memory");
  bool takes_shared = false;
  for (uint32_t i = 0; i < table.count; i++)
    takes_shared |= table.rows[i].enabled && static_cast<ArgKind>(table.rows[i].kind) == ArgKind::threadgroup;
  if (config->shared_bytes && !takes_shared) return call.wrong(kInvalidValue, "launch", "shared memory for a kernel that takes none");
  Uses uses = {launch->module, function};
  auto touch = std::make_shared<Touch>();
  static int count = 0;
  touch->name = "launch " + std::to_string(++count);
  for (unsigned i = 0; i < config->attribute_count; i++)
    touch->programmatic |= config->attributes[i].id == kAttributeProgrammaticSerialization && config->attributes[i].number;
  touch->beside = launch->head.beside;
  touch->late = launch->head.late;
  touch->early = launch->head.early;
  if (touch->early && !table.early) return call.wrong(kInvalidValue, "launch", "it reads early, and its kernel never waits");
  if (!resolve(call, *launch, config->shared_bytes, uses, *touch)) return call.result;
  push(*stream, {[launch] { return launch->run(); }, uses, touch});
  return 0;
}

}  // namespace fake
