#include "pipeline.h"

#include <algorithm>
#include <cstdio>

namespace metalmm::cuda {
namespace {

std::string bytes_of_file(const std::string& path) {
  std::string bytes;
  FILE* file = std::fopen(path.c_str(), "rb");
  if (!file) throw Error(ErrorKind::device, "cuda: cannot read " + path);
  char part[65536];
  for (size_t n; (n = std::fread(part, 1, sizeof(part), file)) > 0;) bytes.append(part, n);
  std::fclose(file);
  return bytes;
}

}  // namespace

CudaPipeline::CudaPipeline(std::shared_ptr<Home> home, const PipelineSource& source) : home_(std::move(home)) {
  name = source.name;
  if (source.library) {
    take_library(source);
    return;
  }
  const Driver& cu = driver();
  std::string image = bytes_of_file(source.file);
  home_->enter();
  Result r = cu.module_load(&module_, image.data());
  if (r) throw Error(ErrorKind::compile, "kernel '" + name + "': the driver does not take its machine code: " + cu.text(r));
  try {
    read_table();
  } catch (...) {
    cu.module_unload(module_);
    throw;
  }
  take_types(source.arguments);
}

CudaPipeline::~CudaPipeline() {
  if (home_->lost) {
    if (blas) blas->forget();
    return;
  }
  home_->enter();
  if (module_) driver().module_unload(module_);
}

void CudaPipeline::take_library(const PipelineSource& source) {
  if (source.library->name != "blas") throw Error(ErrorKind::unsupported, name + ": device cuda has no library " + source.library->name);
  if (source.library->type != kFloat16 && source.library->type != kFloat32)
    throw Error(ErrorKind::unsupported, name + ": blas multiplies no " + source.library->type.name());
  home_->enter();
  blas = std::make_unique<BlasMatmul>(source.file, *source.library);
  written_ = 1u << kIndexD, inlined_ = 1u << kIndexParams;
}

void CudaPipeline::read_table() {
  const Driver& cu = driver();
  Address address = 0;
  size_t size = 0;
  home_->check(cu.module_function(&function, module_, "metalmm_kernel"), "looking for the kernel in its module");
  home_->check(cu.module_global(&address, &size, module_, "metalmm_table"), "looking for the table of a kernel's arguments");
  if (size != sizeof(table)) throw Error(ErrorKind::device, "kernel '" + name + "': it was built for another version of metalmm");
  home_->check(cu.copy_out(&table, address, size, nullptr), "reading the table of a kernel's arguments");
  home_->check(cu.stream_synchronize(nullptr), "reading the table of a kernel's arguments");
  if (table.version != kArgumentsVersion || table.count > kMaxArguments)
    throw Error(ErrorKind::device, "kernel '" + name + "': it was built for another version of metalmm");
  if (table.stop) home_->check(cu.module_global(&stop, &size, module_, "metalmm_stop"), "looking for a kernel's stop");
  if (table.watched) watched = std::make_unique<Watched>(*home_, module_);
  auto attribute = [&](int which) {
    int value = 0;
    home_->check(cu.function_attribute(&value, which, function), "asking what a kernel takes");
    return value;
  };
  max_threads = static_cast<uint32_t>(attribute(kFunctionMaxThreads));
  if (table.max_threads) max_threads = std::min(max_threads, table.max_threads);
  static_threadgroup_bytes = static_cast<size_t>(attribute(kFunctionSharedBytes)) - table.barrier;
  declared = 0;
  for (uint32_t i = 0; i < table.count; i++) add(table.rows[i]);
  auto is_given = [](const KernelArgument& a) { return a.kind == KernelArgument::Kind::threadgroup; };
  if (table.masks || std::any_of(arguments.begin(), arguments.end(), is_given)) {  // it may then have more than 48 KB
    int most = home_->most_shared_bytes - static_cast<int>(static_threadgroup_bytes + table.barrier);
    home_->check(cu.set_function_attribute(function, kFunctionMaxDynamicSharedBytes, most), "allowing a kernel its threadgroup memory");
  }
  std::sort(arguments.begin(), arguments.end(), [](auto& a, auto& b) { return a.index < b.index; });
}

void CudaPipeline::add(const ArgumentRow& row) {
  auto kind = static_cast<abi::ArgKind>(row.kind);
  bool is_buffer = kind == abi::ArgKind::buffer;
  if (!is_buffer && kind != abi::ArgKind::threadgroup) return;
  if (is_buffer) declared |= 1u << row.index;
  if (!row.enabled) return;
  if (is_buffer && !row.is_const) written_ |= 1u << row.index;
  if (is_buffer && row.inlined) inlined_ |= 1u << row.index;
  take({is_buffer ? KernelArgument::Kind::buffer : KernelArgument::Kind::threadgroup, row.index, row.is_const != 0, row.bytes, {}});
}

Span CudaPipeline::largest_read(const Dispatch& d, size_t most) const {
  Span largest{0, 0};
  for (size_t i = 0; i < d.buffer_count; i++) {
    const Buffer& b = **d.buffers[i].buffer;
    if (!b.native() || writes(d.buffers[i].index)) continue;
    uintptr_t begin = (b.address() + d.buffers[i].offset + 15) / 16 * 16, end = b.address() + b.size();
    if (begin < end && end - begin > largest.end - largest.begin) largest = {begin, end};
  }
  return largest.end - largest.begin <= most ? largest : Span{0, 0};
}

}  // namespace metalmm::cuda
