"""Copies of the kernels with changes, in a folder that their content names, so that what is compiled of them is found again."""

from __future__ import annotations

import hashlib
import os
import shutil

import metalmm
from metalmm import kernel_source

from .here import ROOT

Change = tuple[str, str, str]  # a file, its old text, its new
# On the CPU device, too, what asks for tensor cores: lanes are fibers, and a product of theirs is what the fake GPU makes of it.
ON_CPU: tuple[Change, ...] = (
    *(
        (path, "#ifdef __METALMM_CUDA__", "#if 1")
        for path in ("cuda/tensor.h", "cuda/products.h", "cuda/quantized_b.h", "cuda/groups.h", "cuda/halves.h", "include/tile.h")
    ),
    ("variants.toml", 'devices = ["cuda"]\n', ""),
)


def changed_kernels(prefix: str, *changes: Change) -> dict[str, metalmm.Variant]:
    """Every variant by its id, loaded under families with that prefix, with the changes and ON_CPU."""
    texts = {p.relative_to(kernel_source.KERNELS).as_posix(): p.read_text() for p in kernel_source.KERNELS.rglob("*") if p.is_file()}
    for path, old, new in (*changes, *ON_CPU, ("variants.toml", "[families.", f"[families.{prefix}")):
        assert old in texts[path], f"{path} has no {old!r}"
        texts[path] = texts[path].replace(old, new)
    digest = hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()[:16]
    folder = ROOT / "build" / "changed-kernels" / digest
    if not folder.is_dir():
        own = folder.with_name(f".{digest}-{os.getpid()}")
        for path, text in texts.items():
            (own / path).parent.mkdir(parents=True, exist_ok=True)
            (own / path).write_text(text)
        try:
            own.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(own)
    return {v.removeprefix(prefix): v for v in metalmm.load_variants(folder / "variants.toml")}
