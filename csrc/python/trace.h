// What metalmm.trace() is told of dispatches. Off, it costs a look at one flag.
#pragma once
#include <atomic>

#include "../core/batch.h"
#include "matmul.h"

namespace metalmm {

struct TracedDispatch {
  std::string name;  // a variant's id, or a kernel's host name
  Size3 grid;
  std::optional<MatmulSpec> spec;  // of a matmul
  size_t index = 0;                // in its batch, which may have had others before anybody traced
};
using TracedDispatches = std::vector<TracedDispatch>;

extern std::atomic<bool> is_tracing;
inline bool tracing() { return is_tracing.load(std::memory_order_relaxed); }

// Hands them to Python's callback; `what`: call, batch or replay.
void trace(const char* what, const TracedDispatches& dispatches, const BatchTiming& timing);
// One dispatch that ran before its call returned: `device` seconds as Device::run gives them.
void trace_call(TracedDispatch dispatch, double device, Clock::time_point start);

void bind_trace(nb::module_& m);

}  // namespace metalmm
