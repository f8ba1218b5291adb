// What the CUDA device needs of NVIDIA's driver, which is looked for at run time: one build serves machines with and without it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace metalmm::cuda {

using Result = int;  // CUresult; 0 is success
constexpr Result kSuccess = 0, kNotReady = 600;
using DeviceNumber = int;
using Address = unsigned long long;
struct ContextObject;
struct ModuleObject;
struct FunctionObject;
struct StreamObject;
struct EventObject;
struct GraphObject;
struct GraphExecObject;
using Context = ContextObject*;
using Module = ModuleObject*;
using Function = FunctionObject*;
using Stream = StreamObject*;
using Event = EventObject*;
using Graph = GraphObject*;
using GraphExec = GraphExecObject*;

// CUdevice_attribute
constexpr int kMaxThreads = 1, kMaxGridX = 5, kMultiprocessors = 16, kL2Bytes = 38, kCapabilityMajor = 75, kCapabilityMinor = 76,
              kMostSharedBytes = 97;  // of a kernel that asks for it
// CUfunction_attribute
constexpr int kFunctionMaxThreads = 0, kFunctionSharedBytes = 1, kFunctionLocalBytes = 3, kFunctionRegisters = 4,
              kFunctionMaxDynamicSharedBytes = 8;
constexpr unsigned kStreamNonBlocking = 1, kEventDisableTiming = 2;
constexpr int kCaptureThreadLocal = 1;
// CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion
constexpr int kTileUint8 = 0, kTileUint16 = 1, kSwizzle32 = 1, kSwizzle64 = 2, kSwizzle128 = 3, kTilePromote256 = 3;
// CU_LAUNCH_ATTRIBUTE_
constexpr int kAttributeCluster = 4, kAttributeProgrammaticSerialization = 6;

struct LaunchAttribute {
  int id;
  char pad[4];
  union {
    char bytes[64];
    int number;
    unsigned sizes[3];
  };
};
struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

// X(name of ours, symbol, parameters)
#define METALMM_CUDA_FUNCTIONS(X)                                                            \
  X(init, cuInit, (unsigned))                                                                \
  X(driver_version, cuDriverGetVersion, (int*))                                              \
  X(error_name, cuGetErrorName, (Result, const char**))                                      \
  X(error_string, cuGetErrorString, (Result, const char**))                                  \
  X(device_count, cuDeviceGetCount, (int*))                                                  \
  X(device_get, cuDeviceGet, (DeviceNumber*, int))                                           \
  X(device_name, cuDeviceGetName, (char*, int, DeviceNumber))                                \
  X(device_attribute, cuDeviceGetAttribute, (int*, int, DeviceNumber))                       \
  X(device_memory, cuDeviceTotalMem_v2, (size_t*, DeviceNumber))                             \
  X(context_retain, cuDevicePrimaryCtxRetain, (Context*, DeviceNumber))                      \
  X(context_release, cuDevicePrimaryCtxRelease_v2, (DeviceNumber))                           \
  X(context_set, cuCtxSetCurrent, (Context))                                                 \
  X(module_load, cuModuleLoadData, (Module*, const void*))                                   \
  X(module_unload, cuModuleUnload, (Module))                                                 \
  X(module_function, cuModuleGetFunction, (Function*, Module, const char*))                  \
  X(module_global, cuModuleGetGlobal_v2, (Address*, size_t*, Module, const char*))           \
  X(function_attribute, cuFuncGetAttribute, (int*, int, Function))                           \
  X(set_function_attribute, cuFuncSetAttribute, (Function, int, int))                        \
  X(allocate, cuMemAlloc_v2, (Address*, size_t))                                             \
  X(free, cuMemFree_v2, (Address))                                                           \
  X(copy_in, cuMemcpyHtoDAsync_v2, (Address, const void*, size_t, Stream))                   \
  X(copy_out, cuMemcpyDtoHAsync_v2, (void*, Address, size_t, Stream))                        \
  X(fill, cuMemsetD8Async, (Address, unsigned char, size_t, Stream))                         \
  X(stream_create, cuStreamCreate, (Stream*, unsigned))                                      \
  X(stream_destroy, cuStreamDestroy_v2, (Stream))                                            \
  X(stream_synchronize, cuStreamSynchronize, (Stream))                                       \
  X(stream_wait, cuStreamWaitEvent, (Stream, Event, unsigned))                               \
  X(capture_begin, cuStreamBeginCapture_v2, (Stream, int))                                   \
  X(capture_end, cuStreamEndCapture, (Stream, Graph*))                                       \
  X(graph_instantiate, cuGraphInstantiateWithFlags, (GraphExec*, Graph, unsigned long long)) \
  X(graph_launch, cuGraphLaunch, (GraphExec, Stream))                                        \
  X(graph_destroy, cuGraphDestroy, (Graph))                                                  \
  X(graph_exec_destroy, cuGraphExecDestroy, (GraphExec))                                     \
  X(event_create, cuEventCreate, (Event*, unsigned))                                         \
  X(event_destroy, cuEventDestroy_v2, (Event))                                               \
  X(event_record, cuEventRecord, (Event, Stream))                                            \
  X(event_query, cuEventQuery, (Event))                                                      \
  X(event_elapsed, cuEventElapsedTime, (float*, Event, Event))                               \
  X(launch, cuLaunchKernelEx, (const LaunchConfig*, Function, void**, void**))               \
  X(encode_tiles, cuTensorMapEncodeTiled,                                                    \
    (void*, int, unsigned, Address, const uint64_t*, const uint64_t*, const unsigned*, const unsigned*, int, int, int, int))

struct Driver {
#define METALMM_DECLARE(name, symbol, parameters) Result(*name) parameters = nullptr;
  METALMM_CUDA_FUNCTIONS(METALMM_DECLARE)
#undef METALMM_DECLARE
  std::string missing;  // not empty: why there is none

  std::string text(Result) const;
  // Throws DeviceError with what failed.
  void check(Result, const char* what) const;
};

// Loaded and initialized on first use: $METALMM_LIBCUDA, else libcuda.so.1.
const Driver& driver();

std::vector<std::string> gpu_names();

}  // namespace metalmm::cuda
