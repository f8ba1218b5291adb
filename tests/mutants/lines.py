"""Which tests run which lines of Python and of the extension: the suite once, with coverage.py and gcov.

Python is known by test, C++ by file of tests. Kernels and what is compiled into them are not here: run.py has a list for them.
"""

from __future__ import annotations

import bisect
import gzip
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import coverage

_PLUGIN = Path(__file__).with_name("by_test.py")
FOLDERS = ("unit", "conformance", "devices", "cli")


class Lines:
    """seconds: of each test and of each file of tests; runs: by source file and line, which of them execute it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.runs: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))

    def tests(self, file: str, line: int, limit: float) -> list[str]:
        """Those that execute the line, or the nearest before it that somebody does, the quick ones first, as many as the limit allows.
        Of a line that runs on import alone, or in another process, those of the whole file."""
        by_line = self.runs.get(file, {})
        known = sorted(by_line)
        i = bisect.bisect_right(known, line) - 1
        found = by_line[known[i]] if i >= 0 else set[str]()
        if not found:
            found = set().union(*by_line.values())
        chosen, spent = list[str](), 0.0
        for test in sorted(found, key=lambda test: (self.seconds[test], test)):
            spent += self.seconds[test]
            if chosen and spent > limit:
                break
            chosen.append(test)
        return chosen


def measure(
    tree: Path, folder: Path, start: Callable[[list[str], Mapping[str, str]], subprocess.CompletedProcess[str]], jobs: int
) -> Lines:
    """Of the sources in `tree`, whose extension was built with --coverage. `start` runs pytest with these arguments and more of the
    environment. Raises SystemExit where a test fails."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    files = sorted(str(p.relative_to(tree)) for name in FOLDERS for p in (tree / "tests" / name).rglob("test_*.py"))
    files = [f for f in files if not f.startswith(("tests/devices/metal", "tests/devices/cuda"))]
    lines, lock, waiting, failed = Lines(), threading.Lock(), list(enumerate(files)), list[str]()

    def work() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                number, file = waiting.pop()
            own = folder / str(number)
            own.mkdir()
            environment = {"COVERAGE_FILE": str(own / "lines"), "GCOV_PREFIX": str(own), "METALMM_LINES": str(tree)}
            done = start(["-p", _PLUGIN.stem, file], environment)
            with lock:
                if done.returncode not in (0, 5):
                    failed.append(f"{file} fails without a mutant:\n{done.stdout[-9000:]}")
                elif done.returncode == 0:
                    _add(lines, tree, own, file)

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failed:
        raise SystemExit("\n".join(failed))
    return lines


def _add(lines: Lines, tree: Path, folder: Path, file: str) -> None:
    seconds: dict[str, float] = json.loads((folder / "lines.seconds").read_text())
    lines.seconds.update(seconds)
    lines.seconds[file] = sum(seconds.values())
    data = coverage.CoverageData(str(folder / "lines"))
    data.read()
    for name in data.measured_files():
        by_line = lines.runs[str(Path(name).relative_to(tree))]
        for line, tests in data.contexts_by_lineno(name).items():
            by_line[line] |= {test for test in tests if test}
    for notes in folder.rglob("*.gcda"):
        made = Path("/") / notes.relative_to(folder).with_suffix(".gcno")
        shutil.copyfile(made, notes.with_suffix(".gcno"))
        report = subprocess.run(["gcov", "--json-format", "--stdout", notes.name], cwd=notes.parent, capture_output=True, check=True).stdout
        text = gzip.decompress(report) if report[:2] == b"\x1f\x8b" else report
        for source in json.loads(text)["files"]:
            path = Path(os.path.realpath(source["file"]))
            if path.is_relative_to(tree):
                by_line = lines.runs[str(path.relative_to(tree))]
                for row in source["lines"]:
                    by_line[row["line_number"]] |= {file} if row["count"] else set()


if __name__ == "__main__":
    sys.exit("tests/mutants/run.py calls it")
