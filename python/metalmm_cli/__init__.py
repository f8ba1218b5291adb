"""Where the command ``metalmm`` begins: outside of the package, so that Ctrl-C while that is imported is no traceback."""

from __future__ import annotations

import sys


def main() -> int:
    try:
        from metalmm.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("metalmm: interrupted", file=sys.stderr)
        return 130
