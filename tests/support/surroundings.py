"""What several files of tests share: surroundings."""

from __future__ import annotations

from pathlib import Path

import metalmm
import pytest

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"


MANIFEST = """format = 2
[kernels.f]
source = "mine.metal"
template = ["threads"]
tile = [1, 64]
supports = { m = 1, layouts = ["nn"] }
[families.mine]
kernel = "f"
threads = 64
[families.mine.variants]
one = {}
two = {}
"""


ANEW = """format = 2
[kernels.fill]
template = ["threads"]
tile = [1, "threads"]
supports = { layouts = ["nn"] }
[families.anew]
kernel = "fill"
[families.anew.variants]
one = { threads = 32 }
two = { threads = 64 }
"""


FILL = """#include <metal_stdlib>
#include "epilogue.h"
using namespace metal;
template <int TG> [[kernel]] void fill(const device half* A [[buffer(0)]], const device half* B [[buffer(1)]], device half* D [[buffer(2)]],
  const device half* C [[buffer(3)]], const device half* bias [[buffer(4)]], constant MatmulParams& p [[buffer(5)]],
  uint3 at [[thread_position_in_grid]]) { if (at.x < p.n && at.y < p.m) D[at.y * p.ldd + at.x] = VALUE; }
"""


def refused(folder: Path, manifest: str, message: str) -> None:
    """A manifest beside an empty k.metal is refused, and changes nothing."""
    (folder / "k.metal").write_text("")
    (folder / "m.toml").write_text(manifest)
    known = metalmm.variants()
    with pytest.raises(metalmm.ManifestError, match=message):
        metalmm.load_variants(folder / "m.toml")
    assert metalmm.variants() == known


def _write(folder: Path, value: str = "1.0h", manifest: str = ANEW) -> Path:
    (folder / "fill.metal").write_text(FILL.replace("VALUE", value))
    (folder / "anew.toml").write_text(manifest)
    return folder / "anew.toml"
