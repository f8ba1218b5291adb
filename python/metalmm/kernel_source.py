"""MSL on its way to a device: files with their includes in place, the one instantiation of a variant, numbers as arguments."""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import CompileError, DTypeError, LoweringError
from .files import text_of
from .msl.program import Argument, Program
from .msl.program_scope import parsed

_PACKAGE = Path(__file__).resolve().parent


def resource(name: str) -> Path:
    """Kernels and MSL headers: inside the installed package, or beside it in a source tree."""
    installed = _PACKAGE / "resources" / name
    return (installed if installed.is_dir() else _PACKAGE.parents[1] / name).resolve()


KERNELS = resource("kernels")
Constants = Mapping["int | str", "bool | int | float"]


@dataclass(frozen=True)
class KernelText:
    """MSL that a kernel is taken from.

    Attributes:
        text: Has quoted includes in place, so that its only ones are MSL's own.
        name: The file that messages will point to.
        is_preprocessed: Whether the text is without any include instead.
    """

    text: str
    name: str
    is_preprocessed: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether it is a kernel of this package. All lanes of a simdgroup are known to be at each of its operations, but at those
        on the first lane. The test test_debug_mode.py sees to it."""
        return not self.is_preprocessed and Path(self.name).is_relative_to(KERNELS)

    @property
    def is_early(self) -> bool:
        """A kernel of this package that reads weights before anything else, and then says so: kernels/include/wait.h."""
        return self.is_ours and " wait_for_operands();" in self.text

    @property
    def lets_next(self) -> bool:
        """A kernel of this package that says when the next one may begin: kernels/include/next.h."""
        return self.is_ours and " let_next_begin(" in self.text


@dataclass(frozen=True)
class Code:
    """A kernel as the extension takes it: see PipelineSource in csrc/core/device.h.

    Attributes:
        text: For the device's own compiler.
        file: Where its machine code lies, or is to be kept.
        arguments: As its source says them. Empty for a device whose compiler tells them.
    """

    kernel: str
    text: str = ""
    file: str = ""
    arguments: Sequence[Argument] = ()

    def as_tuple(self) -> tuple[str, str, str, list[tuple[bool, int, bool, int, str]]]:
        return self.text, self.file, self.kernel, [(a.is_buffer, a.index, a.is_const, a.bytes, a.type) for a in self.arguments]


@dataclass(frozen=True)
class LibraryText:
    """MSL given to Device.compile(): names of its kernels, and a KernelText of all of them."""

    text: KernelText
    kernel_names: Sequence[str] = field(default_factory=tuple)


def known_arguments(source: KernelText, kernel: str, constants: Constants) -> Sequence[Argument]:
    """As a preprocessed source says them; none of what compiled, but a parser does not know through."""
    with contextlib.suppress(CompileError, LoweringError):
        return parsed(Program, source.text, source.name).arguments(kernel, constants)
    return ()


def library_text(expanded: str, name: str) -> LibraryText:
    """Preprocessed MSL for a device that lowers it. Raises LoweringError."""
    return LibraryText(KernelText(expanded, name, is_preprocessed=True), parsed(Program, expanded, name).kernel_names())


def line_marker(line: int, file: object) -> str:
    """The directive after which a compiler counts lines of `file`."""
    return f"#line {line} " + '"' + str(file).replace("\\", "\\\\").replace('"', '\\"') + '"'


def define_text(value: object) -> str:
    """What a macro of that value stands for."""
    if isinstance(value, bool):
        return str(int(value))
    return "" if value is None else str(value)


_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"[^\n]*$', re.MULTILINE)


def read_text(path: Path) -> str:
    """Raises CompileError for a file that cannot be read, or is none."""
    try:
        return text_of(path)
    except (OSError, UnicodeDecodeError) as error:
        raise CompileError(f"{path}: {error}") from error


def inline_includes(path: Path) -> str:
    """A source file with its quoted includes in place, each once, so that one text is all a compiler needs."""
    return inline_text(path.read_text(), str(path), [path.parent], {path})


def is_include(path: Path, name: str) -> bool:
    """Whether it is a file that `name` can include. Raises CompileError where a compiler would wait for whoever writes to a FIFO."""
    if path.is_file():
        return True
    if path.exists() and not path.is_dir():
        raise CompileError(f"{name}: it includes {path}, which is no plain file")
    return False


def inline_text(text: str, name: str, folders: Sequence[Path], seen: set[Path]) -> str:
    """The same for text; includes are looked for beside the file that has them, in `folders`, then among our own headers."""

    def replace(match: re.Match[str]) -> str:
        candidates = [folder / match[1] for folder in (*folders, KERNELS / "include")]
        target = next((c.resolve() for c in candidates if is_include(c, name)), None)
        if target is None:
            return match[0]
        if target in seen:
            return ""
        seen.add(target)
        line = text[: match.start()].count("\n") + 2
        inner = inline_text(target.read_text(), str(target), [target.parent, *folders], seen)
        return f"{inner}\n{line_marker(line, name)}"

    return f"{line_marker(1, name)}\n" + _INCLUDE.sub(replace, text.replace("#pragma once", ""))


def host_name(instance: str) -> str:
    """The name of a template-id's kernel. It says nothing of a variant: whoever asks for the same code shares it."""
    return re.sub(r"\W+", "_", instance).strip("_")


def assemble(source: Path, instance: str) -> str:
    """The MSL source of one pipeline: shared headers inlined and the one instantiation added."""
    return f'{inline_includes(source)}\ntemplate [[host_name("{host_name(instance)}")]] [[kernel]] decltype({instance}) {instance};\n'


_FORMATS = {
    "bool": "?",
    **dict.fromkeys(("char", "int8_t"), "b"),
    **dict.fromkeys(("uchar", "uint8_t"), "B"),
    **dict.fromkeys(("short", "int16_t"), "h"),
    **dict.fromkeys(("ushort", "uint16_t"), "H"),
    **dict.fromkeys(("int", "int32_t"), "i"),
    **dict.fromkeys(("uint", "uint32_t"), "I"),
    **dict.fromkeys(("long", "int64_t", "ptrdiff_t"), "q"),
    **dict.fromkeys(("ulong", "uint64_t", "size_t"), "Q"),
    "half": "e",
    "float": "f",
    "bfloat": "f",
}


def pack_number(value: Any, kind: str, what: str) -> bytes:
    """A Python number as a kernel's parameter of that MSL type. Raises DTypeError where the type does not hold it."""
    form = _FORMATS[kind]
    shown = repr(value) if not isinstance(value, int) or abs(value) < 10**40 else "a number of more than 40 digits"
    if not isinstance(value, int) and form not in "ef":
        raise DTypeError(f"{what}: {shown} is no whole number; the kernel's parameter is of type {kind}")
    try:
        if form == "?" and value not in (0, 1):
            raise OverflowError
        packed = struct.pack(f"<{form}", bool(value) if form == "?" else value)
    except (struct.error, OverflowError):
        raise DTypeError(f"{what}: {shown} is outside the range of the kernel's parameter, of type {kind}") from None
    if kind == "bfloat":  # round to nearest even
        bits = int.from_bytes(packed, "little")
        upper = (bits >> 16 | 64) if value != value else bits + 0x7FFF + (bits >> 16 & 1) >> 16
        if upper & 0x7FFF == 0x7F80 and value not in (float("inf"), float("-inf")):
            raise DTypeError(f"{what}: {shown} is outside the range of the kernel's parameter, of type {kind}")
        return upper.to_bytes(2, "little")
    return packed
