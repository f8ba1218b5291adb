"""What Python holds, and how a process ends: garbage collection, exit, fork, too few threads or maps, subinterpreters. On every device,
where it is not said otherwise; what may end a process runs in one of its own."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import metalmm
import numpy as np
import pytest
from support.here import ALL_OF_IT, DEVICE, FAKE

V = "gemv/baseline"
on_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="the CPU device's threads and maps")


def half(*shape: int) -> Any:
    return np.ones(shape, np.float16)


class Attributed(np.ndarray):
    """An array that can have attributes, and so be part of a cycle."""


def attributed(*shape: int) -> Any:
    return half(*shape).view(Attributed)


def device_with(**made: Callable[[metalmm.Device], Any]) -> Any:
    device = metalmm.Device()
    for name, make in made.items():
        setattr(device, name, make(device))
    return device


def batch_of(device: metalmm.Device, *arrays: Any) -> metalmm.Batch:
    batch = device.batch()
    batch.matmul(V, *(arrays or (half(1, 64), half(64, 64))))
    return batch


def recording_of(device: metalmm.Device, *arrays: Any) -> metalmm.Recording:
    return batch_of(device, *arrays).record()


def prepared_batch(device: metalmm.Device, x: Any) -> metalmm.Batch:
    batch = device.batch()
    batch.add(device.prepare(V, x, half(64, 64)))
    return batch


KERNEL = "#include <metal_stdlib>\nusing namespace metal;\nkernel void k(device half* x) { x[0] = 1.0h; }"

CYCLES: dict[str, Callable[[], Any]] = {
    "list": lambda: device_with(c=lambda d: [d]),
    "array": lambda: device_with(w=lambda d: d.array(half(4, 4))),
    "prepared": lambda: device_with(p=lambda d: d.prepare(V, half(1, 64), d.array(half(64, 64)))),
    "batch": lambda: device_with(b=batch_of),
    "submitted batch": lambda: device_with(b=lambda d: (lambda b: (b.submit(), b)[1])(batch_of(d))),
    "waited batch": lambda: device_with(b=lambda d: (lambda b: (b.submit(), b.wait(), b)[2])(batch_of(d))),
    "recording": lambda: device_with(r=recording_of),
    "kernel": lambda: device_with(k=lambda d: d.compile(KERNEL).kernel("k")),
}
ARRAY_CYCLES: dict[str, Callable[[metalmm.Device, Any], Any]] = {
    "prepared a": lambda d, x: d.prepare(V, x, half(64, 64)),
    "prepared out": lambda d, x: d.prepare(V, half(1, 64), half(64, 64), out=x),
    "prepared c and a": lambda d, x: d.prepare(V, half(1, 64), half(64, 64), c=x, beta=1.0, out=x),
    "batch": lambda d, x: batch_of(d, x, half(64, 64)),
    "batch of a prepared call": prepared_batch,
    "recording": lambda d, x: recording_of(d, x, half(64, 64)),
    "recording of a prepared call": lambda d, x: prepared_batch(d, x).record(),
}


@pytest.mark.parametrize("name", CYCLES)
def test_a_cycle_through_a_device_is_collected(name: str) -> None:
    device = CYCLES[name]()
    gone = weakref.ref(device)
    del device
    gc.collect()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("name", ARRAY_CYCLES)
def test_a_cycle_through_an_array_is_collected(name: str, device: metalmm.Device) -> None:
    x = attributed(1, 64)
    x.held = ARRAY_CYCLES[name](device, x)
    gone = weakref.ref(x)
    del x
    gc.collect()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("name", ARRAY_CYCLES)
def test_what_is_held_is_not_collected(name: str, device: metalmm.Device) -> None:
    x = attributed(1, 64)
    held = ARRAY_CYCLES[name](device, x)
    x.held = [x]
    seen = weakref.ref(x)
    del x
    gc.collect()
    assert seen() is not None
    if isinstance(held, metalmm.Batch):
        held.submit()
        held.wait()
    elif isinstance(held, metalmm.Recording):
        held.replay()
        held.wait()
    else:
        held()


def test_what_the_collector_took_says_so() -> None:
    """A finalizer in a cycle may meet objects whose device has gone."""
    met: list[str] = []

    class Late:
        def __del__(self) -> None:
            for use in (lambda: self.call(), lambda: self.array.numpy(), lambda: self.batch.submit(), lambda: self.recording.replay()):
                try:
                    use()
                except metalmm.Error as error:
                    met.append(type(error).__name__)

    late = Late()
    late.device = metalmm.Device()
    late.array, late.call = late.device.array(half(4, 4)), late.device.prepare(V, half(1, 64), half(64, 64))
    late.batch, late.recording = batch_of(late.device), recording_of(late.device)
    late.device.back = late
    del late
    gc.collect()
    assert set(met) <= {"ClosedError", "DeviceError"}


# -- the end of a process ---------------------------------------------------------------------------------------------

HEAD = "import metalmm, numpy as np, os, sys, threading, time\nx, w = np.ones((8, 256), np.float16), np.ones((256, 256), np.float16)\n"


def run(script: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HEAD + script]
    if FAKE:
        import on_fake_metal

        path = os.path.dirname(on_fake_metal.__file__)
        # Without the fake's look at what is alive at exit: a thread that stopped there holds on to what it had.
        setup = f"import atexit, sys; sys.path.insert(0, {path!r}); import on_fake_metal; on_fake_metal.fake = on_fake_metal.install()\n"
        command[2] = setup + "atexit.unregister(on_fake_metal._check_exit)\n" + command[2]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


AT_EXIT = {
    "matmul": "def work():\n  while True: metalmm.matmul('gemm_tiled/baseline', x, w)",
    "prepared": "d = metalmm.Device()\ncall = d.prepare('gemm_tiled/baseline', x, w)\ndef work():\n  while True: call()",
    "batch": "d = metalmm.Device()\ndef work():\n  while True:\n    with d.batch() as b: b.matmul('gemm_tiled/baseline', x, w)",
    "dropped batches": "d = metalmm.Device()\ndef work():\n  while True:\n    b = d.batch(); b.matmul('gemm_tiled/baseline', x, w); b.submit()",
}


@pytest.mark.rest(but=2)
@pytest.mark.parametrize("what", [*AT_EXIT, "blas"])
@pytest.mark.needs("simdgroup_matrix")
def test_exit_with_threads_inside_a_matmul(what: str) -> None:
    body = AT_EXIT.get(what, AT_EXIT["matmul"].replace("gemm_tiled", "blas"))
    if what == "blas" and DEVICE == "metal":
        pytest.skip("no blas/baseline on device metal")
    script = (
        body
        + "\nmetalmm.matmul('gemm_tiled/baseline', x, w)\nfor _ in range(3): threading.Thread(target=work, daemon=True).start()\ntime.sleep(0.1)"
    )
    for _ in range(12 if ALL_OF_IT else 1):
        done = run(script)
        # A thread that is told that the device was closed says so; nothing aborts.
        assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
        assert "terminate" not in done.stderr and "Fatal" not in done.stderr


@pytest.mark.needs("simdgroup_matrix")
def test_exit_with_work_that_nobody_waited_for() -> None:
    script = "d = metalmm.Device()\nout = np.zeros((8, 256), np.float16)\nb = d.batch(); b.matmul('gemm_tiled/baseline', x, w, out=out); b.submit()\n"
    done = run(script + "d.close(); print(out[0, 0])")
    assert (done.returncode, done.stdout.strip()) == (0, "256.0"), done.stderr


# -- fork -------------------------------------------------------------------------------------------------------------


def child(work: Callable[[], Any], seconds: int = 30) -> int:
    """The exit status of a child that does it; minus a signal's number where it hung or died."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of threads
        pid = os.fork()
    if pid == 0:
        signal.alarm(seconds)
        try:
            work()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"child: {error!r}\n".encode())
            os._exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def matmul(device: metalmm.Device) -> None:
    out = metalmm.matmul("gemm_tiled/baseline", half(8, 256), half(256, 256), device=device)
    assert (np.asarray(out) == 256).all()


@on_cpu
def test_fork_while_threads_work() -> None:
    device = metalmm.Device("cpu", threads=4)
    matmul(device)
    stop = threading.Event()

    def work(kind: int) -> None:
        while not stop.is_set():
            if kind == 0:
                matmul(device)
            elif kind == 1:
                with device.batch() as batch:
                    batch.matmul("gemm_tiled/baseline", half(8, 256), half(256, 256))
            else:
                batch_of(device).submit()

    threads = [threading.Thread(target=work, args=(i % 3,)) for i in range(6)]
    for t in threads:
        t.start()
    try:
        statuses = [child(lambda: matmul(device)) for _ in range(8)]
        statuses += [child(device.close) for _ in range(3)]
        statuses += [child(lambda: matmul(metalmm.Device("cpu", threads=3))) for _ in range(3)]
    finally:
        stop.set()
        for t in threads:
            t.join()
    assert set(statuses) == {0}


@on_cpu
def test_what_was_in_flight_runs_in_the_parent_alone() -> None:
    device = metalmm.Device("cpu")
    batch = batch_of(device)
    batch.submit()

    def look() -> None:
        with pytest.raises(metalmm.DeviceError, match=r"submitted before the process was forked; it runs in the parent"):
            batch.wait()
        matmul(device)

    assert child(look) == 0
    batch.wait()


@on_cpu
def test_a_timeout_holds_in_a_child_of_fork() -> None:
    source = KERNEL.replace("x[0] = 1.0h;", "volatile int i = 0; while (i >= 0) i = (i + 1) & 7; x[0] = i;")
    device = metalmm.Device("cpu", timeout=0.2)
    spins = device.compile(source).kernel("k")

    def look() -> None:
        with pytest.raises(metalmm.KernelError, match=r"timeout of 0.2 s"):
            spins(half(4), grid=1, threadgroup=1)

    look()
    assert child(look) == 0


@on_cpu
@pytest.mark.parametrize("same", [True, False])
def test_fork_while_another_thread_compiles(same: bool) -> None:
    source = KERNEL.replace("1.0h", f"half({time.time() % 1000:.3f}f)")
    other = source if same else source.replace("half(", "2.0h * half(")
    thread = threading.Thread(target=lambda: metalmm.Device("cpu").compile(source).kernel("k"))
    thread.start()
    time.sleep(0.25)
    status = child(lambda: metalmm.Device("cpu").compile(other).kernel("k"))
    thread.join()
    assert status == 0


@on_cpu
def test_a_child_that_exits_leaves_its_parents_compilation_alone(tmp_path: Path) -> None:
    script = f"""
os.environ['METALMM_CACHE'] = {str(tmp_path / "cache")!r}
t = threading.Thread(target=lambda: print(metalmm.matmul('gemm_tiled/baseline', x, w)[0, 0]))
t.start()
time.sleep(0.5)
if os.fork() == 0: sys.exit(0)
os.wait()
t.join()
"""
    done = run(script)
    assert done.stdout.strip() == "256.0", done.stderr


@on_cpu
def test_a_fork_in_a_signals_handler_ends_the_dispatch_in_the_child() -> None:
    # Each threadgroup works until the handler has forked, and no machine is too fast for it: y says that it runs, and takes the word.
    source = KERNEL.replace("device half* x", "volatile device half* x").replace(
        "x[0] = 1.0h;", "x[0] = 1.0h; volatile int s = 0; for (int i = 0; i < 10000 && x[1] == 0.0h; i++) s = s + i;"
    )
    script = f"""
import signal
d = metalmm.Device('cpu', threads=3)
k = d.compile({source!r}).kernel('k')
child, y = [], np.zeros(4, np.float16)
def handler(*_):
    if not child and y[0]:
        signal.setitimer(signal.ITIMER_REAL, 0)
        child.append(os.fork())
        if child[0]: y[1] = 1
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
try:
    k(y, grid=1000000, threadgroup=1)
    said = 'done'
except metalmm.DeviceError as error:
    said = str(error)
if child[0] == 0:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(20)
    print('child:', said, metalmm.matmul('gemv/baseline', x[:1], w, device=d)[0, 0], flush=True)
    os._exit(0)
os.wait()
print('parent:', said)
"""
    done = run(script)
    assert "child: cpu: the process was forked while this ran" in done.stdout and "256.0" in done.stdout, (done.stdout, done.stderr)
    assert "parent: done" in done.stdout


# -- too little of something ------------------------------------------------------------------------------------------


@on_cpu
def test_threads_that_the_system_does_not_give() -> None:
    script = """
import resource
now = int(open('/proc/self/statm').read().split()[0]) * os.sysconf('SC_PAGE_SIZE')
resource.setrlimit(resource.RLIMIT_AS, (now + 200 * 2**20,) * 2)
try: metalmm.Device('cpu', threads=64)
except metalmm.DeviceError as error: print(error)
print(metalmm.matmul('gemv/baseline', x[:1], w, device=metalmm.Device('cpu', threads=1))[0, 0])
"""
    if not os.path.exists("/proc/self/statm"):
        pytest.skip("no /proc")
    metalmm.matmul(V, half(1, 256), half(256, 256), device=metalmm.Device("cpu"))  # compiled before memory is short
    done = run(script)
    assert done.returncode == 0, done.stderr
    assert "the system gives no more than" in done.stdout and "make the device with threads=" in done.stdout
    assert done.stdout.splitlines()[-1] == "256.0"


@pytest.mark.rest
@on_cpu
@pytest.mark.parametrize("has_guard_pages", [True, False])
def test_the_stacks_of_many_threads_leave_maps_to_others(has_guard_pages: bool, tmp_path: Path) -> None:
    if not os.path.exists("/proc/self/maps"):
        pytest.skip("no /proc")
    source = "#include <metal_stdlib>\\nusing namespace metal;\\nkernel void k(device half* x, uint t [[thread_index_in_threadgroup]], uint g [[threadgroup_position_in_grid]]) "
    source += "{ threadgroup_barrier(mem_flags::mem_threadgroup); volatile int s = 0; for (int i = 0; i < 3000; i++) s = s + i; x[g * 1024 + t] = 1.0h; }"
    script = f"""
d = metalmm.Device('cpu', threads=64)
k = d.compile('{source}').kernel('k')
y = np.zeros(1024 * 640, np.float16)
k(y, grid=640, threadgroup=1024)
print((y == 1).all(), sum(1 for _ in open('/proc/self/maps')))
"""
    environment = dict(os.environ)
    if not has_guard_pages:  # as before Linux 6.13
        shim = tmp_path / "shim.c"
        shim.write_text(
            "#include <errno.h>\n#include <sys/syscall.h>\n#include <unistd.h>\n"
            "int madvise(void *p, size_t n, int advice) { if (advice == 102) { errno = EINVAL; return -1; } return syscall(SYS_madvise, p, n, advice); }\n"
        )
        subprocess.run([shutil.which("cc") or "clang", "-shared", "-fPIC", "-o", str(shim.with_suffix(".so")), str(shim)], check=True)
        environment["LD_PRELOAD"] = str(shim.with_suffix(".so"))
    done = run(script, env=environment)
    assert done.returncode == 0, done.stderr
    right, maps = done.stdout.split()
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    assert right == "True" and int(maps) < limit // 2


def test_a_subinterpreter_is_refused() -> None:
    script = """
try: import _interpreters as interpreters
except ImportError: import _xxsubinterpreters as interpreters
code = "try:\\n  import metalmm\\nexcept ImportError as error:\\n  print('refused:', error, flush=True)\\n"
i = interpreters.create()
failure = (interpreters.exec if hasattr(interpreters, 'exec') else interpreters.run_string)(i, code)
assert not failure, failure
"""
    done = run(script)
    assert "refused:" in done.stdout, (done.stdout, done.stderr)
