"""What this run of the suite is on: the device, its fake, the compilers."""

from __future__ import annotations

import faulthandler
import os
import platform
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any


def cpus(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """That this process may use, by its affinity and its control group."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):  # versions 2 and 1
        try:
            quota, period = (int(word) for name in names for word in (groups / name).read_text().split())
        except (OSError, ValueError):  # no control group, or "max"
            continue
        if quota > 0:
            return max(1, min(count, quota // period))
    return count


faulthandler.enable()  # before a device takes faults of kernels: pytest's would come first, if a device is there sooner

# Workers of pytest-xdist share the CPUs; where they are begun, so many threads would be set for all. NumPy's BLAS reads it when it is imported.
_OWN = os.environ.setdefault("METALMM_TEST_THREADS", "" if "METALMM_CPU_THREADS" in os.environ else "ours")
_each = max(1, cpus() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
FAKE: Any = getattr(sys.modules.get("on_fake_metal"), "fake", None)  # the fake Metal, if this run is on it
FAKE_CUDA: Any = getattr(sys.modules.get("on_fake_cuda"), "fake", None)  # the fake driver of NVIDIA's GPUs, likewise
ON_A_FAKE = bool(FAKE or FAKE_CUDA)  # which is slow, and runs kernels as device cpu does
if _OWN:
    os.environ["METALMM_CPU_THREADS"] = str(_each)
    # Fakes run side by side, and threads of BLAS spin.
    os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1" if ON_A_FAKE else str(_each)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background; tests send it, to this process and to their own
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[2]
os.environ.setdefault("METALMM_CACHE", str(ROOT / "build" / "test-cache"))
DEVICE = os.environ.setdefault("METALMM_DEVICE", "cpu")  # what the suite runs on, where a test does not choose
REAL_GPU = DEVICE in ("metal", "cuda") and not ON_A_FAKE
ALL_OF_IT = bool(os.environ.get("METALMM_TEST_ALL"))  # make test-all
PART = os.environ.get("METALMM_TEST_PART", "")  # of the suite: support/parts.py
BY_TURNS = ON_A_FAKE and not ALL_OF_IT  # what a fake repeats of device cpu
SEED = int(os.environ.get("METALMM_TEST_SEED", "1"))  # of what is drawn
CAMPAIGN_SEED = int(os.environ.get("METALMM_TEST_SEED", time.time_ns() % 10**6))
CAMPAIGN_SECONDS = float(os.environ.get("METALMM_CAMPAIGN", "60"))
ARM = platform.machine() in ("arm64", "aarch64")  # where a division by zero is no fault
LINUX = sys.platform.startswith("linux")

# On macOS g++ is clang, too, and GCC of Homebrew does not take what the device asks for.
_FOUND = [next(filter(shutil.which, names), None) for names in (() if sys.platform == "darwin" else ("g++",), ("clang++", "clang++-14"))]
COMPILERS = os.environ.get("METALMM_TEST_COMPILERS", "").split() or [c for c in _FOUND if c] or ["c++"]
# What .ci/run installs, and what the workflow on GitHub has.
_KNOWN = (
    ["clang++"]
    if sys.platform == "darwin"
    else ["g++", "g++-13", "g++-14", "clang++", "clang++-14", "clang++-16", "clang++-19", "clang++-22"]
)
ALL_COMPILERS = list({os.path.realpath(path): name for name in _KNOWN if (path := shutil.which(name))}.values()) or COMPILERS
