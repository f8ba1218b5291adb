"""README and docs: links lead somewhere, and sentences are short."""

from __future__ import annotations

import collections
import re
import tomllib
from pathlib import Path

import metalmm
import pytest
from support import msl_page
from support.here import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MOST_WORDS = 30


def prose(page: Path) -> str:
    """Without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def dead_links(page: Path) -> list[str]:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if link.startswith("http"):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    return dead


def long_sentences(text: str) -> list[str]:
    """A cell of a table, an item of a list and a heading end one, too."""
    parts = re.split(r"(?<=[.!?:])\s+(?=[A-Z`*\[])|\n\s*\n|\n\s*(?=[-*#] |\d+\. )|\||\n(?=#)", text)
    return [" ".join(s.split()) for s in parts if len(re.findall(r"[A-Za-z][\w'-]*", s)) > MOST_WORDS]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_page_can_be_followed(page: Path) -> None:
    assert not dead_links(page)
    assert not long_sentences(prose(page))


def test_every_page_is_linked_from_readme_or_a_page() -> None:
    linked = {(page.parent / link.partition("#")[0]).resolve() for page in PAGES for link in re.findall(r"\]\(([^)\s]+)\)", prose(page))}
    assert {p for p in PAGES if p.name != "README.md"} <= linked | set((ROOT / "docs" / "lab").glob("*.md"))


def test_a_dead_link_and_a_long_sentence_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("# One two\n[x](#one-two), [y](#three), [z](b.md)\n\n```\n[no link](c.md)\n```\n")
    assert dead_links(page) == ["#three", "b.md"]
    assert long_sentences("Short. " + "word " * 31 + ". Short.") and not long_sentences("word " * 30)


def test_the_page_of_msl_says_what_the_tables_have() -> None:
    """Else: python tests/support/msl_page.py."""
    assert msl_page.PAGE.read_text() == msl_page.page()


def test_the_pages_count_the_ids_as_they_are() -> None:
    """Of each family in variants.md, of our own points together, and of all in the README."""
    families = collections.Counter(str(v).split("/")[0] for v in metalmm.variants())
    page, readme = (ROOT / "docs" / "variants.md").read_text(), (ROOT / "README.md").read_text()
    told = {name: int(count) for name, count in re.findall(r"^\| `(\w+)` \| (\d+)[ ,]", page, re.MULTILINE)}
    assert {name: count for name, count in told.items() if name in families} == families
    own = tomllib.loads((ROOT / "kernels" / "variants.toml").read_text())["families"].values()
    assert f"| points of our own strategies that ship | {sum(len(family.get('points', [])) for family in own)} |" in page
    assert f"There are {families.total()} ids, of which {families.total() - families['mps'] - families['blas']} have a kernel" in readme
