#include "trace.h"

namespace metalmm {

std::atomic<bool> is_tracing{false};

namespace {

nb::object& callback() {
  static nb::object* c = new nb::object;
  return *c;
}

nb::object seconds_or_none(double s) { return s < 0 ? nb::none() : nb::cast(s); }

}  // namespace

void trace(const char* what, const TracedDispatches& dispatches, const BatchTiming& t) {
  nb::object call = callback();  // of its own: another thread may end the trace
  if (!call.is_valid() || call.is_none()) return;
  nb::list all;
  for (const TracedDispatch& d : dispatches)
    all.append(nb::make_tuple(d.name, nb::make_tuple(d.grid[0], d.grid[1], d.grid[2]), d.spec ? nb::cast(*d.spec) : nb::none()));
  nb::list times;
  for (const TracedDispatch& d : dispatches) times.append(seconds_or_none(d.index < t.dispatches.size() ? t.dispatches[d.index] : -1));
  call(what, all, times, t.encode, t.commit, t.wait, seconds_or_none(t.device));
}

void trace_call(TracedDispatch dispatch, double device, Clock::time_point start) {
  BatchTiming t;
  t.wait = seconds(Clock::now() - start);
  t.device = device;
  t.dispatches = {device};
  trace("call", {std::move(dispatch)}, t);
}

void bind_trace(nb::module_& m) {
  m.def(
      "_set_trace",
      [](nb::object call) {
        is_tracing = !call.is_none();
        callback() = std::move(call);
      },
      "call"_a.none(), "call(what, dispatches, times, encode, commit, wait, device) for all that runs from now on; None: no more.");
}

}  // namespace metalmm
