// Memory that a kernel was given, and what is said of an access elsewhere.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "../msl/runtime/abi.h"

namespace metalmm {

struct Bound {
  uint32_t index;  // of the buffer
  const uint8_t *begin, *end;
  bool is_written = false;  // its argument is not const
  bool is_bytes = false;    // it was given as bytes
};

inline bool is_atomic(abi::Access kind) { return kind >= abi::Access::atomic; }
inline bool reads(abi::Access kind) { return kind != abi::Access::store && kind != abi::Access::atomic_store; }
inline bool writes(abi::Access kind) { return kind != abi::Access::load && kind != abi::Access::atomic_load; }

// Where an address stands to the buffer that has it, or to the nearest; empty: near none.
inline std::string place_of(const uint8_t* address, const Bound* bound, size_t count) {
  ptrdiff_t least = 1 << 20;
  std::string nearest;
  for (const Bound* b = bound; b != bound + count; b++) {
    std::string size = " of buffer " + std::to_string(b->index) + " (" + std::to_string(b->end - b->begin) + " bytes)";
    if (address >= b->begin && address < b->end) return "at byte " + std::to_string(address - b->begin) + size;
    ptrdiff_t away = address >= b->end ? address - b->end : b->begin - address;
    if (away >= least) continue;
    least = away;
    nearest = std::to_string(away) + " bytes " + (address >= b->end ? "past the end" : "before the beginning") + size;
  }
  return nearest;
}

// at: file and line, or empty.
inline std::string text_of_misalignment(const std::string& at, uint64_t size) {
  return "a load or store " + (at.empty() ? "" : "at " + at + " ") + "that is not aligned to " + std::to_string(size) + " bytes";
}

inline std::string text_of_refusal(abi::Access kind, uint64_t size) {
  const char* what = kind == abi::Access::load ? "a load" : kind == abi::Access::store ? "a store" : "an atomic operation";
  return what + std::string(" of ") + std::to_string(size) + " bytes outside what is bound";
}

}  // namespace metalmm
