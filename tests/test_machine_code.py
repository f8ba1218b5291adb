"""Device cuda without a GPU: MSL becomes machine code for NVIDIA's GPUs, by NVRTC from PyPI."""

from __future__ import annotations

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


def instances(every: bool) -> Iterator[tuple[Path, str]]:
    """Of each kernel of the manifest: all in half and, of the other types and of what another source has already, the first."""
    seen = set[tuple[str, str]]()
    asked = set[tuple[Path, str]]()
    for v in (*metalmm.variants(), *metalmm.variants(enabled=False)):
        for instance in v.instances() if v.kernel else ():
            kind = next(t for t in ("bfloat", "half", "float") if t in instance)
            is_new = (v.kernel, kind) not in seen
            seen.add((v.kernel, kind))
            if (is_new or (every and kind == "half")) and (v.source, instance) not in asked:
                asked.add((v.source, instance))
                yield v.source, instance


@pytest.mark.parametrize(("source", "instance"), [(s, i) for s, i in instances(every=True)], ids=lambda x: x if isinstance(x, str) else "")
def test_an_instance_becomes_machine_code_of_hopper(source: Path, instance: str) -> None:
    text = KernelText(kernel_source.assemble(source, instance, "kernel"), str(source))
    assert cuda.build(text, "kernel", {}, 90).read_bytes().startswith(b"\x7fELF")


@pytest.mark.parametrize(("source", "instance"), list(instances(every=False)), ids=lambda x: x if isinstance(x, str) else "")
def test_each_kernel_becomes_machine_code_of_ampere(source: Path, instance: str) -> None:
    text = KernelText(kernel_source.assemble(source, instance, "kernel"), str(source))
    assert cuda.build(text, "kernel", {}, 80).read_bytes().startswith(b"\x7fELF")


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
