"""Arrays as NumPy's users and other libraries expect them: DLPack in and out, dtypes, indexing without a copy, wrong calls."""

from __future__ import annotations

import ctypes
import gc
import inspect
import itertools
import pickle
import weakref
from typing import Any

import metalmm
import ml_dtypes
import numpy as np
import pytest
from support.here import DEVICE
from support.numbers import carry_out, half

V = "gemv/baseline"


class Foreign:
    """An array of another library: DLPack and nothing else."""

    def __init__(self, array: Any, device: tuple[int, int] = (1, 0), *, versions: bool = True) -> None:
        self.array, self._device, self._versions = array, device, versions

    def __dlpack__(self, **options: Any) -> Any:
        if options and not self._versions:
            raise TypeError("no such keyword")
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def test_whatever_speaks_dlpack_is_taken(device: metalmm.Device) -> None:
    a, b = np.ones((1, 8), np.float32), np.arange(64, dtype=np.float32).reshape(8, 8)
    out = np.zeros((1, 8), np.float32)
    for versions in (True, False):
        given = Foreign(out, versions=versions)
        assert metalmm.matmul(V, Foreign(a, versions=versions), Foreign(b, versions=versions), out=given, device=device) is given
        np.testing.assert_array_equal(out, a @ b)
        out[...] = 0
    np.testing.assert_array_equal(np.asarray(device.array(Foreign(b[:, ::2]))), b[:, ::2])
    assert type(metalmm.matmul(V, Foreign(a), Foreign(b), device=device)) is np.ndarray
    with device.batch() as batch:
        result = batch.matmul(V, Foreign(a), Foreign(b))
    np.testing.assert_array_equal(np.asarray(result), a @ b)
    b.flags.writeable = False
    np.testing.assert_array_equal(metalmm.matmul(V, a, Foreign(b), device=device), a @ b)
    with pytest.raises(metalmm.LayoutError, match=r"out .* is read-only"):
        metalmm.matmul(V, a, b, out=Foreign(b[:1]), device=device)
    with pytest.raises(metalmm.DeviceError, match="a is a Foreign in the memory of another device; copy it to the CPU first"):
        metalmm.matmul(V, Foreign(a, device=(2, 7)), b, device=device)


def test_a_foreign_array_that_refuses_says_why(device: metalmm.Device) -> None:
    class Refusing(Foreign):
        def __dlpack__(self, **options: Any) -> Any:
            raise RuntimeError("it requires a gradient")

    with pytest.raises(metalmm.DTypeError, match="does not hand its memory over: it requires a gradient"):
        metalmm.matmul(V, Refusing(np.ones((1, 8))), np.ones((8, 8), np.float32), device=device)


def test_torch(device: metalmm.Device) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: its DLPack is NOT tested")
    takes = DEVICE != "cuda" or torch.cuda.is_available()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x, w = torch.randn(1, 96, dtype=dtype), torch.randn(40, 96, dtype=dtype)
        out = torch.full((1, 40), torch.nan, dtype=dtype)
        assert metalmm.matmul("gemv_nt_vec4/c4_tg64", x, w, transpose_b=True, out=out, device=device) is out
        assert torch.allclose(out.float(), x.float() @ w.float().T, atol=0.2, rtol=0.02)
        array = device.array(w)
        assert not takes or torch.equal(torch.from_dlpack(array).cpu(), w)
        result = metalmm.matmul("gemv_nt_vec4/c4_tg64", x, array, transpose_b=True)
        assert not takes or torch.equal(torch.from_dlpack(result).cpu(), out)
    with pytest.raises(metalmm.DTypeError, match="does not hand its memory over"):
        metalmm.matmul(V, torch.ones(1, 8, requires_grad=True), torch.ones(8, 8), device=device)


def test_mlx(device: metalmm.Device) -> None:
    """Whose bfloat16 says a format in the buffer protocol that is nobody's, and is plain by DLPack."""
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed: that its arrays are taken is NOT tested")
    rng = np.random.default_rng(0)
    for dtype in (mx.float16, mx.bfloat16, mx.float32):
        x, w = (mx.array(rng.standard_normal(size).astype(np.float32)).astype(dtype) for size in ((1, 96), (40, 96)))
        mx.eval(x, w)
        out = np.asarray(metalmm.matmul("auto", x, w, transpose_b=True, device=device)).astype(np.float32)
        np.testing.assert_allclose(out, np.array(x.astype(mx.float32) @ w.astype(mx.float32).T), atol=0.2, rtol=0.02)


def test_dtypes_are_numpys(device: metalmm.Device) -> None:
    for dtype in (np.float16, "float32", np.dtype("int8"), "uint64", bool, np.complex64, np.complex128, ml_dtypes.bfloat16, "bfloat16"):
        array = device.empty((3, 4), dtype)
        assert array.dtype == np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        assert (array.size, array.itemsize, array.nbytes) == (12, array.dtype.itemsize, 12 * array.dtype.itemsize)
        source = (np.arange(12).reshape(3, 4) % 2).astype(array.dtype)
        copy = device.array(source)
        np.testing.assert_array_equal(copy.numpy(), source)
        assert copy.numpy().dtype == source.dtype
    points = np.array([(1, 2.5), (3, 4.5)], dtype=[("x", np.int32), ("y", np.float32)])
    array = device.array(points)
    assert array.dtype == points.dtype
    np.testing.assert_array_equal(array.numpy(), points)
    np.testing.assert_array_equal(array[1:].numpy(), points[1:])
    assert device.empty(3, points.dtype).dtype == points.dtype
    for dtype in ("O", "U3", "M8[s]", ">f4"):
        with pytest.raises(metalmm.DTypeError, match="is not supported"):
            device.empty(3, dtype)
    with pytest.raises(metalmm.DTypeError):
        device.array(np.array(["a"]))


def test_reshape_is_the_same_memory(device: metalmm.Device) -> None:
    array = device.array(np.arange(24, dtype=np.float32).reshape(2, 12))
    row = array[1:].reshape((3, 4))
    np.testing.assert_array_equal(row.numpy(), np.arange(12, 24).reshape(3, 4))
    row.write(np.zeros((3, 4), np.float32))
    assert (array.numpy()[1] == 0).all() and (array.numpy()[0] == np.arange(12)).all()
    assert array.reshape(24).shape == (24,) and device.empty((0, 3)).reshape((3, 0, 5)).size == 0
    for shape in ((5, 5), (), (-2, -12), (1,) * 9, (2**40, 2**40)):
        with pytest.raises(metalmm.ShapeError):
            array.reshape(shape)
    with pytest.raises(metalmm.LayoutError, match="not contiguous"):
        array[:, :6].reshape((3, 4))


def test_write_copies_and_says_what_does_not_fit(device: metalmm.Device) -> None:
    array = device.empty((3, 4))
    source = half(4, 6)[:, ::2].T  # of any strides
    array.write(source)
    np.testing.assert_array_equal(array.numpy(), source)
    array.write(device.array(source + 1))
    np.testing.assert_array_equal(array.numpy(), source + 1)
    for wrong, error in ((half(4, 3), "ShapeError"), (half(3, 4).astype(np.float32), "DTypeError"), (half(12), "ShapeError")):
        with pytest.raises(getattr(metalmm, error)):
            array.write(wrong)
    with pytest.raises(metalmm.LayoutError):
        array[:, 1:3].write(half(3, 2))
    np.testing.assert_array_equal(array.numpy(), source + 1)


def test_indexing_gives_the_same_memory(device: metalmm.Device) -> None:
    source = np.arange(2 * 3 * 8, dtype=np.float16).reshape(2, 3, 8)
    array = device.array(source)
    for index in (0, -1, np.s_[1:], np.s_[:, 1], np.s_[0, 1:3], np.s_[..., 4:8], np.s_[1, ..., ::2], np.s_[:, -1, 3:], np.s_[1:1], (0, 2),
                  np.s_[...], (), (1, 1, 5)):  # fmt: skip
        view = array[index]
        np.testing.assert_array_equal(view.numpy(), source[index])
        assert view.shape == np.asarray(source[index]).shape
    array[1].write(np.full((3, 8), 7, np.float16))
    assert (array.numpy()[1] == 7).all()
    assert [row.shape for row in array] == [(3, 8)] * 2
    assert len(array) == 2
    assert array[1, 2].device_address == array.device_address + 2 * (24 + 16)
    for index, message in [(2, "index 2 is outside axis 0 of size 2"), ((0, 0, 0, 0), "takes whole numbers, slices"), ("x", "takes whole"),
                           (np.s_[::-1], "takes whole"), ([0, 1], "takes whole"), ((..., ...), "takes whole"), (1.5, "takes whole")]:  # fmt: skip
        with pytest.raises(IndexError, match=message):
            array[index]


def test_slices_are_operands(device: metalmm.Device) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((4, 24)).astype(np.float16), rng.standard_normal((3, 24, 40)).astype(np.float16)
    da, dw, out = device.array(x), device.array(w), device.empty((5, 40))
    for i in range(3):
        result = metalmm.matmul(V, da[i : i + 1], dw[i])
        np.testing.assert_array_equal(result.numpy(), metalmm.matmul(V, x[i : i + 1].copy(), w[i].copy(), device=device))
        assert metalmm.matmul(V, da[i : i + 1], dw[i], out=out[i : i + 1]) is not None
        np.testing.assert_array_equal(out[i].numpy(), result.numpy()[0])
    columns = metalmm.matmul(V, da[:1], dw[0, :, 7:30])  # rows further apart than they are long, off any alignment
    np.testing.assert_array_equal(columns.numpy(), metalmm.matmul(V, x[:1], w[0, :, 7:30].copy(), device=device))
    with pytest.raises(metalmm.LayoutError, match=r"out .* overlaps a"):
        metalmm.matmul(V, out[:1, :24], dw[0], out=out[:1])


@pytest.mark.skipif(DEVICE != "cpu", reason="blas")
def test_blas_tells_slices_of_one_array_apart(device: metalmm.Device) -> None:
    w = np.stack([np.full((4, 4), i, np.float16) for i in range(3)])
    weights, x = device.array(w), device.array(np.ones((1, 4), np.float16))
    for i in (0, 1, 2, 1):
        assert (metalmm.matmul("blas/baseline", x, weights[i]).numpy() == 4 * i).all()


SOURCE = """#include <metal_stdlib>
using namespace metal;
struct Point { int x; float y; };
struct Pointers { device float* to; uint count; };
kernel void add(device float* y [[buffer(0)]], constant uint& n [[buffer(1)]], constant float& f [[buffer(2)]], constant short& s [[buffer(3)]],
                constant half& h [[buffer(4)]], constant bool& b [[buffer(5)]], constant bfloat& g [[buffer(6)]], constant long& l [[buffer(7)]],
                uint i [[thread_position_in_grid]]) { y[i] += float(n) + f + s + float(h) + (b ? 1000.0f : 0.0f) + float(g) + float(l); }
kernel void swapped(const device float2* z [[buffer(0)]], device Point* p [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  p[i].x = int(z[i].y); p[i].y = z[i].x;
}
kernel void places(device uint4* out [[buffer(0)]], device atomic_uint* count [[buffer(1)]], uint3 at [[thread_position_in_grid]],
                   uint3 size [[threads_per_grid]], uint3 group [[threads_per_threadgroup]], uint3 full [[dispatch_threads_per_threadgroup]],
                   uint3 groups [[threadgroups_per_grid]], uint index [[thread_index_in_threadgroup]], uint lanes [[simdgroups_per_threadgroup]]) {
  atomic_fetch_add_explicit(count, 1, memory_order_relaxed);
  out[(at.z * size.y + at.y) * size.x + at.x] = uint4(group.x * 10000 + group.y * 100 + group.z, full.x * 10000 + full.y * 100 + full.z,
                                                     groups.x * 10000 + groups.y * 100 + groups.z, lanes);
}
kernel void through(constant Pointers& p [[buffer(0)]], device float* keep [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  if (i < p.count) p.to[i] = 3.0f * i;
}
"""


def test_a_python_number_binds_as_its_parameters_type(device: metalmm.Device) -> None:
    add, y = device.compile(SOURCE).kernel("add"), np.zeros(4, np.float32)
    add(y, 3, 0.5, -7, 0.25, True, 1.5, -(2**40), threads=4, threadgroup=4)
    np.testing.assert_array_equal(y, np.full(4, np.float32(np.float32(3 + 0.5 - 7 + 0.25 + 1000 + 1.5) - 2.0**40)))
    good = [y, 3, 0.5, -7, 0.25, True, 1.5, 0]
    for place, value, message in [(1, -1, "-1 is outside the range of the kernel's parameter, of type uint"), (1, 1.5, "1.5 is no whole number"),
                                  (3, 40000, "outside the range .* short"), (4, 1e6, "outside the range .* half"), (5, 2, "of type bool"),
                                  (2, 1e300, "outside the range .* float"), (6, 3.4e38, "outside the range .* bfloat")]:  # fmt: skip
        wrong = [*good[:place], value, *good[place + 1 :]]
        with pytest.raises(metalmm.DTypeError, match=message):
            add(*wrong, threads=4, threadgroup=4)
    with pytest.raises(metalmm.DTypeError, match=r"buffer 0 is int; pass .* or a number whose type says its size"):
        add(5, *good[1:], threads=4, threadgroup=4)
    add({0: y, 1: np.uint32(1), 2: 2, 3: 0, 4: 0, 5: False, 6: 0, 7: 0}, threads=4, threadgroup=4)


def test_complex_and_structured_arrays_are_bytes(device: metalmm.Device) -> None:
    kernel = device.compile(SOURCE).kernel("swapped")
    z = np.array([1 + 2j, 3 + 4j, 5 + 6j], np.complex64)
    points = np.zeros(3, [("x", np.int32), ("y", np.float32)])
    kernel(z, points, threads=3, threadgroup=2)
    np.testing.assert_array_equal(points["x"], [2, 4, 6])
    np.testing.assert_array_equal(points["y"], [1, 3, 5])
    array = device.array(points)
    kernel(device.array(z)[1:], array[1:], threads=2, threadgroup=2)
    np.testing.assert_array_equal(array.numpy()["x"], [2, 4, 6])


@pytest.mark.parametrize(
    ("threads", "threadgroup"), [((10,), (4,)), ((7, 5), (4, 2)), ((5, 3, 4), (2, 2, 3)), ((64,), (32,)), ((1,), (64,))]
)
@pytest.mark.parametrize("how", ["now", "batch", "recording"])
def test_dispatch_by_threads(threads: tuple[int, ...], threadgroup: tuple[int, ...], how: str, device: metalmm.Device) -> None:
    kernel = device.compile(SOURCE).kernel("places")
    size, full = (*threads, 1, 1)[:3], (*threadgroup, 1, 1)[:3]
    total = int(np.prod(size))
    out, count = device.array(np.zeros((total, 4), np.uint32)), device.array(np.zeros(1, np.uint32))
    if how == "now":
        kernel(out, count, threads=threads, threadgroup=threadgroup)
    else:
        batch = device.batch()
        kernel(out, count, threads=threads, threadgroup=threadgroup, batch=batch)
        carry_out(batch, recorded=how == "recording")
    assert count.numpy()[0] == total, "no thread beyond the grid"
    groups = [-(-s // f) for s, f in zip(size, full, strict=True)]
    found = out.numpy().reshape(size[2], size[1], size[0], 4)
    for z, y, x in np.ndindex(size[2], size[1], size[0]):
        own = [min(f, s - at // f * f) for s, f, at in zip(size, full, (x, y, z), strict=True)]
        code = [v[0] * 10000 + v[1] * 100 + v[2] for v in (own, full, groups)]
        assert list(found[z, y, x]) == [*code, -(-int(np.prod(own)) // 32)]


def test_grid_and_threads_exclude_one_another(device: metalmm.Device) -> None:
    kernel, y = device.compile(SOURCE).kernel("through"), np.zeros(4, np.float32)
    for options in ({}, {"grid": 1, "threads": 4}):
        with pytest.raises(metalmm.ArgumentError, match="either grid, in threadgroups, or threads, in threads"):
            kernel(b"\0" * 16, y, threadgroup=4, **options)
    with pytest.raises(metalmm.ArgumentError, match="'threadgroup' is missing"):
        kernel(b"\0" * 16, y, grid=4)
    with pytest.raises(metalmm.KernelError, match="threads takes up to three sizes"):
        kernel(b"\0" * 16, y, threads=0, threadgroup=4)


@pytest.mark.needs("memory that the fake driver follows")
def test_a_device_address_is_a_pointer_for_kernels(device: metalmm.Device) -> None:
    class Pointers(ctypes.Structure):
        _fields_ = (("to", ctypes.c_uint64), ("count", ctypes.c_uint32))

    array = device.array(np.zeros(8, np.float32))
    device.compile(SOURCE).kernel("through")(bytes(Pointers(array[2:].device_address, 5)), array, threads=8, threadgroup=8)
    np.testing.assert_array_equal(array.numpy(), [0, 0, 0, 3, 6, 9, 12, 0])


def test_wrong_calls_name_the_argument(device: metalmm.Device) -> None:
    a, b = np.ones((1, 4), np.float16), np.ones((4, 4), np.float16)
    batch = device.batch()
    calls: list[tuple[Any, str]] = [
        (lambda: metalmm.matmul(3, "a", []), r"variant is 3; a variant is named by a string"),
        (lambda: metalmm.matmul(V, "a", []), r"a is str; pass a numpy array"),
        (lambda: metalmm.matmul(V, a, b, transposeb=True), r"matmul: it has no argument 'transposeb'; did you mean 'transpose_b'\?"),
        (lambda: metalmm.matmul(V, a, b, zzz=1), r"it has no argument 'zzz'; it has variant, a, b, bias"),
        (lambda: metalmm.matmul(V, a), r"argument 'b' is missing"),
        (lambda: metalmm.matmul(), r"argument 'variant' is missing"),
        (lambda: metalmm.matmul(V, a, b, a), r"4 arguments by position; it takes 3"),
        (lambda: metalmm.matmul(V, a, b, b=b), r"argument 'b' is given twice"),
        (lambda: metalmm.matmul(V, a, b, alpha="x"), r"alpha is 'x'; it takes a number"),
        (lambda: metalmm.matmul(V, a, b, transpose_b="yes"), r"transpose_b is 'yes'; it takes True or False"),
        (lambda: metalmm.matmul(V, None, b), r"a and b must be arrays, not None"),
        (lambda: batch.matmul(V, a, b, device=device), r"it has no argument 'device'"),
        (lambda: device.prepare(V, a, b, biass=b), r"did you mean 'bias'\?"),
        (lambda: device.prepare(V, a, b)(3), r"takes no arguments"),
        (lambda: batch.add(3), r"call is 3; it takes what Device.prepare\(\) gives"),
        (lambda: device.batch(per_dispach=True), r"did you mean 'per_dispatch'\?"),
        (lambda: device.empty(), r"empty: argument 'shape' is missing"),
        (lambda: device.empty(4, dtyp="f2"), r"did you mean 'dtype'\?"),
        (lambda: metalmm.MatmulSpec(1, 2), r"MatmulSpec: argument 'k' is missing"),
        (lambda: metalmm.MatmulSpec(m=1, n=2, k=3, transpose=True), r"did you mean 'transpose_\w'\?"),
        (lambda: metalmm.MatmulSpec("1", 2, 3), r"MatmulSpec: m: '1' is not a whole number"),
        (lambda: metalmm.variants("nt"), r"spec is 'nt'; it takes a MatmulSpec"),
        (lambda: metalmm.Device(3), r"name is 3; it takes one of cpu, cuda, metal"),
        (lambda: metalmm.Device(DEVICE, thread=3), r"thread: device \w+ has no such option"),
        (lambda: device.compile(3), r"compile: source is int"),
        (lambda: device.count_writes([1]), r"count_writes: out is list"),
    ]
    for call, message in calls:
        with pytest.raises(metalmm.Error, match=message) as caught:
            call()
        assert "overload" not in str(caught.value)
        assert "nanobind" not in str(caught.value)
        assert isinstance(caught.value, (TypeError, ValueError, LookupError, RuntimeError))
    np.testing.assert_array_equal(metalmm.matmul(V, a, b, device=device), np.full((1, 4), 4))


def test_reprs_say_what_it_is(device: metalmm.Device) -> None:
    a, w = np.ones((1, 4), np.float16), device.array(np.ones((4, 4), np.float16))
    call = device.prepare(V, a, w)
    assert repr(w) == f"metalmm.Array(shape=(4, 4), dtype=float16, device={device.name})"
    assert f"{V}: m=1 n=4 k=4 batch=1 nn, on metalmm.Device('{device.name}'" in repr(call)
    assert (call.spec, call.variant) == (metalmm.MatmulSpec(1, 4, 4), V)
    with device.batch() as batch:
        batch.add(call)
        assert "1 dispatches, open, on metalmm.Device" in repr(batch)
    assert "submitted" in repr(batch)
    assert "add" in repr(device.compile(SOURCE).kernel("add"))
    assert "4 kernels" in repr(device.compile(SOURCE))


def test_specs_pickle_and_devices_are_context_managers() -> None:
    spec = metalmm.MatmulSpec(2, 3, 4, 5, transpose_b=True, bias=True, alpha=0.1, beta=-2.0, dtype="bfloat16")
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert hash(pickle.loads(pickle.dumps(spec))) == hash(spec)
    with metalmm.Device(DEVICE) as device:
        array = device.array(np.ones(4, np.float16))
        assert device is array.device
    with pytest.raises(metalmm.ClosedError):
        array.numpy()


def test_signatures() -> None:
    names = ["variant", "a", "b", "bias", "c", "alpha", "beta", "transpose_a", "transpose_b", "out", "row_invariant", "device"]
    assert list(inspect.signature(metalmm.matmul).parameters) == names
    assert list(inspect.signature(metalmm.Batch.matmul).parameters) == ["self", *names[:-1]]
    assert list(inspect.signature(metalmm.Device.prepare).parameters) == ["self", *names[:-1]]
    assert "dtype" in inspect.signature(metalmm.MatmulSpec).parameters
    for name in metalmm.__all__:
        public = getattr(metalmm, name)
        assert public.__doc__, f"metalmm.{name} has no docstring"
        for member in vars(public) if isinstance(public, type) else []:
            value = getattr(public, member)
            if member.startswith("_") or not (callable(value) or inspect.isdatadescriptor(value)):
                continue
            assert member in ("name", "with_traceback", "add_note") or value.__doc__ or issubclass(public, BaseException), (
                f"metalmm.{name}.{member}"
            )
            if callable(value) and not isinstance(value, type):
                inspect.signature(value)


# -- what was found by attack -----------------------------------------------------------------------------------------


def test_a_number_of_numpy_is_not_read_as_another_type(device: metalmm.Device) -> None:
    add, y = device.compile(SOURCE).kernel("add"), np.zeros(4, np.float32)
    good = [y, np.uint32(3), np.float32(0.5), np.int16(-7), np.float16(0.25), np.bool_(True), ml_dtypes.bfloat16(1.5), np.int64(5)]
    good[6] = 1.5
    add(*good, threads=4, threadgroup=4)
    assert y[0] == 3 + 0.5 - 7 + 0.25 + 1000 + 1.5 + 5
    for place, value, message in [(2, np.int32(2), "number of type int32; the parameter is of type float"), (1, np.float32(2), "type uint"),
                                  (4, np.float32(1.5), "of type half"), (2, np.float16(2), "number of type float16")]:  # fmt: skip
        with pytest.raises(metalmm.DTypeError, match=message):
            add(*good[:place], value, *good[place + 1 :], threads=4, threadgroup=4)
    add(*good[:2], np.float64(0.5), *good[3:], threads=4, threadgroup=4)  # a Python float, too


def test_an_array_is_not_read_as_numbers_of_another_size(device: metalmm.Device) -> None:
    kernel = device.compile(
        "#include <metal_stdlib>\nusing namespace metal;\n"
        "kernel void k(device float* y, device const half* x, constant uint& n, device const uint* words, device const int* more) { y[0] = float(x[0]) + n + words[0] + more[0]; }\n"
    ).kernel("k")
    good: list[Any] = [
        np.zeros(2, np.float32),
        np.ones(4, np.float16),
        np.array([3], np.uint32),
        np.array([4], np.int32),
        np.array([-1], np.int32),
    ]

    def run(*args: Any) -> None:
        kernel(*args, threads=1, threadgroup=1)

    run(*good)
    assert good[0][0] == 7
    run(*good[:3], np.ones(4, np.float16), good[4])  # words of halves
    run(good[0].view(np.uint32), *good[1:])  # and a float's bits
    assert good[0][0] == 7
    run(*(x.view(np.uint8) for x in good))
    for place, value, message in [
        (0, np.zeros(2), "buffer 0 is an array of float64; the parameter is of type float: convert it"),
        (0, np.zeros(4, np.float16), "an array of float16; the parameter is of type float"),
        (1, np.ones(2, np.float32), "an array of float32; the parameter is of type half"),
        (2, np.array([3]), "an array of int64; the parameter is of type uint"),
        (3, device.array(np.ones(2)), "an array of float64; the parameter is of type uint"),
        (0, np.zeros(2, np.int32), "an array of int32; the parameter is of type float"),
        (1, np.ones(4, np.int16), "an array of int16; the parameter is of type half"),
        (4, np.ones(2, np.float32), "an array of float32; the parameter is of type int"),
    ]:
        with pytest.raises(metalmm.DTypeError, match=message):
            run(*good[:place], value, *good[place + 1 :])


def test_arrays_of_ctypes(device: metalmm.Device) -> None:
    numbers = (ctypes.c_float * 4)(1, 2, 3, 4)
    np.testing.assert_array_equal(device.array(numbers).numpy(), [1, 2, 3, 4])
    rows = ((ctypes.c_float * 4) * 4)(*[(i, i, i, i) for i in range(4)])
    out = metalmm.matmul(V, np.ones((1, 4), np.float32), rows, device=device)
    np.testing.assert_array_equal(out, np.full((1, 4), 6))

    class Pair(ctypes.Structure):
        _fields_ = (("x", ctypes.c_int32), ("y", ctypes.c_float))

    pairs = (Pair * 2)(Pair(1, 2.0), Pair(3, 4.0))
    assert list(device.array(pairs).numpy()["x"]) == [1, 3]
    assert list(device.array(memoryview(np.array(pairs))).numpy()["x"]) == [1, 3]


def test_structures_by_their_dtype(device: metalmm.Device) -> None:
    for dtype in ([("Offset", "i4"), ("O", "f4")], "V8", [("a", "u2", (3,))]):
        source = np.zeros(3, dtype)
        assert device.array(source).dtype == source.dtype == device.empty(3, dtype).dtype
    assert device.array(device.empty(3, "V8")).nbytes == 24
    for dtype in (
        [("a", ">f4")],
        [("a", "O")],
        ">f2",
        *(("g", "G") if np.dtype("g").itemsize > 8 else ()),
        None,
        np.dtype(ml_dtypes.bfloat16).newbyteorder(">"),
    ):
        with pytest.raises(metalmm.DTypeError):
            device.empty(3, dtype)
    for array in (
        memoryview(np.zeros(2, [("a", "O")])),
        memoryview(np.zeros(2, [("a", ">i4")])),
        np.zeros(3, [("a", ">f4")]),
        np.zeros((1, 4), ml_dtypes.bfloat16).astype(np.dtype(ml_dtypes.bfloat16).newbyteorder(">")),
    ):
        with pytest.raises(metalmm.DTypeError):
            device.array(array)


def test_what_dlpack_asks_is_heard(device: metalmm.Device) -> None:
    for dtype in ("float32", "bfloat16"):
        array = device.array(np.ones(4, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))
        here, elsewhere = ((2, 0), (1, 0)) if DEVICE == "cuda" else ((1, 0), (2, 0))
        array.__dlpack__(max_version=(1, 0), dl_device=here, copy=None)
        with pytest.raises(Exception, match=r"(?i)device|memory|argument"):
            array.__dlpack__(dl_device=elsewhere)
    with pytest.raises(BufferError, match="without a copy"):
        array.__dlpack__(copy=True)
    with pytest.raises(metalmm.ArgumentError, match="no argument 'bogus'"):
        array.__dlpack__(bogus=3)


def test_foreign_arrays_that_answer_nonsense(device: metalmm.Device) -> None:
    a, b = np.ones((1, 4), np.float32), np.ones((4, 4), np.float32)
    for where in ((), None, 5, [1, 0], ("1", 0), (None, 0), (2**70, 0), (1, 0, 0)):
        with pytest.raises((metalmm.DTypeError, metalmm.DeviceError)):
            metalmm.matmul(V, Foreign(a, device=where), b, device=device)  # type: ignore[arg-type]

    class Raising(Foreign):
        error: type[BaseException] = ValueError

        def __dlpack_device__(self) -> tuple[int, int]:
            raise self.error("no")

    with pytest.raises(metalmm.DTypeError, match="memory over: no"):
        metalmm.matmul(V, Raising(a), b, device=device)
    Raising.error = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        metalmm.matmul(V, Raising(a), b, device=device)


def test_objects_that_were_never_made(device: metalmm.Device) -> None:
    class Bare(metalmm.Device):
        def __init__(self) -> None:
            pass

    a, b = np.ones((1, 4), np.float16), np.ones((4, 4), np.float16)
    bare, array = Bare(), metalmm.Array.__new__(metalmm.Array)
    batch, call = metalmm.Batch.__new__(metalmm.Batch), metalmm.PreparedCall.__new__(metalmm.PreparedCall)
    kernel = device.compile(SOURCE).kernel("through")
    calls = [lambda: bare.empty(3), lambda: bare.array(a), lambda: bare.batch(), lambda: bare.prepare(V, a, b),
             lambda: metalmm.matmul(V, a, b, device=bare), lambda: metalmm.matmul(V, array, b), lambda: device.array(array),
             lambda: batch.matmul(V, a, b), lambda: batch.wait(), lambda: call(), lambda: device.batch().add(call),
             lambda: kernel(array, a, threads=1, threadgroup=1), lambda: kernel(b"", a, threads=1, threadgroup=1, batch=batch)]  # fmt: skip
    for wrong in calls:
        with pytest.raises(metalmm.Error):
            wrong()
    assert metalmm.matmul(V, a, b, device=device)[0, 0] == 4


def test_a_dictionary_that_changes_while_it_is_read(device: metalmm.Device) -> None:
    kernel, y = device.compile(SOURCE).kernel("through"), np.zeros(4, np.float32)

    class Key:
        def __init__(self, owner: dict[Any, Any]) -> None:
            self.owner = owner

        def __index__(self) -> int:
            self.owner.clear()
            gc.collect()
            return 0

    for _ in range(5):
        given: dict[Any, Any] = {}
        given.update({Key(given): b"\0" * 16, 1: y.copy()})
        kernel(given, threads=4, threadgroup=4)


def test_text_that_is_no_utf8_and_reprs_that_fail(device: metalmm.Device) -> None:
    a, b = np.ones((1, 4), np.float16), np.ones((4, 4), np.float16)

    class Odd:
        error: type[BaseException] = ValueError

        def __repr__(self) -> str:
            raise self.error

    for call in (lambda: metalmm.matmul("\ud800", a, b), lambda: metalmm.matmul(V, a, b, alpha="\ud800"), lambda: device.empty(3, "\ud800"),
                 lambda: metalmm.matmul(V, a, b, **{"\ud800": 1}), lambda: metalmm.matmul(V, a, b, alpha="x" + "é" * 60),
                 lambda: metalmm.matmul(V, a, b, device="\ud800"), lambda: device.empty("\ud800"), lambda: metalmm.matmul(V, a, b, alpha=Odd()),
                 lambda: device.empty(b"ab"), lambda: device.empty(itertools.repeat(1)), lambda: device.empty(10**5000)):  # fmt: skip
        with pytest.raises(metalmm.Error):
            call()
    Odd.error = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        metalmm.matmul(V, a, b, alpha=Odd())
    assert np.isinf(metalmm.matmul(V, a, b, alpha=np.inf, device=device)).all()


def test_a_spec_of_nan_is_equal_to_itself() -> None:
    spec = metalmm.MatmulSpec(1, 2, 3, alpha=np.nan)
    assert spec == pickle.loads(pickle.dumps(spec))
    assert hash(spec) == hash(metalmm.MatmulSpec(1, 2, 3, alpha=np.nan))
    assert metalmm.MatmulSpec(1, 2, 3, alpha=-0.0) == metalmm.MatmulSpec(1, 2, 3, alpha=0.0)
    assert repr(metalmm.MatmulSpec(1, 2, 3, alpha=2.0, beta=-0.5)) == "MatmulSpec(m=1 n=2 k=3 batch=1 nn alpha=2 beta=-0.5)"


def test_cycles_through_every_kind_of_array_are_collected(device: metalmm.Device) -> None:
    class Tagged(np.ndarray):
        me: Any

    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32):
        x = np.ones((1, 64), dtype).view(Tagged)
        x.me = device.prepare("gemv_nt_vec4/c4_tg64", x, x, transpose_b=True, out=np.zeros((1, 1), dtype))
        seen = weakref.ref(x)
        del x
        gc.collect()
        assert seen() is None, dtype


def test_an_array_is_iterable_and_has_no_truth(device: metalmm.Device) -> None:
    array = device.array(np.zeros((2, 3), np.float16))
    with pytest.raises(TypeError, match=r"the truth of an Array of shape \(2, 3\)"):
        bool(array)
    assert [row.shape for row in list(array)] == [(3,), (3,)]


@pytest.mark.needs("memory that the fake driver follows")
@pytest.mark.skipif(DEVICE != "cpu", reason="blas")
def test_blas_sees_what_a_pointer_may_have_written(device: metalmm.Device) -> None:
    class Pointers(ctypes.Structure):
        _fields_ = (("to", ctypes.c_uint64), ("count", ctypes.c_uint32))

    weights, x = device.array(np.ones((8, 8), np.float16)), np.ones((1, 8), np.float16)
    assert np.asarray(metalmm.matmul("blas/baseline", x, weights))[0, 0] == 8
    source = "#include <metal_stdlib>\nstruct P { device half* to; uint count; };\nkernel void k(constant P& p) { p.to[0] = 100.0h; }"
    device.compile(source).kernel("k")(bytes(Pointers(weights.device_address, 1)), threads=1, threadgroup=1)
    assert np.asarray(metalmm.matmul("blas/baseline", x, weights))[0, 0] == 107


def test_a_closed_default_device_is_made_anew() -> None:
    a, b = np.ones((1, 4), np.float16), np.ones((4, 4), np.float16)
    with metalmm.default_device() as device:
        pass
    assert metalmm.matmul(V, a, b)[0, 0] == 4
    with pytest.raises(metalmm.ClosedError), device:
        pass
