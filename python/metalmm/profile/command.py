"""``metalmm profile analyze LOG`` and ``metalmm profile sizes LOG``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from .. import files
from . import analysis, log

MARK = "# Matmuls of "  # how a sizes file of ours begins


def add_arguments(parser: argparse.ArgumentParser, common: Callable[[], argparse.ArgumentParser]) -> None:
    kinds = parser.add_subparsers(required=True, metavar="analyze | sizes", dest="kind")
    analyze = kinds.add_parser("analyze", help="what the log says, in sections", parents=[common()], allow_abbrev=False)
    analyze.add_argument("log", metavar="LOG", help="JSON lines, also gzip; - for standard input")
    analyze.add_argument("--top", type=_rows, default=20, help="rows of a section (20)")
    analyze.add_argument("--kernel-top", type=_rows, default=50, help="rows of the kernel aggregate (50)")
    analyze.add_argument("--include-kernel-totals", action="store_true", help="leave totals and cb_wait in the kernel aggregate")
    analyze.add_argument("--kernel-filter", metavar="TEXT", help="only rows whose name contains it, case aside")
    analyze.set_defaults(run=_analyze, schema="metalmm-profile")
    sizes = kinds.add_parser(
        "sizes", help="the matmuls by shape, with counts and times: the file that bench takes", parents=[common()], allow_abbrev=False
    )
    sizes.add_argument("log", metavar="LOG", help="JSON lines, also gzip; - for standard input")
    sizes.add_argument("-o", "--output", metavar="FILE", help="write it there")
    sizes.set_defaults(run=_sizes, schema="metalmm-sizes")


def _rows(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of rows of at least 1")
    return int(text)


def _tell(found: log.Log) -> None:
    for problem in found.problems():
        print(f"metalmm profile: {problem}", file=sys.stderr)


def _analyze(args: argparse.Namespace) -> int:

    found = log.read(args.log)
    sections = analysis.sections(
        found,
        top=args.top,
        kernel_top=args.kernel_top,
        include_kernel_totals=args.include_kernel_totals,
        kernel_filter=args.kernel_filter,
    )
    if args.json != "-":
        print(analysis.text(found, sections))
    files.give_json(args.json, analysis.as_json(found, sections))
    _tell(found)
    if found.broken and not found.events:
        raise log.LogError(f"{args.log}: no line of it is an event")
    if args.kernel_filter and len(sections) == 2:  # the two that it leaves alone
        print(f"metalmm profile: --kernel-filter: no row's name contains {args.kernel_filter!r}", file=sys.stderr)
    return 0


def _sizes(args: argparse.Namespace) -> int:
    from ..bench import sizes

    if args.output:
        files.check_output(Path(args.output), MARK, "sizes file")
    found = log.read(args.log)
    text = sizes.text_of_log(found)
    listed = sizes.parse(text, of_log=True)
    if not listed.shapes and not listed.left_out:
        _tell(found)
        raise log.LogError(f"{args.log}: there is no matmul in it, among {found.events} events")
    sizes.give(args, listed, text, "metalmm profile")
    _tell(found)
    return 0
