"""The extension's types, by hand: nanobind's generator knows no overloads for functions of Python's own calling convention.
tests/test_typing.py compares this file with the extension."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, overload

import numpy as np
import numpy.typing as npt

class _SupportsDLPack(Protocol):
    def __dlpack__(self) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, Any]: ...

NDArray: TypeAlias = npt.NDArray[Any]
HostArray: TypeAlias = NDArray | _SupportsDLPack
AnyArray: TypeAlias = HostArray | Array
_Out = TypeVar("_Out", bound=AnyArray)

class MatmulSpec:
    def __init__(
        self,
        m: int,
        n: int,
        k: int,
        batch: int = 1,
        transpose_a: bool = False,
        transpose_b: bool = False,
        bias: bool = False,
        alpha: float = 1.0,
        beta: float = 0.0,
        dtype: npt.DTypeLike = "float16",
    ) -> None: ...
    @property
    def m(self) -> int: ...
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def transpose_a(self) -> bool: ...
    @property
    def transpose_b(self) -> bool: ...
    @property
    def bias(self) -> bool: ...
    @property
    def alpha(self) -> float: ...
    @property
    def beta(self) -> float: ...
    @property
    def dtype(self) -> str: ...
    @property
    def layout(self) -> str: ...
    @property
    def least_bytes(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[type[MatmulSpec], tuple[Any, ...]]: ...

class BatchTiming:
    @property
    def encode(self) -> float: ...
    @property
    def commit(self) -> float: ...
    @property
    def wait(self) -> float: ...
    @property
    def device(self) -> float | None: ...
    @property
    def dispatches(self) -> list[float | None]: ...
    @property
    def calls(self) -> int: ...

class Array:
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def ndim(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def device(self) -> Device: ...
    @property
    def device_address(self) -> int: ...
    def numpy(self) -> NDArray: ...
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray: ...
    def __dlpack__(self, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __getitem__(self, index: Any, /) -> Array: ...
    def __len__(self) -> int: ...

class PreparedCall:
    def __call__(self) -> Any: ...
    @property
    def out(self) -> Any: ...
    @property
    def variant(self) -> str: ...
    @property
    def spec(self) -> MatmulSpec: ...
    @property
    def device_seconds(self) -> float | None: ...

class Recording:
    def replay(self) -> None: ...
    def wait(self) -> None: ...
    @property
    def timing(self) -> BatchTiming: ...
    def __len__(self) -> int: ...

class Batch:
    def __enter__(self) -> Batch: ...
    def __exit__(self, type: Any, value: Any, traceback: Any) -> None: ...
    @overload
    def matmul(
        self,
        variant: str,
        a: Array,
        b: AnyArray,
        *,
        bias: AnyArray | None = None,
        c: AnyArray | None = None,
        alpha: float = 1.0,
        beta: float = 0.0,
        transpose_a: bool = False,
        transpose_b: bool = False,
        out: None = None,
    ) -> Array: ...
    @overload
    def matmul(
        self,
        variant: str,
        a: HostArray,
        b: Array,
        *,
        bias: AnyArray | None = None,
        c: AnyArray | None = None,
        alpha: float = 1.0,
        beta: float = 0.0,
        transpose_a: bool = False,
        transpose_b: bool = False,
        out: None = None,
    ) -> Array: ...
    @overload
    def matmul(
        self,
        variant: str,
        a: HostArray,
        b: HostArray,
        *,
        bias: AnyArray | None = None,
        c: AnyArray | None = None,
        alpha: float = 1.0,
        beta: float = 0.0,
        transpose_a: bool = False,
        transpose_b: bool = False,
        out: None = None,
    ) -> NDArray: ...
    @overload
    def matmul(
        self,
        variant: str,
        a: AnyArray,
        b: AnyArray,
        *,
        bias: AnyArray | None = None,
        c: AnyArray | None = None,
        alpha: float = 1.0,
        beta: float = 0.0,
        transpose_a: bool = False,
        transpose_b: bool = False,
        out: _Out,
    ) -> _Out: ...
    def add(self, call: PreparedCall) -> Any: ...
    def submit(self) -> None: ...
    def record(self) -> Recording: ...
    def wait(self) -> None: ...
    @property
    def timing(self) -> BatchTiming: ...
    def __len__(self) -> int: ...

class Kernel:
    def __init__(self, device: Device, code: Any, name: str, constants: dict[Any, Any], types: dict[int, str], /) -> None: ...
    def __call__(
        self,
        *args: AnyArray | bytes | float | np.generic | Mapping[int, AnyArray | bytes | float | np.generic | None] | None,
        grid: int | Sequence[int] = ...,
        threads: int | Sequence[int] = ...,
        threadgroup: int | Sequence[int],
        threadgroup_memory: Mapping[int, int] | None = None,
        batch: Batch | None = None,
    ) -> float | None: ...
    @property
    def name(self) -> str: ...
    @property
    def max_total_threads_per_threadgroup(self) -> int: ...
    @property
    def static_threadgroup_memory_length(self) -> int: ...
    @property
    def buffer_indices(self) -> list[int]: ...

class Device:
    def __init__(self, name: str, options: dict[str, bool | int | float]) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def info(self) -> dict[str, Any]: ...
    @property
    def counters(self) -> dict[str, int]: ...
    def array(self, array: AnyArray) -> Array: ...
    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike = "float16") -> Array: ...
    def batch(self, *, per_dispatch: bool = False) -> Batch: ...
    def prepare(
        self,
        variant: str,
        a: AnyArray,
        b: AnyArray,
        *,
        bias: AnyArray | None = None,
        c: AnyArray | None = None,
        alpha: float = 1.0,
        beta: float = 0.0,
        transpose_a: bool = False,
        transpose_b: bool = False,
        out: AnyArray | None = None,
    ) -> PreparedCall: ...
    def close(self) -> None: ...
    def _watch(self, out: Any, counts: Any) -> None: ...
    def _kernel_names(self, text: str) -> list[str]: ...
    def _start_capture(self, path: str) -> None: ...
    def _stop_capture(self) -> None: ...

@overload
def matmul(
    variant: str,
    a: Array,
    b: AnyArray,
    *,
    bias: AnyArray | None = None,
    c: AnyArray | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out: None = None,
    device: Device | None = None,
) -> Array: ...
@overload
def matmul(
    variant: str,
    a: HostArray,
    b: Array,
    *,
    bias: AnyArray | None = None,
    c: AnyArray | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out: None = None,
    device: Device | None = None,
) -> Array: ...
@overload
def matmul(
    variant: str,
    a: HostArray,
    b: HostArray,
    *,
    bias: AnyArray | None = None,
    c: AnyArray | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out: None = None,
    device: Device | None = None,
) -> NDArray: ...
@overload
def matmul(
    variant: str,
    a: AnyArray,
    b: AnyArray,
    *,
    bias: AnyArray | None = None,
    c: AnyArray | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out: _Out,
    device: Device | None = None,
) -> _Out: ...

_SPECIALIZATIONS: tuple[str, ...]
_TYPE_SHIFT: int
_LAYOUTS: tuple[str, ...]
_OPERAND_TYPES: tuple[str, ...]

def _set_hooks(
    build_pipeline: Callable[..., Any],
    unknown_variant: Callable[[str], str],
    default_device: Callable[[], Device],
    pack_number: Callable[[Any, str, str], bytes],
    exceptions: list[type[BaseException]],
    /,
) -> None: ...
def _register_variant(**fields: Any) -> None: ...
def _device_names(name: str, /) -> list[str]: ...
def _lacks(id: str, spec: MatmulSpec, /) -> str: ...
def _prepare_pipeline(device: Device, id: str, spec: MatmulSpec, /) -> None: ...
def _describe(device: Device, id: str, spec: MatmulSpec, /) -> tuple[tuple[int, int, int], int, int]: ...
def _specialization(id: str, spec: MatmulSpec, /) -> int: ...
def _forget_pipelines(device: Device, id: str, /) -> None: ...
