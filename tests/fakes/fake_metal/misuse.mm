// Breaks each of Metal's rules once, so that a test can see the fake notice; tests/devices/metal.
#include <cstring>
#include <utility>

#include "fake.h"

namespace {

struct AutoreleasePool {
  NSAutoreleasePool* pool = [[NSAutoreleasePool alloc] init];
  ~AutoreleasePool() { [pool drain]; }
};

constexpr const char* kSource = R"(#include <metal_stdlib>
using namespace metal;
kernel void add(const device float* x [[buffer(0)]], device float* y [[buffer(1)]], constant float& z [[buffer(2)]],
                uint i [[thread_position_in_grid]]) { y[i] = x[i] + z; }
kernel void wide(const device half4* x [[buffer(0)]], device float* y [[buffer(1)]], constant float& z [[buffer(2)]],
                 uint i [[thread_position_in_grid]]) { y[i] = float(x[i].x) + z; }
)";

const MTLSize kOne = {1, 1, 1};

// Everything that a right dispatch needs.
struct Bench {
  id<MTLDevice> device = [MTLCreateSystemDefaultDevice() autorelease];
  id<MTLCommandQueue> queue = [[device newCommandQueueWithMaxCommandBufferCount:4] autorelease];
  id<MTLBuffer> x = [[device newBufferWithLength:256 options:MTLResourceStorageModeShared] autorelease];
  id<MTLBuffer> y = [[device newBufferWithLength:256 options:MTLResourceStorageModeShared] autorelease];
  id<MTLComputePipelineState> state = pipeline(false);
  id<MTLCommandBuffer> commands = nil;
  id<MTLComputeCommandEncoder> encoder = nil;
  float z = 1;

  id<MTLComputePipelineState> pipeline(bool indirect, NSString* name = @"add") {
    id<MTLLibrary> library = [[device newLibraryWithSource:[NSString stringWithUTF8String:kSource] options:nil error:nullptr] autorelease];
    MTLComputePipelineDescriptor* d = [[[MTLComputePipelineDescriptor alloc] init] autorelease];
    [d setComputeFunction:[[library newFunctionWithName:name] autorelease]];
    [d setSupportIndirectCommandBuffers:indirect];
    return [[device newComputePipelineStateWithDescriptor:d options:MTLPipelineOptionNone reflection:nullptr error:nullptr] autorelease];
  }
  void open(MTLDispatchType type = MTLDispatchTypeConcurrent) {
    commands = [queue commandBufferWithUnretainedReferences];
    encoder = [commands computeCommandEncoderWithDispatchType:type];
  }
  void bind(id<MTLBuffer> from, id<MTLBuffer> to) {
    [encoder setComputePipelineState:state];
    [encoder setBuffer:from offset:0 atIndex:0];
    [encoder setBuffer:to offset:0 atIndex:1];
    [encoder setBytes:&z length:4 atIndex:2];
  }
  void dispatch(MTLSize grid = kOne, MTLSize threadgroup = {4, 1, 1}) {
    [encoder dispatchThreadgroups:grid threadsPerThreadgroup:threadgroup];
  }
  void finish() {
    [encoder endEncoding];
    [commands commit];
    [commands waitUntilCompleted];
    [commands status];
  }
  // An indirect command buffer with one dispatch.
  id<MTLIndirectCommandBuffer> indirect(id<MTLComputePipelineState> with, NSUInteger max_buffers = 3) {
    MTLIndirectCommandBufferDescriptor* d = [[[MTLIndirectCommandBufferDescriptor alloc] init] autorelease];
    [d setCommandTypes:MTLIndirectCommandTypeConcurrentDispatch];
    [d setMaxKernelBufferBindCount:max_buffers];
    id<MTLIndirectCommandBuffer> all = [[device newIndirectCommandBufferWithDescriptor:d maxCommandCount:1 options:0] autorelease];
    id<MTLIndirectComputeCommand> command = [all indirectComputeCommandAtIndex:0];
    [command setComputePipelineState:with];
    for (NSUInteger i = 0; i < 3; i++) [command setKernelBuffer:(i == 1 ? y : x) offset:0 atIndex:i];
    [command concurrentDispatchThreadgroups:kOne threadsPerThreadgroup:kOne];
    return all;
  }
  void multiply(NSUInteger rows, NSUInteger columns, NSUInteger row_bytes, NSUInteger matrices, NSUInteger matrix_bytes) {
    auto matrix = [&](NSUInteger r, NSUInteger c, NSUInteger rb, NSUInteger n, NSUInteger mb) {
      MPSMatrixDescriptor* d = [MPSMatrixDescriptor matrixDescriptorWithRows:r
                                                                     columns:c
                                                                    matrices:n
                                                                    rowBytes:rb
                                                                 matrixBytes:mb
                                                                    dataType:MPSDataTypeFloat16];
      return [[[MPSMatrix alloc] initWithBuffer:x offset:0 descriptor:d] autorelease];
    };
    MPSMatrix* a = matrix(rows, columns, row_bytes, matrices, matrix_bytes);
    MPSMatrix* b = matrix(4, 4, 8, 1, 32);
    if (!a || !b) return;
    MPSMatrixMultiplication* kernel = [[[MPSMatrixMultiplication alloc] initWithDevice:device
                                                                         transposeLeft:NO
                                                                        transposeRight:NO
                                                                            resultRows:4
                                                                         resultColumns:4
                                                                       interiorColumns:4
                                                                                 alpha:1
                                                                                  beta:0] autorelease];
    if (!commands) commands = [queue commandBuffer];
    [kernel encodeToCommandBuffer:commands leftMatrix:a rightMatrix:b resultMatrix:b];
    finish();
  }
};

using Misuse = void (*)(Bench&);

const std::pair<const char*, Misuse> kMisuses[] = {
    {"nothing",
     [](Bench& b) {
       b.open();
       b.bind(b.x, b.y);
       b.dispatch();
       b.finish();
     }},
    {"unbound",
     [](Bench& b) {
       b.open();
       [b.encoder setComputePipelineState:b.state];
       [b.encoder setBuffer:b.x offset:0 atIndex:0];
       [b.encoder setBytes:&b.z length:4 atIndex:2];
       b.dispatch();
       b.finish();
     }},
    {"too-small",
     [](Bench& b) {
       b.open();
       b.bind(b.x, b.y);
       [b.encoder setBuffer:b.x offset:256 atIndex:0];
       b.dispatch();
       b.finish();
     }},
    {"misaligned",
     [](Bench& b) {
       b.open();
       b.bind(b.x, b.y);
       [b.encoder setBuffer:b.x offset:2 atIndex:0];
       b.dispatch();
       b.finish();
     }},
    {"set-bytes",
     [](Bench& b) {
       b.open();
       b.bind(b.x, b.y);
       std::vector<uint8_t> many(4097);
       [b.encoder setBytes:many.data() length:many.size() atIndex:2];
       b.dispatch();
       b.finish();
     }},
    {"threadgroup-limit",
     [](Bench& b) {
       b.open();
       b.bind(b.x, b.y);
       b.dispatch(kOne, {1025, 1, 1});
       b.finish();
     }},
    {"zero-grid",
     [](Bench& b) {
       b.open();
       b.bind(b.x, b.y);
       b.dispatch({0, 1, 1});
       b.finish();
     }},
    {"no-pipeline",
     [](Bench& b) {
       b.open();
       b.dispatch();
       b.finish();
     }},
    {"use-after-end",
     [](Bench& b) {
       b.open();
       b.bind(b.x, b.y);
       [b.encoder endEncoding];
       b.dispatch();
       [b.commands commit];
       [b.commands waitUntilCompleted];
     }},
    {"use-after-commit",
     [](Bench& b) {
       b.open();
       b.finish();
       [b.commands computeCommandEncoderWithDispatchType:MTLDispatchTypeConcurrent];
     }},
    {"double-commit",
     [](Bench& b) {
       b.open();
       b.finish();
       [b.commands commit];
     }},
    {"not-ended",
     [](Bench& b) {
       b.open();
       [b.commands commit];
       [b.commands waitUntilCompleted];
       [b.encoder endEncoding];
     }},
    {"encoder-open",
     [](Bench& b) {
       b.open();
       [b.commands blitCommandEncoder];
       b.finish();
     }},
    {"freed-in-flight",
     [](Bench& b) {
       id<MTLBuffer> gone = [b.device newBufferWithLength:64 options:MTLResourceStorageModeShared];
       b.open();
       b.bind(gone, b.y);
       b.dispatch();
       [b.encoder endEncoding];
       [b.commands commit];
       [gone release];
       [b.commands waitUntilCompleted];
     }},
    {"missing-barrier",
     [](Bench& b) {
       b.open();
       b.bind(b.x, b.y);
       b.dispatch();
       b.bind(b.y, b.x);
       b.dispatch();
       b.finish();
     }},
    {"indirect",
     [](Bench& b) {
       id<MTLIndirectCommandBuffer> all = b.indirect(b.pipeline(false));
       id<MTLResource> used[] = {all, b.x, b.y};
       b.open();
       [b.encoder useResources:used count:3 usage:MTLResourceUsageRead | MTLResourceUsageWrite];
       [b.encoder executeCommandsInBuffer:all withRange:NSMakeRange(0, 1)];
       b.finish();
     }},
    {"indirect-type",
     [](Bench& b) {
       id<MTLIndirectCommandBuffer> all = b.indirect(b.pipeline(true));
       [[all indirectComputeCommandAtIndex:0] concurrentDispatchThreads:kOne threadsPerThreadgroup:kOne];
     }},
    {"indirect-index", [](Bench& b) { b.indirect(b.pipeline(true), 2); }},
    {"not-resident",
     [](Bench& b) {
       b.open();
       [b.encoder executeCommandsInBuffer:b.indirect(b.pipeline(true)) withRange:NSMakeRange(0, 1)];
       b.finish();
     }},
    {"mps-rows", [](Bench& b) { b.multiply(64, 4, 8, 1, 512); }},
    {"mps-row-bytes", [](Bench& b) { b.multiply(4, 4, 6, 1, 24); }},
    {"mps-columns", [](Bench& b) { b.multiply(4, 8, 16, 1, 64); }},
    {"mps-batch", [](Bench& b) { b.multiply(4, 4, 8, 2, 32); }},
    {"mps-matrix-bytes", [](Bench& b) { b.multiply(4, 4, 8, 2, 36); }},
    {"threadgroup-memory",
     [](Bench& b) {
       b.open();
       [b.encoder setThreadgroupMemoryLength:20 atIndex:0];
       b.finish();
     }},
    {"bytes-written",
     [](Bench& b) {
       b.open();
       b.bind(b.x, b.y);
       [b.encoder setBytes:&b.z length:4 atIndex:1];
       b.dispatch();
       b.finish();
     }},
    {"index",
     [](Bench& b) {
       b.open();
       [b.encoder setBuffer:b.x offset:0 atIndex:31];
       b.finish();
     }},
    {"barrier",
     [](Bench& b) {
       b.open();
       [b.encoder memoryBarrierWithScope:MTLBarrierScopeTextures];
       b.finish();
     }},
    {"wait",
     [](Bench& b) {
       b.open();
       [b.encoder endEncoding];
       [b.commands waitUntilCompleted];
     }},
    {"unread-status",
     [](Bench& b) {
       b.open();
       [b.encoder endEncoding];
       [b.commands commit];
       [b.commands waitUntilCompleted];
     }},
    {"event",
     [](Bench& b) {
       id<MTLSharedEvent> event = [[b.device newSharedEvent] autorelease];
       b.open();
       [b.encoder endEncoding];
       [b.commands encodeSignalEvent:event value:2];
       [b.commands encodeSignalEvent:event value:1];
       [b.commands commit];
       [b.commands waitUntilCompleted];
     }},
    {"did-modify", [](Bench& b) { [b.x didModifyRange:NSMakeRange(0, 4)]; }},
    {"synchronize",
     [](Bench& b) {
       id<MTLCommandBuffer> commands = [b.queue commandBuffer];
       id<MTLBlitCommandEncoder> blit = [commands blitCommandEncoder];
       [blit synchronizeResource:b.x];
       [blit endEncoding];
       [commands commit];
       [commands waitUntilCompleted];
     }},
    {"residency", [](Bench& b) { [[[b.device newResidencySetWithDescriptor:nil error:nullptr] autorelease] removeAllocation:b.x]; }},
    {"buffer-length", [](Bench& b) { [b.device newBufferWithLength:0 options:0]; }},
    {"mps-unretained",
     [](Bench& b) {
       b.commands = [b.queue commandBufferWithUnretainedReferences];
       b.multiply(4, 4, 8, 1, 32);
     }},
    {"queue-full",
     [](Bench& b) {
       for (int i = 0; i < 5; i++) [b.queue commandBuffer];
     }},
    {"samples",
     [](Bench& b) {
       MTLCounterSampleBufferDescriptor* d = [[[MTLCounterSampleBufferDescriptor alloc] init] autorelease];
       [d setSampleCount:4097];
       [[b.device newCounterSampleBufferWithDescriptor:d error:nullptr] release];
     }},
    {"no-copy",
     [](Bench& b) {
       std::vector<uint8_t> memory(8192);
       [b.device newBufferWithBytesNoCopy:memory.data() + 1 length:4096 options:MTLResourceStorageModeShared deallocator:nil];
     }},
    {"unordered",
     [](Bench& b) {
       constexpr MTLResourceOptions kUntracked = MTLResourceStorageModeShared | MTLResourceHazardTrackingModeUntracked;
       id<MTLBuffer> z = [[b.device newBufferWithLength:256 options:kUntracked] autorelease];
       b.open();
       b.bind(b.x, z);
       b.dispatch();
       [b.encoder endEncoding];
       b.encoder = [b.commands computeCommandEncoderWithDispatchType:MTLDispatchTypeConcurrent];
       b.bind(z, b.y);
       b.dispatch();
       b.finish();
     }},
    {"lingering",
     [](Bench& b) {
       b.open();
       b.bind(b.x, b.y);
       [b.encoder setThreadgroupMemoryLength:32768 atIndex:0];
       [b.encoder setThreadgroupMemoryLength:16 atIndex:1];
       b.dispatch();
       b.finish();
     }},
    {"working-set",
     [](Bench& b) {
       int before = std::exchange(fake::settings.working_set_mb, 0);
       id<MTLResidencySet> set = [[b.device newResidencySetWithDescriptor:nil error:nullptr] autorelease];
       [set addAllocation:b.x];
       [set commit];
       fake::settings.working_set_mb = before;
     }},
    {"too-long", [](Bench& b) { [b.device newBufferWithLength:[b.device maxBufferLength] + 1 options:0]; }},
    {"misaligned-vector",
     [](Bench& b) {
       b.state = b.pipeline(false, @"wide");
       b.open();
       b.bind(b.x, b.y);
       [b.encoder setBuffer:b.x offset:4 atIndex:0];
       b.dispatch();
       b.finish();
     }},
    {"leak", [](Bench& b) { [b.device newBufferWithLength:64 options:MTLResourceStorageModeShared]; }},
};

}  // namespace

extern "C" __attribute__((visibility("default"))) int fake_metal_misuse(const char* name) {
  AutoreleasePool pool;
  int known = 0;
  for (auto& [key, run] : kMisuses)
    if (std::strcmp(key, name) == 0) {
      Bench bench;
      run(bench);
      known = 1;
    }
  return known;
}
