// Which lanes of a simdgroup meet, and who goes first, where they wait at different operations.
#pragma once
#include <cstdint>

#include "../msl/runtime/abi.h"

namespace metalmm::cpu {

// Of one operation, in one turn of each loop around it.
inline bool is_same(const abi::SimdWait& a, const abi::SimdWait& b) {
  const abi::Turn *x = a.turn, *y = b.turn;
  for (; x != y && x && y; x = x->outer, y = y->outer)
    if (x->count != y->count || x->loop != y->loop) return false;
  return x == y && a.site == b.site && a.complete == b.complete;
}

// In the program, and within loops that both are in by their turns. No memory is taken: a timeout may end the lane here.
inline bool comes_before(const abi::SimdWait& a, const abi::SimdWait& b) {
  auto depth_of = [](const abi::Turn* turn) {
    uint32_t depth = 0;
    for (; turn; turn = turn->outer) depth++;
    return depth;
  };
  auto loop_at = [](const abi::Turn* turn, uint32_t depth, uint32_t i) {  // the ith from outside
    for (uint32_t up = depth - 1 - i; up > 0; up--) turn = turn->outer;
    return turn;
  };
  auto order = [](const abi::Site& s) { return static_cast<uint64_t>(s.line) << 32 | s.column; };
  uint32_t depth_a = depth_of(a.turn), depth_b = depth_of(b.turn);
  for (uint32_t i = 0; i < depth_a && i < depth_b; i++) {
    const abi::Turn *x = loop_at(a.turn, depth_a, i), *y = loop_at(b.turn, depth_b, i);
    if (x->loop != y->loop) return order(x->loop) < order(y->loop);
    if (x->count != y->count) return x->count < y->count;
  }
  uint32_t both = depth_a < depth_b ? depth_a : depth_b;
  return order(both < depth_a ? loop_at(a.turn, depth_a, both)->loop : a.site) <
         order(both < depth_b ? loop_at(b.turn, depth_b, both)->loop : b.site);
}

}  // namespace metalmm::cpu
