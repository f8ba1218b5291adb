#!/usr/bin/env python3
"""Every variant on edge shapes, once each, against float64: what a checker of memory and races is run over.

    METALMM_DEVICE=cuda python tests/nightly/every_variant.py --compile             # all cores; a checker would slow it
    METALMM_DEVICE=cuda compute-sanitizer --tool memcheck python tests/nightly/every_variant.py    # racecheck, initcheck, synccheck

--short: one variant of each kernel, in half. Prints how many ran; exit 1 if one was wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import metalmm
import numpy as np
from metalmm import _core, kernel_source, numerics
from metalmm.backends import cuda
from metalmm.bench import runner, sizes
from test_types import draw

SHAPES = ((37, 131, 2), (96, 160, 1))  # n, k, batch: off every tile and vector, and on them


def cases(short: bool) -> Iterator[tuple[metalmm.Variant, metalmm.MatmulSpec]]:
    seen = set[str]()
    for v in (*metalmm.variants(), *metalmm.variants(enabled=False)):
        is_first = f"{v.kernel} {v.storage}" not in seen
        seen.add(f"{v.kernel} {v.storage}")
        if not v.kernel or v.library or (short and not is_first):
            continue
        layouts = v.supports["layouts"] if is_first else v.supports["layouts"][:1]
        for dtype in v.types if is_first and not short else ("float16",):
            for n, k, batch in SHAPES:
                for layout in layouts:
                    for m in (1, 3):
                        spec = metalmm.MatmulSpec(
                            m=m, n=8 if v.supports.get("n") else n, k=k, batch=batch, transpose_a=layout[0] == "t",
                            transpose_b=layout[1] == "t", bias=True, beta=0.5 if v.weights == 1 else 0.0, dtype=dtype, b_storage=v.storage,
                            also_n=(n,) * (v.weights - 1), swiglu=v.swiglu,
                        )  # fmt: skip
                        if not v.lacks(spec):
                            yield v, spec
                            break


def compiled(job: tuple[str, str, str, int]) -> None:
    text, name, kernel, capability = job
    cuda.build(kernel_source.KernelText(text, name), kernel, {}, capability)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--short", action="store_true")
    args = parser.parse_args()
    device = metalmm.Device()
    if args.compile:
        capability = int(device.info["compute_capability"])
        jobs = {
            (v.assemble(_core._specialization(v, s)), str(v.source), kernel_source.host_name(v), capability): None
            for v, s in cases(args.short)
        }
        with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
            list(pool.map(compiled, jobs, chunksize=2))
        print(f"{len(jobs)} compiled")
        return 0
    rng, ran, wrong = np.random.default_rng(0), 0, 0
    for v, spec in cases(args.short):
        if v.storage != "dense" or v.weights > 1:
            inputs = runner.Inputs(device, sizes.of_spec(spec), 0, 1)
            text = inputs.judge(device, v)
            wrong, ran = wrong + bool(text), ran + 1
            print(f"{v}, {spec}: {text}\n" if text else "", end="", flush=True)
            continue
        a, b, options = draw(rng, spec)
        held: dict[str, Any] = {key: device.array(x) if isinstance(x, np.ndarray) else x for key, x in options.items()}
        out = metalmm.matmul(v, device.array(a), device.array(b), **held)
        reference, bound, _ = numerics.judged(a, b, **options)
        if text := numerics.mismatch(np.asarray(out), reference, bound):
            wrong += 1
            print(f"{v}, {spec}: {text}", flush=True)
        ran += 1
    print(f"{ran} ran on {device!r}, {wrong} wrong")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
