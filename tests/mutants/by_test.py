"""A plugin of pytest for lines.py: which lines of the package each test executes, and how long it takes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

_COVERAGE = coverage.Coverage(source=[os.environ["METALMM_LINES"] + "/python/metalmm"], data_file=os.environ["COVERAGE_FILE"])
_COVERAGE.start()
_seconds: dict[str, float] = {}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _COVERAGE.switch_context(item.nodeid)
    begin = time.perf_counter()
    yield
    _seconds[item.nodeid] = time.perf_counter() - begin


def pytest_sessionfinish() -> None:
    _COVERAGE.stop()
    _COVERAGE.save()
    Path(os.environ["COVERAGE_FILE"] + ".seconds").write_text(json.dumps(_seconds))
