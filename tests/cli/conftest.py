"""Fixtures of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import metalmm
import pytest
from metalmm import tuning
from metalmm.bench import copy, runner


@pytest.fixture(autouse=True)
def _files_of_its_own(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    own = tmp_path_factory.mktemp("tuning") / "tuning.json"
    tuning.write(own, "no device", [])
    monkeypatch.setenv("METALMM_TUNING", str(own))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tuning, "_loaded", None)
    monkeypatch.setattr(runner, "last_level_cache", lambda device: 1 << 20)
    monkeypatch.setattr(copy, "last_level_cache", lambda device: 1 << 20)
    monkeypatch.setattr(copy, "_LEAST", 1 << 20)
    metalmm._core._forget_choices()
    yield
    monkeypatch.setattr(tuning, "_loaded", None)
    metalmm._core._forget_choices()
