// Where arrays lie on the CPU device: plain memory, or memory between zones of poison, which show what a kernel wrote outside.
#pragma once
#include "../core/device.h"

namespace metalmm::cpu {

std::shared_ptr<Buffer> new_plain_buffer(size_t size);

// Its end lies close before a page that is not there, its beginning in the page behind another one: what is written near it breaks a
// zone, what is read or written further away faults. `misalignment`: where it stands relative to a multiple of 128 bytes.
std::shared_ptr<Buffer> new_guarded_buffer(size_t size, size_t misalignment = 0);

// Fills a zone of poison: NaN in float32, float16 and bfloat16, another at each address.
void poison(uint8_t* begin, uint8_t* end);
// The first byte that is not poison any more, or null.
const uint8_t* first_broken(const uint8_t* begin, const uint8_t* end);
// Empty, or where the zones of a guarded buffer were written to, in words. They are whole again afterwards.
std::string take_damage(const Buffer& buffer);

// A dispatch whose host memory is replaced by guarded copies. Arrays that share memory share their copy.
class Staged {
 public:
  explicit Staged(const Dispatch& dispatch);
  Staged(const Staged&) = delete;
  const Dispatch& dispatch() const { return dispatch_; }
  void copy_back() const;  // what the kernel may have written
  // Of a range of the host's memory, and of the counts for each two bytes of it: what a kernel writes to a copy of.
  void translate(uint8_t*& begin, uint8_t*& end, uint8_t*& counts) const;

 private:
  struct Block {
    uint8_t *begin, *end;  // in host memory
    bool written;
    std::shared_ptr<Buffer> copy;
  };
  const Block* block_of(const uint8_t* address) const;
  std::vector<Block> blocks_;  // by address
  std::vector<BufferBinding> bindings_;
  Dispatch dispatch_;
};

}  // namespace metalmm::cpu
