// What a kernel asks of memory, counted on a debug device as a GPU would see it: by simdgroups.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "../core/bound.h"

namespace metalmm::cpu {

class Counts {
 public:
  enum Space { kDevice, kConstant, kThreadgroup };
  void add(Space space, uint32_t thread, const void* pc, uintptr_t at, size_t size, abi::Access kind);
  void end_threadgroup(uint64_t simdgroup_operations);
  std::vector<std::pair<std::string, uint64_t>> all() const;

 private:
  struct Total {
    uint64_t read, written, accesses, parts;
  };
  // A place in the code, the simdgroup, and how often each of its threads had come there before: accesses that a GPU would do at once.
  struct Access {
    Space space;
    std::vector<std::pair<uintptr_t, size_t>> lanes;
  };
  typedef std::array<uintptr_t, 3> Key;
  static uint64_t parts_of(const Access& access);

  Total of_[3] = {};
  uint64_t atomics_ = 0, simdgroup_operations_ = 0;
  std::map<Key, Access> open_;  // of the running threadgroup
  std::map<std::pair<uint32_t, const void*>, uint32_t> turns_;
};

}  // namespace metalmm::cpu
