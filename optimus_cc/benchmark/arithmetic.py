"""What timings say: ratios of pairs with an interval, and latency and bandwidth of a link. No torch."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Median:
    """A median and where the median of what was sampled lies, whatever its distribution."""

    value: float
    low: float | None
    """None, like ``high``: there are too few samples for that confidence."""
    high: float | None
    samples: int


def median_with_interval(values: Sequence[float], confidence: float = 0.95) -> Median:
    """The median of independent ``values``, between the order statistics that cover it with at least ``confidence``.

    The k-th smallest and the k-th largest of n enclose the median unless fewer than k values fall on one side of it,
    and how many do is binomial: 2 P(B(n, 1/2) < k).
    """
    ordered, n = sorted(values), len(values)
    missed, k = 0.0, 0
    while k < n // 2 and 2 * (missed + math.comb(n, k) / 2**n) <= 1 - confidence:
        missed += math.comb(n, k) / 2**n
        k += 1
    low, high = (ordered[k - 1], ordered[n - k]) if k else (None, None)
    return Median(statistics.median(ordered), low, high, n)


def ratio_of_pairs(base: Sequence[float], other: Sequence[float]) -> Median:
    """How many times ``base`` each ``other`` is, pair by pair: a drift that both members of a pair share drops out."""
    return median_with_interval([b / a for a, b in zip(base, other, strict=True)])


@dataclass(frozen=True)
class Line:
    """time = latency + bytes / bandwidth."""

    latency_s: float
    bytes_per_s: float | None
    """None: time doesn't grow with size in what was measured."""
    worst_error: float
    """Largest |fitted - measured| / measured: how well one line describes these sizes."""

    @property
    def gbit_s(self) -> float | None:
        return None if self.bytes_per_s is None else self.bytes_per_s * 8 / 1e9


def fit_line(nbytes: Sequence[float], times_s: Sequence[float]) -> Line:
    """The line with the smallest sum of absolute relative errors, neither coefficient negative.

    Relative, because times span orders of magnitude and small messages decide the latency; absolute rather than
    squared, so that a few sizes that were held up don't bend it. Such a minimum goes through two of the points, or
    through one with one coefficient zero: all of those lines are tried.

    Args:
        nbytes: bytes that a rank sends; at least two different values, all positive.
        times_s: what each took; positive.
    """
    points = list(zip(nbytes, times_s, strict=True))

    def errors(line: tuple[float, float]) -> list[float]:
        return [abs(line[0] + line[1] * size - time) / time for size, time in points]

    # The steepest of equals: exact data has many pairs with one line, apart from rounding.
    latency, per_byte = min(_candidates(points), key=lambda line: (sum(errors(line)), -line[1]))
    return Line(latency, 1 / per_byte if per_byte else None, max(errors((latency, per_byte))))


def _candidates(points: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """(seconds, seconds per byte) of every line that can be the minimum."""
    for (size, time), (other_size, other_time) in itertools.combinations(points, 2):
        if size != other_size:
            per_byte = (other_time - time) / (other_size - size)
            latency = time - per_byte * size
            if per_byte >= 0 and latency >= 0:
                yield latency, per_byte
    for size, time in points:
        yield 0.0, time / size
        yield time, 0.0
