// How a kernel of the CUDA device takes its arguments: one block of bytes, which host and kernel lay out alike. csrc/cuda compiles this
// file too.
#pragma once
#include "../abi.h"

namespace metalmm::cuda {

using abi::u32;
using abi::u64;
using abi::u8;

constexpr u32 kArgumentsVersion = 7;
constexpr u32 kMaxArguments = 64;
constexpr u32 kMaxBarrier = 256;  // bytes of threadgroup memory of the barrier that lanes may skip: lanes.h
constexpr u32 kMaxInline = 3072;  // bytes of numbers that travel in the block itself; CUDA takes 4,096 in all
constexpr u32 kBlockAt = 64;      // where the block begins, at a multiple: maps stand so

// First in the block; a word for each argument follows (a buffer's address, or a threadgroup block's offset), then what is inline.
struct LaunchHead {
  abi::Uint3 origin;   // of this launch, in threadgroups: CUDA's y and z end at 65,535
  abi::Uint3 groups;   // of the grid
  abi::Uint3 group;    // threads of a threadgroup
  abi::Uint3 threads;  // of the grid; x = 0: as many as the threadgroups have
  u64 ahead;           // what the launch after this one will read: each threadgroup has its share of it brought to the second-level cache
  u32 ahead_bytes;     // of one threadgroup
  u32 ahead_groups;    // so many of them, in the order of x, then y, then z
  u32 beside;          // it shares nothing with the launches before it that may still run: it need not wait for them, but to end
  u32 late;            // the next one is beside this one, so that it may begin only after what this one waits for
  u32 early;           // it may read its weights before those before it are through: none of those writes them
  u32 unused;
};
// Of `early`, `late` and `beside` in it, for NVRTC 13.0 has no offsetof.
constexpr u32 kEarlyAt = sizeof(LaunchHead) - 8, kLateAt = kEarlyAt - 4, kBesideAt = kEarlyAt - 8;

struct ArgumentRow {
  u32 kind;     // abi::ArgKind
  u32 index;    // in the kernel's declaration
  u32 enabled;  // by its function constant
  u32 is_const;
  u32 bytes;         // least size
  u32 word;          // where its word stands, in bytes from the block's beginning
  u32 inlined;       // where its value may stand instead, then the word is zero; 0: nowhere
  u32 only_inlined;  // its word is never read
};

// What a kernel says of itself, in its module's metalmm_table.
struct KernelTable {
  u32 version;
  u32 max_threads;  // as declared; 0: not
  u32 count;        // of rows
  u32 size;         // of the block
  u32 stop;         // whether it looks at metalmm_stop
  u32 early;        // whether it reads weights before it waits: kernels/include/wait.h
  u32 barrier;      // bytes of threadgroup memory that are no kernel's: lanes.h
  u32 masks;        // whether each thread has four more, behind what a launch gives: lanes.h
  u32 watched;      // whether it has a metalmm_watch
  u32 cluster;      // threadgroups along x that read each other's memory: group.h
  ArgumentRow rows[kMaxArguments];
};

// What a debug device's kernel may touch, and its first access elsewhere; in its module's metalmm_watch.
constexpr u32 kMaxSpans = 4 * kMaxArguments;
struct Watch {
  u64 begin[kMaxSpans], end[kMaxSpans];
  u32 count;         // of these
  u32 refused;       // accesses. What follows is of the first
  u32 access, site;  // python/metalmm/ptx.py says both
  u64 at;
  abi::Uint3 group;
  u32 thread;
  u32 hidden;  // bytes of threadgroup memory that are not the kernel's
};

}  // namespace metalmm::cuda
