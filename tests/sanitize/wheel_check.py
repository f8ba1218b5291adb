"""Run against an installed wheel, away from the source tree: everything it needs must have travelled with it. Without a compiler on the
PATH all works that compiles nothing, and device cpu says what to install."""

import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import metalmm
import numpy as np

package = Path(metalmm.__file__).parent
assert metalmm.__version__ == version("metalmm"), (metalmm.__version__, version("metalmm"))
for name in (
    "py.typed",
    "_core.pyi",
    "bench/qwen25_sizes.md",
    "resources/kernels/variants.toml",
    "resources/csrc/msl/runtime/msl.h",
    "resources/docs/lab/gpus",
):
    assert (package / name).exists(), f"{name} is missing from the wheel"
x, w = np.ones((3, 20), np.float16), np.ones((20, 5), np.float16)
has_compiler = any(map(shutil.which, ("clang++", "g++", "c++")))
assert metalmm.variants() and (metalmm.reference(x, w) == 20).all()
if sys.platform == "darwin" or has_compiler:  # a Mac's GPU compiles Metal itself
    assert (metalmm.matmul("gemm_tiled/baseline", x, w) == 20).all()
else:
    try:
        metalmm.matmul("gemm_tiled/baseline", x, w)
    except metalmm.CompilerNotFoundError as error:
        assert "apt-get install g++" in str(error), error
    else:
        raise AssertionError("a kernel was compiled, and there is no compiler")
print(f"wheel of metalmm {metalmm.__version__} works {'with' if has_compiler else 'without'} a compiler")
