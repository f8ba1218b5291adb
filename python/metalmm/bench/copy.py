"""The bandwidth of a plain copy on a device: what a kernel that streams its weights is held against."""

from __future__ import annotations

import statistics

import numpy as np

from .. import Device, Kernel
from .runner import last_level_cache

# A thread's share is one vector of four (neighbouring threads, neighbouring vectors, as a GPU likes it), or a run of them (as a CPU does).
_SOURCE = """
#include <metal_stdlib>
using namespace metal;
template <uint RUN>
kernel void copied(const device float4* from [[buffer(0)]], device float4* to [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  for (uint j = 0; j < RUN; j++) to[i * RUN + j] = from[i * RUN + j];
}
template [[host_name("copy_1")]] kernel void copied<1>(const device float4*, device float4*, uint);
template [[host_name("copy_16")]] kernel void copied<16>(const device float4*, device float4*, uint);
template [[host_name("copy_1024")]] kernel void copied<1024>(const device float4*, device float4*, uint);
"""
_LEAST, _MOST = 64 << 20, 1 << 30
_LASTS = 500e-6  # seconds: beginning and ending a batch was 5 of the 35 microseconds that one copy of 64 MB took an H200


def measured_copy(device: Device, repeats: int = 5) -> float:
    """GB/s, read and written bytes together: the median of the best of three access patterns, of blocks that are twice the last-level
    cache each (64 MB to 1 GB). As many in a row as take half a millisecond."""
    size = min(max(2 * last_level_cache(device), _LEAST), _MOST) // (1 << 20) * (1 << 20)
    with Device(device.name) as plain:  # without guards, which would be looked at after each
        library = plain.compile(_SOURCE)
        source, target = plain.empty(size // 4, "float32"), plain.empty(size // 4, "float32")
        source.write(np.ones(size // 4, np.float32))

        def seconds(kernel: Kernel, run: int, copies: int) -> float:
            """Of one of so many copies in a row."""
            with plain.batch() as batch:
                for _ in range(copies):
                    kernel(source, target, threads=size // 16 // run, threadgroup=256, batch=batch)
            return (batch.timing.device if batch.timing.device is not None else batch.timing.wait) / copies

        trials = list[tuple[float, int, Kernel, int]]()
        for run in (1, 16, 1024):
            kernel = library.kernel(f"copy_{run}")
            seconds(kernel, run, 1)  # warms up
            copies = max(1, min(64, round(_LASTS / max(seconds(kernel, run, 1), 1e-6))))
            trials.append((min(seconds(kernel, run, copies) for _ in range(2)), run, kernel, copies))
        _, run, kernel, copies = min(trials, key=lambda t: t[0])
        return 2 * size / statistics.median(seconds(kernel, run, copies) for _ in range(repeats)) / 1e9
