"""The C++ compiler behind the CPU device: finding it, preprocessing MSL, building kernels."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import cache, lowering
from .errors import CompileError, CompilerNotFoundError

_PACKAGE = Path(__file__).resolve().parent


def _resource(name: str) -> Path:
    """Kernels and MSL headers: inside the installed package, or beside it in a source tree."""
    installed = _PACKAGE / "resources" / name
    return installed if installed.is_dir() else _PACKAGE.parents[1] / name


KERNELS = _resource("kernels")
MSL = _resource("csrc/msl")

Constants = Mapping["int | str", "bool | int | float"]

_COMMON_FLAGS = [
    "-std=c++17",
    "-O3",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-fno-math-errno",
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

    path: of the program; kind: "gcc" or "clang"; version: its own words.
    """

    path: str
    kind: str
    version: str

    @property
    def flags(self) -> list[str]:
        # Without the machine's own half arithmetic: a * b + c in half would become one instruction with one rounding.
        is_arm = platform.machine() in ("arm64", "aarch64")
        native = ["-mcpu=native+nofp16"] if is_arm else ["-march=native", "-mno-avx512fp16"]
        if sys.platform != "darwin":  # whose linker binds symbols so by itself
            native.append("-Wl,-Bsymbolic")
        if self.kind == "clang":
            half = ["-Xclang", "-fnative-half-type", "-Xclang", "-fallow-half-arguments-and-returns"]
            return [*_COMMON_FLAGS, *native, *half, f"-Wframe-larger-than={_FRAME_LIMIT}", "-Werror=frame-larger-than"]
        return [*_COMMON_FLAGS, *native, "-fno-gnu-unique", f"-Werror=frame-larger-than={_FRAME_LIMIT}"] + (
            ["-fcf-protection=none"] if platform.machine() == "x86_64" else []
        )

    @property
    def preprocess(self) -> list[str]:
        defines = ["-D__METAL_VERSION__=310", "-D__METAL__=1", "-D__METAL_MACOS__=1", "-D__HAVE_BFLOAT__=1", "-D__METALMM_CPU__=1"]
        defines += [f"-D__METAL_{name}_MATH__=0" for name in ("FAST", "MAYBE_FAST", "PRECISE")]
        return ["-E", "-undef", "-x", "c++", "-std=c++17", "-nostdinc", *defines, "-isystem", str(MSL / "include")]


def find_compiler() -> Compiler:
    """$METALMM_CXX, else clang++ or g++ from the PATH."""
    wanted = os.environ.get("METALMM_CXX")
    for name in [wanted] if wanted else ["clang++", "g++", "c++"]:
        if path := shutil.which(name):
            real = os.path.realpath(path)
            status = os.stat(real)
            return _identify(path, f"{real} {status.st_size} {status.st_mtime_ns}")
    if wanted:
        raise CompilerNotFoundError(f"METALMM_CXX is {wanted!r}, and there is no such program")
    raise CompilerNotFoundError("the CPU device needs clang++ or g++ (12 or newer) on the PATH; install one, or set METALMM_CXX")


@functools.cache
def _identify(path: str, identity: str) -> Compiler:
    # Asking a compiler costs 10 ms or more; its file says whether it is the one that was asked before.
    entry = hashlib.sha256(f"{path} {identity}".encode()).hexdigest()[:20]

    def ask(target: Path) -> None:
        target.write_text(_run([path, "--version"]).splitlines()[0])

    version = cache.fetch(f"compiler-{entry}", ask).read_text()
    return Compiler(path, "clang" if "clang" in version else "gcc", version)


def _run(command: Sequence[str], text: str | None = None) -> str:
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, errors="replace", env={**os.environ, "LC_ALL": "C"})
    except OSError as error:
        raise CompilerNotFoundError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise CompileError(f"{Path(command[0]).name} failed:\n{done.stderr.strip()}")
    return done.stdout


@functools.cache
def _machine() -> str:
    """What -march=native depends on."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        text = info.read_text()
        wanted = [re.search(rf"^{key}\s*:.*$", text, re.MULTILINE) for key in ("model name", "flags", "Features", "CPU part")]
        return platform.machine() + "".join(m[0] for m in wanted if m)
    return platform.machine() + platform.processor()


@functools.cache
def _runtime_digest() -> str:
    digest = hashlib.sha256()
    for path in [
        *sorted((MSL / "runtime").glob("*.h")),
        *sorted((MSL / "include").rglob("*")),
        *sorted(_PACKAGE.glob("msl_*.py")),
        Path(lowering.__file__),
    ]:
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def preprocess(text: str, name: str, include_dirs: Sequence[str | Path] = (), defines: Mapping[str, object] | None = None) -> str:
    """MSL after the preprocessor, with line markers. `name` is the file that messages will point to.

    Raises CompileError with the compiler's text.
    """
    compiler = find_compiler()
    command = [compiler.path, *compiler.preprocess]
    command += [f"-I{Path(d)}" for d in include_dirs]
    command += [f"-D{key}={define_text(value)}" for key, value in (defines or {}).items()]
    return _run([*command, "-"], f'#line 1 "{name}"\n{text}')


def define_text(value: object) -> str:
    """What a macro of that value stands for."""
    if isinstance(value, bool):
        return str(int(value))
    return "" if value is None else str(value)


# A debug device's: the thread sanitizer's calls at every access, none of its library; nothing made of several accesses.
_DEBUG_FLAGS = {
    "clang": ["-DMETALMM_DEBUG", "-O1", "-fno-vectorize", "-fno-slp-vectorize", "-fsanitize=thread"]
    + [x for name in ("func-entry-exit", "memintrinsics", "atomics") for x in ("-mllvm", f"-tsan-instrument-{name}=0")],
    "gcc": [
        "-DMETALMM_DEBUG",
        "-O1",
        "-fno-tree-vectorize",
        "-fno-tree-slp-vectorize",
        "-fsanitize=thread",
        "--param",
        "tsan-instrument-func-entry-exit=0",
    ],
}


def build(
    text: str,
    kernel: str,
    constants: Constants | None = None,
    name: str = "<source>",
    *,
    is_preprocessed: bool = False,
    debug: bool = False,
) -> Path:
    """The compiled module of one kernel, from the cache or made now.

    text: preprocessed MSL, or MSL whose only includes are MSL's own, so that the text alone says what it means.
    """
    compiler = find_compiler()
    chosen = sorted((str(k), repr(v)) for k, v in (constants or {}).items())
    flags = [*compiler.flags, *(_DEBUG_FLAGS[compiler.kind] if debug else [])]
    parts = [text, kernel, repr(chosen), compiler.path, compiler.version, " ".join(flags), _machine(), _runtime_digest()]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]

    def compile_to(target: Path) -> None:
        source = target.with_suffix(".cpp")
        expanded = text if is_preprocessed else preprocess(text, name)
        source.write_text(lowering.lower(expanded, kernel, constants, name=name, compiler=compiler.kind))
        if debug:  # in two steps: a link with the sanitizer's flag would bring its library
            made = str(source.with_suffix(".o"))
            traced = [f for f in flags if f != "-shared" and not f.startswith("-Wl,")]
            _run([compiler.path, *traced, f"-I{MSL / 'runtime'}", "-c", "-o", made, str(source)])
            _run([compiler.path, "-shared", "-fPIC", "-o", str(target), made, "-lm"])
            return
        _run([compiler.path, *flags, f"-I{MSL / 'runtime'}", "-o", str(target), str(source), "-lm"])

    try:
        return cache.fetch(f"{key}.so", compile_to)
    except CompileError as error:
        error.args = (f"kernel '{kernel}': {error}",)
        raise
