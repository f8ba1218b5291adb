// Of threadgroup memory on a debug device: which thread used each byte since the threads last met, and so whether two of them race.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "../msl/runtime/abi.h"

namespace metalmm::cpu {

class Shadow {
 public:
  // A threadgroup begins, whose memory nobody has used.
  void begin(const uint8_t* memory, size_t bytes);
  // All of its threads have met at a barrier.
  void meet() { epoch_++; }
  // The running thread is about to use bytes of the memory. Empty, or which race that is, or an earlier one that shows now.
  std::string use(const abi::Context& context, size_t at, size_t size, bool is_write);
  // The same, of what was written last.
  std::string settle();

 private:
  // Threads of one simdgroup meet at its operations, too: `met` counts those.
  struct User {
    uint32_t epoch = 0, met = 0, thread = 0;
  };
  struct Cell {
    User writer, reader, another;  // another: who read before, of another simdgroup than `reader`
    bool many = false;             // wrote the same; who of them reads is not followed
  };
  // A write beside somebody else's use: a race if it changes what is there, which the next use shows. Threads that all write one value
  // are no mistake.
  struct Pending {
    uint32_t first = 0, second = 0;
    bool first_wrote = false;
    std::vector<std::pair<size_t, uint8_t>> before;  // bytes that somebody else used, by their places; empty: nothing is pending
  };
  bool conflicts(const User& user, const abi::Context& context) const;
  std::string text(uint32_t first, bool first_wrote, uint32_t second, bool second_writes, size_t at) const;

  const uint8_t* memory_ = nullptr;
  size_t bytes_ = 0;
  uint32_t epoch_ = 0;
  std::vector<Cell> cells_;
  Pending pending_;
};

}  // namespace metalmm::cpu
