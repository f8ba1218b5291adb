"""Matrix multiplications by named Metal kernel variants; see README.md."""

from . import _core, errors
from ._core import Array, Batch, BatchTiming, Kernel, MatmulSpec, PreparedCall, Recording, matmul
from .device import Device, Library, capture, default_device, metal_devices
from .errors import (
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
from .manifest import Variant, build_pipeline, load_variants, unknown_message, variants
from .numerics import error_bound, reference

__version__ = "0.1.0"

__all__ = [
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
    "Kernel",
    "KernelError",
    "LayoutError",
    "Library",
    "LoweringError",
    "ManifestError",
    "MatmulSpec",
    "PreparedCall",
    "Recording",
    "ShapeError",
    "UnknownVariantError",
    "UnsupportedError",
    "Variant",
    "capture",
    "default_device",
    "error_bound",
    "load_variants",
    "matmul",
    "metal_devices",
    "reference",
    "variants",
]

_core._set_hooks(build_pipeline, unknown_message, default_device, list(errors._BY_KIND))


def _load_builtin() -> None:
    from .compiler import KERNELS

    load_variants(KERNELS / "variants.toml")


_load_builtin()
del _load_builtin, build_pipeline, unknown_message, errors
