"""What tests/sanitize/run.sh runs under the sanitizers: threads at once on one device, for the seconds given, and error paths."""

from __future__ import annotations

import gc
import mmap
import os
import sys
import tempfile
import threading
import time

# An editable install finds its own build first, whatever PYTHONPATH says.
sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]

import metalmm  # noqa: E402
import numpy as np  # noqa: E402

assert "sanitize" in metalmm._core.__file__, metalmm._core.__file__

SOURCE = """#include <metal_stdlib>
using namespace metal;
kernel void diverges(device float* y, uint t [[thread_index_in_threadgroup]]) {
  if (t > 3) return;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[t] = 1.0f;
}
"""


def main(seconds: float) -> None:
    in_time = {"return_on_event": True, "untracked": True, "first_commit": 2, "keep_resident": 5} if os.environ.get("METALMM_FAKE") else {}
    device = metalmm.Device(**in_time)
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((1, 200)).astype(np.float16), rng.standard_normal((300, 200)).astype(np.float16)
    names = ["m1_optimized_v2/nt_bn64_col_vec4_bk64_tg128", "m1_optimized_v4/nt_bn8_largek_smalln_tg128", "gemm_tiled/baseline", "auto"]
    names += ["mps/baseline"] if device.name == "metal" else ["blas/baseline"]
    expected = {v: metalmm.matmul(v, a, b, transpose_b=True, device=device) for v in names}
    q, halves = metalmm.quantize(b, "q8_0"), [b[:100], b[100:200]]
    expected_q = metalmm.matmul("auto", a, q, device=device)
    expected_fused = [np.array(out) for out in metalmm.matmul_fused("auto", a, halves, device=device)]
    diverges = device.compile(SOURCE).kernel("diverges")
    problems: list[BaseException] = []
    counts = [0, 0]

    def work(index: int) -> None:
        try:
            w = device.array(b)
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                v = names[(counts[index] + index) % len(names)]
                np.testing.assert_array_equal(metalmm.matmul(v, a, b, transpose_b=True, device=device), expected[v])
                paged = np.frombuffer(mmap.mmap(-1, b.nbytes), b.dtype).reshape(b.shape)  # which a device may keep wrapped
                paged[...] = b
                for _ in range(2):
                    np.testing.assert_array_equal(metalmm.matmul(v, a, paged, transpose_b=True, device=device), expected[v])
                del paged
                call = device.prepare(v, a, w, transpose_b=True)
                np.testing.assert_array_equal(np.asarray(call()), expected[v])
                with device.batch() as batch:
                    outs = [batch.matmul(v, a, w, transpose_b=True) for _ in range(3)]
                    again = device.batch()
                    again.add(call)
                for out in outs:
                    np.testing.assert_array_equal(np.asarray(out), expected[v])
                recording = again.record()
                for _ in range(3):
                    recording.replay()
                if counts[index] % 2:  # the others are dropped in flight
                    recording.wait()
                dropped = device.batch()
                dropped.matmul(v, a, w, transpose_b=True)
                dropped.submit()
                del dropped
                device.batch().matmul(v, a, w, transpose_b=True)  # dropped before it is submitted
                quantized = device.prepare("auto", a, q.to(device))
                fused = device.prepare_fused("auto", device.array(a), [device.array(x) for x in halves])
                gc.collect()
                np.testing.assert_array_equal(np.asarray(quantized()), expected_q)
                for out, good in zip(fused(), expected_fused, strict=True):
                    np.testing.assert_array_equal(np.asarray(out), good)
                with device.batch() as batch:
                    batch.add(quantized)
                    batch.matmul_fused("auto", a, halves)
                    del quantized, fused
                counts[index] += 1
                if counts[index] % 5 == 1:
                    try:
                        diverges(np.zeros(64, np.float32), grid=(4,), threadgroup=(64,))
                    except metalmm.KernelError:
                        continue
                    raise AssertionError("the divergence was not reported")
        except BaseException as error:
            problems.append(error)

    def trace() -> None:
        """Looks on, now and then, while the others dispatch, and makes "auto" be asked anew."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with tempfile.TemporaryDirectory() as folder, metalmm.trace(f"{folder}/log", f"{folder}/chrome"):
                time.sleep(0.2)
            metalmm._core._forget_choices()
            time.sleep(0.1)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)] + [threading.Thread(target=trace)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if problems:
        raise problems[0]
    assert min(counts) > 0
    view = device.array(b).numpy()
    device.close()
    gc.collect()
    assert view.sum() == b.sum()
    print(f"{sum(counts)} rounds on two threads in {seconds:g} s, all right")


if __name__ == "__main__":
    main(float(sys.argv[1]))
