"""``metalmm report RUN.json… -o page.html``: results as one page that needs nothing else, light or dark, wide or narrow."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from .. import __version__, files
from ..errors import Error
from . import page, results
from .report import ms
from .results import Run, decide
from .runner import ShapeRun
from .sizes import Shape
from .statistics import Median, median_of, verdict

_SHOWN = 8  # variants of a shape's chart
_AXIS = 4.0  # times the best median: where a chart ends, so that one slow variant flattens no bar
_COLOURS = 6  # of a step's parts; the last is all others'

_CSS = """
:root { color-scheme: light dark; --paper: #fbfbfa; --card: #fff; --ink: #1c1d1f; --soft: #62666d; --line: #e3e4e6; --accent: #2457c5;
  --bar: #9db7ec; --good: #1d7f4d; --bad: #b3261e; --s0: #2457c5; --s1: #d9822b; --s2: #2a9d78; --s3: #8b5fbf; --s4: #c0527a; --s5: #7a8a99; }
@media (prefers-color-scheme: dark) { :root { --paper: #131417; --card: #1b1d21; --ink: #e9eaec; --soft: #9aa0a8; --line: #2d3036;
  --accent: #8fb0ff; --bar: #3d5a9e; --good: #63c794; --bad: #ff8a80; --s0: #6f97f5; --s1: #e6a15c; --s2: #57c4a0; --s3: #b594e0; --s4: #e08bac; --s5: #93a1ae; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 64px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 6px; } h2 { font-size: 18px; margin: 40px 0 10px; } h3 { font-size: 15px; margin: 0 0 8px; overflow-wrap: anywhere; }
p, li { max-width: 78ch; } .soft, figcaption, small { color: var(--soft); font-size: 13px; } .bad { color: var(--bad); } .good { color: var(--good); }
.mono, td.name, .name { font: 12.5px/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
.cards { display: grid; gap: 14px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 430px), 1fr)); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; min-width: 0; }
.big { font-size: 28px; font-weight: 650; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 6px 10px; border-top: 1px solid var(--line); vertical-align: top; } thead th { border-top: 0; color: var(--soft); font-weight: 500; font-size: 13px; }
td.n, th.n { text-align: right; white-space: nowrap; }
.row { display: grid; grid-template-columns: minmax(0, 1fr) 74px; gap: 2px 10px; margin: 7px 0; align-items: baseline; } .row .v { text-align: right; font-variant-numeric: tabular-nums; font-size: 13px; }
.track { grid-column: 1 / -1; position: relative; height: 8px; border-radius: 4px; background: var(--line); }
.track i { position: absolute; top: 0; bottom: 0; left: 0; border-radius: 4px; background: var(--bar); } .track b { position: absolute; top: -2px; bottom: -2px; border-radius: 2px; background: var(--ink); opacity: .55; min-width: 2px; }
.track.cut i { border-radius: 4px 0 0 4px; background-image: linear-gradient(to right, transparent 88%, var(--card)); }
.row.first .track i { background: var(--accent); } .row.first .name { font-weight: 700; }
.stack { display: flex; height: 22px; border-radius: 6px; overflow: hidden; background: var(--line); margin: 8px 0; } .stack i { min-width: 1px; }
.key { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13px; padding: 0; margin: 0; list-style: none; } .key i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 6px; }
@media (max-width: 760px) { thead { display: none; } tr { display: block; border-top: 1px solid var(--line); padding: 6px 0; }
  td, td.n { display: flex; justify-content: space-between; gap: 12px; border: 0; padding: 2px 10px; text-align: right; white-space: normal; }
  td:empty { display: none; } td::before { content: attr(data-of); color: var(--soft); font: 13px/1.5 system-ui, sans-serif; text-align: left; } }
details { margin-top: 8px; } summary { cursor: pointer; color: var(--soft); }
"""


class ReportError(Error, ValueError):
    """A file that no page can be made of."""


def _tag(name: str, text: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f"<{name}{attribute}>{text}</{name}>"


def _table(head: Sequence[tuple[str, bool]], rows: Iterable[Sequence[str]], names: Sequence[int] = ()) -> str:
    """head: titles, and whether the column holds numbers; cells are HTML. Columns that are empty throughout are left out. On a narrow
    screen each row is a block, whose cells name their columns."""
    rows = list(rows)
    shown = [i for i in range(len(head)) if any(row[i] for row in rows)]
    top = "".join(_tag("th", escape(head[i][0]), "n" if head[i][1] else "") for i in shown)
    kinds = {i: "n" if head[i][1] else "name" if i in names else "" for i in shown}
    cells = ("".join(f'<td class="{kinds[i]}" data-of="{escape(head[i][0])}">{row[i]}</td>' for i in shown) for row in rows)
    body = "".join(_tag("tr", row) for row in cells)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _name(text: str) -> str:
    """An id or a shape, that a line may end in only behind a space, a slash or an underscore."""
    return re.sub(r"(?<=[/_])(?=\w)", "<wbr>", escape(text))


def _where(environment: dict[str, Any]) -> str:
    machine = environment.get("gpu") or f"{environment.get('cpu')}, {environment.get('threads')} threads"
    return f"device {environment.get('device')} ({machine})"


def _bar(name: str, m: Median, text: str, widest: float, first: bool, title: str = "") -> str:
    """A median with its interval on a track that ends at `widest`; what is past it fades away there."""

    def at(value: float) -> str:
        return f"{min(100.0, 100 * value / widest) if widest else 0:.2f}%"

    span = min(m.high, widest) - min(m.low, widest)
    interval = f'<b style="left:{at(m.low)};width:{100 * span / widest if widest else 0:.2f}%"></b>' if m.count > 1 else ""
    return (
        f'<div class="row{" first" if first else ""}" title="{escape(title)}"><span class="name">{_name(name)}</span><span class="v">{text}</span>'
        f'<span class="track{" cut" if m.value > widest else ""}"><i style="width:{at(m.value)}"></i>{interval}</span></div>'
    )


def _stack(parts: Sequence[tuple[str, float, int]]) -> str:
    """Parts of a whole, each of a colour."""
    total = sum(v for _, v, _ in parts) or 1.0
    bars = "".join(f'<i style="width:{100 * v / total:.2f}%;background:var(--s{i})" title="{escape(n)}"></i>' for n, v, i in parts)
    keys = "".join(
        f'<li><i style="background:var(--s{i})"></i><span class="mono">{_name(n)}</span> {v / total:.1%}</li>' for n, v, i in parts
    )
    return f'<div class="stack">{bars}</div><ul class="key">{keys}</ul>'


def _colours(policies: Sequence[dict[str, Any]]) -> dict[int, int]:
    """Of the calls that take most, by their places: one call has one colour, whatever the policy."""
    totals = [sum(p["shares"][i] or 0.0 for p in policies) for i in range(len(policies[0]["shares"]))]
    most = sorted(range(len(totals)), key=lambda i: -totals[i])[: _COLOURS - 1]
    return {call: colour for colour, call in enumerate(sorted(most))}


def _parts(data: dict[str, Any], policy: dict[str, Any], colours: dict[int, int]) -> list[tuple[str, float, int]]:
    """A policy's shares of the step with their colours; calls that have none are one part."""
    parts, others = list[tuple[str, float, int]](), 0.0
    for i, (call, variant, share) in enumerate(zip(data["calls"], policy["variants"], policy["shares"], strict=True)):
        if not share or not variant:
            continue
        if i in colours:
            parts.append((f"{_short(call['shape'])}: {variant}", share, colours[i]))
        else:
            others += share
    return [*parts, *([("the others", others, _COLOURS - 1)] if others else [])]


def _step(data: dict[str, Any]) -> str:
    """A decode step under its policies."""
    policies = data["policies"]
    times = {p["name"]: median_of([t for t in p["device_ms"] if t is not None] or p["host_ms"]) for p in policies if p["host_ms"]}
    hosts = {p["name"]: median_of(p["host_ms"]) for p in policies if p["host_ms"]}
    if not times:
        return ""
    best = min(times, key=lambda name: times[name].value)
    widest = max(m.high for m in times.values())
    count = sum(c["calls"] for c in data["calls"])
    out = [_tag("h2", f"The step: {count} matmuls on {escape(_where(data['environment']))}")]
    lead = f"of device time under <b>{escape(best)}</b>"
    others = []
    for name, m in times.items():
        if name != best and verdict(times[best], m) == "slower":
            others.append(f"{escape(name)} takes {m.value / times[best].value:.2f} times as long")
        elif name != best:
            others.append(f"{escape(name)} cannot be told from it")
    out.append(
        _tag("p", f'<span class="big">{ms(times[best].value)}</span><br>{lead}' + (f"; {', '.join(others)}" if others else "") + ".")
    )
    cards, colours = [], _colours(policies)
    for p in policies:
        if p["name"] not in times:
            continue
        m, host = times[p["name"]], hosts[p["name"]]
        rate = p["bytes"] / m.value / 1e6 if m.value else 0.0
        title = f"{escape(str(p['calls']))} calls, {p['bytes'] / 1e6:.0f} MB"
        body = _tag("h3", escape(p["name"])) + _bar("device", m, ms(m.value), widest, p["name"] == best, title)
        body += _bar(
            "host, from replay to the end of the wait", host, ms(host.value), max(widest, max(h.high for h in hosts.values())), False
        )
        body += _tag("p", f"{title}; {rate:.1f} GB/s, {page.percent(rate / data['copy_gbps'])} of a copy's {data['copy_gbps']:.1f}", "soft")
        shares = _parts(data, p, colours)
        body += _stack(shares) if shares else ""
        missing = [_short(c["shape"]) for c, v in zip(data["calls"], p["variants"], strict=True) if v is None]
        body += _tag("p", f"without: {escape('; '.join(missing))}", "bad") if missing else ""
        cards.append(_tag("div", body, "card"))
    out.append(_tag("div", "".join(cards), "cards"))
    environment = data["environment"]
    out.append(
        _tag("p", escape(f"metalmm {environment['metalmm']}, commit {str(environment['commit'])[:10]}, {environment['time']}"), "soft")
    )
    if data["left_out"]:
        rows = [[escape(g["text"]), escape(str(g["calls"] or "")), escape(g["why"])] for g in data["left_out"]]
        out.append(
            f"<details><summary>left out of the step: {len(rows)}</summary>{_table([('shape', False), ('calls', True), ('why', False)], rows, [0])}</details>"
        )
    return "".join(out)


def _short(shape: dict[str, Any]) -> str:
    return Shape.from_json(shape).short


def _winners(runs: Sequence[tuple[str, Run]]) -> str:
    """A row for each shape and run; the runs of a shape one under another."""
    order: dict[str, list[ShapeRun | None]] = {}
    for i, (_, run) in enumerate(runs):
        for one in run.shapes:
            order.setdefault(one.shape.short, [None] * len(runs))[i] = one
    shares = [page.step_share(run) for _, run in runs]
    head = [("shape", False), ("run", False), ("calls", True), ("winner", False)]
    head += [(title, True) for title in ("ms", "noise", "share", "over base", "GB/s", "of copy")]
    rows = list[list[str]]()
    for short, ran in order.items():
        calls = next((s.shape.calls for s in ran if s and s.shape.calls), None)
        for i, ((name, run), s, share) in enumerate(zip(runs, ran, shares, strict=True)):
            d = decide(s, run.bad_rel) if s else None
            cells = ["" if i else _name(short), escape(name) if len(runs) > 1 else "", "" if i else escape(str(calls or ""))]
            rows.append(cells)
            if not s or not d:
                cells += [_tag("span", "not run" if not s else "none is right" if s.results else "no variant", "soft"), *[""] * 6]
                continue
            rate = page.gbps(s, d.median.value)
            names = escape(", ".join(d.ties))
            ties = f' <small title="{names}">= {len(d.ties)} more</small>' if d.ties else ""
            over = f"{d.over_baseline:.2f}x" if d.over_baseline and not page.is_emulated(run, s.baseline) else ""
            cells += [
                f'<span class="mono">{_name(d.winner.variant)}</span>{ties}',
                ms(d.median.value).removesuffix("ms"),
                f"±{page.percent(s.noise)}" if s.twin else "",
                page.percent(share.get(run.shapes.index(s))),
                over,
                f"{rate:.1f}",
                page.percent(rate / run.copy_gbps) if run.copy_gbps else "",
            ]
    return _table(head, rows, [0, 1])


def _chart(s: ShapeRun, run: Run) -> str:
    """The best variants of a shape with their intervals, and how the winner's bandwidth stands to the copy's."""
    right = [(r, m) for r in s.results if r.is_right and not r.stopped and (m := r.median())]
    right.sort(key=lambda pair: pair[1].value)
    d = decide(s, run.bad_rel)
    if not d:
        return ""
    shown = right[:_SHOWN]
    base = next(((r, m) for r in s.results if r.variant == s.baseline and (m := r.median()) and r.is_right), None)
    widest = min(max(m.high for _, m in shown) * 1.02, _AXIS * d.median.value)
    body = [_tag("h3", escape(s.shape.short))]
    for r, m in shown:
        tie = " =" if r.variant in d.ties else ""
        title = f"{m.count} samples, 95% of the median {ms(m.low)} to {ms(m.high)}"
        body.append(_bar(r.variant + tie, m, ms(m.value), widest, r is d.winner, title))
    if base and base[0] not in [r for r, _ in shown]:
        body.append(
            _tag(
                "p",
                f"baseline {escape(base[0].variant)}: {ms(base[1].value)}, {base[1].value / d.median.value:.2f} times the winner's",
                "soft",
            )
        )
    rate = page.gbps(s, d.median.value)
    if run.copy_gbps:
        part = Median(rate, rate, rate, 1)
        body.append(
            _bar(f"bandwidth of the winner; a copy moves {run.copy_gbps:.1f} GB/s", part, f"{rate:.1f}", max(rate, run.copy_gbps), False)
        )
    device = [g for g in d.winner.gpu if g is not None]
    if device and d.winner.cpu:
        g, h = median_of(device), median_of(d.winner.cpu)
        body.append(
            _bar(
                "the winner on the host, from submit to the end of the wait",
                h,
                ms(h.value),
                max(h.value, g.value),
                False,
                f"device {ms(g.value)}",
            )
        )
    rest = len(s.results) - len(shown)
    body.append(
        _tag("p", f"{rest} more variants{f'; noise of this shape ±{page.percent(s.noise)}' if s.twin else ''}", "soft") if rest > 0 else ""
    )
    return _tag("section", "".join(body), "card")


def _run(name: str, run: Run, many: bool) -> str:
    title = f": {name}" if many else ""
    out = [_tag("h2", f"Variants by shape{escape(title)}")]
    out.append(
        _tag(
            "p",
            "Bars are medians, the dark span on each is the 95% interval of the median; = marks what this run cannot tell from the winner. "
            f"A bar of more than {_AXIS:g} times the winner's fades out.",
            "soft",
        )
    )
    out.append(_tag("div", "".join(_chart(s, run) for s in run.shapes), "cards"))
    bad = [
        [escape(shape.short), escape(r.variant), _tag("span", "failed" if r.failed else "wrong", "bad"), escape(r.failed or r.wrong)]
        for shape, r in run.bad()
    ]
    if bad:
        out.append(
            _tag("h2", f"Wrong or failed{escape(title)}")
            + _table([("shape", False), ("variant", False), ("", False), ("why", False)], bad, [0, 1])
        )
    lines = [*page.skip_lines(run), *(f"not run: {g.text}: {g.why}" for g in run.left_out)]
    if lines:
        items = "".join(_tag("li", escape(line), "soft") for line in lines)
        out.append(f"<details><summary>{len(lines)} reasons why variants or shapes were left out</summary><ul>{items}</ul></details>")
    return "".join(out)


def make(benches: Sequence[tuple[str, Run]], steps: Sequence[dict[str, Any]]) -> str:
    """The page."""
    environments = [run.environment for _, run in benches] + [data["environment"] for data in steps]
    devices = list(dict.fromkeys(_where(e) for e in environments))
    notes = list(dict.fromkeys(e["note"] for e in environments if e.get("note")))
    notes = [n for n in notes if not any(n != other and other.startswith(n) for other in notes)]
    head = f"Which variant, and how long is the step: {', '.join(devices)}"
    facts = "".join(
        _tag(
            "li",
            escape(
                f"{name}: metalmm {run.environment['metalmm']}, commit {str(run.environment['commit'])[:10]}, {run.environment['os']}, "
                f"{'cold' if run.arguments.get('cold') else 'warm'} weights, {run.environment['time']}"
                f"{'' if run.is_complete else f'; INCOMPLETE: {len(run.shapes)} of {run.planned} shapes, {min((s.rounds for s in run.shapes), default=0)} of {run.rounds} rounds of each'}"
            ),
            "soft",
        )
        for name, run in benches
    )
    body = [_tag("h1", escape(head)), *(_tag("p", escape(note), "soft") for note in notes), _tag("ul", facts)]
    body += [_step(data) for data in steps]
    if benches:
        body.append(_tag("h2", "Winners") + _winners(benches))
        body += [
            _tag("p", escape(f"{name}: {page.copy_text(run)}; {'; '.join(page.baseline_lines(run))}"), "soft") for name, run in benches
        ]
        body.append(
            _tag(
                "p",
                "ms: the median. noise: how far two series of one variant came out apart. share: of calls times ms. over base: the baseline's median over it. "
                "of copy: the bytes that must move over the rate of a copy; warm weights may come from a cache, above 100%.",
                "soft",
            )
        )
    body += [_run(name, run, len(benches) > 1) for name, run in benches]
    body.append(_tag("p", f"made by metalmm {__version__} report", "soft"))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(head)}</title><style>{_CSS}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="RUN.json", help="results of bench, tune and step, in any number")
    parser.add_argument("-o", "--output", metavar="PAGE.html", default="metalmm-report.html", help="default: metalmm-report.html")
    parser.set_defaults(run=main)


def read(paths: Sequence[str]) -> tuple[list[tuple[str, Run]], list[dict[str, Any]]]:
    """Bench runs by the names of their files, and steps. Raises ReportError, FileError."""
    benches: list[tuple[str, Run]] = []
    steps = []
    for path in paths:
        schema = files.schema_of(path)
        name = Path(path).stem
        if schema == results.SCHEMA:
            benches.append((name, results.load(path)))
        elif schema == "metalmm-tune":
            benches.append((name, results.load(path, part="bench")))
        elif schema == "metalmm-step":
            steps.append(files.read_json(path, schema, 1))
        else:
            raise ReportError(f"{path}: it holds {schema!r}; a page is made of what bench, tune and step write with --json")
    return benches, steps


def main(args: argparse.Namespace) -> int:
    files.check_output(Path(args.output), "<!doctype html>", "page")
    benches, steps = read(args.files)
    try:
        text = make(benches, steps)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if isinstance(error, Error):
            raise
        raise ReportError(f"{', '.join(args.files)}: a part of a result is missing or of another kind: {error!r}") from error
    files.write_text(args.output, text)
    if args.json != "-":
        print(f"{args.output}: {len(text) / 1e3:.0f} kB, of {len(benches)} runs and {len(steps)} steps")
    files.give_json(args.json, {"schema": "metalmm-report", "version": 1, "page": args.output, "runs": len(benches), "steps": len(steps)})
    return 0
