"""Device cuda without a GPU: MSL becomes machine code for NVIDIA's GPUs, by NVRTC from PyPI."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import metalmm
import pytest
from conftest import ROOT
from metalmm import kernel_source, nvrtc
from metalmm.backends import cuda
from metalmm.errors import CompileError
from metalmm.kernel_source import KernelText
from metalmm.msl.program import Program

try:
    nvrtc.find()
except metalmm.Error as error:
    pytest.skip(f"{error}: device cuda's kernels are NOT compiled", allow_module_level=True)

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"


def built(text: str, kernel: str = "k", capability: int = 90, **options: object) -> bytes:
    expanded = metalmm.compiler.preprocess(text, "own.metal", for_metal=True)
    return cuda.build(KernelText(expanded, "own.metal", is_preprocessed=True), kernel, {}, capability, **options).read_bytes()  # type: ignore[arg-type]


EVERY = bool(os.environ.get("METALMM_EVERY_INSTANCE"))  # make machine-code: ten minutes of two cores


def instances() -> Iterator[tuple[Path, str, int]]:
    """By capability: of each variant the instance that a call with whole, aligned tiles takes, for 9.0; of each kernel one of each type, for
    8.0. Or all for both."""
    asked = set[tuple[Path, str, int]]()
    kernels = set[tuple[str, int]]()
    for v in (*metalmm.variants(), *metalmm.variants(enabled=False)):
        if not v.kernel:
            continue
        of_types = [list(group) for _, group in itertools.groupby(v.instances(), lambda x: x.partition(",")[0])]
        for number, all_of_type in enumerate(of_types):
            is_new = (v.kernel, number) not in kernels
            kernels.add((v.kernel, number))
            chosen = [(x, c) for x in all_of_type for c in (80, 90)] if EVERY else [(all_of_type[-1], 90)] * (number == 0)
            chosen += [(all_of_type[0], 80)] if is_new and not EVERY else []
            for instance, capability in chosen:
                if (v.source, instance, capability) not in asked:
                    asked.add((v.source, instance, capability))
                    yield v.source, instance, capability


@pytest.mark.parametrize(("source", "instance", "capability"), list(instances()), ids=lambda x: "" if isinstance(x, Path) else str(x))
def test_an_instance_becomes_machine_code(source: Path, instance: str, capability: int) -> None:
    text = KernelText(kernel_source.assemble(source, instance, "kernel"), str(source))
    assert cuda.build(text, "kernel", {}, capability).read_bytes().startswith(b"\x7fELF")


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "msl").glob("*.metal")), ids=lambda p: p.stem)
def test_what_the_language_tests_use(path: Path) -> None:
    text = metalmm.compiler.preprocess(path.read_text(), str(path), for_metal=True)
    for kernel in Program(text, str(path)).kernel_names():
        constants = {0: True, 1: 3} if kernel == "spaces" else {}
        for stops in (False, True):
            cuda.build(KernelText(text, str(path), is_preprocessed=True), kernel, constants, 90, stops=stops)


def test_the_compilers_words_point_into_the_file() -> None:
    with pytest.raises(CompileError, match=r"(?s)kernel 'k'.*own\.metal\(3\).*nowhere"):
        built(HEAD + "kernel void k(device float* y) { y[0] = nowhere; }\n")


def test_loads_are_as_wide_as_the_kernel_says() -> None:
    """16 bytes in one instruction, and nothing in local memory: what simd_octets is for."""
    source = kernel_source.KERNELS / "simd_octets.metal"
    text = KernelText(kernel_source.assemble(source, "simd_octets<half, 1, 2, 1, 4, 128, true>", "kernel"), str(source))
    lowered = cuda.cxx.lower(metalmm.compiler.preprocess(text.text, text.name, for_metal=True), "kernel", {}, compiler="nvrtc")
    ptx = nvrtc.find().ptx(lowered, text.name, cuda.options(90, is_ours=True, stops=False)).decode()
    ptx = ptx.partition(".entry")[2]
    assert ptx.count("ld.global.v4.u32") + ptx.count("ld.global.v2.u64") == 12  # 8 of B, 4 of A
    assert "st.local" not in ptx and "ld.local" not in ptx
