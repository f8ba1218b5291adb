#include <unistd.h>

#include <cstring>
#include <fstream>
#include <sstream>

#include "../../../csrc/core/error.h"
#include "fake_values.h"

NSString* const MTLCommonCounterSetTimestamp = @"timestamp";

namespace {

std::mutex buffers_mutex;
std::set<FakeBuffer*> live_buffers;
std::vector<FakeCommandBuffer*> in_flight;

std::string archive_key(const fake::Kernel& k) {
  return std::to_string(std::hash<std::string>()(k.source + '\n' + k.name + '\n' + k.constants));
}

}  // namespace

// A vector's is its size, half4 8 and float3 16; of what has no name here, such as a structure, 4 where it is not smaller.
size_t fake::alignment(const metalmm::KernelArgument& argument) {
  const std::string& t = argument.type;
  bool is_vector = t.size() > 1 && t.rfind("packed", 0) != 0 && std::strchr("234", t.back()) && std::isalpha(t[t.size() - 2]);
  if (is_vector) return argument.bytes;  // of a 3 it is that of a 4
  return argument.bytes >= 8 && (t == "long" || t == "ulong") ? 8 : argument.bytes >= 4 ? 4 : argument.bytes == 2 ? 2 : 1;
}

bool fake::uses_matrices(const std::string& source) {
  for (const char* word : {"simdgroup_matrix", "simdgroup_load", "simdgroup_float8x8", "simdgroup_half8x8"})
    if (source.find(word) != std::string::npos) return true;
  return false;
}

static bool uses_tensors(NSString* source) { return fake::text(source).find("<MetalPerformancePrimitives/") != std::string::npos; }

@implementation MTLFunctionConstant
LIFE - (NSString*)name { return VALUES.objects["name"]; }
- (MTLDataType)type {
  return (MTLDataType)VALUES.numbers["type"];
}
- (NSUInteger)index {
  return (NSUInteger)VALUES.numbers["index"];
}
@end

namespace {

const std::pair<const char*, MTLDataType> kTypes[] = {
    {"bool", MTLDataTypeBool},   {"int", MTLDataTypeInt},     {"uint", MTLDataTypeUInt},     {"float", MTLDataTypeFloat},
    {"half", MTLDataTypeHalf},   {"short", MTLDataTypeShort}, {"ushort", MTLDataTypeUShort}, {"char", MTLDataTypeChar},
    {"uchar", MTLDataTypeUChar}, {"long", MTLDataTypeLong},   {"ulong", MTLDataTypeULong}};

MTLDataType type_named(const std::string& name) {
  for (auto& [key, type] : kTypes)
    if (name == key) return type;
  return MTLDataTypeFloat2;  // one that the library must refuse
}

std::string literal(const void* value, MTLDataType type) {
  auto read = [&](auto x) {
    std::memcpy(&x, value, sizeof(x));
    return x;
  };
  switch (type) {
    case MTLDataTypeBool:
      return read(uint8_t{}) ? "True" : "False";
    case MTLDataTypeInt:
      return std::to_string(read(int32_t{}));
    case MTLDataTypeUInt:
      return std::to_string(read(uint32_t{}));
    case MTLDataTypeShort:
      return std::to_string(read(int16_t{}));
    case MTLDataTypeUShort:
      return std::to_string(read(uint16_t{}));
    case MTLDataTypeChar:
      return std::to_string(static_cast<int>(read(int8_t{})));
    case MTLDataTypeUChar:
      return std::to_string(static_cast<int>(read(uint8_t{})));
    case MTLDataTypeLong:
      return std::to_string(read(int64_t{}));
    case MTLDataTypeULong:
      return std::to_string(read(uint64_t{}));
    case MTLDataTypeFloat:
      return std::to_string(read(float{}));
    case MTLDataTypeHalf: {
      __fp16 h;
      std::memcpy(&h, value, 2);
      return std::to_string(static_cast<float>(h));
    }
    default:
      fake::violation("constant-type", "a function constant of type " + std::to_string(type));
      return "0";
  }
}

}  // namespace

@implementation MTLFunctionConstantValues
LIFE - (void)setConstantValue : (const void*)value type : (MTLDataType)type atIndex : (NSUInteger)index {
  NSString* text = [NSString stringWithUTF8String:(std::to_string(index) + "=" + literal(value, type)).c_str()];
  VALUES.set(std::to_string(index).c_str(), text);
}
- (NSString*)all {
  std::string all;
  for (auto& [key, object] : VALUES.objects) all += fake::text(object) + ";";
  return [NSString stringWithUTF8String:all.c_str()];
}
@end
@interface MTLFunctionConstantValues (Fake)
- (NSString*)all;
@end

@implementation FakeFunction
- (void)dealloc {
  delete kernel;
  [super dealloc];
}
- (NSString*)name {
  return [NSString stringWithUTF8String:kernel->name.c_str()];
}
- (NSDictionary*)functionConstantsDictionary {
  NSMutableDictionary* found = [NSMutableDictionary dictionary];
  for (const std::string& line : fake::describe(kernel->source)) {
    std::istringstream in(line);
    std::string what, name, type;
    int64_t index;
    if (!(in >> what >> name >> index >> type) || what != "constant") continue;
    MTLFunctionConstant* c = [[[MTLFunctionConstant alloc] init] autorelease];
    values(c->fakeState).numbers["index"] = index;
    values(c->fakeState).numbers["type"] = (int64_t)type_named(type);
    values(c->fakeState).set("name", [NSString stringWithUTF8String:name.c_str()]);
    [found setObject:c forKey:[c name]];
  }
  return found;
}
@end

@interface FakeLibrary : FakeObject <MTLLibrary> {
 @public
  std::string* source;
}
@end
@implementation FakeLibrary
- (void)dealloc {
  delete source;
  [super dealloc];
}
- (NSArray*)functionNames {
  NSMutableArray* names = [NSMutableArray array];
  for (const std::string& line : fake::describe(*source))
    if (line.rfind("kernel ", 0) == 0) [names addObject:[NSString stringWithUTF8String:line.c_str() + 7]];
  return names;
}
- (id<MTLFunction>)newFunctionWithName:(NSString*)name {
  if (![[self functionNames] containsObject:name]) return nil;
  FakeFunction* f = [[FakeFunction alloc] init];
  f->kernel = new fake::Kernel{*source, fake::text(name), ""};
  return f;
}
- (id<MTLFunction>)newFunctionWithName:(NSString*)name constantValues:(MTLFunctionConstantValues*)given error:(NSError**)error {
  FakeFunction* f = (FakeFunction*)[self newFunctionWithName:name];
  if (!f) return nil;
  f->kernel->constants = fake::text([given all]);
  try {
    fake::compile(*f->kernel);
  } catch (const metalmm::Error& e) {
    [f release];
    store(error, fake::error(@"MTLLibraryErrorDomain", MTLLibraryErrorCompileFailure, e.what()));
    return nil;
  }
  return f;
}
@end

// -- pipelines ---------------------------------------------------------------------------------------------------------

@interface FakeBinding : NSObject <MTLBufferBinding, MTLThreadgroupBinding> {
 @public
  metalmm::KernelArgument argument;
}
@end
@implementation FakeBinding
- (MTLBindingType)type {
  return argument.kind == metalmm::KernelArgument::Kind::buffer ? MTLBindingTypeBuffer : MTLBindingTypeThreadgroupMemory;
}
- (MTLBindingAccess)access {
  return argument.is_const ? MTLBindingAccessReadOnly : MTLBindingAccessReadWrite;
}
- (NSUInteger)index {
  return argument.index;
}
- (NSUInteger)bufferDataSize {
  return argument.bytes;
}
- (MTLDataType)bufferDataType {
  static const std::map<std::string, MTLDataType> types = {
      {"bool", MTLDataTypeBool},     {"char", MTLDataTypeChar}, {"uchar", MTLDataTypeUChar},   {"short", MTLDataTypeShort},
      {"ushort", MTLDataTypeUShort}, {"int", MTLDataTypeInt},   {"uint", MTLDataTypeUInt},     {"long", MTLDataTypeLong},
      {"ulong", MTLDataTypeULong},   {"half", MTLDataTypeHalf}, {"bfloat", MTLDataTypeBFloat}, {"float", MTLDataTypeFloat}};
  auto it = types.find(argument.type);
  return it == types.end() ? MTLDataTypeStruct : it->second;
}
- (NSUInteger)bufferAlignment {
  return fake::alignment(argument);
}
- (NSUInteger)threadgroupMemoryDataSize {
  return argument.bytes;
}
@end

@implementation MTLComputePipelineReflection
- (NSArray*)bindings {
  return static_cast<id>(fakeState);
}
- (void)dealloc {
  [static_cast<id>(fakeState) release];
  [super dealloc];
}
@end

@implementation FakePipeline
- (void)dealloc {
  delete pipeline;
  [super dealloc];
}
- (NSUInteger)maxTotalThreadsPerThreadgroup {
  return std::min<NSUInteger>((*pipeline)->max_threads, (NSUInteger)fake::settings.max_threads);
}
- (NSUInteger)threadExecutionWidth {
  return 32;
}
- (NSUInteger)staticThreadgroupMemoryLength {
  return (*pipeline)->static_threadgroup_bytes;
}
- (BOOL)supportIndirectCommandBuffers {
  return indirect;
}
@end

@interface FakeArchive : FakeObject <MTLBinaryArchive> {
 @public
  std::set<std::string>* keys;
}
@end
@implementation FakeArchive
- (void)dealloc {
  delete keys;
  [super dealloc];
}
- (BOOL)addComputePipelineFunctionsWithDescriptor:(MTLComputePipelineDescriptor*)descriptor error:(NSError**)error {
  if (fake::fault("archive_add"))
    return store(error, fake::error(@"MTLBinaryArchiveDomain", MTLBinaryArchiveErrorCompilationFailure, "cannot add"));
  keys->insert(archive_key(*((FakeFunction*)[descriptor computeFunction])->kernel));
  return YES;
}
- (BOOL)serializeToURL:(NSURL*)url error:(NSError**)error {
  if (fake::fault("archive_save"))
    return store(error, fake::error(@"MTLBinaryArchiveDomain", MTLBinaryArchiveErrorInternalError, "no space left"));
  std::ofstream out(fake::text([url path]));
  out << "fake archive\n";
  for (auto& k : *keys) out << k << "\n";
  return out.good() ? YES : store(error, fake::error(@"MTLBinaryArchiveDomain", MTLBinaryArchiveErrorInvalidFile, "cannot be written"));
}
@end

// -- memory ------------------------------------------------------------------------------------------------------------

@implementation FakeBuffer
+ (bool)alive:(id)buffer {
  std::lock_guard lock(buffers_mutex);
  return live_buffers.count((FakeBuffer*)buffer) != 0;
}
- (id)init {
  self = [super init];
  std::lock_guard lock(buffers_mutex);
  live_buffers.insert(self);
  return self;
}
- (void)dealloc {
  {
    std::lock_guard lock(buffers_mutex);
    live_buffers.erase(self);
    for (FakeCommandBuffer* commands : in_flight)
      if (fake::uses(commands, self)) {
        fake::violation("freed-in-flight", "a buffer of " + std::to_string(length_) +
                                               " bytes is deallocated while a command buffer that uses it is in flight");
        break;
      }
  }
  delete memory;
  delete managed;
  [super dealloc];
}
- (NSUInteger)length {
  return length_;
}
- (void*)contents {
  return (*memory)->host();
}
- (MTLGPUAddress)gpuAddress {
  return reinterpret_cast<MTLGPUAddress>([self gpu]);
}
- (uint8_t*)gpu {
  return managed ? (*managed)->host() : (*memory)->host();
}
- (bool)untracked {
  return (options_ & MTLResourceHazardTrackingModeMask) == MTLResourceHazardTrackingModeUntracked;
}
- (MTLStorageMode)storageMode {
  return managed ? MTLStorageModeManaged : MTLStorageModeShared;
}
- (void)didModifyRange:(NSRange)range {
  if (!managed)
    fake::violation("did-modify", "didModifyRange: of a buffer that is not managed");
  else if (range.location + range.length > length_)
    fake::violation("did-modify", "didModifyRange: past the end");
  else
    std::memcpy((*managed)->host() + range.location, (*memory)->host() + range.location, range.length);
}
@end

static std::mutex residency_mutex;

@implementation FakeResidencySet
- (id)init {
  self = [super init];
  added = new std::set<id>;
  committed = new std::set<id>;
  wired = new std::set<id>;
  return self;
}
- (void)dealloc {
  delete added;
  delete committed;
  delete wired;
  [super dealloc];
}
- (void)addAllocation:(id<MTLAllocation>)allocation {
  fake::spend_us(fake::settings.residency_us);
  added->insert(allocation);
}
- (void)removeAllocation:(id<MTLAllocation>)allocation {
  fake::spend_us(fake::settings.residency_us);
  if (!added->erase(allocation)) fake::violation("residency", "removeAllocation: of something that was not added");
}
- (void)wire:(BOOL)asked {
  std::lock_guard lock(residency_mutex);
  double now = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  if (fake::settings.unwire_ms && now - touched > fake::settings.unwire_ms * 1e-3) wired->clear();
  touched = now;
  if (!asked)
    for (id buffer : *committed) fake::waited_for += !wired->count(buffer);
  *wired = *committed;
}
- (void)requestResidency {
  fake::spend_us(fake::settings.residency_us);
  [self wire:YES];
}
- (void)endResidency {
  std::lock_guard lock(residency_mutex);
  wired->clear();
}
- (void)commit {
  fake::spend_us(fake::settings.residency_us);
  std::lock_guard lock(residency_mutex);
  *committed = *added;
  uint64_t total = 0;
  for (id buffer : *committed)
    if ([FakeBuffer alive:buffer]) total += [(FakeBuffer*)buffer length];
  if (total > [[self device] recommendedMaxWorkingSetSize])
    fake::violation("working-set", "a residency set of " + std::to_string(total) + " bytes, more than the working set may have");
}
@end

// -- the device --------------------------------------------------------------------------------------------------------

@implementation FakeDevice
- (NSString*)name {
  return @"Fake GPU (CPU device)";
}
- (MTLArchitecture*)architecture {
  return [[[MTLArchitecture alloc] init] autorelease];
}
- (uint64_t)registryID {
  return 1;
}
- (BOOL)hasUnifiedMemory {
  return fake::settings.unified_memory;
}
- (MTLSize)maxThreadsPerThreadgroup {
  return MTLSizeMake(1024, 1024, 1024);
}
- (NSUInteger)maxThreadgroupMemoryLength {
  return 32768;
}
- (NSUInteger)maxBufferLength {
  return static_cast<NSUInteger>(fake::settings.max_buffer_mb) << 20;
}
- (uint64_t)recommendedMaxWorkingSetSize {
  return static_cast<uint64_t>(fake::settings.working_set_mb) << 20;
}
- (BOOL)supportsFamily:(MTLGPUFamily)family {
  if (family == MTLGPUFamilyMetal3 || family == MTLGPUFamilyMac2) return YES;
  return family >= MTLGPUFamilyApple1 && family <= MTLGPUFamilyApple1 + fake::settings.apple_family - 1;
}
- (BOOL)supportsCounterSampling:(MTLCounterSamplingPoint)point {
  return fake::settings.counters && point == MTLCounterSamplingPointAtStageBoundary;  // as Apple silicon
}
- (NSArray*)counterSets {
  return [NSArray arrayWithObject:[[[FakeCounterSet alloc] init] autorelease]];
}
- (BOOL)respondsToSelector:(SEL)selector {
  if (!fake::settings.residency_sets && sel_isEqual(selector, @selector(newResidencySetWithDescriptor:error:))) return NO;
  return [super respondsToSelector:selector];
}
- (id<MTLCommandQueue>)newCommandQueueWithMaxCommandBufferCount:(NSUInteger)count {
  if (fake::fault("no_queue")) return nil;
  FakeQueue* queue = [[FakeQueue alloc] init];
  queue->limit = count;
  return queue;
}
- (id<MTLSharedEvent>)newSharedEvent {
  return [[FakeSharedEvent alloc] init];
}
- (id<MTLEvent>)newEvent {
  return [[FakeSharedEvent alloc] init];
}
- (id<MTLFence>)newFence {
  return [[FakeFence alloc] init];
}
- (id<MTLResidencySet>)newResidencySetWithDescriptor:(MTLResidencySetDescriptor*)descriptor error:(NSError**)error {
  (void)descriptor, (void)error;
  return [[FakeResidencySet alloc] init];
}
- (FakeBuffer*)newBuffer:(std::shared_ptr<metalmm::Buffer>)memory options:(MTLResourceOptions)options {
  FakeBuffer* buffer = [[FakeBuffer alloc] init];
  buffer->length_ = memory->size();
  buffer->options_ = options;
  if ((options & MTLResourceStorageModeMask) == MTLResourceStorageModeManaged) {
    buffer->managed = new std::shared_ptr<metalmm::Buffer>(fake::cpu().new_buffer(memory->size()));
    std::memset((*buffer->managed)->host(), 0xff, memory->size());
  }
  buffer->memory = new std::shared_ptr<metalmm::Buffer>(std::move(memory));
  return buffer;
}
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options {
  fake::spend_us(fake::settings.allocate_us);
  if (length == 0 || length > [self maxBufferLength]) {
    fake::violation("buffer-length", "newBufferWithLength: of " + std::to_string(length));
    return nil;
  }
  if (fake::fault("allocation")) return nil;
  if (!fake::settings.unified_memory && (options & MTLResourceStorageModeMask) == MTLResourceStorageModeShared)
    fake::violation("storage", "shared memory on a device of its own memory; managed is meant");
  try {
    return [self newBuffer:fake::new_pages(length) options:options];
  } catch (const metalmm::Error&) {
    return nil;
  }
}
- (id<MTLBuffer>)newBufferWithBytesNoCopy:(void*)bytes
                                   length:(NSUInteger)length
                                  options:(MTLResourceOptions)options
                              deallocator:(void (^)(void*, NSUInteger))deallocator {
  (void)deallocator;
  auto page = static_cast<NSUInteger>(getpagesize());
  if (reinterpret_cast<uintptr_t>(bytes) % page || length % page || length == 0) {
    fake::violation("no-copy", "newBufferWithBytesNoCopy: of memory that is not whole pages");
    return nil;
  }
  fake::spend_us(fake::settings.allocate_us);
  if (length > [self maxBufferLength]) fake::violation("buffer-length", "newBufferWithBytesNoCopy: of " + std::to_string(length));
  if (fake::fault("wrap")) return nil;
  if (fake::settings.no_copy_zero) length = 0;
  return [self newBuffer:std::make_shared<metalmm::Buffer>(bytes, length, false, nullptr) options:options];
}
- (id<MTLLibrary>)newLibraryWithSource:(NSString*)source options:(MTLCompileOptions*)options error:(NSError**)error {
  try {
    // Of an older language the header holds nothing, nor before another one.
    bool is_first = fake::text(source).find("<MetalPerformancePrimitives/") < fake::text(source).find("<metal_stdlib>");
    if (uses_tensors(source) && ([options languageVersion] < MTLLanguageVersion4_0 || is_first || fake::fault("tensors")))
      throw metalmm::Error(metalmm::ErrorKind::compile, "program_source:1:1: error: use of undeclared identifier 'mpp'");
    if (fake::fault("library")) throw metalmm::Error(metalmm::ErrorKind::compile, "program_source:1:1: error: injected");
    fake::describe(fake::text(source));
  } catch (const metalmm::Error& e) {
    store(error, fake::error(@"MTLLibraryErrorDomain", MTLLibraryErrorCompileFailure, e.what()));
    return nil;
  }
  FakeLibrary* library = [[FakeLibrary alloc] init];
  library->source = new std::string(fake::text(source));
  return library;
}
- (id<MTLBinaryArchive>)newBinaryArchiveWithDescriptor:(MTLBinaryArchiveDescriptor*)descriptor error:(NSError**)error {
  if (getenv("MTL_SHADER_VALIDATION")) fake::violation("archive", "a binary archive under shader validation, which has other pipelines");
  FakeArchive* archive = [[FakeArchive alloc] init];
  archive->keys = new std::set<std::string>;
  if (![descriptor url]) return archive;
  std::ifstream in(fake::text([[descriptor url] path]));
  std::string line;
  if (fake::fault("archive_load") || !std::getline(in, line) || line != "fake archive") {
    [archive release];
    store(error, fake::error(@"MTLBinaryArchiveDomain", MTLBinaryArchiveErrorInvalidFile, "not an archive"));
    return nil;
  }
  while (std::getline(in, line)) archive->keys->insert(line);
  return archive;
}
- (id<MTLComputePipelineState>)newComputePipelineStateWithDescriptor:(MTLComputePipelineDescriptor*)descriptor
                                                             options:(MTLPipelineOption)options
                                                          reflection:(MTLAutoreleasedComputePipelineReflection*)reflection
                                                               error:(NSError**)error {
  FakeFunction* function = (FakeFunction*)[descriptor computeFunction];
  if (!function) {
    fake::violation("pipeline", "a descriptor without a function");
    return nil;
  }
  if (options & MTLPipelineOptionFailOnBinaryArchiveMiss) {
    bool found = false;
    for (FakeArchive* archive in [descriptor binaryArchives]) found |= archive->keys->count(archive_key(*function->kernel)) != 0;
    if (!found) {
      store(error, fake::error(@"MTLBinaryArchiveDomain", MTLBinaryArchiveErrorInternalError, "the archive does not have this pipeline"));
      return nil;
    }
  }
  FakePipeline* state = nil;
  try {
    if (fake::settings.apple_family < 7 && fake::uses_matrices(function->kernel->source))
      throw metalmm::Error(metalmm::ErrorKind::compile, "simdgroup matrices are not supported by this GPU");
    if (fake::fault("pipeline")) throw metalmm::Error(metalmm::ErrorKind::compile, "injected: the compiler gave up");
    auto compiled = fake::compile(*function->kernel);
    state = [[FakePipeline alloc] init];
    state->pipeline = new std::shared_ptr<metalmm::Pipeline>(std::move(compiled));
    state->indirect = [descriptor supportIndirectCommandBuffers];
  } catch (const metalmm::Error& e) {
    store(error, fake::error(@"MTLLibraryErrorDomain", MTLLibraryErrorCompileFailure, e.what()));
    return nil;
  }
  NSMutableArray* bindings = [[NSMutableArray alloc] init];
  for (const metalmm::KernelArgument& argument : (*state->pipeline)->arguments) {
    FakeBinding* b = [[[FakeBinding alloc] init] autorelease];
    b->argument = argument;
    [bindings addObject:b];
  }
  MTLComputePipelineReflection* r = [[[MTLComputePipelineReflection alloc] init] autorelease];
  r->fakeState = bindings;
  if (reflection) *reflection = r;
  return state;
}
- (id<MTLIndirectCommandBuffer>)newIndirectCommandBufferWithDescriptor:(MTLIndirectCommandBufferDescriptor*)descriptor
                                                       maxCommandCount:(NSUInteger)count
                                                               options:(MTLResourceOptions)options {
  (void)options;
  constexpr MTLIndirectCommandType kDispatches = MTLIndirectCommandTypeConcurrentDispatch | MTLIndirectCommandTypeConcurrentDispatchThreads;
  if (![descriptor commandTypes] || ([descriptor commandTypes] & ~kDispatches) || [descriptor inheritBuffers] ||
      [descriptor inheritPipelineState])
    fake::violation("indirect", "a descriptor that is not for concurrent dispatches with pipelines and buffers of their own");
  if ([descriptor maxKernelBufferBindCount] > 31) fake::violation("indirect", "more than 31 buffers");
  if (fake::settings.apple_family < 3) fake::violation("indirect", "this family has no indirect compute commands");
  if (fake::fault("indirect")) return nil;
  FakeIndirect* indirect = [[FakeIndirect alloc] init];
  indirect->commands = new std::vector<fake::Indirect>(count);
  indirect->types = [descriptor commandTypes];
  indirect->max_buffers = [descriptor maxKernelBufferBindCount];
  indirect->max_memory = [descriptor maxKernelThreadgroupMemoryBindCount];
  return indirect;
}
- (id<MTLCounterSampleBuffer>)newCounterSampleBufferWithDescriptor:(MTLCounterSampleBufferDescriptor*)descriptor error:(NSError**)error {
  if ([descriptor sampleCount] > 4096) fake::violation("samples", "more than 32 KB of samples");
  if (fake::fault("counters")) {
    store(error, fake::error(@"MTLCounterErrorDomain", MTLCounterSampleBufferErrorOutOfMemory, "none left"));
    return nil;
  }
  FakeSamples* samples = [[FakeSamples alloc] init];
  samples->times = new std::vector<uint64_t>([descriptor sampleCount]);
  return samples;
}
@end

extern "C" id<MTLDevice> MTLCreateSystemDefaultDevice() {
  static FakeDevice* device = [[FakeDevice alloc] init];  // one, as in Metal; it is never gone
  return [device retain];
}
extern "C" NSArray<id<MTLDevice>>* MTLCopyAllDevices() {
  id<MTLDevice> device = MTLCreateSystemDefaultDevice();
  NSArray* all = [[NSArray alloc] initWithObjects:device, nil];
  [device release];
  return all;
}

namespace fake {
void set_in_flight(FakeCommandBuffer* commands, bool is) {
  std::lock_guard lock(buffers_mutex);
  in_flight.erase(std::remove(in_flight.begin(), in_flight.end(), commands), in_flight.end());
  if (is) in_flight.push_back(commands);
}
}  // namespace fake
