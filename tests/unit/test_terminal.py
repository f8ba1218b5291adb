"""Tables on terminals of any width: no line is longer, and no word is cut."""

from __future__ import annotations

import io

import pytest
import rich.console
from metalmm import terminal

COLUMNS = ("#", "shape", "calls", "winner", "ms", "runner-up")
ROWS = [
    ["1", "m=1 n=9728 k=896 nt", "2280", "m1_optimized_v4/nt_bn8_largek_smalln_tg256", "0.123ms", "= m1_optimized_v2/nt_bn64_col +0.4%"],
    ["2", "m=1 n=896 k=4864 nt", "2280", "mlx/baseline", "12.3ms", ""],
]


@pytest.mark.parametrize("width", range(60, 201, 7))
def test_a_table_fits_its_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(terminal, "console", lambda file=None: rich.console.Console(file=out, width=width))
    terminal.table(COLUMNS, ROWS, numbers=(0, 2, 4), first_to_go=(5, 2, 0))
    lines = out.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    words = " ".join(lines).split()
    for word in ("n=9728", "nt_bn8_largek_smalln_tg256", "0.123ms", "mlx/", "12.3ms"):
        assert any(w == word or w.endswith("/" + word) or w.startswith(word) for w in words), (word, lines)
    assert ("runner-up" in lines[0]) == (width > 120) or "no room for: runner-up" in out.getvalue()


def test_a_plain_line_says_how_long_the_rest_takes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    progress = terminal.Progress()
    progress.begin("compiling", 4)
    now += 60
    progress.step()
    assert capsys.readouterr().err == "... compiling 1/4, about 180 s left\n"
