"""Run against an installed wheel, away from the source tree: everything it needs must have travelled with it."""

from importlib.metadata import version
from pathlib import Path

import metalmm
import numpy as np

package = Path(metalmm.__file__).parent
assert metalmm.__version__ == version("metalmm"), (metalmm.__version__, version("metalmm"))
for name in ("py.typed", "_core.pyi", "bench/qwen25_sizes.md", "resources/kernels/variants.toml", "resources/csrc/msl/runtime/msl.h"):
    assert (package / name).exists(), f"{name} is missing from the wheel"
out = metalmm.matmul("gemm_tiled/baseline", np.ones((3, 20), np.float16), np.ones((20, 5), np.float16))
assert (out == 20).all()
print(f"wheel of metalmm {metalmm.__version__} works")
