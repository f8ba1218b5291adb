"""metalmm check: races, reads of what nobody set, accesses outside and off their alignment, in variants and in any .metal file."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from . import __version__, checking, files, manifest, terminal
from .bench.command import UsageError
from .bench.sizes import parse_spec
from .device import Device
from .errors import Error, UnsupportedError
from .manifest import load_variants, variants

_BUFFER = re.compile(r"(\d+)=(?:([a-z]+\d*)\[([\d, ]+)\](?::(.+))?|(-?[\d.e+-]+))")
_RULES = {
    "race": "Two threads use the same bytes, one writes, and nothing orders them.",
    "unset": "Threadgroup memory is read that no thread of the threadgroup wrote, or a variable that was never set is stored.",
    "bounds": "An access outside of what is bound, or an index outside of an array.",
    "alignment": "A vector is loaded or stored off its alignment.",
    "barrier": "Threads of a threadgroup wait at different barriers, or have returned before one; or some of a simdgroup do.",
    "timeout": "The kernel took longer than --timeout.",
    "fault": "The kernel ended with a fault.",
    "order": "The result depends on the order of threads, or on a variable that was never set.",
    "coverage": "An element of the output is not written, or written more than once.",
    "result": "The result is not within the bound.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="*", metavar="ID|FILE.metal|FILE.toml", help="variants, one .metal file, or manifests of yours")
    parser.add_argument("--all", action="store_true", help="every variant that device cpu runs")
    parser.add_argument("--spec", action="append", default=[], help="a variant's shape, such as 'm=3 n=67 k=96 nt q8_0'; again for more")
    parser.add_argument("--kernel", help="of a .metal file: the kernel's name")
    parser.add_argument("--grid", help="threadgroups, such as 8,1,1")
    parser.add_argument("--threadgroup", help="threads of a threadgroup, such as 64,1,1")
    parser.add_argument(
        "--buffer", action="append", default=[], metavar="I=TYPE[SHAPE][:VALUE]",
        help="0=float32[64,64] of random numbers, 1=int32[8]:3 of one value, or 2=67, a number; others are 1 MiB of random numbers",
    )  # fmt: skip
    parser.add_argument("--memory", action="append", default=[], metavar="I=BYTES", help="of a threadgroup argument")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a function constant, by name or index")
    parser.add_argument(
        "--output", action="append", default=[], type=int, metavar="I", help="a buffer whose elements are each written once"
    )
    parser.add_argument("-I", dest="include_dirs", action="append", default=[], type=Path, metavar="FOLDER", help="where includes are")
    parser.add_argument("--counts", action="store_true", help="of a .metal file: what one dispatch asks of memory, too")
    parser.add_argument("--runs", type=int, default=checking._RUNS, help="in as many orders of threads (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds of a run (default: %(default)s)")
    parser.add_argument("--sarif", type=Path, metavar="FILE", help="findings for code-scanning tools, SARIF 2.1.0")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0; 1 where something was found; 2 where something could not be checked, and nothing was found."""
    start, found, failed, counts = time.perf_counter(), list[checking.Finding](), list[str](), dict[str, int]()
    if args.sarif:
        files.check_output(args.sarif, "sarif-2.1.0", "a SARIF file")
    metal = [Path(x) for x in args.what if x.endswith(".metal")]
    if metal:
        if len(args.what) > 1 or args.all or args.spec:
            raise UsageError("check: one .metal file at a time, and no variants beside it")
        if not metal[0].is_file():
            raise UsageError(f"check: {metal[0]}: there is no such file")
        for name in ("grid", "threadgroup"):
            if getattr(args, name) is None:
                raise UsageError(f"check: a .metal file takes --{name}, such as 8,1,1")
        given: dict[str, Any] = {
            "grid": _sizes(args.grid, "grid"), "threadgroup": _sizes(args.threadgroup, "threadgroup"),
            "buffers": dict(_buffer(text) for text in args.buffer), "threadgroup_memory": dict(_pair(x, "memory") for x in args.memory),
            "constants": dict(_constant(x) for x in args.set), "include_dirs": args.include_dirs, "timeout": args.timeout,
        }  # fmt: skip
        found = checking.check(metal[0], args.kernel, outputs=args.output, runs=args.runs, **given)
        counts = {} if found or not args.counts else checking.count(metal[0], args.kernel, **given)
        count = 1
    else:
        if alone := [x for x in ("kernel", "grid", "threadgroup", "buffer", "memory", "set", "output", "counts") if getattr(args, x)]:
            raise UsageError(f"check: --{alone[0]} is of a .metal file")
        chosen, specs = _variants(args), [parse_spec(text.split()) for text in args.spec]
        if args.all and specs:
            chosen = [v for v in chosen if not all(v.lacks(s) for s in specs)]
        count = len(chosen)
        with terminal.Progress() as progress:
            progress.begin("variants", count)
            for v in chosen:
                progress.note(str(v))
                own = [s for s in specs if not v.lacks(s)]
                try:
                    if specs and not own:
                        raise UnsupportedError(f"it takes no --spec that is given: {v.lacks(specs[0])}")
                    found += checking.check(v, specs=own, runs=args.runs, timeout=args.timeout)
                except Error as error:
                    failed.append(f"{v}: {error}")
                progress.step()
    data = {
        "schema": "metalmm-check",
        "version": 1,
        "checked": count,
        "findings": [vars(f) for f in found],
        "failed": failed,
        "counts": counts,
    }
    if args.json != "-":
        _show_counts(counts)
        _show(found, failed, count, time.perf_counter() - start)
    if args.sarif:
        args.sarif.write_text(json.dumps(sarif(found, failed), indent=1), encoding="utf-8")
    files.give_json(args.json, data)
    return 1 if found else 2 if failed else 0


def _variants(args: argparse.Namespace) -> list[Any]:
    with Device("cpu", debug=True) as device:
        if args.all:
            return [v for v in variants(device=device) if v.kernel and not v.library]
        chosen = []
        for word in args.what:
            before = {str(v) for v in variants()}
            if word.endswith(".toml"):
                load_variants(word)
                chosen += [v for v in variants() if str(v) not in before]
            else:
                chosen.append(manifest.get(word))
        if not chosen:
            raise UsageError("check: name variants, a .metal file or a manifest, or --all")
        return chosen


def _sizes(text: str, name: str) -> list[int]:
    parts = text.split(",")
    if not 1 <= len(parts) <= 3 or not all(x.strip().isdecimal() and int(x) for x in parts):
        raise UsageError(f"check: --{name} {text!r}: it takes up to three whole numbers from 1 on, such as 8,1,1")
    return [int(x) for x in parts]


def _pair(text: str, name: str) -> tuple[int, int]:
    key, equals, value = text.partition("=")
    if not equals or not key.isdecimal() or not value.isdecimal():
        raise UsageError(f"check: --{name} {text!r}: it takes INDEX=NUMBER")
    return int(key), int(value)


def _number(text: str) -> Any:
    words = {"true": True, "false": False}
    try:
        return words[text] if text in words else float(text) if re.search(r"[.e]", text) else int(text)
    except ValueError:
        raise UsageError(f"check: {text!r} is no number, true or false") from None


def _constant(text: str) -> tuple[int | str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(f"check: --set {text!r}: it takes NAME=VALUE")
    return int(key) if key.isdecimal() else key, _number(value)


def _buffer(text: str) -> tuple[int, Any]:
    match = _BUFFER.fullmatch(text)
    if not match:
        raise UsageError(f"check: --buffer {text!r}: it takes 0=float32[4096], 0=int32[8,8]:3 or 0=67")
    index, kind, shape, value, number = match.groups()
    if number is not None:
        return int(index), _number(number)
    try:
        # MSL's names are MSL's: NumPy's float and int are of 64 bits.
        dtype, sizes = np.dtype(checking.NUMPY_OF.get(kind, kind)), [int(x) for x in shape.split(",")]
        if value is not None:
            return int(index), np.full(sizes, _number(value), dtype)
        return int(index), checking.random_of(np.random.default_rng(int(index)), dtype, 0, sizes)
    except (TypeError, ValueError, OverflowError, MemoryError) as error:
        raise UsageError(f"check: --buffer {text!r}: {error}") from None


def _show_counts(counts: dict[str, int]) -> None:
    for space, parts, what in (
        ("device", "lines", "lines of 128 bytes"), ("constant", "lines", "lines of 128 bytes"), ("threadgroup", "turns", "turns of a bank"),
    ):  # fmt: skip
        if each := counts.get(f"{space}_accesses"):
            read, written = counts[f"{space}_bytes_read"], counts[f"{space}_bytes_written"]
            mean = counts[f"{space}_{parts}"] / each
            terminal.say(f"{space}: {read:,} bytes read, {written:,} written; {each:,} accesses of a simdgroup, {mean:.2f} {what} each")
    if counts:
        others = ("barriers", "simdgroup_operations", "atomics", "multiplications")
        terminal.say("; ".join(f"{counts[name]:,} {name.replace('_', ' ')}" for name in others if name in counts))
    if "registers" in counts:
        terminal.say(f"{counts['registers']} registers a thread, by NVIDIA's compiler for compute capability 9.0")


def _show(found: list[checking.Finding], failed: list[str], count: int, seconds: float) -> None:
    for finding in found:
        terminal.say(f"{finding.kind}: {finding.what}", "bold")
        terminal.say(f"  {finding.text}")
    for text in failed:
        print(f"metalmm: {text}", file=sys.stderr)
    terminal.say(f"{count - len(failed)} checked, {len(found) or 'no'} finding{'s' * (len(found) != 1)}, {seconds:.1f} s")


def sarif(found: list[checking.Finding], failed: Sequence[str] = ()) -> dict[str, Any]:
    """As SARIF 2.1.0 has them; files relative to the current folder where they are in it."""

    def location(place: str) -> dict[str, Any]:
        file, _, line = place.rpartition(":")
        path = Path(os.path.abspath(file))
        uri = quote(path.relative_to(Path.cwd()).as_posix()) if path.is_relative_to(Path.cwd()) else path.as_uri()
        return {"physicalLocation": {"artifactLocation": {"uri": uri}, "region": {"startLine": int(line)}}}

    results = []
    for f in found:
        result: dict[str, Any] = {"ruleId": f.kind, "level": "error", "message": {"text": str(f)}}
        if f.places:
            result["locations"] = [location(f.places[0])]
            result["relatedLocations"] = [{"id": i, **location(place)} for i, place in enumerate(f.places[1:])]
        results.append(result)
    rules = [{"id": kind, "shortDescription": {"text": text}} for kind, text in _RULES.items()]
    tool = {"driver": {"name": "metalmm check", "version": __version__, "rules": rules}}
    told = [{"level": "error", "message": {"text": text}} for text in failed]
    invocation = {"executionSuccessful": not failed, "toolExecutionNotifications": told}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": tool, "results": results, "invocations": [invocation]}],
    }
