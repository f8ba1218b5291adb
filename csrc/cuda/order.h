// How launches of one stream may run beside each other.
#pragma once
#include <vector>

#include "../core/batch.h"
#include "../core/hazards.h"

namespace metalmm::cuda {

// How a launch stands to those around it: as LaunchHead says.
struct Order {
  bool beside = false, late = false, early = false;
  Span reads{0, 0};  // the largest argument that it only reads, of no more bytes than asked for
};

// Of each dispatch. ahead: bytes of `reads` at most. in_order: none beside another, whatever they share.
void find_orders(const DispatchList& work, size_t ahead, bool in_order, std::vector<Order>& orders);

}  // namespace metalmm::cuda
