#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace metalmm::cpu {
namespace {

constexpr size_t kHugePage = 2 << 20;
constexpr size_t kAlignment = 128;
constexpr size_t kZone = 256;        // least poison on either side
constexpr size_t kAbsent = 1 << 20;  // address space on either side that faults

// NaN in float32, float16 and bfloat16, and another one at each place: a kernel that reads poison and writes it on, elsewhere, shows.
uint16_t poison_at(uintptr_t half) {
  auto x = static_cast<uint32_t>(half);
  x = (x ^ x >> 11) * 0x85ebca6bu;  // twice: zones stand apart by whole pages, which one product would carry into each element alike
  x = (x ^ x >> 15) * 0x9e3779b1u;
  return static_cast<uint16_t>(0xff81 | x >> 25);
}
uint8_t poison_byte(const uint8_t* p) {  // little-endian, as both machines of this device are
  auto at = reinterpret_cast<uintptr_t>(p);
  return static_cast<uint8_t>(poison_at(at / 2) >> (at % 2 * 8));
}

size_t round_up(size_t x, size_t to) { return (x + to - 1) / to * to; }

[[noreturn]] void no_memory(size_t size) { throw Error(ErrorKind::device, "cpu: cannot allocate " + std::to_string(size) + " bytes"); }

void advise_huge(void* data, size_t size) {
#if defined(MADV_HUGEPAGE)
  madvise(data, size, MADV_HUGEPAGE);
#else
  (void)data, (void)size;
#endif
}

}  // namespace

// Slack behind the end holds NaN, so that a read past the end shows in the result. Large buffers ask for huge pages, from half of
// one on: a kernel that walks down 128 rows at once has 56 small pages in use, and page walks cost a virtual machine most.
std::shared_ptr<Buffer> new_plain_buffer(size_t size) {
  constexpr size_t kSlack = 128;
  bool huge = size >= kHugePage / 2;
  size_t alignment = huge ? kHugePage : kAlignment;
  if (size > SIZE_MAX / 2) no_memory(size);
  size_t bytes = round_up(size + kSlack, alignment);
  void* data = std::aligned_alloc(alignment, bytes);
  if (!data) no_memory(size);
  if (huge) advise_huge(data, bytes);
  std::memset(static_cast<uint8_t*>(data) + size, 0xff, std::min(bytes - size, kSlack));
  return std::make_shared<Buffer>(data, size, false, [data] { std::free(data); }, data);
}

std::shared_ptr<Buffer> new_guarded_buffer(size_t size, size_t misalignment) {
  if (size > SIZE_MAX / 2) no_memory(size);
  auto page = static_cast<size_t>(getpagesize());
  misalignment %= kAlignment;
  size_t body = round_up(round_up(size + misalignment, kAlignment) + 2 * kZone, page), total = body + 2 * kAbsent;
  void* base = mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) no_memory(size);
  uint8_t *first = static_cast<uint8_t*>(base) + kAbsent, *end = first + body;
  if (mprotect(first, body, PROT_READ | PROT_WRITE) != 0) {
    munmap(base, total);
    no_memory(size);
  }
  if (size >= kHugePage / 2) advise_huge(first, body);
  uint8_t* data = end - kZone - round_up(size + misalignment, kAlignment) + misalignment;
  poison(first, end);  // and what is in between, for a kernel that leaves something unwritten
  return std::make_shared<Buffer>(data, size, false, [base, total] { munmap(base, total); }, data);
}

void poison(uint8_t* begin, uint8_t* end) {
  for (uint8_t* p = begin; p < end; p++) *p = poison_byte(p);
}

const uint8_t* first_broken(const uint8_t* begin, const uint8_t* end) {
  const uint8_t* p = begin;
  constexpr ptrdiff_t kBlock = 64;
  while (end - p > kBlock && reinterpret_cast<uintptr_t>(p) % 2 == 0) {  // whole blocks at once: the compiler makes vectors of it
    unsigned different = 0;
    for (ptrdiff_t i = 0; i < kBlock; i += 2) {
      uint16_t found;
      std::memcpy(&found, p + i, 2);
      different |= found ^ poison_at(reinterpret_cast<uintptr_t>(p + i) / 2);
    }
    if (different) break;
    p += kBlock;
  }
  for (; p < end; p++)
    if (*p != poison_byte(p)) return p;
  return nullptr;
}

std::string take_damage(const Buffer& buffer) {
  uint8_t *data = buffer.host(), *after = data + buffer.size();
  size_t page = static_cast<size_t>(getpagesize()), misalignment = reinterpret_cast<uintptr_t>(data) % kAlignment;
  uint8_t *aligned = data - misalignment, *end = aligned + round_up(buffer.size() + misalignment, kAlignment) + kZone;
  uint8_t* first = aligned - kZone - reinterpret_cast<uintptr_t>(aligned - kZone) % page;
  std::string damage;
  if (const uint8_t* p = first_broken(after, end)) {
    damage = "past its end, at byte " + std::to_string(p - data) + " of " + std::to_string(buffer.size());
  } else if (first_broken(first, data)) {
    const uint8_t* p = data;  // the nearest write, from its first byte on
    while (!first_broken(p - 1, p)) p--;
    while (p > first && first_broken(p - 1, p)) p--;
    damage = std::to_string(data - p) + " bytes before its beginning";
  }
  if (!damage.empty()) poison(first, data), poison(after, end);
  return damage;
}

// -- copies of host memory --------------------------------------------------------------------------------------------

Staged::Staged(const Dispatch& dispatch) : dispatch_(dispatch) {
  const Pipeline& pipeline = **dispatch.pipeline;
  auto is_written = [&](uint32_t index) {
    for (const KernelArgument& a : pipeline.arguments)
      if (a.kind == KernelArgument::Kind::buffer && a.index == index) return !a.is_const;
    return false;
  };
  std::vector<Block> found;
  for (size_t i = 0; i < dispatch.buffer_count; i++) {
    const Buffer& b = **dispatch.buffers[i].buffer;
    if (!b.native()) found.push_back({b.host(), b.host() + b.size(), is_written(dispatch.buffers[i].index), nullptr});
  }
  std::sort(found.begin(), found.end(), [](const Block& x, const Block& y) { return x.begin < y.begin; });
  for (const Block& b : found) {
    if (!blocks_.empty() && b.begin < blocks_.back().end) {
      blocks_.back().end = std::max(blocks_.back().end, b.end);
      blocks_.back().written |= b.written;
    } else {
      blocks_.push_back(b);
    }
  }
  for (Block& b : blocks_) {
    b.copy = new_guarded_buffer(static_cast<size_t>(b.end - b.begin), reinterpret_cast<uintptr_t>(b.begin));
    std::memcpy(b.copy->host(), b.begin, b.copy->size());
  }
  for (size_t i = 0; i < dispatch.buffer_count; i++) {
    BufferBinding binding = dispatch.buffers[i];
    const Buffer& b = **binding.buffer;
    if (const Block* block = b.native() ? nullptr : block_of(b.host()))
      binding.buffer = &block->copy, binding.offset += static_cast<size_t>(b.host() - block->begin);
    bindings_.push_back(binding);
  }
  dispatch_.buffers = bindings_.data();
}

// Neighbours may touch: the end of one is the beginning of the next. An array of no bytes has a block of none.
const Staged::Block* Staged::block_of(const uint8_t* address) const {
  const Block* empty = nullptr;
  for (const Block& b : blocks_) {
    if (address >= b.begin && address < b.end) return &b;
    if (address == b.begin) empty = &b;
  }
  return empty;
}

void Staged::copy_back() const {
  for (const Block& b : blocks_)
    if (b.written) std::memcpy(b.begin, b.copy->host(), b.copy->size());
}

void Staged::translate(uint8_t*& begin, uint8_t*& end, uint8_t*& counts) const {
  for (const Block& b : blocks_) {
    uint8_t *first = std::max(begin, b.begin), *last = std::min(end, b.end);
    if (!b.written || first >= last) continue;
    counts += (first - begin) / 2;
    begin = b.copy->host() + (first - b.begin);
    end = begin + (last - first);
    return;
  }
  end = begin;  // nothing of it is in this kernel's hands
}

}  // namespace metalmm::cpu
