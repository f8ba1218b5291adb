// What the CPU device's executor and a compiled kernel share. Included by both, so plain C++17 and no system headers:
// a kernel's text may use any global name that MSL leaves free.
#pragma once

#define METALMM_INLINE inline __attribute__((always_inline))
// Once in a module, where each kernel would hold it dozens of times.
#define METALMM_ONCE static __attribute__((noinline, unused))

namespace metalmm::abi {

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 kVersion = 6;
constexpr u32 kSimdWidth = 32;
constexpr u32 kMaxThreads = 1024;
constexpr u32 kMaxGroups = kMaxThreads / kSimdWidth;
constexpr u32 kMaxPayload = 64;  // bytes a lane may bring to a simdgroup operation
constexpr u32 kNoLane = ~0u;

// NVIDIA's CUtensorMap: where a copy finds its box of a matrix.
struct alignas(64) TileMap {
  u64 words[16];
};
// What the fake of the driver writes there.
struct FakeTileMap {
  const u8* data;
  u64 pitch[2], size[3];
  u32 box[2], bytes;
};
static_assert(sizeof(TileMap) == 128 && sizeof(FakeTileMap) <= sizeof(TileMap), "the driver and its fake fill one size");
// Of a matmul's A and B.
struct TileMaps {
  TileMap a, b;
  u32 there;                 // 0: threads bring the tiles
  u32 rows_of_a, rows_of_b;  // that one copy brings: a tile's, or of A fewer
  u32 rows_of_last_a;        // that are copied of A's last tile, where it is not full: a multiple of rows_of_a
};

// Where in the .metal file a lane waits.
struct Site {
  const char* file;
  u32 line;
  u32 column;
};

inline bool operator==(const Site& a, const Site& b) { return a.line == b.line && a.column == b.column; }
inline bool operator!=(const Site& a, const Site& b) { return !(a == b); }

// How often a lane has gone round a loop that it is in: lanes of one turn alone meet in it. Outer loops have their own.
struct Turn {
  const Turn* outer;
  Site loop;
  u32 count;
};

// A fiber at rest: stack, frame and instruction pointers are all that the switch keeps.
struct Lane {
  void* sp;
  void* fp;
  void* ip;
  const Turn* turn;  // of the innermost loop that counts them: ControlFlow.turns in python/metalmm/msl
};

struct Simdgroup;

// At which operation a lane waits.
struct SimdWait {
  Site site;
  void (*complete)(Simdgroup*, u32 mask);  // computes out[] of the lanes in mask from their in[] and arg[]; null: a barrier
  const Turn* turn;
};

constexpr u32 kDevice = 1, kThreadgroup = 2;  // as mem_flags says them

struct Simdgroup {
  u32 ready;      // lanes that can run, started or not
  u32 simd_wait;  // lanes at a simdgroup operation
  u32 tg_wait;    // lanes at threadgroup_barrier
  u32 live;       // lanes that have not returned
  u32 unstarted;
  u32 mixed;  // the lanes in simd_wait stand at more than one operation: see wait[], not first
  u32 base;   // index in the threadgroup of lane 0
  u32 all;    // the lanes that exist: fewer than 32 in the last simdgroup of an odd threadgroup
  // In debug mode alone: how often lanes have met at an operation that orders threadgroup memory, and device memory; and which of them
  // the operation that completes orders: kDevice, kThreadgroup; and how many operations there were.
  u32 met, met_device, orders, operations;
  u32 fenced, fenced_device, fenced_widely;  // `met` at the last fence, `met_device` at that, and at the last one of the device's scope
  SimdWait first;  // where the first lane in simd_wait stands
  u32 arg[kSimdWidth];
  SimdWait wait[kSimdWidth];  // written only once lanes differ
  // What lanes bring and take: a region of its own for each payload size, so that lanes at different operations never
  // share a byte.
  alignas(64) u8 in[2 * kSimdWidth * kMaxPayload];
  alignas(64) u8 out[2 * kSimdWidth * kMaxPayload];
  alignas(64) float matrices[4][64];  // a, b, c and the result of simdgroup_multiply_accumulate
};

inline void has_met(Simdgroup* g) {
  g->operations++;
  g->met += g->orders / kThreadgroup % 2;
  g->met_device += g->orders % 2;
  g->orders = kDevice | kThreadgroup;
}

struct Uint3 {
  u32 x, y, z;
};

enum class Access : u8 { load, store, atomic, atomic_load, atomic_store };  // atomic: it reads and writes

// One per worker thread: the threadgroup it is running.
struct Context {
  u32 lane;           // index in the threadgroup of the running lane
  u32 threads;        // in the threadgroup
  Simdgroup* group;   // of the running lane
  Lane* lanes;        // [threads]
  Simdgroup* groups;  // [ceil(threads / 32)]
  u32 groups_ready;   // simdgroups with a lane in `ready`
  u32 barrier_mixed;   // lanes stand at more than one barrier: see wait[]
  u32 barrier_strict;  // one that orders memory: a lane that has returned is missed
  u32 barrier_orders;  // in debug mode: which memory, by all lanes that wait
  Site barrier_site;  // of the first lane at the threadgroup barrier
  Lane host;          // where to go when every lane has returned
  void (*differs)(Context*, SimdWait);  // the running lane comes to another operation, or barrier, than those that wait
  u32 (*schedule)(Context*);  // the lane to run when the current simdgroup has none ready; kNoLane: leave to host
  u8* threadgroup_memory;
  u8* const* buffers;               // by index
  const u32* threadgroup_offsets;   // by index of dynamic threadgroup arguments
  Uint3 threadgroup_position, grid_groups;
  Uint3 group_threads, dispatch_threads;  // of this threadgroup, and of all but those at the edges of the grid
  Uint3 grid_threads;
  // In debug mode, before each access and where an array's index is outside of it; they return if the running lane may go on.
  void (*access)(Context*, const void* at, u64 size, Access kind, const void* pc, const void* frame);
  void (*out_of_bounds)(Context*, Site, const char* type, u64 index, bool is_signed);
  void (*skipped)(Context*, u32 mask);  // those lanes of the running simdgroup are at a barrier of it
};

enum class ArgKind : u8 {
  buffer,
  threadgroup,
  thread_position_in_grid,
  thread_position_in_threadgroup,
  threadgroup_position_in_grid,
  threads_per_threadgroup,
  threads_per_grid,
  threadgroups_per_grid,
  thread_index_in_threadgroup,
  thread_index_in_simdgroup,
  simdgroup_index_in_threadgroup,
  threads_per_simdgroup,
  simdgroups_per_threadgroup,
  thread_index_in_quadgroup,
  quadgroup_index_in_threadgroup,
  quadgroups_per_threadgroup,
  grid_origin,
  dispatch_threads_per_threadgroup,
  dispatch_simdgroups_per_threadgroup,
  dispatch_quadgroups_per_threadgroup,
};

// One kernel parameter as its attribute gives it.
struct ArgSpec {
  ArgKind kind;
  u8 index;
  bool enabled;  // false: gated by a function constant that is false; the argument does not exist
};

// One buffer or threadgroup parameter as its C++ type gives it.
struct ArgInfo {
  ArgKind kind;
  u8 index;
  bool enabled;
  bool is_const;
  u32 bytes;  // least size of a buffer bound to a reference; of one element for a pointer
};

struct KernelInfo {
  u32 version;
  u32 max_threads;  // 0: not declared
  u32 arg_count;
  const ArgInfo* args;
  void (*run)();                       // entry of every fresh fiber
  u32 (*static_threadgroup_bytes)();   // valid once the module is loaded
  void (*bind)(long tls_offset, Context* (*current)());
};

}  // namespace metalmm::abi
