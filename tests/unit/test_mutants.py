"""tests/mutants changes texts that must stand in their files exactly once."""

from __future__ import annotations

import sys
import tomllib

import pytest
from support.here import ROOT


def test_every_mutant_by_hand_has_its_place() -> None:
    mutants = [m for p in (ROOT / "tests" / "mutants" / "by_hand").glob("*.toml") for m in tomllib.loads(p.read_text())["mutant"]]
    assert len(mutants) > 100
    for mutant in mutants:
        count = (ROOT / mutant["file"]).read_text().count(mutant["old"])
        assert count == 1, f"{mutant['file']}: {mutant['what']}: its text stands there {count} times"


def test_every_explained_mutant_has_its_place() -> None:
    for mutant in tomllib.loads((ROOT / "tests" / "mutants" / "explained.toml").read_text())["mutant"]:
        assert mutant["change"].partition(": ")[2] in (ROOT / mutant["file"]).read_text() and mutant["reason"], mutant


@pytest.mark.rest
def test_drawn_mutants_follow_from_their_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "mutants"))
    try:
        import draw

        first, again = draw.draw(ROOT, 40, 7), draw.draw(ROOT, 40, 7)
    finally:
        sys.modules.pop("draw", None)
    assert first == again and len(first) == 40 and {m.area for m in first} == set(draw.AREAS)
    for m in first:
        text = (ROOT / m.file).read_text()
        assert text[m.offset : m.offset + len(m.old)] == m.old != m.new
