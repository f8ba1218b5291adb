"""Compiled modules of kernels for the CPU device: made one by one or several at once, kept in the cache.

A kernel's text is found in the cache by two keys. The first key is of the text as it was given and of the lowering. Under it lies the
second key, which is of the lowered text and of all that its compilation depends on. So a kernel that is there costs no lowering. A
change of the lowering that leaves a text as it was costs no compilation.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from . import cache, compiler, kernel_source, msl, multiplications
from .compiler import Compiler, check_headers, header_digest
from .errors import CompileError, Error
from .kernel_source import Constants, KernelText
from .msl.targets import cpu as cpu_target

_T = TypeVar("_T")
MOST_TOGETHER = 16  # kernels in one translation unit: more would gain little, and one that does not compile costs the others their turn

# A debug device's: the thread sanitizer's calls at every access and those of the undefined-behaviour sanitizer where one is not
# aligned, none of their libraries; nothing made of several accesses.
_DEBUG_FLAGS = {
    "clang": [
        "-DMETALMM_DEBUG",
        "-O1",
        "-fno-vectorize",
        "-fno-slp-vectorize",
        "-fsanitize=thread,alignment,array-bounds",
        "-g1",
        "-gdwarf-4",
        "-fno-omit-frame-pointer",
    ]
    + ["-ftrivial-auto-var-init=pattern"]
    + [x for text in ("func-entry-exit=0", "atomics=0", "read-before-write=1") for x in ("-mllvm", f"-tsan-instrument-{text}")],
    "gcc": [
        "-DMETALMM_DEBUG",
        "-O1",
        "-fno-tree-vectorize",
        "-fno-tree-slp-vectorize",
        "-fsanitize=thread,alignment,bounds",
        "-g1",
        "-gdwarf-4",
        "-fno-omit-frame-pointer",
        "-ftrivial-auto-var-init=pattern",
        "--param",
        "tsan-instrument-func-entry-exit=0",
    ],
}
_LEAVE = "-enable-trivial-auto-var-init-zero-knowing-it-will-be-removed-from-clang"  # what zeros need before clang 16
_parsed: dict[str, Path | None] = {}  # by key; None: there is none in this process
# A compiler's words where parsed headers are damaged. g++ takes no notice of a file that is none, and looks for the header by that name.
_BLAMES = re.compile(r"PCH|precompiled|AST file|error in backend|frontend command failed|\.parsed\.h|internal compiler error")
# How a compiler names them: the file's end, the option, and whether the option takes the name without its last end.
_KEPT = {"clang": (".pch", "-include-pch", False), "gcc": (".parsed.h.gch", "-include", True)}
# What a compiler says of a ?: and of a call that it cannot decide: g++, clang, NVRTC. The file, its line and the call's name.
_AT = r"^(.*?)(?::(\d+):\d+|\((\d+)\)): error: "
_UNDECIDED = re.compile(
    rf"{_AT}(?:operands to '\?:' have different types|conditional expression is ambiguous|ambiguous \"\?\" operation"
    r"|call (?:of overloaded|to) '(\w+).*' is ambiguous"
    r'|more than one instance of overloaded function "(?:\w+::)*(?:metalmm_)?(\w+)")',
    re.MULTILINE,
)
_CONSTEXPR = re.compile(
    rf"{_AT}(?:call to non-'constexpr' function|dynamic initialization is not supported for a __device__ variable)", re.MULTILINE
)
_NOT_IN_METAL = re.compile("is not a member of 'metal'|in namespace 'metal'|namespace \"metal\" has no member")
_FULL = re.compile("No space left on device|File size limit exceeded", re.IGNORECASE)
# A linker that looks through the C++ library, of which a kernel needs nothing, takes as long as a small kernel's compilation.
_LIBRARIES = ["-lm"] if sys.platform == "darwin" else ["-nodefaultlibs", "-lm", "-lgcc"]
_INCLUDE = '#include "msl.h"\n'  # what a lowered text begins with, behind what it asks for of the rest of the runtime


@dataclass(frozen=True)
class Job:
    """One kernel that is to be compiled.

    Attributes:
        source: MSL.
        kernel: Its name in the source.
        constants: Values of function constants.
        debug: Whether it is for a device with debug=True.
        zeros: Of such a device: variables that a kernel does not set begin with zeros, in place of a pattern.
        counts: It counts its multiplications; of clang alone.
    """

    source: KernelText
    kernel: str
    constants: Constants = field(default_factory=dict)
    debug: bool = False
    zeros: bool = False
    counts: bool = False


class _Kernel:
    """A job with the compiler that there is now."""

    def __init__(self, job: Job, cxx: Compiler) -> None:
        self.job, self.cxx = job, cxx
        debug = [*_DEBUG_FLAGS[cxx.kind], *(["-DMETALMM_CONVERGED"] if job.source.is_ours else [])] if job.debug else []
        if job.zeros:
            debug = [f.replace("init=pattern", "init=zero") for f in debug] + [_LEAVE] * (cxx.kind == "clang" and cxx.major < 16)
        self.flags = [*cxx.flags, *debug, *(multiplications.flags() if job.counts else [])]
        self._lowered = ""
        self.beside: Sequence[_Kernel] = ()  # instances of the same file, which are lowered with it

    def lowered(self, choose: Collection[str] = ()) -> str:
        """Its C++, with what stands in these places decided: see msl/undecided.py. Raises CompileError, LoweringError."""
        if self._lowered and not choose:
            return self._lowered
        source, kernels = self.job.source, {self.job.kernel: self}
        text = preprocessed(source)
        for other in self.beside:
            if other.job.kernel not in kernels:
                kernels[other.job.kernel] = other
                text = text.rstrip("\n") + _parts(other.job.source)[1]  # on one line, so that those behind keep theirs
        found = cpu_target.lower_all(
            text, [*kernels], self.job.constants, name=source.name, compiler=self.cxx.kind, converged=source.is_ours, choose=choose
        )
        if choose:
            return found[self.job.kernel]
        for kernel, lowered in found.items():
            kernels[kernel]._lowered = lowered
        return self._lowered

    def key(self) -> str:
        """Under which its module lies."""
        source, chosen = self.job.source, sorted((str(k), repr(v)) for k, v in self.job.constants.items())
        given = [source.text, source.name, self.job.kernel, repr(chosen), str(source.is_preprocessed)]

        def write(target: Path) -> None:
            target.write_text(_key_of(self.cxx, self.flags, self.lowered()))

        kept = cache.fetch(f"{_key_of(self.cxx, self.flags, *given, _lowering_digest())}.key", write)
        try:
            return kept.read_text()
        except OSError:  # somebody empties the folder
            return _key_of(self.cxx, self.flags, self.lowered())


def preprocessed(source: KernelText, defines: Mapping[str, object] | None = None, *, for_metal: bool = False) -> str:
    """See compiler.preprocess. Of a kernel of ours all but its last line, which says the instance, is the next one's, too."""
    if source.is_preprocessed:
        return source.text
    if not source.is_ours:
        return compiler.preprocess(source.text, source.name, defines=defines, for_metal=for_metal)
    all_but, instance = _parts(source)
    return compiler.preprocess(all_but, source.name, defines=defines, for_metal=for_metal) + "\n" + instance


def _parts(source: KernelText) -> tuple[str, str]:
    """Of a kernel of ours all but its last line, and that line, which says the instance."""
    all_but, _, instance = source.text.rstrip("\n").rpartition("\n")
    return all_but, f"{instance}\n"


def build(job: Job) -> Path:
    """The compiled module of one kernel, from the cache or made now. Raises CompileError, LoweringError."""
    kernel = _Kernel(job, compiler.find_compiler())
    try:
        return cache.fetch(
            f"{kernel.key()}.so", lambda target: compile_decided(kernel.lowered, lambda text, _: _compile(kernel, text, target))
        )
    except CompileError as error:
        error.args = (f"kernel '{job.kernel}': {error}",)
        raise


def undecided(said: str) -> set[str]:
    """Places as msl/undecided.py takes them, of a compiler's words; behind PLAIN those where it takes less of constexpr than MSL."""
    found = (match.groups("") for match in _UNDECIDED.finditer(said))
    places = {f"{file}:{line}{at} {call}{name}".rstrip() for file, line, at, call, name in found}
    return places | {f"{cpu_target.PLAIN}{file}:{line}{at}" for file, line, at in _CONSTEXPR.findall(said)}


def compile_decided(lower: Callable[[set[str]], str], attempt: Callable[[str, set[str]], _T]) -> _T:
    """What attempt() makes of what lower() gives. What the compiler cannot decide, where half or bfloat is a class, the lowering does once
    it has heard where. Raises CompileError."""
    places, first = set[str](), None
    while True:
        try:
            return attempt(lower(places), places)
        except CompileError as error:
            found = undecided(str(error)) - places
            first = first or error
            if not found:  # a call between two templates of the program's own is no matter of metal's
                is_ours = any(place.startswith(cpu_target.PLAIN) for place in places)  # what was tried then is not the program's own word
                raise first if is_ours or _NOT_IN_METAL.search(str(error)) else error from None
            places |= found


def may_stand_beside_others(source: KernelText) -> bool:
    """This package's own: in a namespace, a function hides all of metal's overloads of its name, which it joins where it stands alone."""
    return source.is_ours


def build_together(jobs: Iterable[Job]) -> None:
    """Compiles in one translation unit what the cache does not have; what does not compile is left to `build`, which says why, and so are
    kernels of others.

    Half of a small kernel's compilation is the runtime's headers, which are read once here.
    """
    cxx, by_flags = compiler.find_compiler(), dict[tuple[str, ...], dict[str, _Kernel]]()
    kernels = [_Kernel(job, cxx) for job in jobs if may_stand_beside_others(job.source)]
    by_file = dict[tuple[str, str], list[_Kernel]]()
    for kernel in kernels:
        kernel.beside = by_file.setdefault((_parts(kernel.job.source)[0], str(kernel.job.constants)), [])
        kernel.beside.append(kernel)
    for kernel in kernels:
        with contextlib.suppress(Error):
            key = kernel.key()
            if not cache.has(f"{key}.so"):
                by_flags.setdefault((_asked_of(kernel.lowered()), *kernel.flags), {})[key] = kernel
    for group in by_flags.values():
        with contextlib.suppress(Error):
            _build_group(group)


def _build_group(group: dict[str, _Kernel]) -> None:
    """One module with a file by the name of each kernel in it."""
    place = Path(tempfile.mkdtemp(dir=cache.folder(), prefix=".new-"))
    module = place / "group.so"

    def link(target: Path) -> None:
        try:
            os.link(module, target)
        except OSError:  # a file system without hard links
            shutil.copyfile(module, target)

    try:
        _compile(next(iter(group.values())), _together(group), module)
        for key in group:
            cache.fetch(f"{key}.so", link)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _asked_of(lowered: str) -> str:
    """Macros for what it takes of the runtime that few do: other headers, which are parsed once, too."""
    return lowered.partition(_INCLUDE)[0]


def _together(group: dict[str, _Kernel]) -> str:
    """C++ of all of them, each in a namespace of its own: see METALMM_SCOPE in csrc/msl/runtime/kernel.h."""
    asked = _asked_of(next(iter(group.values())).lowered())
    parts = [asked + _INCLUDE]
    for unit, (key, kernel) in enumerate(group.items()):
        scope = f"metalmm_unit_{unit}"
        names = {"SCOPE": f"::{scope}", "UNIT": str(unit), "SYMBOL": f"metalmm_kernel_{key}"}
        parts += [f"#undef METALMM_{name}\n#define METALMM_{name} {value}\n" for name, value in names.items()]
        parts.append(f"namespace {scope} {{\n{kernel.lowered().removeprefix(asked + _INCLUDE)}\n}}\n")
    return "".join(parts)


def _compile(kernel: _Kernel, lowered: str, target: Path) -> None:
    """Makes the module `target` of C++ with that kernel's compiler and flags."""
    asked = re.findall(r"^#define (\w+) 1$", _asked_of(lowered), re.MULTILINE)
    cxx, flags = kernel.cxx, [*kernel.flags, *(f"-D{name}" for name in asked)]
    target.with_suffix(".cpp").write_text(lowered)
    parsed, plain = _parsed_header(cxx, flags), [f"-I{compiler.MSL / 'runtime'}"]
    try:
        _compile_to(kernel, target, [*flags, *parsed, *plain])
    except CompileError as error:
        if not parsed or not _BLAMES.search(str(error)):
            raise
        _compile_to(kernel, target, [*flags, *plain])
        key = _header_key(cxx, flags)
        if kept := _parsed.get(key):
            kept.unlink(missing_ok=True)  # another process makes them anew
        _parsed[key] = None
    if not target.is_file():
        raise CompileError(f"{cxx.path} ended as if all were well, and made no file")
    check_headers()


def _compile_to(kernel: _Kernel, target: Path, flags: Sequence[str]) -> None:
    path, source = kernel.cxx.path, target.with_suffix(".cpp")
    try:
        if kernel.job.debug:  # in two steps: a link with the sanitizer's flag would bring its library
            made = str(source.with_suffix(".o"))
            compiler.run([path, *_without_link(flags), "-c", "-o", made, str(source)])
            compiler.run([path, "-shared", "-fPIC", "-o", str(target), made, *_LIBRARIES])
        elif kernel.job.counts:
            code = source.with_suffix(".ll")
            compiler.run([path, *_without_link(flags), "-S", "-emit-llvm", "-o", str(code), str(source)])
            code.write_text(multiplications.instrumented(code.read_text(), kernel.cxx.major < 15))
            compiler.run([path, "-shared", "-fPIC", "-o", str(target), str(code), *_LIBRARIES])
        else:
            compiler.run([path, *flags, "-o", str(target), str(source), *_LIBRARIES])
    except CompileError as error:
        if _FULL.search(str(error)):  # which is the folder's fault: the cache takes another
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise


def _without_link(flags: Sequence[str]) -> list[str]:
    return [f for f in flags if f != "-shared" and not f.startswith("-Wl,")]


def _key_of(cxx: Compiler, flags: Sequence[str], *texts: str) -> str:
    return cache.key_of(*texts, cxx.path, cxx.version, " ".join(flags), compiler.machine(), header_digest())


def _header_key(cxx: Compiler, flags: Sequence[str]) -> str:
    return _key_of(cxx, flags, str(compiler.MSL / "runtime" / "parsed.h"))


def _parsed_header(cxx: Compiler, flags: Sequence[str]) -> list[str]:
    """Flags that name the runtime's headers as the compiler keeps them once parsed: a small kernel takes half as long by them. None where
    they cannot be made."""
    key, (end, option, is_implied) = _header_key(cxx, flags), _KEPT[cxx.kind]
    kept = _parsed.get(key)
    if key not in _parsed or (kept and not kept.is_file()):

        def parse(target: Path) -> None:
            # clang: the same headers, installed anew, are the same. g++ never asks when they were made.
            timeless = ["-Xclang", "-fno-pch-timestamp"] if cxx.kind == "clang" else []
            header = str(compiler.MSL / "runtime" / "parsed.h")
            compiler.run([cxx.path, *_without_link(flags), *timeless, "-x", "c++-header", header, "-o", str(target)])
            check_headers()
            if not target.is_file():
                raise CompileError("no headers were parsed")

        try:
            _parsed[key] = kept = cache.fetch(key + end, parse)
        except CompileError:  # the kernel's own compilation says it, if there is more to it
            _parsed[key] = kept = None
    return [option, str(kept.with_suffix("") if is_implied else kept)] if kept else []


@functools.cache
def _lowering_digest() -> str:
    lowering = sorted(Path(str(msl.__file__)).parent.rglob("*.py"))  # all of it: a list would miss the next file
    return cache.digest_of([Path(str(compiler.__file__)), Path(str(kernel_source.__file__)), *lowering])


def source_digest() -> str:
    """Of what makes code of a kernel's text, whatever compiles it then."""
    return header_digest() + _lowering_digest()
