"""The suite's own rules: docs/testing.md."""

from __future__ import annotations

import re

from support.here import ROOT

FILES = [p for p in (ROOT / "tests").rglob("*") if p.suffix in (".py", ".cpp", ".h", ".mm", ".sh", ".toml") and p.is_file()]


def test_no_test_imports_another() -> None:
    found = [p for p in FILES if p.suffix == ".py" and re.search(r"^\s*(from|import) \.*test_", p.read_text(), re.MULTILINE)]
    assert not found, "what tests share lies in tests/support"


def test_no_file_is_longer_than_600_lines() -> None:
    long = {str(p.relative_to(ROOT)): n for p in FILES if (n := len(p.read_text().splitlines())) > 600}
    assert not long
