"""The C++ compiler behind the CPU device: finding it, running it, preprocessing MSL with it."""

from __future__ import annotations

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import cache
from .errors import CompileError, CompilerNotFoundError, DeviceError
from .kernel_source import define_text, is_include, line_marker, resource

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
    "-fno-threadsafe-statics",  # a class's constants are set as the module is loaded
    "-fno-rtti",
    "-fno-asynchronous-unwind-tables",
    "-fno-stack-protector",
]
# Fibers have 256 KB each; a frame that comes near is refused rather than run into the guard page.
_FRAME_LIMIT = 131072


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler that the CPU device can use.

    Attributes:
        path: Of the program.
        kind: "gcc" or "clang".
        version: Its own words.
        major: Their first number.
        native: Its flags for this machine.
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
_PREDEFINED += ["-Dassert(condition)=static_cast<void>(0)"]  # no kernel is ended by one


def find_compiler() -> Compiler:
    """$METALMM_CXX, else clang++ or g++ from the PATH. Raises CompilerNotFoundError."""
    wanted = os.environ.get("METALMM_CXX")
    for name in [wanted] if wanted else ["clang++", "g++", "c++"]:
        if path := shutil.which(name):
            return _identify(path)
    if wanted:
        raise CompilerNotFoundError(f"METALMM_CXX is {wanted!r}, and there is no such program")
    raise CompilerNotFoundError(
        "the CPU device needs clang++ or g++ (12 or newer) on the PATH. Install one (Debian: apt-get install g++; macOS: xcode-select"
        " --install), or set METALMM_CXX"
    )


def _identify(path: str) -> Compiler:
    """Asking a compiler costs 10 ms or more; the file of one says whether it was asked before. A wrapper (a script, ccache, Apple's
    shim), which may lead to another compiler tomorrow, is asked in each process."""
    real = os.path.realpath(path)
    status = os.stat(real)
    identity = f"{path} {real} {status.st_size} {status.st_mtime_ns} {machine()}"
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
            text = run([path, *flags, "-dM", "-E", "-x", "c++", "-"], "")
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


def run(command: Sequence[str], text: str | None = None) -> str:
    """What a compiler printed. Raises CompileError with its messages, CompilerNotFoundError."""
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
def machine() -> str:
    """What -march=native depends on."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        text = info.read_text()
        wanted = [re.search(rf"^{key}\s*:.*$", text, re.MULTILINE) for key in ("model name", "flags", "Features", "CPU part")]
        return platform.machine() + "".join(m[0] for m in wanted if m)
    return platform.machine() + platform.processor()


_DIRECTIVE = re.compile(r"^[ \t]*(?:#|%:)(.*)$", re.MULTILINE)
_NAMED = re.compile(r'["<]([^"<>]+)[">]')
_LINE = re.compile(r"\s*(?:line\b|\d)")  # names a file and reads none


def _reads_files(text: str, name: str, folders: list[Path]) -> bool:
    """Whether a directive may read a file that is not MSL's own. Raises CompileError for what is no file, and would hold the compiler up."""
    seen, waiting, reads = set[Path](), [(text, name, folders)], False
    while waiting:
        text, name, beside = waiting.pop()
        # Whatever a directive names: an include may be a macro, an import, or asked about by __has_include.
        directives = [d for d in _DIRECTIVE.findall(text.replace("\\\n", "")) if not _LINE.match(d)]
        named = {name for directive in directives for name in _NAMED.findall(directive) if "\0" not in name}
        for found in {folder / file for file in named for folder in beside or [Path()]} - seen:
            seen.add(found)
            try:
                if is_include(found, name):
                    reads = True
                    waiting.append((found.read_text(errors="replace"), str(found), [found.parent, *folders]))
            except OSError:  # which is the compiler's to tell
                reads = True
    return reads


def preprocess(
    text: str, name: str, include_dirs: Sequence[str | Path] = (), defines: Mapping[str, object] | None = None, *, for_metal: bool = False
) -> str:
    """MSL after the preprocessor, with line markers. `name` is the file that messages will point to; for_metal: with the branches that
    Apple's compiler takes, and not the CPU device.

    Raises CompileError with the compiler's text.
    """
    reads_files = _reads_files(text, name, [Path(d) for d in include_dirs])
    compiler = find_compiler()
    command = [compiler.path, *compiler.preprocess]
    if for_metal:
        command.append(f"-U{_ON_CPU}")
    command += [f"-I{Path(d)}" for d in include_dirs]
    command += [f"-D{key}={define_text(value)}" for key, value in (defines or {}).items()]
    given = f"{line_marker(1, name)}\n{text}"

    def leave() -> str:
        return run([*command, "-"], given)

    if reads_files:  # of which the cache does not know
        return leave()

    def keep(target: Path) -> None:
        target.write_text(leave(), encoding="utf-8")
        check_headers()

    key = cache.key_of(*command, compiler.version, header_digest(), given)
    try:
        return cache.fetch(f"{key}.msl", keep).read_text(encoding="utf-8")
    except (OSError, DeviceError):  # somebody empties the folder, or none takes anything
        return leave()


@functools.cache
def header_digest() -> str:
    """Of all headers that a kernel may include."""
    return cache.digest_of([*sorted((MSL / "runtime").rglob("*.h")), *sorted((MSL / "include").rglob("*"))])


def check_headers() -> None:
    """A compiler reads them as they are now; what it makes would be kept under the name of those that this process began with."""
    if header_digest.__wrapped__() != header_digest():
        raise CompileError(f"the headers in {MSL} have changed since this process began; begin another")
