"""The suite's own rules: docs/testing.md."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from support.here import ROOT, cpus

FILES = [p for p in (ROOT / "tests").rglob("*") if p.suffix in (".py", ".cpp", ".h", ".mm", ".sh", ".toml") and p.is_file()]


def test_no_test_imports_another() -> None:
    found = [p for p in FILES if p.suffix == ".py" and re.search(r"^\s*(from|import) \.*test_", p.read_text(), re.MULTILINE)]
    assert not found, "what tests share lies in tests/support"


def test_no_file_is_longer_than_600_lines() -> None:
    long = {str(p.relative_to(ROOT)): n for p in FILES if (n := len(p.read_text().splitlines())) > 600}
    assert not long


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="of Linux")
@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 64),
        ({"cpu.max": "max 100000"}, 64),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu.max": "9900000 100000"}, 64),
    ],
)
def test_workers_are_no_more_than_a_control_group_allows(
    files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(64))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert cpus(tmp_path) == expected
