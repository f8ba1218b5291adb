// Of memory that threads share on a debug device: who used each byte, and whether two of them race.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "../msl/runtime/abi.h"

namespace metalmm::cpu {

// A thread as it uses memory. Threads of one threadgroup have met as often as `epoch` says, those of one simdgroup as `met` says: at
// operations that order this memory.
struct User {
  uint32_t group = 0;  // a number of its own for each threadgroup that a device runs; 0: nobody
  uint16_t epoch = 0, met = 0;
  uint16_t thread = 0;
  uint8_t is_atomic = 0, many = 0;  // many: others wrote the same there; who of them reads is not followed
  std::array<uint32_t, 4> code{};   // in the module's image: Code
};

struct Race {
  const uint8_t* at = nullptr;  // null: there is none
  User first, second;
  bool first_wrote = false, second_writes = false, is_unset = false;  // unset: a read of what nobody wrote
};

// A write beside somebody else's use is a race if it changes what is there, which shows once it is done. Threads that all write one value
// are no mistake.
struct Pending {
  Race race;
  std::vector<std::pair<const uint8_t*, uint8_t>> before;  // empty: nothing is pending
  Race settle();
};

class Shadow {
 public:
  explicit Shadow(bool is_shared) : is_shared_(is_shared) {}
  // Who came before this threadgroup has nothing to do with what follows.
  void begin(uint32_t group);
  // Whether a thread of that threadgroup has written there.
  bool is_set(uint32_t group, const uint8_t* at);
  Race use(const User& self, const uint8_t* at, size_t size, abi::Access kind, Pending& pending);

 private:
  static constexpr size_t kPage = 256;
  struct Cell {
    User writer, reader, another;  // another: who read before, of another simdgroup than `reader`
  };
  bool is_current(const User& user, const User& self) const { return is_shared_ ? user.group >= first_ : user.group == self.group; }
  bool conflicts(const User& user, const User& self) const;
  void meet_at(uint32_t group, const uint8_t* atomic);

  const bool is_shared_;  // by threadgroups
  uint32_t first_ = 1;
  std::mutex mutex_;
  std::unordered_map<uintptr_t, std::unique_ptr<Cell[]>> pages_;
  // By an atomic: threadgroups that have used it. What they did before is ordered for those who use it after them.
  std::unordered_map<const uint8_t*, std::set<uint32_t>> used_;
  std::unordered_map<uint32_t, std::set<uint32_t>> known_;  // by threadgroup
};

}  // namespace metalmm::cpu
