"""Shared fixtures. Compiled kernels stay in build/test-cache, so that a second run is fast."""

from __future__ import annotations

import functools
import gc
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("METALMM_CACHE", str(ROOT / "build" / "test-cache"))
DEVICE = os.environ.setdefault("METALMM_DEVICE", "cpu")  # what the suite runs on, where a test does not choose
FAKE: Any = getattr(sys.modules.get("on_fake_metal"), "fake", None)  # the fake Metal, if this run is on it
FAKE_CUDA: Any = getattr(sys.modules.get("on_fake_cuda"), "fake", None)  # the fake driver of NVIDIA's GPUs, likewise

import metalmm  # noqa: E402
import numpy as np  # noqa: E402
from metalmm import backends, kernel_source, manifest, numerics  # noqa: E402
from metalmm.bench import runner  # noqa: E402

if FAKE_CUDA:  # a sample of some calls says as much as one of hundreds
    backends.get("cuda").replays, runner._MOST_COPIES = 2, 3
REAL_GPU = DEVICE in ("metal", "cuda") and not (FAKE or FAKE_CUDA)
METAL_ONLY = ["test_metal.py", "test_new_device.py", "test_unkind.py"]
ARM = platform.machine() in ("arm64", "aarch64")  # where a division by zero is no fault
# `make test` runs the suite once for each device that it can have.
CPU_ONLY = [
    "test_compiling.py",
    "test_machine_code.py",
    "test_debug_mode.py",
    "test_misbehaving.py",
    "test_msl_rules.py",
    "test_quantized.py",
    "test_surroundings.py",
]  # its own matter
collect_ignore = {"cpu": [*METAL_ONLY, "test_cuda.py"], "metal": [*CPU_ONLY, "test_cuda.py"]}.get(
    DEVICE, [*CPU_ONLY, *METAL_ONLY, "test_cpu_device.py"]
)
if REAL_GPU:
    collect_ignore += ["test_cpu_device.py"]  # what hardware does not check

# On macOS g++ is clang, too, and GCC of Homebrew does not take what the device asks for.
FOUND = [next(filter(shutil.which, names), None) for names in (() if sys.platform == "darwin" else ("g++",), ("clang++", "clang++-14"))]
COMPILERS = [c for c in FOUND if c] or ["c++"]
# What .ci/run installs, and what the workflow on GitHub has.
KNOWN = ["g++", "g++-13", "g++-14", "clang++", "clang++-14", "clang++-16", "clang++-19", "clang++-22"]
if sys.platform == "darwin":
    KNOWN = ["clang++"]
ALL_COMPILERS = list({os.path.realpath(path): name for name in KNOWN if (path := shutil.which(name))}.values()) or COMPILERS


def changed_kernels(folder: Path, prefix: str, *changes: tuple[str, str, str]) -> Iterator[dict[str, metalmm.Variant]]:
    """For a fixture: every variant by its id, from a copy of the kernels with `changes`, a file's old text and its new. On the CPU device, too,
    what asks for tensor cores: lanes are fibers, and a product of theirs is what the fake GPU makes of it."""
    shutil.copytree(kernel_source.KERNELS, folder)
    for path, old, new in (
        *changes,
        ("include/tensor.h", "#ifdef __METALMM_CUDA__", "#if 1"),
        ("variants.toml", 'devices = ["cuda"], ', ""),
        ("variants.toml", "[families.", f"[families.{prefix}"),
    ):
        text = (folder / path).read_text()
        assert old in text
        (folder / path).write_text(text.replace(old, new))
    yield {v.removeprefix(prefix): v for v in metalmm.load_variants(folder / "variants.toml")}
    manifest.unload(folder / "variants.toml")  # other modules list the families there are


@pytest.fixture(scope="session")
def device() -> metalmm.Device:
    return metalmm.Device(DEVICE)


@pytest.fixture(params=COMPILERS[:1] if REAL_GPU or DEVICE == "cuda" else COMPILERS)
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
def _own_variants_stay_in_their_test() -> Iterator[None]:
    before = dict(manifest._registry)
    yield
    manifest._registry.clear()
    manifest._registry.update(before)


@pytest.fixture(autouse=True)
def _no_rule_of_metal_is_broken() -> Iterator[None]:
    yield
    for fake in filter(None, (FAKE, FAKE_CUDA)):
        assert fake.take_violations() == []


def half(*shape: int, seed: int = 0) -> Any:
    """Normal draws in float16."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def carry_out(batch: metalmm.Batch, recorded: bool) -> None:
    """All of it, as it is or as a recording."""
    if recorded:
        recording = batch.record()
        recording.replay()
        recording.wait()
    else:
        batch.submit()
        batch.wait()


def allowed(v: str, bound: Any, reference: Any, options: dict[str, Any]) -> Any:
    """The bound, and for cuBLAS another rounding to the operands' type before C and bias: it has kernels, of batches above all, that do
    not add them in float32."""
    if v != "blas/baseline" or DEVICE != "cuda" or FAKE_CUDA or (options.get("bias") is None and not options.get("beta")):
        return bound
    before = abs(reference) + sum(abs(np.asarray(options[x], np.float64)) for x in ("bias", "c") if options.get(x) is not None)
    return bound + numerics.half_ulp(before * max(1.0, abs(options.get("beta", 0.0))))


def right(out: Any, a: Any, b: Any, **options: Any) -> None:
    """The result is within the float64 bound."""
    assert (abs(np.asarray(out) - metalmm.reference(a, b, **options)) <= metalmm.error_bound(a, b, **options)).all()


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, so that nothing is in an archive; the CPU's modules behind the fake stay."""
    compiled = Path(os.environ["METALMM_CACHE"])
    for entry in compiled.glob("*"):
        if not entry.name.endswith(".metalarchive"):
            (tmp_path / entry.name).symlink_to(entry)
    monkeypatch.setenv("METALMM_CACHE", str(tmp_path))
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
    choose = FAKE and request.module.__name__ in ("test_metal", "test_unkind", "test_doctor")
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


_cases = 0


def count_case() -> None:
    """One matmul was checked against the float64 bound."""
    global _cases
    _cases += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:  # a process of pytest-xdist tells its parent
        output["cases"] = _cases


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    global _cases
    _cases += getattr(node, "workeroutput", {}).get("cases", 0)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _cases:
        terminalreporter.write_line(f"{_cases} matmuls on device {DEVICE} checked element by element against the float64 bound")
