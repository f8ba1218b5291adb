"""Fixtures of the whole suite. Compiled kernels stay in build/test-cache, so that a second run is fast."""

from __future__ import annotations

import functools
import gc
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.here import ALL_COMPILERS, ALL_OF_IT, COMPILERS, DEVICE, FAKE, FAKE_CUDA, ON_A_FAKE, REAL_GPU, cpus  # isort: skip  # before NumPy

import metalmm
import pytest
from metalmm import backends, cache, manifest
from metalmm.bench import runner
from support import counting, parts

if FAKE_CUDA:  # a sample of some calls says as much as one of hundreds
    backends.get("cuda").replays, runner._MOST_COPIES = 2, 3


# What is of one device alone, or has been looked at on another.
# A fake runs kernels as the CPU device does; what is looked at there is the host's code.
_COMMANDS = [
    f"cli/test_{name}.py"
    for name in ("cli", "depths", "foreign_files", "frameworks_and_docs", "profile", "rules_of_bench", "step_and_page", "tune")
]
_RULES = ["conformance/test_msl_rules.py", "conformance/test_msl_taken.py", "conformance/test_kernels_and_constants.py"]
_ON_A_FAKE = ["unit", "docs", "kernels", "nightly", "devices/cpu", "conformance/test_lint.py", *_RULES, *_COMMANDS]
_SKIPPED = {
    "cpu": ["devices/metal", "devices/cuda"],
    # The fake Metal's kernels are lowered as the CPU's are.
    "metal": [*_ON_A_FAKE, "devices/cuda", *(["conformance", "fuzz"] if FAKE else [])],
    "cuda": [
        *_ON_A_FAKE,
        "cli/test_models.py",
        "devices/metal",
        *([] if ALL_OF_IT or REAL_GPU else ["fuzz", "conformance/test_functions.py"]),
    ],
}
collect_ignore = [*_SKIPPED[DEVICE if DEVICE in _SKIPPED else "cpu"], "fakes", "sanitize", "mutants"]
if not ALL_OF_IT:
    collect_ignore.append("nightly")
if REAL_GPU:
    collect_ignore = [x for x in collect_ignore if x not in ("kernels", *_RULES)]


# What is about kernels' results: a fake's are the CPU device's. Each change needs of a fake what is about the host's code.
_LATER_ON_A_FAKE = (
    *("conformance", "fuzz", "cli"),
    *(f"devices/test_{name}.py" for name in ("autotune", "gathered", "matmul", "quantized_calls", "row_invariant")),
)
_TESTS = Path(__file__).parent


def pytest_configure() -> None:
    try:
        parts.takes(True, "")
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.fixture(scope="session")
def device() -> metalmm.Device:
    return metalmm.Device(DEVICE)


@pytest.fixture(params=COMPILERS if DEVICE == "cpu" else COMPILERS[-1:])
def each_compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test once with every C++ compiler of this machine."""
    monkeypatch.setenv("METALMM_CXX", request.param)
    return str(request.param)


@pytest.fixture(params=ALL_COMPILERS if DEVICE == "cpu" else [])
def every_compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same, with every version of them that is known to work."""
    monkeypatch.setenv("METALMM_CXX", request.param)
    return str(request.param)


def pytest_report_header() -> str:
    return f"metalmm {metalmm.__version__} on device {DEVICE}{' (the fake Metal)' if FAKE else ' (the fake driver)' if FAKE_CUDA else ''}: kernels compiled by {', '.join(COMPILERS)}, some by {', '.join(ALL_COMPILERS)}; cache {os.environ['METALMM_CACHE']}"


@pytest.fixture(autouse=True)
def _own_variants_stay_in_their_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Those of the changed kernels that tests/kernels runs are there alone, too."""
    before = dict(manifest._registry)
    if "kernels" not in request.path.parts:
        for v in [v for v in before.values() if "changed-kernels" in v.manifest.parts]:
            del manifest._registry[v]
    yield
    manifest._registry.clear()
    manifest._registry.update(before)


@pytest.fixture(autouse=True, scope="module")
def _what_is_there_stays() -> None:
    """Neither what the suite is made of nor what files before have left is what a test of this file has the garbage collector look through."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_rule_of_metal_is_broken() -> Iterator[None]:
    yield
    for fake in filter(None, (FAKE, FAKE_CUDA)):
        assert fake.take_violations() == []


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for Metal's archives; the modules behind the fake stay where they are."""
    monkeypatch.setattr(backends.metal, "cache", SimpleNamespace(folder=lambda: tmp_path, key_of=cache.key_of))
    return tmp_path


@pytest.fixture
def like() -> Iterator[Callable[..., metalmm.Device]]:
    """Devices whose fake GPU is like that."""
    before: dict[str, int] = {}

    def make(options: dict[str, Any] | None = None, /, **settings: int) -> metalmm.Device:
        for name, value in settings.items():
            was = FAKE.set(name, value)
            before.setdefault(name, was)
        return metalmm.Device("metal", **options or {})

    yield make
    gc.collect()
    for name, value in before.items():
        FAKE.set(name, value)


@pytest.fixture(autouse=True, scope="module")
def _these_choose_their_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever GPU the suite was asked to run on."""
    choose = FAKE and request.module.__name__.startswith(("test_metal", "test_unkind", "test_doctor"))
    for name, (plain, _) in FAKE.given.items() if choose else ():
        FAKE.set(name, plain)
    yield
    for name, (_, given) in FAKE.given.items() if choose else ():
        FAKE.set(name, given)


@functools.cache
def _lacking() -> list[str]:
    if DEVICE == "cpu":
        return []
    with metalmm.Device(DEVICE) as device:
        found = [*device.lacking, *(["work after a fault", "memory shared with the host"] if DEVICE == "cuda" else [])]
        return [*found, *(["memory that the fake driver follows"] if FAKE_CUDA else [])]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test with parameters of its own that asks for each compiler, one by turns; `make test-all` has all, as has who names a test."""
    turns, left_out = dict[str, dict[str, int]](), dict[pytest.Item, None]()
    is_named = config.getoption("lf", False) or any("::" in arg for arg in config.args)
    for item in items if DEVICE == "cpu" and not ALL_OF_IT and not is_named else ():
        params = _params_of(item)
        if len(params) < 2 or "each_compiler" not in params:
            continue
        function, others = item.nodeid.partition("[")[0], repr({k: v for k, v in params.items() if k != "each_compiler"})
        turn = turns.setdefault(function, {}).setdefault(others, len(turns[function]))
        if params["each_compiler"] != COMPILERS[turn % len(COMPILERS)]:
            left_out[item] = None
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]

    if parts.PART:
        _take_part(config, items)


def _take_part(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is of other parts of the suite. Rows of the array are those of this part already."""
    cases, left_out = defaultdict[str, list[pytest.Item]](list), dict[pytest.Item, None]()
    for item in items:
        is_row = item.path.is_relative_to(_TESTS / "kernels") and any(type(x).__name__ == "Row" for x in _params_of(item).values())
        if not is_row:
            cases[item.nodeid.partition("[")[0]].append(item)
    for name, of_one in cases.items():
        mark = of_one[0].get_closest_marker("rest")
        if ON_A_FAKE and any(of_one[0].path.is_relative_to(_TESTS / x) for x in _LATER_ON_A_FAKE):
            first = []
        elif mark:
            first = parts.spaced(of_one, mark.kwargs.get("but", 0))
        elif all([*_params_of(item)] == ["each_compiler"] for item in of_one):  # one each, by turns
            first = [of_one[zlib.crc32(name.encode()) % len(of_one)]]
        else:
            first = of_one
        left_out |= {item: None for item in of_one if not parts.takes(item in first, item.nodeid)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _params_of(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        if mark.args[0] in _lacking():
            pytest.skip(f"NOT run on this device, which lacks {mark.args[0]}")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test of what this GPU does not have (an older one, or a virtual machine's) was not run, and says so."""
    outcome: Any = yield
    error = outcome.excinfo[1] if outcome.excinfo else None
    if isinstance(error, metalmm.UnsupportedError) and "which this device lacks" in str(error):
        outcome.force_exception(pytest.skip.Exception(f"NOT run on this GPU: {error}"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Of -n auto; xdist by itself knows the affinity alone."""
    return cpus()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:  # a process of pytest-xdist tells its parent
        output["cases"] = counting.cases


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    counting.cases += getattr(node, "workeroutput", {}).get("cases", 0)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if counting.cases:
        terminalreporter.write_line(f"{counting.cases} matmuls on device {DEVICE} checked element by element against the float64 bound")
