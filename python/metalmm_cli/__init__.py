"""Where the command ``metalmm`` begins: outside of the package, so that Ctrl-C while that is imported is no traceback."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    try:
        held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # NumPy would make another error of it
        try:
            from metalmm.cli import main as run
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        return run()
    except KeyboardInterrupt:
        print("metalmm: interrupted", file=sys.stderr)
        return 130
