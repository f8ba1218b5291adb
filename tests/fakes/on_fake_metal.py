#!/usr/bin/env python3
"""Runs a script, or a module with -m, with metalmm built against the fake Metal of tests/fakes/fake_metal (`make fake-metal` builds it).

python tests/fakes/on_fake_metal.py -m pytest tests/devices
python tests/fakes/on_fake_metal.py benchmarks/host_overhead.py
METALMM_FAKE=apple_family=8,commit_us=20 python tests/fakes/on_fake_metal.py ...     # another GPU, with costs: Settings in fake_metal/fake.h
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import ctypes
import functools
import gc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from common import apply_settings, end_if, run_arguments

if TYPE_CHECKING:
    from metalmm.msl.program import Program

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("METALMM_FAKE_BUILD", ROOT / "build" / "fake-metal"))


class FakeMetal:
    """The fake's own door, beside Metal's: what it saw, what it shall do wrong."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        for name in ("calls", "waited_for"):
            getattr(self._library, f"fake_metal_take_{name}").restype = ctypes.c_long
        function = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_char), ctypes.c_size_t
        )
        self._compile = function(self._answer)  # must live as long as the library
        self._library.fake_metal_set_compiler(self._compile)
        self.given: dict[str, tuple[int, int]] = {}  # by $METALMM_FAKE: as it was before, and the value

    def _text(self, name: str) -> list[str]:
        out = ctypes.create_string_buffer(1 << 20)
        getattr(self._library, name)(out, ctypes.c_size_t(len(out)))
        return out.value.decode().splitlines()

    def take_violations(self) -> list[str]:
        """Rules that were broken since the last call, "rule: what"."""
        return self._text("fake_metal_take_violations")

    def live(self) -> dict[str, int]:
        """Objects that are alive, by class."""
        return {name: int(count) for name, count in (line.split() for line in self._text("fake_metal_live"))}

    def take_calls(self) -> int:
        """Calls of compute encoders since the last one."""
        return int(self._library.fake_metal_take_calls())

    def take_waited_for(self) -> int:
        """Buffers of residency sets that a command buffer found out of the GPU's reach since the last call."""
        return int(self._library.fake_metal_take_waited_for())

    def inject(self, fault: str, count: int = 1, code: int = 0) -> None:
        """The next `count` times, the fake fails at `fault`; tests/devices/metal names them."""
        self._library.fake_metal_inject(fault.encode(), count, code)

    def set(self, name: str, value: int) -> int:
        """What the GPU is like and what it costs from now on, by the names of Settings in tests/fakes/fake_metal/fake.h; as it was before."""
        before = int(self._library.fake_metal_set(name.encode(), int(value)))
        if before == -(2**31):
            raise ValueError(f"the fake has no setting {name}")
        return before

    def misuse(self, name: str) -> None:
        """Breaks a rule on purpose; tests/fakes/fake_metal/misuse.mm."""
        if not self._library.fake_metal_misuse(name.encode()):
            raise ValueError(f"no misuse {name}")

    @staticmethod
    def _answer(source: bytes, kernel: bytes | None, constants: bytes, out: ctypes._Pointer[ctypes.c_char], size: int) -> int:
        try:
            answer, failed = _compile(source.decode(), kernel.decode() if kernel else None, constants.decode()), 0
        except Exception as error:
            answer, failed = str(error), 1
        text = answer.encode()[: size - 1] + b"\0"
        ctypes.memmove(out, text, len(text))
        return failed


@functools.cache
def _program(source: str) -> Program:
    from metalmm import compiler
    from metalmm.msl.program import Program

    return Program(compiler.preprocess(source, "program_source"), "program_source")


def _compile(source: str, kernel: str | None, constants: str) -> str:
    """A module's path and lines "INDEX TYPE" of its buffers; without a kernel, what the source holds: lines "kernel NAME" and "constant NAME INDEX TYPE"."""
    import metalmm
    from metalmm import kernel_source, modules

    program = _program(source)
    if kernel is not None:
        given = (part.split("=", 1) for part in constants.split(";") if part)
        numbers = {int(index): ast.literal_eval(value) for index, value in given}
        types = []
        with contextlib.suppress(metalmm.CompileError, metalmm.LoweringError):
            types = [f"{a.index} {a.type}" for a in program.arguments(kernel, numbers) if a.is_buffer]
        return "\n".join([str(modules.build(modules.Job(kernel_source.KernelText(source, "program_source"), kernel, numbers))), *types])
    lines = [f"kernel {name}" for name in program.kernel_names()]
    tokens = program.source.tokens
    for d in program.declarations:
        for a in d.attributes:
            if "function_constant" in a.names and not d.is_function:
                first = tokens[d.start : d.end]
                words = [t.text for t in first if t.kind == "name" and t.text not in ("constant", "const", "constexpr", "static")]
                lines.append(f"constant {d.name} {program.integer(a.names['function_constant'], d.namespace)} {words[0]}")
    return "\n".join(lines)


def install() -> FakeMetal:
    """Makes `import metalmm` find the build with the fake, and gives the fake its compiler."""
    # An editable install finds its own build first, whatever sys.path says.
    sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
    sys.path.insert(0, str(BUILD))
    atexit.register(_check_exit)  # before metalmm's own, so that it runs after it
    import metalmm

    assert str(BUILD) in metalmm._core.__file__, f"{metalmm._core.__file__}: run tests/fakes/fake_metal.sh first"
    fake = FakeMetal(metalmm._core.__file__)
    apply_settings(fake)
    return fake


fake: FakeMetal | None = None


def _check_exit() -> None:
    """Everything must be gone, once all devices are closed, and every rule kept."""
    assert fake
    gc.collect()
    wrong = fake.take_violations()
    if leaked := {name: count for name, count in fake.live().items() if name != "FakeDevice"}:
        wrong.append(f"leak: alive at exit: {leaked}")
    end_if(wrong, "fake Metal")


def main() -> None:
    global fake
    sys.modules["on_fake_metal"] = sys.modules["__main__"]  # for tests that import it
    fake = install()
    run_arguments()


if __name__ == "__main__":
    main()
