#include "shadow.h"

#include <algorithm>

namespace metalmm::cpu {

void Shadow::begin(const uint8_t* memory, size_t bytes) {
  memory_ = memory;
  bytes_ = bytes;
  pending_.before.clear();
  if (++epoch_ > 1u << 31) epoch_ = 1, cells_.clear();
  if (cells_.size() < bytes) cells_.resize(bytes);
}

bool Shadow::conflicts(const User& user, const abi::Context& c) const {
  if (user.epoch != epoch_ || user.thread == c.lane) return false;
  bool is_neighbour = user.thread / abi::kSimdWidth == c.lane / abi::kSimdWidth;
  return !is_neighbour || user.met == c.group->met;
}

std::string Shadow::use(const abi::Context& c, size_t at, size_t size, bool is_write) {
  std::string race = settle();
  if (!race.empty()) return race;
  User self{epoch_, c.group->met, c.lane};
  for (size_t i = at; i < at + size; i++) {
    Cell& cell = cells_[i];
    bool beside_writer = conflicts(cell.writer, c);
    if (!is_write) {
      if (beside_writer && !cell.many) return text(cell.writer.thread, true, c.lane, false, i);
      if (cell.reader.epoch == epoch_ && cell.reader.thread / abi::kSimdWidth != c.lane / abi::kSimdWidth) cell.another = cell.reader;
      cell.reader = self;
      continue;
    }
    const User* reader = conflicts(cell.reader, c) ? &cell.reader : conflicts(cell.another, c) ? &cell.another : nullptr;
    if (beside_writer || reader) {
      if (pending_.before.empty()) {
        pending_.first = beside_writer ? cell.writer.thread : reader->thread;
        pending_.second = c.lane;
        pending_.first_wrote = beside_writer;
      }
      pending_.before.emplace_back(i, memory_[i]);
    }
    cell.many = beside_writer;
    cell.writer = self;
  }
  return {};
}

std::string Shadow::settle() {
  Pending& p = pending_;
  auto changed = std::find_if(p.before.begin(), p.before.end(), [&](const auto& byte) { return memory_[byte.first] != byte.second; });
  std::string race = changed == p.before.end() ? std::string() : text(p.first, p.first_wrote, p.second, true, changed->first);
  p.before.clear();
  return race;
}

std::string Shadow::text(uint32_t first, bool first_wrote, uint32_t second, bool second_writes, size_t at) const {
  return "a race: thread " + std::to_string(second) + (second_writes ? " writes" : " reads") + " byte " + std::to_string(at) + " of the " +
         std::to_string(bytes_) + " bytes of threadgroup memory, which thread " + std::to_string(first) +
         (first_wrote ? " wrote" : " read") + ", and no barrier stands between";
}

}  // namespace metalmm::cpu
