"""Shared fixtures. Compiled kernels stay in build/test-cache, so that a second run is fast."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("METALMM_CACHE", str(ROOT / "build" / "test-cache"))

import metalmm  # noqa: E402
from metalmm import manifest  # noqa: E402

FOUND = [next(filter(shutil.which, names), None) for names in (("g++",), ("clang++", "clang++-14"))]
COMPILERS = [c for c in FOUND if c] or ["c++"]


@pytest.fixture(scope="session")
def device() -> metalmm.Device:
    return metalmm.Device("cpu")


@pytest.fixture(params=COMPILERS)
def each_compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test once with every C++ compiler of this machine."""
    monkeypatch.setenv("METALMM_CXX", request.param)
    return str(request.param)


def pytest_report_header() -> str:
    return f"metalmm {metalmm.__version__}: kernels compiled by {', '.join(COMPILERS)}; cache {os.environ['METALMM_CACHE']}"


@pytest.fixture(autouse=True)
def _own_variants_stay_in_their_test() -> Iterator[None]:
    before = dict(manifest._registry)
    yield
    manifest._registry.clear()
    manifest._registry.update(before)
