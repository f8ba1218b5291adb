"""The C++ compiler behind the CPU device: finding it, preprocessing MSL, building kernels."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import cache
from .errors import CompileError, CompilerNotFoundError
from .kernel_source import Constants, define_text, line_marker, resource
from .msl.targets import cpu as cpu_target

_PACKAGE = Path(__file__).resolve().parent
MSL = resource("csrc/msl")

_COMMON_FLAGS = [
    "-std=c++17",
    "-O3",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-fno-finite-loops",  # C++ lets a compiler take an endless loop for none at all; a GPU runs it
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-asynchronous-unwind-tables",
    "-fno-stack-protector",
]
# Fibers have 256 KB each; a frame that comes near is refused rather than run into the guard page.
_FRAME_LIMIT = 131072


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler that the CPU device can use.

    path: of the program; kind: "gcc" or "clang"; version: its own words; major: their first number; native: its flags for this
    machine.
    """

    path: str
    kind: str
    version: str
    major: int
    native: tuple[str, ...]

    @property
    def flags(self) -> list[str]:
        link = [] if sys.platform == "darwin" else ["-Wl,-Bsymbolic"]  # whose linker binds symbols so by itself
        common = [*_COMMON_FLAGS, *self.native, *link]
        if self.kind == "clang":
            half = ["-Xclang", "-fnative-half-type", "-Xclang", "-fnative-half-arguments-and-returns"]
            warnings = [
                "-Wno-everything",
                f"-Wframe-larger-than={_FRAME_LIMIT}",
                "-Werror=frame-larger-than",
                "-fno-caret-diagnostics",
                "-Werror=vla",
            ]
            return [*common, *half, *warnings]
        # From 13 on g++ would keep halves in float between operations.
        half = ["-fexcess-precision=16"] if self.major >= 13 else []
        protection = ["-fcf-protection=none"] if platform.machine() == "x86_64" else []
        return [
            *common,
            *half,
            *protection,
            "-fno-gnu-unique",
            f"-Werror=frame-larger-than={_FRAME_LIMIT}",
            "-fno-diagnostics-show-caret",
            "-Werror=vla",
        ]

    @property
    def preprocess(self) -> list[str]:
        quiet = "-fno-caret-diagnostics" if self.kind == "clang" else "-fno-diagnostics-show-caret"
        return ["-E", "-undef", quiet, "-x", "c++", "-std=c++17", "-nostdinc", *_PREDEFINED, "-isystem", str(MSL / "include")]


# What Apple's compiler defines for MSL 3.1 on macOS, as far as public kernels ask for it.
_HAVE = [
    "BFLOAT",
    "INT64",
    "ATOMIC_ULONG_MIN_MAX",
    "ATOMIC_FLOAT",
    "SIMDGROUP",
    "SIMDGROUP_MATRIX",
    "SIMDGROUP_REDUCTION",
    "SIMDGROUP_BALLOT",
    "SIMDGROUP_BARRIER",
    "SIMDGROUP_SHUFFLE_AND_FILL",
    "QUADGROUP",
    "QUADGROUP_REDUCTION",
    "QUADGROUP_BARRIER",
    "COHERENT",
]
_ON_CPU = "__METALMM_CPU__"
_PREDEFINED = ["-D__METAL_VERSION__=310", "-D__METAL__=1", "-D__METAL_MACOS__=1", f"-D{_ON_CPU}=1"]
_PREDEFINED += [f"-D__HAVE_{name}__=1" for name in _HAVE]
_PREDEFINED += [f"-D__METAL_{name}_MATH__=0" for name in ("FAST", "MAYBE_FAST", "PRECISE")]


def find_compiler() -> Compiler:
    """$METALMM_CXX, else clang++ or g++ from the PATH. Raises CompilerNotFoundError."""
    wanted = os.environ.get("METALMM_CXX")
    for name in [wanted] if wanted else ["clang++", "g++", "c++"]:
        if path := shutil.which(name):
            return _identify(path)
    if wanted:
        raise CompilerNotFoundError(f"METALMM_CXX is {wanted!r}, and there is no such program")
    raise CompilerNotFoundError("the CPU device needs clang++ or g++ (12 or newer) on the PATH; install one, or set METALMM_CXX")


def _identify(path: str) -> Compiler:
    """Asking a compiler costs 10 ms or more; the file of one says whether it was asked before. A wrapper (a script, ccache, Apple's
    shim), which may lead to another compiler tomorrow, is asked in each process."""
    real = os.path.realpath(path)
    status = os.stat(real)
    identity = f"{path} {real} {status.st_size} {status.st_mtime_ns} {_machine()}"
    with open(real, "rb") as file:
        is_script = file.read(2) == b"#!"
    if is_script:
        return _ask(path)
    if sys.platform == "darwin" or not re.search(r"clang|gcc|[gc]\+\+", os.path.basename(real)):
        return _ask_once(path, identity)
    return _remembered(path, identity)


@functools.cache
def _ask_once(path: str, identity: str) -> Compiler:
    return _ask(path)


@functools.cache
def _remembered(path: str, identity: str) -> Compiler:
    def ask(target: Path) -> None:
        c = _ask(path)
        target.write_text(json.dumps([c.kind, c.version, c.major, c.native]))

    entry = hashlib.sha256(identity.encode()).hexdigest()[:20]
    kind, version, major, native = json.loads(cache.fetch(f"compiler-{entry}.json", ask).read_text())
    return Compiler(path, kind, version, major, tuple(native))


def _ask(path: str) -> Compiler:
    """What it says of itself by its predefined macros, for the machine it runs on."""

    def macros(*flags: str) -> dict[str, str]:
        try:
            text = _run([path, *flags, "-dM", "-E", "-x", "c++", "-"], "")
        except CompileError as error:
            raise CompilerNotFoundError(f"{path} does not work as a C++ compiler: {error}") from error
        return {row[1]: row[2] for row in re.finditer(r"^#define (\w+) (.*)$", text, re.MULTILINE)}

    own = macros()
    kind = "clang" if "__clang__" in own else "gcc"
    major = own.get("__clang_major__" if kind == "clang" else "__GNUC__", "")
    if not major.isdigit():
        raise CompilerNotFoundError(f"{path} is no C++ compiler that metalmm knows; it takes g++ or clang++")
    version = f"{kind} {own.get('__VERSION__', major)}".replace('"', "")
    # Without the machine's own half arithmetic: a * b + c in half would become one instruction with one rounding.
    if platform.machine() in ("arm64", "aarch64"):
        return Compiler(path, kind, version, int(major), ("-mcpu=native+nofp16",))
    native: tuple[str, ...] = ("-march=native", "-mno-avx512fp16")
    machine = macros(*native)
    if "__AVX512FP16__" in machine:  # clang 19 takes it for part of avx10.1
        native = (*native, "-mno-avx10.1")
    # For Intel's, g++ would take 256 bits, and take vectors of 512 (struct matrix in csrc/msl/runtime/types.h) apart into scalars.
    if kind == "gcc" and "__AVX512F__" in machine:
        native = (*native, "-mprefer-vector-width=512")
    return Compiler(path, kind, version, int(major), native)


def _run(command: Sequence[str], text: str | None = None) -> str:
    name = Path(command[0]).name
    try:
        # On macOS posix_spawn, which is taken where nothing is to be closed: fork() there runs the handlers of Metal's frameworks.
        environment, close = {**os.environ, "LC_ALL": "C"}, sys.platform != "darwin"
        done = subprocess.run(command, input=text, capture_output=True, text=True, errors="replace", env=environment, close_fds=close)
    except OSError as error:
        raise CompilerNotFoundError(f"{command[0]}: {error}") from error
    if done.returncode < 0:
        number = -done.returncode
        what = signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"
        raise CompileError(f"{name} was ended by {what}; there may have been too little memory\n{done.stderr.strip()}".rstrip())
    if done.returncode:
        raise CompileError(f"{name} failed:\n{_errors_of(done.stderr) or f'exit status {done.returncode}, and it said nothing'}")
    if "ignoring packed attribute" in done.stderr:  # g++, for members that are classes here: the layout would be another
        raise CompileError(f"{name} cannot pack a struct of vectors as the kernel asks; use clang++ (METALMM_CXX)\n{done.stderr.strip()}")
    return done.stdout


_DIAGNOSTIC = re.compile(r"^(?P<file>[^\n]*?):(?P<line>\d+)(?::\d+)?: (?P<kind>warning|note|(?:fatal )?error): ")
_MAX_ERRORS = 20


def _errors_of(text: str) -> str:
    """A compiler's errors with their notes, each with its line as it stands in the file; what else it said, where it has none."""
    kept: list[str] = []
    errors, keep = 0, False
    for row in text.strip().splitlines():
        if match := _DIAGNOSTIC.match(row):
            if match["kind"] != "note":
                keep = "error" in match["kind"]
                errors += keep
            if keep and errors <= _MAX_ERRORS:
                kept.append(row)
                if quoted := _line_of(match["file"], int(match["line"])):
                    kept.append(f"    {quoted}")
        elif not errors or (
            keep and errors <= _MAX_ERRORS and not re.search(r"In (member )?function|In instantiation|warnings? generated", row)
        ):
            kept.append(row)
    if not errors:
        return text.strip()
    more = [f"and {errors - _MAX_ERRORS} errors more"] if errors > _MAX_ERRORS else []
    return "\n".join([*kept, *more])


def _line_of(file: str, line: int) -> str:
    try:
        return Path(file).read_text(errors="replace").splitlines()[line - 1].strip()
    except (OSError, IndexError, ValueError):
        return ""


@functools.cache
def _machine() -> str:
    """What -march=native depends on."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        text = info.read_text()
        wanted = [re.search(rf"^{key}\s*:.*$", text, re.MULTILINE) for key in ("model name", "flags", "Features", "CPU part")]
        return platform.machine() + "".join(m[0] for m in wanted if m)
    return platform.machine() + platform.processor()


def _digest_of(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _header_digest() -> str:
    return _digest_of([*sorted((MSL / "runtime").rglob("*.h")), *sorted((MSL / "include").rglob("*"))])


def check_headers() -> None:
    """A compiler reads them as they are now; what it makes would be kept under the name of those that this process began with."""
    if _header_digest.__wrapped__() != _header_digest():
        raise CompileError(f"the headers in {MSL} have changed since this process began; begin another")


@functools.cache
def _runtime_digest() -> str:
    return _header_digest() + _digest_of([*sorted((_PACKAGE / "msl").glob("*.py")), Path(cpu_target.__file__)])


def preprocess(
    text: str, name: str, include_dirs: Sequence[str | Path] = (), defines: Mapping[str, object] | None = None, *, for_metal: bool = False
) -> str:
    """MSL after the preprocessor, with line markers. `name` is the file that messages will point to; for_metal: with the branches that
    Apple's compiler takes, and not the CPU device.

    Raises CompileError with the compiler's text.
    """
    compiler = find_compiler()
    command = [compiler.path, *compiler.preprocess]
    if for_metal:
        command.append(f"-U{_ON_CPU}")
    command += [f"-I{Path(d)}" for d in include_dirs]
    command += [f"-D{key}={define_text(value)}" for key, value in (defines or {}).items()]
    return _run([*command, "-"], f"{line_marker(1, name)}\n{text}")


# A debug device's: the thread sanitizer's calls at every access and those of the undefined-behaviour sanitizer where one is not
# aligned, none of their libraries; nothing made of several accesses.
_DEBUG_FLAGS = {
    "clang": ["-DMETALMM_DEBUG", "-O1", "-fno-vectorize", "-fno-slp-vectorize", "-fsanitize=thread,alignment"]
    + [x for name in ("func-entry-exit", "atomics") for x in ("-mllvm", f"-tsan-instrument-{name}=0")],
    "gcc": [
        "-DMETALMM_DEBUG",
        "-O1",
        "-fno-tree-vectorize",
        "-fno-tree-slp-vectorize",
        "-fsanitize=thread,alignment",
        "--param",
        "tsan-instrument-func-entry-exit=0",
    ],
}


_parsed: dict[str, Path | None] = {}  # by key; None: there is none in this process
_BLAMES = re.compile("PCH|precompiled|AST file|error in backend|frontend command failed")  # clang's words where parsed headers are damaged
_FULL = re.compile("No space left on device|File size limit exceeded", re.IGNORECASE)


def _without_link(flags: Sequence[str]) -> list[str]:
    return [f for f in flags if f != "-shared" and not f.startswith("-Wl,")]


def _header_key(compiler: Compiler, flags: Sequence[str]) -> str:
    header = MSL / "runtime" / "parsed.h"
    parts = [str(header), compiler.path, compiler.version, " ".join(flags), _machine(), _runtime_digest()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]


def _parsed_header(compiler: Compiler, flags: Sequence[str]) -> list[str]:
    """Flags that name the runtime's headers as clang keeps them once parsed: without them a kernel takes it half as long again. None where
    they cannot be made, and for g++, which would gain a tenth of it."""
    if compiler.kind != "clang":
        return []
    key = _header_key(compiler, flags)
    kept = _parsed.get(key)
    if key not in _parsed or (kept and not kept.is_file()):

        def parse(target: Path) -> None:
            timeless = ["-Xclang", "-fno-pch-timestamp"]  # the same headers, installed anew, are the same
            header = str(MSL / "runtime" / "parsed.h")
            _run([compiler.path, *_without_link(flags), *timeless, "-x", "c++-header", header, "-o", str(target)])
            check_headers()
            if not target.is_file():
                raise CompileError("no headers were parsed")

        try:
            _parsed[key] = kept = cache.fetch(f"{key}.pch", parse)
        except CompileError:  # the kernel's own compilation says it, if there is more to it
            _parsed[key] = kept = None
    return ["-include-pch", str(kept)] if kept else []


def build(
    text: str,
    kernel: str,
    constants: Constants | None = None,
    name: str = "<source>",
    *,
    is_preprocessed: bool = False,
    debug: bool = False,
    is_ours: bool = False,
) -> Path:
    """The compiled module of one kernel, from the cache or made now.

    text: preprocessed MSL, or MSL whose only includes are MSL's own, so that the text alone says what it means. is_ours: as
    KernelText.is_ours says, which a debug device looks at.
    """
    compiler = find_compiler()
    chosen = sorted((str(k), repr(v)) for k, v in (constants or {}).items())
    flags = [*compiler.flags, *(_DEBUG_FLAGS[compiler.kind] if debug else []), *(["-DMETALMM_CONVERGED"] if debug and is_ours else [])]
    parts = [text, kernel, repr(chosen), compiler.path, compiler.version, " ".join(flags), _machine(), _runtime_digest()]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]

    def compile_to(target: Path, header: Sequence[str]) -> None:
        source = target.with_suffix(".cpp")
        try:
            if debug:  # in two steps: a link with the sanitizer's flag would bring its library
                made = str(source.with_suffix(".o"))
                _run([compiler.path, *_without_link(flags), *header, "-c", "-o", made, str(source)])
                _run([compiler.path, "-shared", "-fPIC", "-o", str(target), made, "-lm"])
            else:
                _run([compiler.path, *flags, *header, "-o", str(target), str(source), "-lm"])
        except CompileError as error:
            if _FULL.search(str(error)):  # which is the folder's fault: the cache takes another
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            raise

    def checked(target: Path) -> None:
        expanded = text if is_preprocessed else preprocess(text, name)
        lowered = cpu_target.lower(expanded, kernel, constants, name=name, compiler=compiler.kind)
        target.with_suffix(".cpp").write_text(lowered)
        is_plain = lowered.startswith("#include")  # else it asks for more of them than they have by themselves
        parsed, plain = _parsed_header(compiler, flags) if is_plain else [], [f"-I{MSL / 'runtime'}"]
        try:
            compile_to(target, [*parsed, *plain])
        except CompileError as error:
            if not parsed or not _BLAMES.search(str(error)):
                raise
            compile_to(target, plain)
            _parsed[_header_key(compiler, flags)] = None
            Path(parsed[-1]).unlink(missing_ok=True)  # another process makes them anew
        if not target.is_file():
            raise CompileError(f"{compiler.path} ended as if all were well, and made no file")
        check_headers()

    try:
        return cache.fetch(f"{key}.so", checked)
    except CompileError as error:
        error.args = (f"kernel '{kernel}': {error}",)
        raise
