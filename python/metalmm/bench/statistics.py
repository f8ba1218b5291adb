"""Medians and how far they can be trusted. One rule serves the stopping rule, ties between variants and runs that are compared."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Median:
    """A median and its interval.

    The interval holds the median of the distribution with 95% confidence, whatever the distribution, by order statistics. Below six
    samples no pair of them does. The interval is then their range, widened by half on each side.

    Attributes:
        low: Where the interval begins.
        high: Where it ends.
        noise: How far apart, relative, two series of the same thing in the same run came out.
    """

    value: float
    low: float
    high: float
    count: int
    noise: float = 0.0

    @property
    def spread(self) -> float:
        """Half the interval, relative to the median."""
        return (self.high - self.low) / 2 / self.value if self.value > 0 else 0.0


def median_of(samples: Sequence[float], noise: float = 0.0) -> Median:
    """Of at least one sample."""
    ordered = sorted(samples)
    if len(ordered) < 6:
        return Median(statistics.median(ordered), ordered[0] / 1.5, ordered[-1] * 1.5, len(ordered), noise)
    rank = _rank(len(ordered))
    return Median(statistics.median(ordered), ordered[rank], ordered[-1 - rank], len(ordered), noise)


@functools.lru_cache
def _rank(count: int) -> int:
    """How many samples lie outside the interval on each side: as many as leave at most 2.5% on each."""
    if count > 200:  # the normal approximation of the binomial distribution
        return int(count / 2 - 0.98 * math.sqrt(count))
    rank, outside = 0, 0.5**count
    while (outside := outside + math.comb(count, rank + 1) * 0.5**count) <= 0.025:
        rank += 1
    return rank


def verdict(old: Median, new: Median) -> str:
    """How `new` stands to `old`. It is "faster" or "slower" where the intervals are apart and the medians differ by more than either run's
    noise. It is "same" where neither is so. It is "unclear" where one is so and the other is not."""
    change = abs(new.value - old.value) / old.value if old.value else 0.0
    within_noise = change <= max(old.noise, new.noise)
    overlap = new.low <= old.high and old.low <= new.high
    if within_noise and overlap:
        return "same"
    if within_noise or overlap:
        return "unclear"
    return "faster" if new.value < old.value else "slower"
