"""metalmm lint: MSL type-checked without Apple's compiler."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import files
from .bench.command import UsageError
from .errors import CompileError
from .kernel_source import KERNELS
from .manifest import variants
from .msl import lint
from .variant import Variant


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help=".metal files, each with what it includes")
    parser.add_argument("--all", action="store_true", help="every instance of every variant's kernel that a call can ask for")
    parser.add_argument(
        "-I",
        dest="include_dirs",
        action="append",
        default=[],
        type=Path,
        metavar="FOLDER",
        help="where includes are looked for, before the headers of metalmm's kernels",
    )
    parser.add_argument("-D", dest="defines", action="append", default=[], metavar="NAME[=VALUE]", help="macros")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0; 1 where something was found, 2 where a file could not be read."""
    if not args.files and not args.all:
        raise UsageError("lint: name files, or --all")
    defines = {name: value if given else "1" for name, given, value in (d.partition("=") for d in args.defines)}
    checked = list[dict[str, object]]()
    wrong = False

    def tell(source: Path, what: str, found: list[lint.Finding], start: float) -> None:
        nonlocal wrong
        wrong |= bool(found)
        if args.json != "-":
            print(f"{source}: {what}{len(found) or 'no'} finding{'s' * (len(found) != 1)}, {time.perf_counter() - start:.1f} s")
            for finding in found:
                print(f"  {finding}")
        checked.append({"file": str(source), "findings": [vars(f) for f in found]})

    unread = False
    for path in args.files:
        start = time.perf_counter()
        try:
            text = path.read_text(encoding="utf-8-sig", errors="surrogateescape")
            found = lint.check(text, str(path), [path.resolve().parent, *args.include_dirs, KERNELS / "include"], defines)
        except (OSError, CompileError) as error:  # the other files are looked at all the same
            print(f"metalmm: {error}", file=sys.stderr)
            unread = True
        else:
            tell(path, "", found, start)
    kinds = [kind for v in variants() if v.kernel for kind in v.kinds()] if args.all else []
    for source in sorted({kind.source for kind in kinds}):
        start = time.perf_counter()
        for count, found in check_instances([kind for kind in kinds if kind.source == source]).values():
            tell(source, f"{count} instances, ", found, start)
    if args.json != "-":
        print("what is accepted here may still be refused by Apple's compiler; docs/lint.md says what is not looked at")
    files.give_json(args.json, {"schema": "metalmm-lint", "version": 1, "files": checked})
    return 2 if unread else int(wrong)


def check_instances(chosen: Sequence[Variant]) -> dict[Path, tuple[int, list[lint.Finding]]]:
    """By source file: every instance of its templates that a call of some variants can ask for on Metal, counted, and what is wrong with
    them."""
    asked = dict[Path, dict[str, None]]()
    for v in chosen:
        if v.kernel and (not v.devices or "metal" in v.devices):
            for kind in v.kinds():
                asked.setdefault(kind.source, {}).update(dict.fromkeys(kind.instances()))
    found = {}
    for source, instances in asked.items():
        text = [source.read_text()]
        text += [f'template [[host_name("instance_{i}")]] [[kernel]] decltype({x}) {x};' for i, x in enumerate(instances)]
        found[source] = len(instances), lint.check("\n".join(text), str(source), [source.parent, KERNELS / "include"])
    return found
