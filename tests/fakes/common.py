"""What the runners of both fakes share: on_fake_metal.py, on_fake_cuda.py."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Protocol

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy: fakes run side by side, and its threads spin


class Fake(Protocol):
    given: dict[str, tuple[int, int]]

    def set(self, name: str, value: int) -> int: ...


def apply_settings(fake: Fake) -> None:
    """Those of $METALMM_FAKE; fake.given: as each was before, and the value."""
    for setting in filter(None, os.environ.get("METALMM_FAKE", "").split(",")):
        name, _, value = setting.partition("=")
        fake.given[name] = fake.set(name, int(value)), int(value)


def end_if(wrong: list[str], label: str) -> None:
    """At exit, where an exception would be printed and forgotten."""
    if wrong:
        print(f"{label}:", *wrong, sep="\n  ", file=sys.stderr, flush=True)
        os._exit(86)


def run_arguments() -> None:
    """The script, or the module after -m, that the command line names."""
    if sys.argv[1] == "-m":
        module = sys.argv[2]
        sys.argv = sys.argv[2:]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = sys.argv[1:]
        sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
