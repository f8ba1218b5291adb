"""What the command line shows: tables, and progress with the time that is left. Drawn by rich (pip install rich)."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Sequence
from typing import IO, Any

from .errors import Error

try:
    import rich.box
    import rich.console
    import rich.markup
    import rich.progress
    import rich.table
except ImportError:  # said when it is needed: import metalmm needs NumPy alone
    rich = None  # type: ignore[assignment]

_PLAIN_SECONDS = 15.0  # between lines where there is no terminal
_GAP = 3  # between columns, as rich draws them


class TerminalError(Error, RuntimeError):
    """The command line's own library is missing."""


def console(file: IO[str] | None = None) -> Any:
    """Colours on a terminal alone; elsewhere lines as wide as they are."""
    if rich is None:
        raise TerminalError("this command draws tables with the package rich: pip install rich, or metalmm with its extra [cli]")
    file = file or sys.stdout
    made = rich.console.Console(file=file, highlight=False, soft_wrap=True)
    if not made.is_terminal:
        made.width = 400
    return made


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Iterable[int] = (),
    marked: Iterable[int] = (),
    first_to_go: Iterable[int] = (),
) -> None:
    """Prints one. Columns that are empty throughout are left out.

    Args:
        numbers: Columns set to the right.
        marked: Rows in bold.
        first_to_go: Columns that a narrow terminal does without, in that order.
    """
    rows = [list(row) for row in rows]
    out = console()
    widths = [max(map(len, (columns[i], *(row[i] for row in rows)))) for i in range(len(columns))]
    shown = [i for i in range(len(columns)) if any(row[i] for row in rows)]

    def is_too_wide() -> bool:
        return sum(widths[i] + _GAP for i in shown) - _GAP > int(out.width)

    gone = list[str]()
    for i in first_to_go:
        if i in shown and is_too_wide():
            shown.remove(i)
            gone.append(columns[i])
    if is_too_wide():  # an id takes two lines
        rows = [[re.sub(r"(?<=/)(?=\w)|(?<=\S) (?=\+\d)", "\n", cell) for cell in row] for row in rows]
    drawn = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    right, bold = set(numbers), set(marked)
    for i in shown:
        drawn.add_column(columns[i], justify="right" if i in right else "left", overflow="fold", no_wrap=i in right)
    for number, row in enumerate(rows):
        drawn.add_row(*(rich.markup.escape(row[i]) for i in shown), style="bold" if number in bold else None)
    out.print(drawn)
    if gone:
        say(f"This terminal has {out.width} columns and no room for: {', '.join(gone)}.")


def say(text: str, style: str | None = None) -> None:
    """A line, as it stands; style: for a terminal."""
    if rich is None:
        print(text)
    else:
        console().print(rich.markup.escape(text), style=style)


class Progress:
    """What goes on, on standard error: a line that is redrawn on a terminal, now and then a plain one elsewhere. A context manager."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bar: Any = None
        self._task: Any = None
        self._done, self._total, self._started, self._last, self._what = 0.0, 0.0, time.monotonic(), time.monotonic(), ""

    def __enter__(self) -> Progress:
        err = console(sys.stderr) if rich is not None else None
        if err and err.is_terminal and not self._quiet:
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("{task.fields[what]}"),
                rich.progress.BarColumn(bar_width=20),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TimeRemainingColumn(compact=True),
                rich.progress.TextColumn(
                    "[dim]{task.fields[note]}", table_column=rich.table.Column(no_wrap=True, overflow="ellipsis", ratio=1)
                ),
                console=err,
                transient=True,
                expand=True,
            )
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None

    def begin(self, what: str, total: float) -> None:
        self._what, self._done, self._total, self._started = what, 0.0, total, time.monotonic()
        if self._bar:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(what, total=total, what=what, note="")

    def step(self, amount: float = 1.0) -> None:
        amount = min(amount, max(self._total - self._done, 0.0))
        self._done += amount
        if self._bar and self._task is not None:
            self._bar.advance(self._task, amount)
        self._plain("")

    def note(self, text: str) -> None:
        if self._bar and self._task is not None:
            if time.monotonic() - self._last > 0.1:
                self._last = time.monotonic()
                self._bar.update(self._task, note=rich.markup.escape(text))
        else:
            self._plain(text)

    def _plain(self, text: str) -> None:
        now = time.monotonic()
        if self._bar or self._quiet or now - self._last < _PLAIN_SECONDS:
            return
        self._last = now
        left = (now - self._started) * (self._total / self._done - 1) if self._done else 0.0
        ending = f", about {left:.0f} s left" if self._done else ""
        print(f"... {self._what} {self._done:.0f}/{self._total:.0f}{ending} {text}".rstrip(), file=sys.stderr, flush=True)
