"""Points that do not ship: a budgeted sample of what the strategies may be given, then the neighbours of the best."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from pathlib import Path

from .. import Device, Variant, manifest
from ..errors import Error
from ..terminal import Progress
from . import runner
from .runner import Rule, ShapeRun
from .sizes import Shape

QUICK = Rule(least=0.01, most=0.05, spread=0.05)
_FINALISTS = 3


@dataclass(frozen=True)
class Candidate:
    """A point of a strategy. values: of the strategy's parameters that are searched, in their order."""

    family: str
    values: tuple[int, ...]
    id: str


class Space:
    """Every candidate for one shape, of every manifest that says what may be tried."""

    def __init__(self, paths: list[Path], shape: Shape, families: set[str] | None) -> None:
        """families: those that are searched; None: all."""
        self.strategies = {
            s.family: s for path in paths for s in manifest.strategies(path) if s.search and (families is None or s.family in families)
        }
        sizes = {"m": shape.m, "n": shape.n, "k": shape.k, "batch": shape.batch}
        self.candidates = {
            name: [Candidate(name, tuple(values.values()), f"{name}/{s.name(values)}") for values in s.searched(sizes)]
            for name, s in self.strategies.items()
        }

    def neighbours(self, of: Candidate) -> list[Candidate]:
        """Those that differ in one value, by one step of its list."""
        search = self.strategies[of.family].search

        def steps(other: Candidate) -> list[int]:
            return [
                abs(choices.index(a) - choices.index(b))
                for choices, a, b in zip(search.values(), of.values, other.values, strict=True)
                if a != b
            ]

        return [c for c in self.candidates[of.family] if steps(c) == [1]]


@dataclass
class Found:
    """What a search of one shape came to.

    Attributes:
        tried: Every candidate with what it took in milliseconds, or why it failed.
        last: The best of them beside the variants that ship, measured by the full rule.
        best: Those of `tried` that are in it.
    """

    shape: Shape
    tried: list[tuple[Candidate, float | None, str]]
    last: ShapeRun
    best: list[str]


def search(
    device: Device,
    shape: Shape,
    paths: list[Path],
    ids: list[Variant],
    families: set[str] | None,
    *,
    budget: int,
    rule: Rule,
    copies: int,
    seed: int,
    progress: Progress,
) -> Found:
    """Searches one shape. Half of the budget goes to a sample, evenly over the families (None: all). The rest goes to neighbours of the
    best so far. The best are measured beside `ids` at last."""
    space, draw = Space(paths, shape, families), random.Random(seed)
    tried: dict[Candidate, tuple[float | None, str]] = {}
    pools = {name: draw.sample(all_of_it, len(all_of_it)) for name, all_of_it in space.candidates.items() if all_of_it}
    progress.begin(f"searching {shape.short}", budget)

    def measure(chosen: list[Candidate]) -> None:
        usable = list[Variant]()
        for c in chosen:
            tried[c] = (None, "the shape or the device does not allow it")
            try:
                v = manifest.get(c.id)
            except Error as error:
                tried[c] = (None, str(error))
                continue
            if v.runs_on(device) and not v.lacks(shape.spec):
                usable.append(v)
        known = {c.id: c for c in chosen}
        for r in compiled_run(device, shape, usable, QUICK, copies, seed, progress).results if usable else []:
            median = r.median()
            why = r.failed or r.wrong or r.stopped
            tried[known[r.variant]] = (median.value if median and r.is_right else None, why)
        progress.step(len(chosen))

    first = max(1, budget // 2)
    sample = [c for c in itertools.chain.from_iterable(itertools.zip_longest(*pools.values())) if c][:first]
    measure(sample)
    while (left := budget - len(tried)) > 0:
        ranked = sorted((t, c.id, c) for c, (t, _) in tried.items() if t is not None)
        near = list(dict.fromkeys(n for _, _, c in ranked[:_FINALISTS] for n in space.neighbours(c) if n not in tried))[:left]
        if not near:
            near = [c for pool in pools.values() for c in pool if c not in tried]
            draw.shuffle(near)
            near = near[: min(left, 4)]
        if not near:
            break
        measure(near)
    ranked = sorted((t, c.id, c) for c, (t, _) in tried.items() if t is not None)
    best = [name for _, name, _ in ranked[:_FINALISTS]]
    everyone: list[Variant] = [*ids, *(manifest.get(name) for name in best if name not in ids)]
    last = compiled_run(device, shape, everyone, rule, copies, seed, progress)
    return Found(shape, [(c, t, why) for c, (t, why) in tried.items()], last, best)


def compiled_run(device: Device, shape: Shape, vs: list[Variant], rule: Rule, copies: int, seed: int, progress: Progress) -> ShapeRun:
    """Compiles what runs; `progress` goes on meanwhile."""
    failures = {name: why for (name, _), why in runner.compile_all(device, [(shape, vs)], Progress(quiet=True)).items()}
    return runner.run_shape(device, shape, vs, rule=rule, copies=copies, seed=seed, progress=progress, failures=failures)
