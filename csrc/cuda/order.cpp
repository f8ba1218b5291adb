#include "order.h"

#include "pipeline.h"

namespace metalmm::cuda {
namespace {

constexpr size_t kMostWritten = 256;  // spans: each costs the host its time

// Lines of the cache: what stands in one with weights that were read early would be read from there, too.
Span whole_lines(Span s) { return {s.begin / 128 * 128, (s.end + 127) / 128 * 128}; }

}  // namespace

void find_orders(const DispatchList& work, size_t ahead, bool in_order, std::vector<Order>& orders) {
  Hazards hazards;
  SpanSet written;                          // by what may be unfinished when a launch begins
  std::vector<Span> writes, writes_before;  // of a dispatch and of the one before it
  bool is_first = true;
  bool is_open = false;  // what came before the launch that stands first may be unfinished, too: `written` does not have it
  work.for_each([&](size_t i, const Dispatch& d) {
    auto& pipeline = static_cast<const CudaPipeline&>(**d.pipeline);
    bool on_device = !pipeline.blas, early = pipeline.table.early != 0;
    writes.swap(writes_before);
    writes.clear();
    for (size_t j = 0; j < d.buffer_count; j++) {
      const Buffer& b = **d.buffers[j].buffer;
      uint32_t index = d.buffers[j].index;
      Span span{b.address() + d.buffers[j].offset, b.address() + b.size()};
      if (pipeline.writes(index)) {
        hazards.write(span);
        writes.push_back(whole_lines(span));
      } else {
        hazards.read(span);
      }
      on_device &= b.native() != nullptr;
      if (pipeline.reads_early(index)) early &= !written.overlaps(span);
    }
    for (size_t j = 0; j < d.bytes_count; j++) on_device &= pipeline.inlines(d.bytes[j].index);
    bool may_begin = on_device && !is_first && !in_order, beside = !hazards.next() && may_begin;
    orders[i] = {beside, false, early && may_begin && !beside, pipeline.largest_read(d, ahead)};
    if (beside || (orders[i].early && (is_open || written.size() > kMostWritten))) {
      Order& before = orders[i - 1];
      before.late = true, before.early = false;
      if (!before.beside) {  // it waits, so that nothing before it is left when this one begins
        is_open = false;
        written.clear();
        for (Span s : writes_before) written.insert(s);
      }
    }
    for (Span s : writes) written.insert(s);
    // After copies, or what cuBLAS launches, one that waits comes first.
    is_open = on_device && (is_first || is_open);
    is_first = !on_device;
  });
}

}  // namespace metalmm::cuda
