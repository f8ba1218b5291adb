"""Fixtures of this folder."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import metalmm
import pytest
from metalmm import cache, compiler, modules
from support.here import COMPILERS

_OF_THE_SUITE, _RUNTIME = Path(os.environ["METALMM_CACHE"]), str(compiler.MSL / "runtime" / "parsed.h")


@pytest.fixture(scope="module")
def device() -> metalmm.Device:
    return metalmm.Device("cpu")


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache. Headers are parsed once for all such tests, for g++ takes two seconds: what a compiler of the suite keeps is copied."""
    run, compilers = compiler.run, {shutil.which(name) for name in COMPILERS}

    def copying(command: Sequence[str], text: str | None = None) -> str:
        if command[0] not in compilers or _RUNTIME not in command:
            return run(command, text)
        *asked, target = command
        kept = (
            _OF_THE_SUITE
            / f"{hashlib.sha256(repr((asked, compiler.find_compiler().version, compiler.machine(), modules.header_digest())).encode()).hexdigest()[:40]}.parsed"
        )
        if not kept.is_file():
            run(command, text)
            kept.parent.mkdir(parents=True, exist_ok=True)
            own = kept.with_suffix(f".{os.getpid()}")
            shutil.copyfile(target, own)
            own.replace(kept)
        shutil.copyfile(kept, target)
        return ""

    monkeypatch.setattr(compiler, "run", copying)
    monkeypatch.setenv("METALMM_CACHE", str(tmp_path / "cache"))
    for name in ("_folder", "_wanted", "_temporary"):
        monkeypatch.setattr(cache, name, None)
    compiler._remembered.cache_clear()
    yield tmp_path / "cache"
    compiler._remembered.cache_clear()
