#include "device.h"

namespace metalmm {
namespace {

[[noreturn]] void fail(const Pipeline& pipeline, const std::string& what) {
  throw Error(ErrorKind::kernel, "kernel '" + pipeline.name + "': " + what);
}

std::string text(const Size3& s) { return "(" + std::to_string(s[0]) + ", " + std::to_string(s[1]) + ", " + std::to_string(s[2]) + ")"; }

void check_threads(const Dispatch& d) {
  const Pipeline& p = **d.pipeline;
  uint64_t threads = 1, groups = 1;
  for (int i = 0; i < 3; i++) {
    threads *= d.threadgroup[i];
    groups *= d.grid[i];
    if (groups > UINT32_MAX || threads > UINT32_MAX) fail(p, "grid " + text(d.grid) + " has more than 2^32 threadgroups");
  }
  if (groups == 0) fail(p, "grid " + text(d.grid) + " is empty; every axis must be at least 1");
  if (threads == 0) fail(p, "threadgroup " + text(d.threadgroup) + " is empty; every axis must be at least 1");
  if (threads > p.max_threads)
    fail(p, "threadgroup " + text(d.threadgroup) + " has " + std::to_string(threads) + " threads; the limit of this kernel is " +
                std::to_string(p.max_threads));
}

void check_buffer(const Dispatch& d, const KernelArgument& arg) {
  const Pipeline& p = **d.pipeline;
  auto index = [&] { return std::to_string(arg.index); };
  for (size_t i = 0; i < d.buffer_count; i++) {
    const BufferBinding& b = d.buffers[i];
    if (b.index != arg.index) continue;
    size_t left = (*b.buffer)->size() - b.offset;
    if (left < arg.bytes)
      fail(p, "buffer " + index() + " holds " + std::to_string(left) + " bytes; the argument takes at least " + std::to_string(arg.bytes));
    if ((*b.buffer)->read_only() && !arg.is_const)
      fail(p, "buffer " + index() + " is read-only memory and the kernel's argument is not const");
    return;
  }
  for (size_t i = 0; i < d.bytes_count; i++) {
    const BytesBinding& b = d.bytes[i];
    if (b.index != arg.index) continue;
    if (!arg.is_const) fail(p, "argument " + index() + " is not const; bind a buffer, not bytes");
    if (b.size < arg.bytes)
      fail(p,
           "bytes at index " + index() + " are " + std::to_string(b.size) + "; the argument takes at least " + std::to_string(arg.bytes));
    return;
  }
  fail(p, "nothing is bound to buffer index " + index() + "; bind a buffer, or None for one that the kernel will not touch");
}

}  // namespace

std::vector<std::string> Device::kernel_names(const std::string&) {
  throw Error(ErrorKind::device, std::string(name()) + ": it compiles no source text");
}

void Device::start_capture(const std::string&) {
  throw Error(ErrorKind::device, std::string("capture: device ") + name() + " has no GPU capture; it needs device metal");
}

void check_dispatch(const Dispatch& d, size_t limit) {
  check_threads(d);
  const Pipeline& p = **d.pipeline;
  size_t total = p.static_threadgroup_bytes;
  for (size_t i = 0; i < d.threadgroup_memory_count; i++) {
    const ThreadgroupMemory& m = d.threadgroup_memory[i];
    if (m.index >= kMaxBuffers) fail(p, "threadgroup memory index " + std::to_string(m.index) + " is not in 0 to 30");
    // Before it is rounded up: a size near the largest would wrap to nothing.
    if (m.size > limit) fail(p, std::to_string(m.size) + " bytes of threadgroup memory; the limit is " + std::to_string(limit));
    total += threadgroup_space(m.size);
  }
  if (total > limit) fail(p, std::to_string(total) + " bytes of threadgroup memory; the limit is " + std::to_string(limit));
  for (const KernelArgument& arg : p.arguments) {
    if (arg.kind == KernelArgument::Kind::buffer) {
      check_buffer(d, arg);
      continue;
    }
    bool found = false;
    for (size_t i = 0; i < d.threadgroup_memory_count; i++) found |= d.threadgroup_memory[i].index == arg.index;
    if (!found) fail(p, "no size is given for threadgroup memory " + std::to_string(arg.index));
  }
}

}  // namespace metalmm
