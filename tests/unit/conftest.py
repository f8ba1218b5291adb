"""No test of this folder asks for a compiler: what does stands in devices/cpu."""

from __future__ import annotations

from typing import Any

import pytest
from metalmm import compiler


@pytest.fixture(scope="session")
def _known() -> None:
    """Which compiler there is, of which a key is made, is asked before and kept in the cache."""
    compiler.find_compiler()


@pytest.fixture(autouse=True)
def _no_compiler(_known: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(command: Any, text: str | None = None) -> str:
        raise AssertionError(f"a unit test runs {command[0]}")

    monkeypatch.setattr(compiler, "run", refuse)
