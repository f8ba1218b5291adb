// Of memory that threads share on a debug device: who used each byte, and whether two of them race.
#pragma once
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../core/bound.h"

namespace metalmm::cpu {

// A thread as it uses memory. Threads of one threadgroup have met as often as `epoch` says, those of one simdgroup as `met` says: at
// operations that order this memory.
struct User {
  uint32_t group = 0;  // a number of its own for each threadgroup that a device runs; 0: nobody
  uint32_t epoch = 0, met = 0;
  uint32_t code = 0;  // its number: Executor::number_of
  uint16_t thread = 0;
  uint8_t is_atomic = 0, many = 0;  // many: others wrote the same there, who are in Shadow::writers_
  uint32_t simdgroup() const { return thread / abi::kSimdWidth; }
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

// How often a simdgroup had met (User::met) at its last fence: of the threadgroup's scope or a wider one, and of the device's.
struct Fenced {
  uint32_t threadgroup = 0, device = 0;
};

// What atomics order. What a thread did before a fence, or a barrier of its threadgroup, is known to all who use the same atomic later and
// then have one, too. fenced: of the scope in question.
class Atomics {
 public:
  explicit Atomics(bool is_shared) : is_shared_(is_shared) {}
  void begin() { told_.clear(); }
  void use(const User& self, uint32_t fenced, const uint8_t* atomic);
  bool know(const User& self, uint32_t fenced, const User& user);

 private:
  // How far threadgroups have come, by their number and that of a simdgroup, or kAll: what they did before that time.
  typedef std::pair<uint32_t, uint32_t> Whose;
  typedef std::pair<uint32_t, uint32_t> Time;  // epoch, met
  typedef std::map<Whose, Time> Times;
  static constexpr uint32_t kAll = ~0u;

  static void add(Times& to, Times::const_iterator begin, Times::const_iterator end);
  void come_to(const User& self, uint32_t fenced);

  const bool is_shared_;  // by threadgroups
  std::unordered_map<const uint8_t*, Times> told_;
  // Of the threadgroup that runs, since its last barrier: one runs after another.
  uint32_t group_ = 0, epoch_ = 0;
  std::map<uint32_t, Times> known_;                           // by a simdgroup, or kAll
  std::map<std::pair<uint32_t, uint32_t>, Times> heard_;      // by a simdgroup, when it had met so often: known once a fence follows
  std::map<std::pair<const uint8_t*, uint32_t>, Time> last_;  // of an atomic and a simdgroup: when it was used
};

class Shadow {
 public:
  explicit Shadow(bool is_shared) : is_shared_(is_shared) {}
  // Who came before this threadgroup has nothing to do with what follows.
  void begin(uint32_t group);
  // Who of its threadgroup has written there.
  enum class Set { no, by_itself, by_others };
  Set is_set(const User& self, const uint8_t* at);
  Race use(const User& self, const Fenced& fenced, const uint8_t* at, size_t size, abi::Access kind, Pending& pending);

 private:
  static constexpr size_t kPage = 256;
  struct Cell {
    User writer, reader, another;  // another: who read before, of another simdgroup than `reader`
  };
  bool is_current(const User& user, const User& self) const { return is_shared_ ? user.group >= first_ : user.group == self.group; }
  bool conflicts(const User& user, const User& self, const Fenced& fenced);
  bool has_written(const User& self, const uint8_t* at) const;

  const bool is_shared_;  // by threadgroups
  uint32_t first_ = 1;
  std::mutex mutex_;
  std::unordered_map<uintptr_t, std::unique_ptr<Cell[]>> pages_;
  // Of one threadgroup, the last that wrote there.
  struct Writers {
    uint32_t group = 0;
    std::bitset<1024> threads;
  };
  std::unordered_map<const uint8_t*, Writers> writers_;
  Atomics among_simdgroups_{false}, among_threadgroups_{true};
};

}  // namespace metalmm::cpu
