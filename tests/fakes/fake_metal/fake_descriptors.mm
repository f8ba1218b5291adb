// Descriptors, compile options, the capture manager: classes of Metal that carry values.
#include <fstream>

#include "fake_values.h"

// clang-format off
@implementation MTLCompileOptions
LIFE
NUMBER(MTLMathMode, mathMode, setMathMode)
NUMBER(BOOL, fastMathEnabled, setFastMathEnabled)
NUMBER(MTLMathFloatingPointFunctions, mathFloatingPointFunctions, setMathFloatingPointFunctions)
NUMBER(MTLLanguageVersion, languageVersion, setLanguageVersion)
@end

@implementation MTLComputePipelineDescriptor
LIFE
OBJECT(NSString*, label, setLabel)
OBJECT(id<MTLFunction>, computeFunction, setComputeFunction)
OBJECT(NSArray*, binaryArchives, setBinaryArchives)
NUMBER(BOOL, supportIndirectCommandBuffers, setSupportIndirectCommandBuffers)
@end

@implementation MTLBinaryArchiveDescriptor
LIFE
OBJECT(NSURL*, url, setUrl)
@end

@implementation MTLIndirectCommandBufferDescriptor
LIFE
NUMBER(MTLIndirectCommandType, commandTypes, setCommandTypes)
NUMBER(BOOL, inheritPipelineState, setInheritPipelineState)
NUMBER(BOOL, inheritBuffers, setInheritBuffers)
NUMBER(NSUInteger, maxKernelBufferBindCount, setMaxKernelBufferBindCount)
NUMBER(NSUInteger, maxKernelThreadgroupMemoryBindCount, setMaxKernelThreadgroupMemoryBindCount)
@end

@implementation MTLCounterSampleBufferDescriptor
LIFE
OBJECT(id<MTLCounterSet>, counterSet, setCounterSet)
NUMBER(MTLStorageMode, storageMode, setStorageMode)
NUMBER(NSUInteger, sampleCount, setSampleCount)
@end

@implementation MTLArchitecture
LIFE
- (NSString*)name {
  return @"fake_g15g";
}
@end

@implementation NSProcessInfo (Darwin)
- (BOOL)isLowPowerModeEnabled {
  return fake::settings.low_power;
}
@end

@implementation MTLResidencySetDescriptor
LIFE
NUMBER(NSUInteger, initialCapacity, setInitialCapacity)
@end

@implementation MTLComputePassSampleBufferAttachmentDescriptor
LIFE
OBJECT(id<MTLCounterSampleBuffer>, sampleBuffer, setSampleBuffer)
NUMBER(NSUInteger, startOfEncoderSampleIndex, setStartOfEncoderSampleIndex)
NUMBER(NSUInteger, endOfEncoderSampleIndex, setEndOfEncoderSampleIndex)
@end

@implementation MTLComputePassSampleBufferAttachmentDescriptorArray
LIFE
- (MTLComputePassSampleBufferAttachmentDescriptor*)objectAtIndexedSubscript:(NSUInteger)index {
  if (index > 3) fake::violation("sample-attachment", "index " + std::to_string(index) + " is not in 0 to 3");
  if (!VALUES.objects["first"]) VALUES.objects["first"] = [[MTLComputePassSampleBufferAttachmentDescriptor alloc] init];
  return VALUES.objects["first"];
}
@end

@implementation MTLComputePassDescriptor
LIFE
+ (MTLComputePassDescriptor*)computePassDescriptor {
  return [[[MTLComputePassDescriptor alloc] init] autorelease];
}
NUMBER(MTLDispatchType, dispatchType, setDispatchType)
- (MTLComputePassSampleBufferAttachmentDescriptorArray*)sampleBufferAttachments {
  if (!VALUES.objects["all"]) VALUES.objects["all"] = [[MTLComputePassSampleBufferAttachmentDescriptorArray alloc] init];
  return VALUES.objects["all"];
}
@end

@implementation MTLCaptureDescriptor
LIFE
OBJECT(id, captureObject, setCaptureObject)
OBJECT(NSURL*, outputURL, setOutputURL)
NUMBER(MTLCaptureDestination, destination, setDestination)
@end
// clang-format on

@implementation MTLCaptureManager
+ (MTLCaptureManager*)sharedCaptureManager {
  static MTLCaptureManager* manager = [[MTLCaptureManager alloc] init];
  return manager;
}
- (BOOL)supportsDestination:(MTLCaptureDestination)destination {
  return destination == MTLCaptureDestinationGPUTraceDocument && getenv("METAL_CAPTURE_ENABLED");
}
- (BOOL)startCaptureWithDescriptor:(MTLCaptureDescriptor*)descriptor error:(NSError**)error {
  if (VALUES.numbers["capturing"])
    return store(error, fake::error(@"MTLCaptureError", MTLCaptureErrorAlreadyCapturing, "already capturing"));
  if (![descriptor captureObject])
    return store(error, fake::error(@"MTLCaptureError", MTLCaptureErrorInvalidDescriptor, "no capture object"));
  std::ofstream(fake::text([[descriptor outputURL] path])) << "fake trace\n";
  VALUES.numbers["capturing"] = 1;
  fake::captures++, fake::capturing = true;
  return YES;
}
- (void)stopCapture {
  VALUES.numbers["capturing"] = 0;
  fake::capturing = false;
}
- (BOOL)isCapturing {
  return VALUES.numbers["capturing"] != 0;
}
@end

@implementation FakeCounterSet
- (NSString*)name {
  return MTLCommonCounterSetTimestamp;
}
@end

@implementation FakeSamples
- (void)dealloc {
  delete times;
  [super dealloc];
}
- (NSUInteger)sampleCount {
  return times->size();
}
- (NSData*)resolveCounterRange:(NSRange)range {
  if (range.location + range.length > times->size()) {
    fake::violation("samples", "resolveCounterRange: past the end");
    return nil;
  }
  if (fake::fault("resolve_counters")) return nil;
  return [NSData dataWithBytes:times->data() + range.location length:range.length * sizeof(uint64_t)];
}
@end

@implementation FakeSharedEvent
- (id)init {
  self = [super init];
  before = new std::set<uint64_t>;
  return self;
}
- (void)dealloc {
  delete before;
  [super dealloc];
}
- (uint64_t)signaledValue {
  return seen = value.load();
}
- (BOOL)waitUntilSignaledValue:(uint64_t)wanted timeoutMS:(uint64_t)ms {
  return fake::wait_for_event(value, wanted, ms);
}
@end

@implementation FakeFence
- (id)init {
  self = [super init];
  before = new std::set<uint64_t>;
  return self;
}
- (void)dealloc {
  delete before;
  [super dealloc];
}
@end
