#!/usr/bin/env python3
"""How many kernels of other projects compile: for each compiler of the CPU device, and by NVRTC.

    python tests/nightly/corpora.py [--only mlx [--root FOLDER]] [--with g++,clang++,nvrtc] [--mirror FOLDER] [--update]

corpora.toml names the projects and what is expected. Of each file some kernels are tried, `each` of them, evenly. Exit status 1 where fewer
compile than there. --mirror: a folder of git directories, OWNER+NAME/repo, in place of the network.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import metalmm
from metalmm import compiler
from metalmm.backends import cuda
from metalmm.kernel_source import KernelText

HERE = Path(__file__).resolve().parent
EACH = 4


def checked_out(corpus: dict[str, Any], mirror: Path | None, to: Path) -> Path:
    """The project's files at its commit."""
    url = corpus["url"]
    if mirror is not None:
        url = str(mirror / "+".join(url.split("/")[-2:]) / "repo")
    part = [["sparse-checkout", "set", *corpus["folders"]]] if "folders" in corpus else []
    fetch = ["fetch", "-q", "--depth", "1", "--filter=blob:none", url, corpus["commit"]]
    for words in (["init", "-q", "."], *part, fetch, ["checkout", "-q", "FETCH_HEAD"]):
        subprocess.run(["git", *words], cwd=to, check=True)
    return to


def kernels(corpus: dict[str, Any], root: Path, folders: tuple[Path, ...]) -> Iterator[tuple[Path, Any, str]]:
    """File, library and name; where the file cannot be read at all its error and ""."""
    device = metalmm.Device("cpu")
    for path in sorted({path for pattern in corpus["files"] for path in root.glob(pattern)}):
        if any(fnmatch.fnmatch(path.name, pattern) for pattern in corpus.get("but", [])):
            continue
        try:
            library = device.compile(path, folders)
        except metalmm.Error as error:
            yield path, error, ""
            continue
        names = library.kernel_names
        count = min(corpus.get("each", EACH), len(names))
        for i in range(count):
            yield path, library, names[i * (len(names) - 1) // max(count - 1, 1)]


@functools.cache
def for_metal(path: Path, folders: tuple[Path, ...]) -> KernelText:
    return KernelText(
        compiler.preprocess(path.read_text(), str(path), [path.parent, *folders], for_metal=True), str(path), is_preprocessed=True
    )


@functools.cache
def constants(path: Path, folders: tuple[Path, ...]) -> dict[str | int, Any]:
    """A value for each function constant: of a bool True, of a number 1."""
    found = re.findall(r"\bconstant\s+(?:const(?:expr)?\s+)*(\w+)\s+(\w+)\s*\[\[\s*function_constant", for_metal(path, folders).text)
    return {name: True if kind == "bool" else 1 for kind, name in found}


def mistake(path: Path, folders: tuple[Path, ...], library: Any, name: str, by: str) -> str:
    """Empty, or why it does not compile."""
    if not name:
        return str(library)
    try:
        if by == "nvrtc":
            cuda.build(for_metal(path, folders), name, constants(path, folders), 90)
        else:
            os.environ["METALMM_CXX"] = by
            library.kernel(name, constants(path, folders))
    except metalmm.Error as error:
        return str(error)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="one project")
    parser.add_argument("--with", dest="compilers", default="g++,clang++,nvrtc")
    parser.add_argument("--mirror", type=Path)
    parser.add_argument("--root", type=Path, help="the files of the one project, as they lie there")
    parser.add_argument("--update", action="store_true", help="writes what was reached to corpora.toml")
    args = parser.parse_args()
    os.environ["METALMM_LINT"] = "0"
    path, fallen = HERE / "corpora.toml", 0
    text = path.read_text()
    corpora = tomllib.loads(text)
    if args.only not in ("", *corpora):
        parser.error(f"--only {args.only}: corpora.toml has {', '.join(corpora)}")
    for project, corpus in corpora.items():
        if args.only not in ("", project):
            continue
        with tempfile.TemporaryDirectory() as folder:
            root = args.root or checked_out(corpus, args.mirror, Path(folder))
            folders = tuple(root / name for name in corpus.get("include", []))
            tried, reached = list(kernels(corpus, root, folders)), dict[str, list[int]]()
            for by in args.compilers.split(","):
                good = 0
                for file, library, name in tried:
                    said = mistake(file, folders, library, name, by)
                    good += not said
                    if said:
                        first = next((line for line in said.splitlines() if "error" in line), said.splitlines()[0])
                        print(f"  {by} {file.relative_to(root)} {name}: {first[:200]}", flush=True)
                reached[by] = [good, len(tried)]
                expected = corpus.get("compiled", {}).get(by, [len(tried), 0])[0]
                fallen += good < expected
                print(f"{project} {by}: {good} of {len(tried)} kernels compile; expected {expected}", flush=True)
        if args.update:
            entry = "compiled = { " + ", ".join(f'"{c}" = {n}' for c, n in {**corpus.get("compiled", {}), **reached}.items()) + " }\n"
            start = text.index(f"[{project}]")
            end = text.find("\n[", start) if "\n[" in text[start:] else len(text)
            part = re.sub(r"compiled = .*\n", "", text[start:end]).rstrip("\n") + "\n" + entry
            text = text[:start] + part + text[end:]
            path.write_text(text)
    return 1 if fallen else 0


if __name__ == "__main__":
    sys.exit(main())
