"""The command line: from a profile log to the variant for each matmul and the length of the step. docs/decide.md walks through it."""

from __future__ import annotations

import argparse
import difflib
import functools
import io
import itertools
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from . import __version__, _core, backends, check_command, doctor, export, files, lint_command, manifest, tuning
from .bench import command as bench_command
from .bench import compare, html, models, products, step, tune_command
from .bench.sizes import Sizes, parse_spec
from .device import Device, default_device
from .errors import DeviceError, Error, UnsupportedError
from .manifest import load_variants, variants
from .profile import command as profile_command
from .variant import ENDS, LAYOUTS, OPERAND_TYPES, STORAGES, Form, Variant


def _sizes_of(f: Form) -> list[str]:
    parts = []
    for size in ("m", "n", "k", "batch"):
        if (value := f.supports.get(size)) is not None:
            text = f"{value.get('min', 1)}..{value.get('max', '')}" if isinstance(value, dict) else str(value).replace(" ", "")
            parts.append(f"{size}={text}")
    return parts


def _what_b(members: list[Variant]) -> str:
    """Storages and numbers of B, layouts and types; those together that have the last two in common."""
    taken = dict[tuple[str, str], tuple[set[str], set[str]]]()
    for v in members:
        for f in v.forms:
            for b in itertools.product(f.storages, f.ends):
                layouts, types = taken.setdefault(b, (set(), set()))
                layouts.update(f.supports["layouts"])
                types.update(f.types)
    alike = dict[tuple[tuple[str, ...], tuple[str, ...]], tuple[set[str], set[str]]]()
    for (storage, end), (layouts, types) in taken.items():
        key = (tuple(x for x in LAYOUTS if x in layouts), tuple(t for t in OPERAND_TYPES if t not in types))
        storages, ends = alike.setdefault(key, (set(), set()))
        storages.add(storage)
        ends.add(end)
    return " or ".join(" ".join([*_words_of_b(*found), ",".join(key[0]), *(f"no {t}" for t in key[1])]) for key, found in alike.items())


def _words_of_b(storages: set[str], ends: set[str]) -> list[str]:
    if storages == {"dense"}:
        words = []
    elif len(storages) == len(STORAGES):
        words = ["any B"]
    elif storages == set(STORAGES[1:]):
        words = ["quantized B"]
    else:
        words = [",".join(x for x in STORAGES[1:] if x in storages) + ", dense" * ("dense" in storages)]
    return words if ends == {"1"} else [*words, f"{','.join(x for x in ENDS if x in ends)} of one A"]


def _without(v: Variant) -> str:
    parts = [f"no {flag}" for flag in ("bias", "c", "alpha") if not any(f.supports.get(flag, True) for f in v.forms)]
    return " ".join([*parts, *([f"(device {', '.join(v.devices)})"] if v.devices else [])])


def _list(args: argparse.Namespace) -> int:
    chosen = [v for v in variants(family=args.family) if args.all or v.enabled]
    if args.json:
        files.give_json(args.json, {"schema": "metalmm-variants", "version": 2, "variants": [_as_json(v) for v in chosen]})
        if args.json == "-":
            return 0
    if args.all or args.family:
        rows = [("id", "tile", "threads", "takes", "state")]
        for v in chosen:
            takes = " ".join(x for x in (_what_b([v]), *_sizes_of(v.forms[0]), _without(v)) if x)
            rows.append((str(v), f"{v.tile[0]}x{v.tile[1] or 'n'}", str(v.threads), takes, "on" if v.enabled else f"off: {v.reason}"))
    else:
        named = {s.family: s.form for s in manifest.strategies()}
        rows, every = [("family", "on", "off", "takes", "names")], variants()
        for family in dict.fromkeys([*(v.family for v in every), *named]):
            members = [v for v in every if v.family == family]
            takes = " or ".join(dict.fromkeys(" ".join(_sizes_of(v.forms[0])) for v in members))
            takes = f"{_what_b(members)} {takes} {_without(members[0])}".strip() if members else ""
            on = sum(v.enabled for v in members)
            rows.append((family, str(on), str(len(members) - on), " ".join(takes.split()), named.get(family, "")))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in rows:
        print("  ".join([*(cell.ljust(w) for cell, w in zip(row[:4], widths, strict=True)), row[4]]).rstrip())
    off = sum(not v.enabled for v in variants(family=args.family))
    print(f"{len(chosen)} variants" + (f"; {off} more are off (--all)" if off and not args.all else ""))
    if not (args.all or args.family):
        print("--family NAME lists one. Any point of a family with names can be called: what is at its default is left out of the name.")
    return 0


def _as_json(v: Variant) -> dict[str, Any]:
    return {
        "id": str(v),
        "library": v.library or None,
        "parameters": v.params,
        "tile": v.tile,
        "threads": v.threads,
        "kernels": [
            {
                "kernel": f.kernel or None,
                "source": f.source.name,
                "storages": f.storages,
                "matrices": f.ends,
                "supports": f.supports,
                "without": f.without,
            }
            for f in v.forms
        ],
        "devices": v.devices,
        "off": v.reason or None,
    }


_MAX_COUNTED = 1 << 30  # multiplications of a shape that is run to count its barriers


def _barriers(v: Variant, spec: _core.MatmulSpec) -> str:
    """Of a threadgroup, counted while the CPU device runs the shape once, with the epilogue asked for. All threadgroups of a kernel
    meet equally often, so that of a large n as many columns as some of them own will do."""
    n, batch = spec.n, spec.batch
    if spec.m * n * spec.k * batch > _MAX_COUNTED:
        n, batch = min(n, 4 * v.tile[1] + n % v.tile[1]) if v.tile[1] else n, 1
    if spec.m * n * spec.k * batch > _MAX_COUNTED:
        return "not counted: the shape is too large to run for it"
    if spec.b_storage != "dense" or spec.also_n:
        return "not counted: of dense weights and one matrix alone"
    device = Device(backends.counting_barriers())
    lead = (batch,) if batch > 1 else ()
    a = device.empty((*lead, *((spec.k, spec.m) if spec.transpose_a else (spec.m, spec.k))), spec.dtype)
    b = device.empty((*lead, *((n, spec.k) if spec.transpose_b else (spec.k, n))), spec.dtype)
    options: dict[str, Any] = {"transpose_a": spec.transpose_a, "transpose_b": spec.transpose_b, "alpha": spec.alpha, "beta": spec.beta}
    bias = device.empty((n,), spec.dtype) if spec.bias else None
    c = device.empty((*lead, spec.m, n), spec.dtype) if spec.beta else None
    device.prepare(v, a, b, bias=bias, c=c, row_invariant=spec.row_invariant, **options)()
    counted = device.counters
    return f"{int(counted['barriers']) / int(counted['threadgroups']):g} a threadgroup"


_CLIENT_GBPS = 142.0  # what the client's machine sustained at n=151936; of a GPU whose figure nobody measured
_LATENCY = 0.5e-6  # seconds of a load that nothing hides, on Apple's GPUs


def _device_of(args: argparse.Namespace) -> Device | None:
    """None where --device names one that is not here, of which the rule behind auto can be asked."""
    try:
        return default_device()
    except DeviceError:
        if args.id != "auto" or not args.device:
            raise
        return None


def _explain_model(args: argparse.Namespace, found: Sizes) -> int:
    """What "auto" takes for each matmul of a model, on the device or on one of a kind that is not here."""
    if args.id != "auto" or args.words or args.spec:
        raise bench_command.UsageError("--model goes with auto, and in place of a shape")
    device, rows = _device_of(args), []
    for shape in found.shapes:
        try:
            name, why = tuning.choose(device, shape.spec) if device else tuning.choose_unseen(args.device, shape.spec)
        except UnsupportedError as error:
            name, why = "", str(error)
        rows.append({"spec": repr(shape.spec), "calls": shape.calls, "variant": name or None, "why": why})
        if args.json != "-":
            print(f"{shape.short} calls={shape.calls}\n  {name or '-'}: {why}")
    files.give_json(args.json, {"schema": "metalmm-explain-model", "version": 1, "device": args.device, "shapes": rows})
    return 0


def _explain(args: argparse.Namespace) -> int:
    if found := models.sizes_of(args):
        return _explain_model(args, found)
    words = " ".join([*args.words, args.spec or ""]).split()
    spec = parse_spec([w for w in words if not w.startswith("calls=")])  # which --spec of others says
    facts: dict[str, Any] = {"schema": "metalmm-explain", "version": 1, "spec": repr(spec), "asked": args.id}
    why, device = "", _device_of(args)
    if not device:
        name, why = tuning.choose_unseen(args.device, spec)
        why = f"no such device is here; by the rule alone, of a GPU of {backends.get(args.device).usual_cores} cores: {why}"
        if args.json != "-":
            print(f"{name}\n  {spec!r}\n  auto                {why}")
        files.give_json(args.json, {**facts, "variant": name, "why": why, "device": args.device})
        return 0
    if args.id == "auto":
        name, why = tuning.choose(device, spec)
        v = manifest.get(name)
    else:
        v = manifest.get(args.id)
    if lack := v.lacks(spec):
        others = [str(o) for o in variants(spec, enabled=True)]
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        print(f"{v} does not take {spec!r}: {lack}; supported by {', '.join(others[:5]) or 'none'}{more}", file=sys.stderr)
        return 1
    if v.devices and device.name not in v.devices:
        try:
            device = Device(v.devices[0])
        except Error as error:
            raise DeviceError(f"{v} is of device {' and '.join(v.devices)} alone: {error}") from error
    bits = _core._specialization(spec)
    lines = [
        f"{v}: {v.library or v.instance(bits)}, {v.form(bits).source.name if v.kernel else 'no kernel of ours'}",
        f"  {spec!r}",
    ]
    if why:
        lines.append(f"  auto                {why}")
    if not v.enabled:
        lines.append(f"  off by default: {v.reason}")
    facts.update(variant=str(v), why=why or None, device=device.name, off=v.reason or None)
    if not v.library:
        lines += _dispatch_lines(device, v, spec, facts)
    least, flops = spec.least_bytes, 2 * spec.m * (spec.n + sum(spec.also_n)) * spec.k * spec.batch
    lines.append(f"  bytes moved         at least {least} ({least / 1e6:.3f} MB): each operand once; {flops / least:.3g} operations a byte")
    facts.update(least_bytes=least, operations=flops)
    if args.json != "-":
        print("\n".join(lines))
    files.give_json(args.json, facts)
    return 0


def _dispatch_lines(device: Device, v: Variant, spec: _core.MatmulSpec, facts: dict[str, Any]) -> list[str]:
    grid, limit, memory = _core._describe(device, v, spec)
    groups, outputs = int(np.prod(grid)), spec.m * (spec.n if spec.swiglu else spec.n + sum(spec.also_n)) * spec.batch
    lines = [
        f"  device              {device.name}: the limits below are its own",
        f"  grid                {grid[0]} x {grid[1]} x {grid[2]} threadgroups of {v.tile[0]} x {v.tile[1] or spec.n} outputs",
        f"  threads             {v.threads} a threadgroup (limit {limit}), {groups * v.threads} in all, {groups * v.threads / outputs:.3g} an output",
        f"  threadgroup memory  {memory} bytes of {device.info['max_threadgroup_memory_length']}",
    ]
    facts.update(grid=list(grid), threads=v.threads, threads_limit=limit, threadgroup_memory=memory)
    if v.runs_on(backends.counting_barriers()):
        facts["barriers"] = _barriers(v, spec)
        lines.append(f"  barriers            {facts['barriers']}")
    if loads := v.loads(spec):
        rounds, each, together = loads[0], loads[1], min(loads[2], v.loaded(spec))
        known = device.backend.memory_gbps(device)
        gbps, where = (known, str(device.info["name"])) if known else (_CLIENT_GBPS, "the client's Apple GPU")
        product = gbps * 1e9 * _LATENCY
        keeps = together >= min(product, v.loaded(spec))
        lines += [
            f"  load rounds         {rounds} one after another a thread, {each} bytes of B in flight each: about {rounds * _LATENCY * 1e6:.1f} us if nothing hides them",
            f"  bytes in flight     {together / 1e3:.1f} KB over the whole GPU; {where} ({gbps:g} GB/s, {_LATENCY * 1e6:g} us a load) needs {product / 1e3:.0f} KB",
        ]
        if not keeps:
            lines.append("  CANNOT KEEP A GPU'S MEMORY BUSY on this shape: fewer bytes are in flight than latency times bandwidth")
        facts["loads"] = {
            "rounds": rounds,
            "bytes_each": each,
            "bytes_in_flight": together,
            "needed": product,
            "gbps": gbps,
            "keeps_memory_busy": keeps,
        }
    return lines


_OF_NO_DEVICE = ("check", "compare", "lint", "report", "sizes")  # check: device cpu's debug mode


def _common(name: str = "") -> argparse.ArgumentParser:
    """What the command takes as every other."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--manifest", type=Path, action="append", default=[], help="variants of your own (docs/add_a_variant.md); again for more"
    )
    if name in _OF_NO_DEVICE:
        parser.set_defaults(device=None)
    else:
        parser.add_argument("--device", choices=backends.names(), help="default: $METALMM_DEVICE, else metal where there is one")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write it all there as JSON; to standard output without FILE")
    return parser


class _Parser(argparse.ArgumentParser):
    """With the command, or the option's value, that was meant."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"argument (.*?): invalid choice: '(.*?)' \(choose from (.*)\)", message)
        near = difflib.get_close_matches(wrong[2], re.findall(r"\w+", wrong[3]), 1) if wrong else []
        what = wrong[1] if wrong and wrong[1].startswith("-") else "command"
        super().error(f"there is no {what} '{wrong[2]}'; did you mean {near[0]}?" if wrong and near else message)


def _arguments_of_variants(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--family")
    parser.add_argument("--all", action="store_true", help="those that are off, too")
    parser.set_defaults(run=_list)


def _arguments_of_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id")
    parser.add_argument(
        "words",
        nargs="*",
        metavar="spec",
        help="m=1 n=9728 k=896 batch=1 nt bias alpha=1 beta=0 float16 (or bfloat16, float32), q8_0 …, or n=4864+4864 swiglu; default layout: nn, of quantized weights nt",
    )
    parser.add_argument("--spec", help="the same in one argument")
    models.add_model_arguments(parser)
    parser.set_defaults(run=_explain)


_COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "bench": ("which variant is right and which is fastest on each shape", bench_command.add_arguments),
    "step": ("a whole decode step as one recording: how long it is under one choice of variants or another", step.add_arguments),
    "tune": ("measure, and keep the choice for matmul('auto', ...)", tune_command.add_arguments),
    "sizes": ("the matmuls of a model, as bench, tune and step take them: of a .gguf file, a config.json or a name", models.add_arguments),
    "compare": ("two bench results: what became faster or slower", compare.add_arguments),
    "frameworks": (
        "operations, or a model's products, in MLX, PyTorch and metalmm side by side, for what is installed",
        products.add_arguments,
    ),
    "doctor": (
        "what works on this device, what does not, and which options suit it: for a first hour, and to send back",
        doctor.add_arguments,
    ),
    "lint": ("MSL type-checked as Apple's compiler does it, without one; needs pip install libclang", lint_command.add_arguments),
    "check": ("races, reads of what nobody set, accesses outside: in variants, and in any .metal file", check_command.add_arguments),
    "report": ("results as one page to show", html.add_arguments),
    "export": ("a kernel for another engine: a .metal file, all of its dispatch as JSON, and code that launches it", export.add_arguments),
    "profile": (
        "an inference engine's log: sections to read, or the sizes file that bench takes",
        functools.partial(profile_command.add_arguments, common=_common),
    ),
    "variants": ("ids, parameters, what they take, which are off and why", _arguments_of_variants),
    "explain": ("grid, threads, memory, bytes and barriers of a variant on a shape", _arguments_of_explain),
}


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Of these arguments: of the other commands it has the names alone, which is a tenth of the time."""
    parser: argparse.ArgumentParser = _Parser(prog="metalmm", description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"metalmm {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, (what, add_arguments) in _COMMANDS.items():
        common = [_common(name)] if name in words and name != "profile" else []  # profile's own commands take it
        command = commands.add_parser(name, help=what, description=what, parents=common, allow_abbrev=False)
        if name in words:
            command.set_defaults(schema=f"metalmm-{name}")
            add_arguments(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 for what is wrong, failed or became slower; 2 for arguments that say nothing; 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal's encoding lacks is written as an escape
            stream.reconfigure(errors="backslashreplace")
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (for the life of the process)
    try:
        try:
            parser = _parser(sys.argv[1:] if argv is None else argv)
            args, rest = parser.parse_known_args(argv)
            if rest and (not hasattr(args, "words") or any(word.startswith("-") for word in rest)):
                parser.error(f"unrecognized arguments: {' '.join(rest)}")
            if rest:  # of a shape, behind an option: argparse takes such words in one place alone
                args.words += rest
        except SystemExit as stop:  # argparse's: 2 after a message, 0 after --help
            return stop.code if isinstance(stop.code, int) else 2
        files.check_json(args.json, args.schema)
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
