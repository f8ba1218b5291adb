#!/usr/bin/env python3
"""Runs a script, or a module with -m, with device cuda on the fake driver and the fake NVRTC of tests/fakes/fake_cuda (tests/fakes/fake_cuda.sh
builds them).

python tests/fakes/on_fake_cuda.py -m pytest tests/devices
METALMM_FAKE=capability=80,in_time=1 python tests/fakes/on_fake_cuda.py ...     # another GPU: Settings in fake_cuda/fake.h
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import hashlib
import os
import shlex
import sys
from pathlib import Path

from common import apply_settings, end_if, run_arguments

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("METALMM_FAKE_CUDA_BUILD", ROOT / "build" / "fake-cuda"))
_NO_SETTING = -(1 << 62)


class FakeCuda:
    """The fake's own door, beside CUDA's: what it saw, what it shall do wrong."""

    def __init__(self, driver: str, nvrtc: str) -> None:
        self.driver, self.nvrtc = ctypes.CDLL(driver), ctypes.CDLL(nvrtc)
        self.driver.fake_cuda_set.restype = self.driver.fake_cuda_early.restype = ctypes.c_longlong
        self.given: dict[str, tuple[int, int]] = {}  # by $METALMM_FAKE: as it was before, and the value

    def _text(self, name: str) -> str:
        out = ctypes.create_string_buffer(1 << 20)
        getattr(self.driver, name)(out, ctypes.c_size_t(len(out)))
        return out.value.decode()

    def take_violations(self) -> list[str]:
        """Rules that were broken since the last call, "rule: what"."""
        return self._text("fake_cuda_take_violations").splitlines()

    def live(self) -> dict[str, int]:
        """Objects that are alive, by kind."""
        counts = {name: int(count) for name, count in (line.split() for line in self._text("fake_cuda_live").splitlines())}
        programs = int(self.nvrtc.fake_nvrtc_live())
        return {**counts, "Program": programs} if programs else counts

    def early(self) -> int:
        """Launches so far that read their weights before those before them were through; of a recording, each once."""
        return int(self.driver.fake_cuda_early())

    def inject(self, fault: str, count: int = 1, code: int = 0, skip: int = 0) -> None:
        """After `skip` times, the next `count` calls of csrc/cuda/driver.h's `fault` fail with a CUresult; "kernel": runs of a kernel."""
        self.driver.fake_cuda_inject(fault.encode(), count, code, skip)

    def clear_faults(self) -> int:
        """How many nobody came by."""
        return int(self.driver.fake_cuda_clear_faults())

    def last_error(self) -> str:
        """What the CPU said of the last kernel that failed."""
        return self._text("fake_cuda_last_error")

    def set(self, name: str, value: int) -> int:
        """What the GPU is like from now on, by the names of Settings in tests/fakes/fake_cuda/fake.h; as it was before."""
        before = int(self.driver.fake_cuda_set(name.encode(), ctypes.c_longlong(int(value))))
        if before == _NO_SETTING:
            raise ValueError(f"the fake has no setting {name}")
        return before


def _nvrtc() -> Path:
    """By a name that is another one for another compiler: it is part of the key under which metalmm keeps machine code."""
    from metalmm import modules
    from metalmm.compiler import find_compiler

    compiler = find_compiler()
    flags = [*compiler.flags, "-O0"]  # the host's code is what is looked at
    os.environ["METALMM_FAKE_NVRTC"] = shlex.join([compiler.path, *flags])
    os.environ["METALMM_FAKE_PARSED"] = shlex.join(modules._parsed_header(compiler, flags))
    library = BUILD / "libfakenvrtc.so"
    digest = hashlib.sha256(library.read_bytes() + f"{compiler}".encode() + os.environ["METALMM_FAKE_NVRTC"].encode()).hexdigest()[:12]
    link = BUILD / f"libfakenvrtc-{digest}.so"
    if not link.is_symlink():
        own = BUILD / f".{digest}-{os.getpid()}"
        own.symlink_to(library.name)
        own.replace(link)
    return link


def install() -> FakeCuda:
    """Makes metalmm find the fakes in place of NVIDIA's libraries."""
    driver = BUILD / "libfakecuda.so"
    assert driver.exists(), f"{driver}: run tests/fakes/fake_cuda.sh first"
    os.environ["METALMM_LIBCUDA"] = os.environ["METALMM_LIBCUBLAS"] = str(driver)
    os.environ.setdefault("METALMM_DEVICE", "cuda")
    atexit.register(_check_exit)  # before metalmm's own, so that it runs after it
    os.environ["METALMM_LIBNVRTC"] = str(nvrtc := _nvrtc())
    fake = FakeCuda(str(driver), str(nvrtc))
    apply_settings(fake)
    return fake


fake: FakeCuda | None = None


def _check_exit() -> None:
    """Everything must be gone, once all devices are closed, and every rule kept."""
    if not fake:
        return  # it did not start
    gc.collect()
    wrong = fake.take_violations()
    if leaked := fake.live():
        wrong.append(f"leak: alive at exit: {leaked}")
    end_if(wrong, "fake CUDA")


def main() -> None:
    global fake
    sys.modules["on_fake_cuda"] = sys.modules["__main__"]  # for tests that import it
    fake = install()
    run_arguments()


if __name__ == "__main__":
    main()
