#!/usr/bin/env python3
"""Barriers of this package's kernels dropped or weakened, one at a time, at random: how many does `metalmm check` find?

    python tests/nightly/weakened_barriers.py [--count 200] [--seed N] [--json FILE]

A barrier is dropped, orders nothing (mem_none), orders other memory, or becomes a simdgroup's. Those that the shape never comes to are left out:
a trap in their place shows it. Those that nobody finds are printed with their line, for somebody to explain. Exit status 1 if more than one in twenty is not found.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import metalmm
from metalmm import checking, kernel_source, manifest

_BARRIER = re.compile(r"(metal::)?(threadgroup|simdgroup)_barrier\((?:metal::)?mem_flags::(mem_threadgroup|mem_device)\);")
_LINE = re.compile(r'#line (\d+) "([^"]*)"')


def changes(match: re.Match[str]) -> dict[str, str]:
    space, kind, flags = match.group(1) or "", match.group(2), match.group(3)
    other = "mem_device" if flags == "mem_threadgroup" else "mem_threadgroup"
    found = {"dropped": ";", "orders nothing": f"{space}{kind}_barrier({space}mem_flags::mem_none);"}
    found["orders other memory"] = f"{space}{kind}_barrier({space}mem_flags::{other});"
    if kind == "threadgroup":
        found["a simdgroup's"] = f"{space}simdgroup_barrier({space}mem_flags::{flags});"
    return found


def place_of(text: str, at: int) -> str:
    """File and line, by the directives before it."""
    last = list(_LINE.finditer(text, 0, at))[-1]
    return f"{Path(last.group(2)).name}:{int(last.group(1)) + text.count(chr(10), last.end(), at) - 1}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    print(f"seed {args.seed}")
    with metalmm.Device("cpu", debug=True) as device:
        known = [v for v in metalmm.variants(device=device) if v.kernel and not v.library]
    places = list[tuple[Any, Any, str, re.Match[str]]]()
    for v in known:
        spec = rng.choice(checking.specs_of(v, 1) or [None])
        if spec is None:
            continue
        text = v.assemble(metalmm._core._specialization(spec))
        kernel = text.rindex("\ntemplate [[host_name")  # of the instance, behind all that it may use
        places += [(v, spec, text, match) for match in _BARRIER.finditer(text, 0, kernel)]
    original, done = manifest.kernel_text, list[dict[str, Any]]()
    rng.shuffle(places)
    for v, spec, text, match in places:
        if len(done) == args.count:
            break
        how, new = rng.choice(sorted(changes(match).items()))

        def found_with(
            new: str, runs: int, v: Any = v, spec: Any = spec, before: str = text[: match.start()], behind: str = text[match.end() :]
        ) -> list[checking.Finding]:
            def kernel_text(variant: str, specialization: int) -> Any:
                made, source, name = original(variant, specialization)
                return made, kernel_source.KernelText(before + new + behind, source.name) if variant == str(v) else source, name

            manifest.kernel_text = kernel_text  # type: ignore[assignment]
            try:
                return checking.check(v, specs=[spec], runs=runs)
            finally:
                manifest.kernel_text = original

        if not found_with("__builtin_trap();", 2):
            continue
        found = found_with(new, 3)
        done.append({"variant": str(v), "place": place_of(text, match.start()), "how": how, "found": sorted({f.kind for f in found})})
        if not found:
            print(f"not found: {done[-1]['place']} {how}, in {v}", flush=True)
    caught = sum(bool(one["found"]) for one in done)
    print(f"{caught} of {len(done)} found")
    if args.json:
        args.json.write_text(json.dumps(done, indent=1))
    return int(caught < 0.95 * len(done))


if __name__ == "__main__":
    sys.exit(main())
