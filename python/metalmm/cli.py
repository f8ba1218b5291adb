"""The command line: ``metalmm variants`` lists them, ``metalmm explain ID m=1 n=9728 k=896 nt`` says what one does with a shape."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import __version__, _core, backends, manifest
from .bench import command as bench_command
from .bench.sizes import parse_spec
from .device import Device, default_device
from .errors import Error
from .manifest import Variant, load_variants, variants
from .profile import command as profile_command


def _supports(v: Variant) -> str:
    parts = [",".join(v.supports["layouts"])]
    for size in ("m", "n", "k", "batch"):
        if (value := v.supports.get(size)) is not None:
            text = f"{value.get('min', 1)}..{value.get('max', '')}" if isinstance(value, dict) else str(value).replace(" ", "")
            parts.append(f"{size}={text}")
    parts += [f"no {t}" for t in v.without]
    parts += [f"no {flag}" for flag in ("bias", "c", "alpha") if not v.supports.get(flag, True)]
    return " ".join(parts)


def _list(args: argparse.Namespace) -> int:
    chosen = [v for v in variants(family=args.family) if args.all or v.enabled]
    rows = [("id", "kernel", "tile", "threads", "parameters", "takes", "state")]
    for v in chosen:
        parameters = " ".join(f"{key}={manifest.cpp(value)}" for key, value in v.params.items() if key in v.template)
        state = "on" if v.enabled else f"off: {v.reason}"
        if v.devices:
            state += f" (device {', '.join(v.devices)})"
        kernel = v.library or f"{v.source.name}:{v.kernel}"
        rows.append((str(v), kernel, f"{v.tile[0]}x{v.tile[1] or 'n'}", str(v.threads), parameters, _supports(v), state))
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    for row in rows:
        print("  ".join([*(cell.ljust(w) for cell, w in zip(row[:6], widths, strict=True)), row[6]]).rstrip())
    off = sum(not v.enabled for v in variants(family=args.family))
    print(f"{len(chosen)} variants" + (f"; {off} more are off (--all)" if off and not args.all else ""))
    return 0


_MAX_COUNTED = 1 << 30  # multiplications of a shape that is run to count its barriers


def _barriers(v: Variant, spec: _core.MatmulSpec) -> str:
    """Of a threadgroup, counted while the CPU device runs the shape once, with the epilogue asked for. All threadgroups of a kernel
    meet equally often, so that of a large n as many columns as some of them own will do."""
    n, batch = spec.n, spec.batch
    if spec.m * n * spec.k * batch > _MAX_COUNTED:
        n, batch = min(n, 4 * v.tile[1] + n % v.tile[1]) if v.tile[1] else n, 1
    if spec.m * n * spec.k * batch > _MAX_COUNTED:
        return "not counted: the shape is too large to run for it"
    device = Device(backends.counting_barriers())
    lead = (batch,) if batch > 1 else ()
    a = device.empty((*lead, *((spec.k, spec.m) if spec.transpose_a else (spec.m, spec.k))), spec.dtype)
    b = device.empty((*lead, *((n, spec.k) if spec.transpose_b else (spec.k, n))), spec.dtype)
    options: dict[str, Any] = {"transpose_a": spec.transpose_a, "transpose_b": spec.transpose_b, "alpha": spec.alpha, "beta": spec.beta}
    bias = device.empty((n,), spec.dtype) if spec.bias else None
    c = device.empty((*lead, spec.m, n), spec.dtype) if spec.beta else None
    device.prepare(v, a, b, bias=bias, c=c, **options)()
    counted = device.counters
    return f"{int(counted['barriers']) / int(counted['threadgroups']):g} a threadgroup"


def _explain(args: argparse.Namespace) -> int:
    v, spec = manifest.get(args.id), parse_spec([*args.spec, *(args.spec_text or "").split()])
    if lack := v.lacks(spec):
        others = [str(o) for o in variants(spec, enabled=True)]
        print(f"{v} does not take {spec!r}: {lack}; supported by {', '.join(others[:5])}", file=sys.stderr)
        return 1
    device = default_device()
    if not v.runs_on(device.name):
        device = Device(v.devices[0])
    print(f"{v}: {v.library or v.instance(_core._specialization(v, spec))}, {v.source.name if v.kernel else 'no kernel of ours'}")
    print(f"  {spec!r}")
    if not v.enabled:
        print(f"  off by default: {v.reason}")
    if not v.library:
        grid, limit, memory = _core._describe(device, v, spec)
        groups, outputs = int(np.prod(grid)), spec.m * spec.n * spec.batch
        print(f"  device              {device.name}: the limits below are its own")
        print(f"  grid                {grid[0]} x {grid[1]} x {grid[2]} threadgroups of {v.tile[0]} x {v.tile[1] or spec.n} outputs")
        print(
            f"  threads             {v.threads} a threadgroup (limit {limit}), {groups * v.threads} in all, {groups * v.threads / outputs:.3g} an output"
        )
        print(f"  threadgroup memory  {memory} bytes of {device.info['max_threadgroup_memory_length']}")
        if v.runs_on(backends.counting_barriers()):
            print(f"  barriers            {_barriers(v, spec)}")
    least = spec.least_bytes
    flops = 2 * spec.m * spec.n * spec.k * spec.batch
    print(f"  bytes moved         at least {least} ({least / 1e6:.3f} MB): each operand once; {flops / least:.3g} operations a byte")
    return 0


def _common(device: bool = True) -> argparse.ArgumentParser:
    """What every command takes."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--manifest", type=Path, action="append", default=[], help="variants of your own (docs/add_a_variant.md); again for more")
    parser.add_argument("--device", choices=backends.names(), help="default: $METALMM_DEVICE, else metal where there is one")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write it all there as JSON; to standard output without FILE")
    return parser


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="metalmm", description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"metalmm {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    def add(name: str, what: str, **options: Any) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=what, description=what, parents=[_common()], allow_abbrev=False, **options)

    bench_command.add_arguments(add("bench", "which variant is right and which is fastest on each shape"))
    profile_command.add_arguments(add("profile", "an inference engine's log: sections to read, or the sizes file that bench takes"), _common)
    listing = add("variants", "ids, parameters, what they take, which are off and why")
    listing.add_argument("--family")
    listing.add_argument("--all", action="store_true", help="those that are off, too")
    listing.set_defaults(run=_list)
    explain = add("explain", "grid, threads, memory, bytes and barriers of a variant on a shape")
    explain.add_argument("id")
    explain.add_argument("spec", nargs="*", help="m=1 n=9728 k=896 batch=1 nt bias alpha=1 beta=0 float16 (or bfloat16, float32)")
    explain.add_argument("--spec", dest="spec_text", help="the same in one argument")
    explain.set_defaults(run=_explain)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 for what is wrong, failed or became slower; 2 for arguments that say nothing; 130 after Ctrl-C."""
    try:
        try:
            args = _parser().parse_args(argv)
        except SystemExit as stop:  # argparse's: 2 after a message, 0 after --help
            return stop.code if isinstance(stop.code, int) else 2
        for path in args.manifest:
            load_variants(path)
        if args.device:
            os.environ["METALMM_DEVICE"] = args.device  # of devices made from here on, the default one too
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("metalmm: interrupted", file=sys.stderr)
        return 130
    except (Error, OSError) as error:
        if isinstance(error, BrokenPipeError):  # `| head`: nobody reads on
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        print(f"metalmm: {error}", file=sys.stderr)
        return 2
    except MemoryError:
        print("metalmm: there is not enough memory for that", file=sys.stderr)
        return 2
