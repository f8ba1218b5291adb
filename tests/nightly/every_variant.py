#!/usr/bin/env python3
"""Every row of the array on two edge shapes, once each, against float64: what a checker of memory and races is run over.

    METALMM_DEVICE=cuda python tests/nightly/every_variant.py --compile             # all cores; a checker would slow it
    METALMM_DEVICE=cuda compute-sanitizer --tool memcheck python tests/nightly/every_variant.py    # racecheck, initcheck, synccheck

--short: one row of each strategy, format and end. Prints how many ran; exit 1 if one was wrong.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import metalmm
from metalmm import kernel_source, manifest
from metalmm.backends import cuda
from support.operands import draw
from support.rows import What, array

SHAPES = ((3, 37, 131, 2), (3, 96, 160, 1))  # m, n, k, batch: off every tile and vector, and on them


def compiled(job: tuple[kernel_source.KernelText, str, int]) -> None:
    text, kernel, capability = job
    cuda.build(text, kernel, {}, capability)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--short", action="store_true")
    args = parser.parse_args()
    device, rows = metalmm.Device(), array()
    if args.short:
        rows = list({What.of(row.variant): row for row in reversed(rows)}.values())
    if args.compile:
        capability = int(device.info["compute_capability"])
        made = [manifest.kernel_text(row.variant, row.specialization) for row in rows]
        jobs = {(text, kernel, capability): None for _, text, kernel in made if text}
        with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
            list(pool.map(compiled, jobs, chunksize=2))
        print(f"{len(jobs)} compiled")
        return 0
    ran, wrong = 0, 0
    for row in rows:
        for m, n, k, batch in SHAPES:
            ran += 1
            try:
                draw(row, m, n, k, batch=batch, bias=True, c=True, beta=0.5).check(device)
            except AssertionError as error:
                wrong += 1
                print(error, flush=True)
    print(f"{ran} ran on {device!r}, {wrong} wrong")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
