// From MSL text to a pipeline: the compiler, function constants, and the archive of machine code on disk.
#include <stdio.h>
#include <unistd.h>

#include <cmath>
#include <limits>
#include <set>

#include "../core/matmul.h"
#include "metal_device.h"

namespace metalmm::metal {
namespace {

[[noreturn]] void compile_error(const std::string& kernel, const std::string& text) {
  throw Error(ErrorKind::compile, "kernel '" + kernel + "': " + text);
}

// The value in the type of the constant's declaration.
template <class T>
void set_value(MTLFunctionConstantValues* values, MTLFunctionConstant* constant, T value) {
  [values setConstantValue:&value type:[constant type] atIndex:[constant index]];
}

// A whole number that T holds; nothing of what was given may be lost.
template <class T>
void set_integer(MTLFunctionConstantValues* values, MTLFunctionConstant* constant, const FunctionConstant& given,
                 const std::string& kernel) {
  auto least = std::numeric_limits<T>::min(), most = std::numeric_limits<T>::max();
  T value{};
  bool fits = std::visit(
      [&](auto v) {
        if constexpr (std::is_floating_point_v<decltype(v)>) {
          if (!(v >= static_cast<double>(least) && v <= static_cast<double>(most)) || v != std::trunc(v)) return false;
          if (static_cast<double>(most) > 9e15 && std::fabs(v) > 9e15) return false;  // past what a double counts one by one
          value = static_cast<T>(v);
          return true;
        } else {
          value = static_cast<T>(v);
          return static_cast<int64_t>(value) == static_cast<int64_t>(v) && (v >= 0 || std::is_signed_v<T>);
        }
      },
      given.value);
  if (!fits) {
    std::string text = std::visit([](auto v) { return std::to_string(v); }, given.value);
    compile_error(kernel, "function constant '" + text_of([constant name]) + "' is " + text + "; its type holds whole numbers of " +
                              std::to_string(+least) + " to " + std::to_string(+most));
  }
  set_value(values, constant, value);
}

void set_constant(MTLFunctionConstantValues* values, MTLFunctionConstant* constant, const FunctionConstant& given,
                  const std::string& kernel) {
  double number = std::visit([](auto v) { return static_cast<double>(v); }, given.value);
  auto check_reach = [&](double most) {
    if (std::isfinite(number) && std::fabs(number) > most)
      compile_error(kernel, "function constant '" + text_of([constant name]) + "' is " + std::to_string(number) +
                                "; its type does not reach that far");
  };
  switch ([constant type]) {
    case MTLDataTypeBool:
      return set_integer<bool>(values, constant, given, kernel);
    case MTLDataTypeFloat:
      check_reach(3.4028235677973366e38);
      return set_value(values, constant, static_cast<float>(number));
    case MTLDataTypeHalf: {
      check_reach(65504);
      auto half = static_cast<__fp16>(number);
      return [values setConstantValue:&half type:MTLDataTypeHalf atIndex:[constant index]];
    }
    case MTLDataTypeChar:
      return set_integer<int8_t>(values, constant, given, kernel);
    case MTLDataTypeUChar:
      return set_integer<uint8_t>(values, constant, given, kernel);
    case MTLDataTypeShort:
      return set_integer<int16_t>(values, constant, given, kernel);
    case MTLDataTypeUShort:
      return set_integer<uint16_t>(values, constant, given, kernel);
    case MTLDataTypeInt:
      return set_integer<int32_t>(values, constant, given, kernel);
    case MTLDataTypeUInt:
      return set_integer<uint32_t>(values, constant, given, kernel);
    case MTLDataTypeLong:
      return set_integer<int64_t>(values, constant, given, kernel);
    case MTLDataTypeULong:
      return set_integer<uint64_t>(values, constant, given, kernel);
    default:
      compile_error(kernel, "function constant '" + text_of([constant name]) + "' is of type " + std::to_string([constant type]) +
                                "; metalmm sets bool, half, float and integers");
  }
}

// Values may come for indices that the kernel does not have, as in Metal; a name that it does not have is a mistake.
MTLFunctionConstant* find_constant(NSDictionary* known, const FunctionConstant& given, const std::string& kernel) {
  std::string names;
  for (NSString* name in known) {
    MTLFunctionConstant* constant = [known objectForKey:name];
    if (given.name.empty() ? [constant index] == given.index : text_of(name) == given.name) return constant;
    names += (names.empty() ? "" : ", ") + text_of(name);
  }
  if (!given.name.empty())
    compile_error(kernel, "no function constant '" + given.name + "'; there are: " + (names.empty() ? "none" : names));
  return nil;
}

// The name of a scalar's type, for numbers as arguments.
std::string type_name(MTLDataType type) {
  switch (type) {
    case MTLDataTypeBool:
      return "bool";
    case MTLDataTypeChar:
      return "char";
    case MTLDataTypeUChar:
      return "uchar";
    case MTLDataTypeShort:
      return "short";
    case MTLDataTypeUShort:
      return "ushort";
    case MTLDataTypeInt:
      return "int";
    case MTLDataTypeUInt:
      return "uint";
    case MTLDataTypeLong:
      return "long";
    case MTLDataTypeULong:
      return "ulong";
    case MTLDataTypeHalf:
      return "half";
    case MTLDataTypeBFloat:
      return "bfloat";
    case MTLDataTypeFloat:
      return "float";
    default:
      return {};
  }
}

// As Metal's compiler says them, and not as PipelineSource does: a text comes here with its macros, conditions and comments, and what
// those make of a parameter decides which dispatches must wait for one another.
std::vector<KernelArgument> described(MTLComputePipelineReflection* reflection) {
  std::vector<KernelArgument> arguments;
  for (id<MTLBinding> binding in [reflection bindings]) {
    auto index = static_cast<uint32_t>([binding index]);
    bool is_const = [binding access] == MTLBindingAccessReadOnly;
    if ([binding type] == MTLBindingTypeBuffer) {
      auto buffer = static_cast<id<MTLBufferBinding>>(binding);
      arguments.push_back({KernelArgument::Kind::buffer, index, is_const, [buffer bufferDataSize], type_name([buffer bufferDataType]),
                           std::max<size_t>([buffer bufferAlignment], 1)});
    } else if ([binding type] == MTLBindingTypeThreadgroupMemory) {
      size_t bytes = [static_cast<id<MTLThreadgroupBinding>>(binding) threadgroupMemoryDataSize];
      arguments.push_back({KernelArgument::Kind::threadgroup, index, false, bytes, {}, 1});
    }
  }
  std::sort(arguments.begin(), arguments.end(), [](auto& a, auto& b) { return a.index < b.index; });
  return arguments;
}

void take_library(MetalPipeline& pipeline, const PipelineSource& source) {
  const LibraryMatmul& what = *source.library;
  if (what.name == "mps_matmul")
    pipeline.kind = MetalPipeline::Kind::mps_matmul;
  else if (what.name == "mps_matvec")
    pipeline.kind = MetalPipeline::Kind::mps_matvec;
  else if (what.name == "mps_ndarray")
    pipeline.kind = MetalPipeline::Kind::mps_ndarray;
  else
    throw Error(ErrorKind::unsupported, source.name + ": device metal has no library " + what.name);
  if (what.type != kFloat16 && what.type != kFloat32 && pipeline.kind != MetalPipeline::Kind::mps_ndarray)
    throw Error(ErrorKind::unsupported, source.name + ": MPS multiplies no matrices of " + what.type.name());
  pipeline.transpose_a = what.transpose_a, pipeline.transpose_b = what.transpose_b, pipeline.type = what.type;
}

// Its first by its number: MTLPipelineOptionBindingInfo in the SDK of macOS 15, MTLPipelineOptionArgumentInfo before.
constexpr MTLPipelineOption kReflect = MTLPipelineOption(1) | MTLPipelineOptionBufferTypeInfo;

}  // namespace

// NaN and Inf must come out as the reference has them, so no fast math.
Handle<id<MTLLibrary>> MetalDevice::library(const std::string& code, const std::string& what) {
  {
    std::lock_guard lock(mutex_);
    auto it = libraries_.find(code);
    if (it != libraries_.end()) return it->second;
  }
  auto options = Handle<MTLCompileOptions*>::adopt([[MTLCompileOptions alloc] init]);
  [options.get() setLanguageVersion:MTLLanguageVersion3_1];
  // Without it the header is empty.
  if (@available(macOS 26.0, *))
    if (code.find("<MetalPerformancePrimitives/") != std::string::npos) [options.get() setLanguageVersion:MTLLanguageVersion(4 << 16)];
  if (@available(macOS 15.0, *)) {
    [options.get() setMathMode:MTLMathModeSafe];
    [options.get() setMathFloatingPointFunctions:MTLMathFloatingPointFunctionsPrecise];
  } else {
    [options.get() setFastMathEnabled:NO];
  }
  NSError* error = nil;
  auto library = Handle<id<MTLLibrary>>::adopt([get() newLibraryWithSource:ns_string(code) options:options.get() error:&error]);
  if (!library) throw Error(ErrorKind::compile, what + text_of(error));
  return library;
}

std::vector<std::string> MetalDevice::kernel_names(const std::string& code) {
  AutoreleasePool pool;
  auto compiled = library(code, "");
  std::vector<std::string> names;
  for (NSString* name in [compiled.get() functionNames]) names.push_back(text_of(name));
  std::sort(names.begin(), names.end());
  std::lock_guard lock(mutex_);
  if (libraries_.size() >= 16) libraries_.clear();
  libraries_[code] = compiled;  // its kernels will be asked for one by one
  return names;
}

Handle<id<MTLFunction>> MetalDevice::function(id<MTLLibrary> library, const PipelineSource& source) {
  auto plain = Handle<id<MTLFunction>>::adopt([library newFunctionWithName:ns_string(source.kernel)]);
  if (!plain) {
    std::string names;
    for (NSString* name in [library functionNames]) names += (names.empty() ? "" : ", ") + text_of(name);
    throw Error(ErrorKind::compile, "no kernel '" + source.kernel + "'; there are: " + (names.empty() ? "none" : names));
  }
  NSDictionary* known = [plain.get() functionConstantsDictionary];
  auto values = Handle<MTLFunctionConstantValues*>::adopt([[MTLFunctionConstantValues alloc] init]);
  std::set<NSUInteger> seen;
  for (const FunctionConstant& given : source.constants) {
    MTLFunctionConstant* constant = find_constant(known, given, source.name);
    if (!constant) continue;
    if (!seen.insert([constant index]).second)
      compile_error(source.name, "constants: " + std::to_string([constant index]) + " and '" + text_of([constant name]) +
                                     "' are one function constant; give it once");
    set_constant(values.get(), constant, given, source.name);
  }
  if ([known count] == 0) return plain;
  NSError* error = nil;
  auto specialized = Handle<id<MTLFunction>>::adopt([library newFunctionWithName:ns_string(source.kernel)
                                                                  constantValues:values.get()
                                                                           error:&error]);
  if (!specialized) compile_error(source.name, text_of(error));
  return specialized;
}

std::shared_ptr<Pipeline> MetalDevice::load_pipeline(const PipelineSource& source) {
  AutoreleasePool pool;
  auto pipeline = std::make_shared<MetalPipeline>();
  pipeline->name = source.name;
  if (source.library) take_library(*pipeline, source);
  auto compiled = library(source.text, "kernel '" + source.name + "': ");
  MTLComputePipelineReflection* reflection = nil;
  build_state(*pipeline, function(compiled.get(), source).get(), archives_ ? source.file : std::string(), &reflection);
  pipeline->arguments = described(reflection);
  if (source.library) {  // what it takes is what MPS takes; the kernel finds the product in place of A
    pipeline->arguments[0].bytes = pipeline->arguments[0].alignment = source.library->type.size;
    pipeline->arguments.insert(pipeline->arguments.begin() + 1,
                               {KernelArgument::Kind::buffer, kIndexB, true, source.library->type.size, {}, 1});
  }
  for (const KernelArgument& a : pipeline->arguments)
    if (a.kind == KernelArgument::Kind::buffer && !a.is_const) pipeline->written |= 1u << a.index;
  return pipeline;
}

void MetalDevice::build_state(MetalPipeline& pipeline, id<MTLFunction> function, const std::string& archive,
                              MTLComputePipelineReflection** reflection) {
  auto descriptor = Handle<MTLComputePipelineDescriptor*>::adopt([[MTLComputePipelineDescriptor alloc] init]);
  [descriptor.get() setLabel:ns_string(pipeline.name)];
  [descriptor.get() setComputeFunction:function];
  [descriptor.get() setSupportIndirectCommandBuffers:indirect_];
  pipeline.state = from_archive(descriptor.get(), archive, reflection);
  if (!pipeline.state) {
    NSError* error = nil;
    pipeline.state = Handle<id<MTLComputePipelineState>>::adopt([get() newComputePipelineStateWithDescriptor:descriptor.get()
                                                                                                     options:kReflect
                                                                                                  reflection:reflection
                                                                                                       error:&error]);
    if (!pipeline.state) compile_error(pipeline.name, "no pipeline: " + text_of(error));
    if (!archive.empty()) save_archive(descriptor.get(), archive);
  }
  pipeline.max_threads = static_cast<uint32_t>([pipeline.state.get() maxTotalThreadsPerThreadgroup]);
  pipeline.static_threadgroup_bytes = [pipeline.state.get() staticThreadgroupMemoryLength];
}

// Null on a miss. One archive a pipeline: a growing one would be written whole each time.
Handle<id<MTLComputePipelineState>> MetalDevice::from_archive(MTLComputePipelineDescriptor* descriptor, const std::string& path,
                                                              MTLComputePipelineReflection** reflection) {
  if (path.empty()) return {};
  if (access(path.c_str(), F_OK) != 0) {
    archive_misses_++;
    return {};
  }
  auto file = Handle<MTLBinaryArchiveDescriptor*>::adopt([[MTLBinaryArchiveDescriptor alloc] init]);
  [file.get() setUrl:[NSURL fileURLWithPath:ns_string(path)]];
  NSError* error = nil;
  Handle<id<MTLComputePipelineState>> state;
  auto archive = Handle<id<MTLBinaryArchive>>::adopt([get() newBinaryArchiveWithDescriptor:file.get() error:&error]);
  if (archive) {
    [descriptor setBinaryArchives:[NSArray arrayWithObject:archive.get()]];
    state = Handle<id<MTLComputePipelineState>>::adopt([get()
        newComputePipelineStateWithDescriptor:descriptor
                                      options:kReflect | MTLPipelineOptionFailOnBinaryArchiveMiss
                                   reflection:reflection
                                        error:&error]);
    [descriptor setBinaryArchives:nil];
  }
  if (state) {
    archive_hits_++;
    return state;
  }
  archive_misses_++;
  warn("the archive " + path + " is of no use (" + text_of(error) + "); it is built again");
  unlink(path.c_str());
  return {};
}

// To a name of its own first, then renamed: another process must never see half of it. An archive saves time, no more, so
// that one that cannot be written is a warning.
void MetalDevice::save_archive(MTLComputePipelineDescriptor* descriptor, const std::string& path) {
  static std::atomic<unsigned> count{0};
  std::string fresh = path + "." + std::to_string(getpid()) + "." + std::to_string(count++);
  auto empty = Handle<MTLBinaryArchiveDescriptor*>::adopt([[MTLBinaryArchiveDescriptor alloc] init]);
  NSError* error = nil;
  auto archive = Handle<id<MTLBinaryArchive>>::adopt([get() newBinaryArchiveWithDescriptor:empty.get() error:&error]);
  bool saved = archive && [archive.get() addComputePipelineFunctionsWithDescriptor:descriptor error:&error] &&
               [archive.get() serializeToURL:[NSURL fileURLWithPath:ns_string(fresh)] error:&error];
  if (saved && rename(fresh.c_str(), path.c_str()) == 0) return;
  unlink(fresh.c_str());
  warn("cannot write the archive " + path + " (" + text_of(error) + "); the kernel will be compiled again next time");
}

}  // namespace metalmm::metal
