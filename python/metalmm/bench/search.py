"""Parameters that no id has: a budgeted sample of what the manifest's kernels may be given, then the neighbours of the best."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import Device, Variant, manifest, manifest_file
from ..errors import Error
from ..expressions import holds
from ..terminal import Progress
from ..variant import cpp
from . import runner
from .report import Result
from .runner import Rule, ShapeRun
from .sizes import Shape

_QUICK = Rule(least=0.01, most=0.05, spread=0.05)
_FINALISTS = 3
_MOST = 1_000_000  # combinations of a kernel


class SearchError(Error, ValueError):
    """A space that cannot be searched."""


def _holds(rule: str, values: dict[str, int]) -> bool:
    """Also where it divides by zero: it does not."""
    try:
        return holds(rule, values)
    except ValueError:
        return False


@dataclass(frozen=True)
class Candidate:
    """A kernel's table in a manifest with values for its template."""

    kernel: str
    values: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        return "_".join([self.kernel, *(f"{key}{cpp(value)}" for key, value in self.values)])

    def row(self) -> str:
        """As a manifest has it."""
        return f'{self.name} = {{ kernel = "{self.kernel}", {", ".join(f"{k} = {cpp(v)}" for k, v in self.values)} }}'


class Space:
    """Every candidate for one shape, of every manifest that says what may be tried."""

    def __init__(self, paths: list[Path], shape: Shape) -> None:
        self.tables: dict[str, tuple[Path, dict[str, Any]]] = {}
        self.candidates: dict[str, list[Candidate]] = {}
        sizes = {"m": shape.m, "n": shape.n, "k": shape.k, "batch": shape.batch}
        for path in paths:
            for name, table in manifest_file.search_space(path).items():
                values = {key: choices for key, choices in table["search"].items() if key != "where"}
                if math.prod(map(len, values.values())) > _MOST:
                    raise SearchError(
                        f"{path}: kernels.{name}: search has {math.prod(map(len, values.values()))} combinations; the limit is {_MOST}"
                    )
                combinations = [tuple(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]
                fixed = {key: value for key, value in table.items() if isinstance(value, int)}
                self.tables[name] = (path, table)
                self.candidates[name] = [
                    Candidate(name, c)
                    for c in combinations
                    if all(_holds(rule, {**sizes, **fixed, **dict(c)}) for rule in table["search"].get("where", []))
                ]

    def neighbours(self, of: Candidate) -> list[Candidate]:
        """Those that differ in one value, by one step of its list."""
        search = self.tables[of.kernel][1]["search"]

        def steps(other: Candidate) -> list[int]:
            return [abs(search[k].index(a) - search[k].index(b)) for (k, a), (_, b) in zip(of.values, other.values, strict=True) if a != b]

        return [c for c in self.candidates[of.kernel] if steps(c) == [1]]

    @contextlib.contextmanager
    def registered(self, chosen: list[Candidate]) -> Iterator[dict[str, Candidate]]:
        """Variants of them, by id, for as long as the block lasts; what a manifest may not have is left out."""
        folder = Path(tempfile.mkdtemp(prefix="metalmm-search-"))
        known: dict[str, Candidate] = {}
        files = []
        try:
            for number, candidate in enumerate(chosen):
                path, table = self.tables[candidate.kernel]
                kept = {k: v for k, v in table.items() if k not in ("search", *dict(candidate.values))}
                kept["source"] = str((path.parent / table["source"]).resolve())
                text = f"format = 2\n[kernels.{candidate.kernel}]\n" + "".join(f"{k} = {_toml(v)}\n" for k, v in kept.items())
                text += f"[families.search_{number}.variants]\n{candidate.row()}\n"
                file = folder / f"{number}.toml"
                file.write_text(text)
                with contextlib.suppress(Error):
                    known.update({str(v): candidate for v in manifest.load_variants(file)})
                    files.append(file)
            yield known
        finally:
            for file in files:
                manifest.unload(file)
            shutil.rmtree(folder, ignore_errors=True)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(v)}" for key, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return json.dumps(value)


@dataclass
class Found:
    """What a search of one shape came to.

    Attributes:
        tried: Every candidate with what it took in milliseconds, or why it failed.
        last: The best of them beside the best of the ids, measured by the full rule.
    """

    shape: Shape
    tried: list[tuple[Candidate, float | None, str]]
    last: ShapeRun
    names: dict[str, Candidate]


def search(
    device: Device,
    shape: Shape,
    paths: list[Path],
    ids: list[Variant],
    kernels: set[str] | None,
    *,
    budget: int,
    rule: Rule,
    copies: int,
    seed: int,
    progress: Progress,
) -> Found:
    """Searches one shape. Half of the budget goes to a sample, evenly over the kernels (None: all). The rest goes to neighbours of the best
    so far. The best are measured beside `ids` at last."""
    space, draw = Space(paths, shape), random.Random(seed)
    if kernels is not None:
        space.candidates = {name: found for name, found in space.candidates.items() if name in kernels}
    tried: dict[Candidate, tuple[float | None, str]] = {}
    pools = {name: draw.sample(all_of_it, len(all_of_it)) for name, all_of_it in space.candidates.items() if all_of_it}
    progress.begin(f"searching {shape.short}", budget)

    def measure(chosen: list[Candidate]) -> None:
        with space.registered(chosen) as known:
            usable = [manifest.get(name) for name in known]
            usable = [v for v in usable if v.runs_on(device) and not v.lacks(shape.spec)]
            for c in chosen:
                tried[c] = (None, "the manifest or the shape does not allow it")
            for r in _results(device, shape, usable, _QUICK, copies, seed, progress):
                median = r.median()
                why = r.failed or r.wrong or r.stopped
                tried[known[r.variant]] = (median.value if median and r.is_right else None, why)
        progress.step(len(chosen))

    first = max(1, budget // 2)
    sample = [c for c in itertools.chain.from_iterable(itertools.zip_longest(*pools.values())) if c][:first]
    measure(sample)
    while (left := budget - len(tried)) > 0:
        ranked = sorted((t, c.name, c) for c, (t, _) in tried.items() if t is not None)
        near = list(dict.fromkeys(n for _, _, c in ranked[:_FINALISTS] for n in space.neighbours(c) if n not in tried))[:left]
        if not near:
            near = [c for pool in pools.values() for c in pool if c not in tried]
            draw.shuffle(near)
            near = near[: min(left, 4)]
        if not near:
            break
        measure(near)
    ranked = sorted((t, c.name, c) for c, (t, _) in tried.items() if t is not None)
    finalists = [c for _, _, c in ranked[:_FINALISTS]]
    with space.registered(finalists) as known:
        everyone: list[Variant] = [*ids, *(manifest.get(name) for name in known)]
        failures = _compiled(device, shape, everyone)
        last = runner.run_shape(device, shape, everyone, rule=rule, copies=copies, seed=seed, progress=progress, failures=failures)
    return Found(shape, [(c, t, why) for c, (t, why) in tried.items()], last, known)


def _compiled(device: Device, shape: Shape, vs: list[Variant]) -> dict[str, str]:
    """What did not compile; the search's own progress goes on meanwhile."""
    return {name: why for (name, _), why in runner.compile_all(device, [(shape, vs)], Progress(quiet=True)).items()}


def _results(device: Device, shape: Shape, vs: list[Variant], rule: Rule, copies: int, seed: int, progress: Progress) -> list[Result]:
    if not vs:
        return []
    failures = _compiled(device, shape, vs)
    return runner.run_shape(device, shape, vs, rule=rule, copies=copies, seed=seed, progress=progress, failures=failures).results
