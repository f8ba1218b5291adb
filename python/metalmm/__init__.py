"""Matrix multiplications by named Metal kernel variants; see README.md."""

import inspect as _inspect
import sys as _sys
from typing import Any as _Any

from . import _core, errors
from ._core import Array, Batch, BatchTiming, Kernel, MatmulSpec, PreparedCall, Recording, matmul, matmul_fused
from .checking import Finding, check, count
from .device import Device, Library, capture, default_device, metal_devices
from .errors import (
    ArgumentError,
    ClosedError,
    CompileError,
    CompilerNotFoundError,
    DeviceError,
    DTypeError,
    Error,
    KernelError,
    LayoutError,
    LoweringError,
    ManifestError,
    ShapeError,
    UnknownVariantError,
    UnsupportedError,
)
from .gathered import matmul_gathered
from .kernel_source import pack_number
from .manifest import BUILTIN as _BUILTIN
from .manifest import add_point, load_variants, variants
from .numerics import error_bound, reference
from .pipelines import build_pipeline
from .profile.trace import trace
from .quantized import QuantizedArray, from_gguf, from_mlx, quantize
from .tuning import choose_variant, load_tuning
from .variant import Variant
from .weight_files import WeightFile, load_gguf, load_safetensors

__version__ = "0.1.0"

if not getattr(_sys, "_is_gil_enabled", lambda: True)():  # a free-threaded Python takes the lock for the extension, unless it must not
    raise ImportError("metalmm needs Python's global interpreter lock; this process runs without it: leave out PYTHON_GIL=0 or -X gil=0")

__all__ = [
    "ArgumentError",
    "Array",
    "Batch",
    "BatchTiming",
    "ClosedError",
    "CompileError",
    "CompilerNotFoundError",
    "DTypeError",
    "Device",
    "DeviceError",
    "Error",
    "Finding",
    "Kernel",
    "KernelError",
    "LayoutError",
    "Library",
    "LoweringError",
    "ManifestError",
    "MatmulSpec",
    "PreparedCall",
    "QuantizedArray",
    "Recording",
    "ShapeError",
    "UnknownVariantError",
    "UnsupportedError",
    "Variant",
    "WeightFile",
    "capture",
    "check",
    "count",
    "default_device",
    "error_bound",
    "from_gguf",
    "from_mlx",
    "load_gguf",
    "load_safetensors",
    "load_tuning",
    "load_variants",
    "matmul",
    "matmul_fused",
    "matmul_gathered",
    "metal_devices",
    "quantize",
    "reference",
    "trace",
    "variants",
]

_core._set_hooks(build_pipeline, add_point, default_device, pack_number, choose_variant, QuantizedArray, list(errors._BY_KIND))


def _signatures() -> None:
    """What inspect.signature() shows: the extension's classes say it of their methods alone."""

    def make(
        m: int,
        n: int,
        k: int,
        batch: int = 1,
        transpose_a: bool = False,
        transpose_b: bool = False,
        bias: bool = False,
        alpha: float = 1.0,
        beta: float = 0.0,
        dtype: _Any = "float16",
        b_storage: str = "dense",
        also_n: _Any = (),
        swiglu: bool = False,
        row_invariant: bool = False,
    ) -> None: ...

    def call(
        *args: _Any, grid: _Any = None, threads: _Any = None, threadgroup: _Any, threadgroup_memory: _Any = None, batch: _Any = None
    ) -> None: ...

    MatmulSpec.__signature__ = _inspect.signature(make)  # type: ignore[attr-defined]
    Kernel.__signature__ = _inspect.signature(call)  # type: ignore[attr-defined]
    PreparedCall.__signature__ = _inspect.Signature()  # type: ignore[attr-defined]


_signatures()


load_variants(_BUILTIN)
del _signatures, choose_variant, build_pipeline, pack_number, add_point, errors
