"""What several seeds say: means with intervals, paired differences, and whether two techniques are equivalent.

Runs of two techniques with the same seed start from the same weights and see the same batches, so their difference is
looked at, seed by seed; it is taken to be normal. Intervals are Student's t. *Unchanged* is never read from a
difference that is merely not significant: it takes two one-sided tests (Schuirmann 1987) that reject every difference
as large as a margin.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from scipy.special import stdtr, stdtrit

CONFIDENCE = 0.95
MARGIN = 0.01
"""Of the baseline's mean: how much perplexity may change and still count as unchanged."""

Verdict = Literal["equivalent", "different", "inconclusive"]


@dataclass(frozen=True)
class Mean:
    """Mean of n values. ``low`` and ``high`` bound its confidence interval; None with fewer than two values."""

    value: float
    low: float | None
    high: float | None
    n: int
    confidence: float = CONFIDENCE

    @property
    def half_width(self) -> float | None:
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    def text(self, digits: int = 2) -> str:
        """``9.31 ± 0.05 (n = 3)``; says so where there is no interval."""
        if self.half_width is None:
            return f"{self.value:.{digits}f} (n = {self.n}, no interval)"
        return f"{self.value:.{digits}f} ± {self.half_width:.{digits}f} (n = {self.n})"


@dataclass(frozen=True)
class Comparison:
    """A technique against its baseline, over the seeds that both have."""

    baseline: float
    """The baseline's mean."""
    difference: Mean
    """Technique minus baseline."""
    margin: float
    """In the values' own unit."""
    p_different: float | None
    """Of the t test that there is no difference; None with fewer than two pairs."""
    p_equivalent: float | None
    """Of the two one-sided tests that the difference is at least the margin; None likewise."""
    left_out: tuple[Any, ...] = ()
    """Seeds that only one of the two has, or whose value is not finite."""

    @property
    def verdict(self) -> Verdict:
        """``equivalent`` wins: a difference may be significant and yet smaller than the margin."""
        alpha = 1 - self.difference.confidence
        if self.p_equivalent is not None and self.p_equivalent < alpha:
            return "equivalent"
        if self.p_different is not None and self.p_different < alpha:
            return "different"
        return "inconclusive"

    @property
    def percent(self) -> float:
        """The mean difference, in per cent of the baseline's mean."""
        return 100 * self.difference.value / self.baseline if self.baseline else math.nan

    def text(self, digits: int = 2) -> str:
        """The verdict with what it rests on."""
        if self.p_different is None:
            return f"inconclusive: {self.difference.n} pair{'s' * (self.difference.n != 1)} of seeds, no interval"
        return (
            f"{self.verdict}: {self.difference.value:+.{digits}f} ± {self.difference.half_width or 0:.{digits}f} "
            f"({self.percent:+.1f} %), n = {self.difference.n}, margin {self.margin:.{digits}f}, "
            f"p(no difference) = {self.p_different:.2g}, p(beyond the margin) = {self.p_equivalent:.2g}"
        )


def mean(values: Sequence[float], confidence: float = CONFIDENCE) -> Mean:
    """Mean with Student's t interval; there is none if a value is not finite.

    Raises:
        ValueError: there are no values.
    """
    n = len(values)
    if n == 0:
        raise ValueError("the mean of no values")
    finite = all(map(math.isfinite, values))
    centre = statistics.fmean(values) if finite else math.nan
    if n < 2 or not finite:
        return Mean(centre, None, None, n, confidence)
    half = float(stdtrit(n - 1, (1 + confidence) / 2)) * _standard_error(values)
    return Mean(centre, centre - half, centre + half, n, confidence)


def compare(
    baseline: Mapping[Any, float],
    other: Mapping[Any, float],
    *,
    margin: float = MARGIN,
    confidence: float = CONFIDENCE,
) -> Comparison:
    """Paired comparison of two techniques.

    Args:
        baseline, other: a value for each seed.
        margin: what counts as unchanged, as a fraction of the baseline's mean.

    Raises:
        ValueError: no seed has a finite value in both.
    """
    finite = {
        seed for seed in baseline.keys() & other.keys() if math.isfinite(baseline[seed]) and math.isfinite(other[seed])
    }
    left_out = tuple(sorted((baseline.keys() | other.keys()) - finite, key=str))
    if not finite:
        raise ValueError("no seed has a finite value in both")
    seeds = sorted(finite, key=str)
    differences = [other[seed] - baseline[seed] for seed in seeds]
    level = statistics.fmean(baseline[seed] for seed in seeds)
    allowed = abs(margin * level)
    p_different = p_equivalent = None
    if len(differences) > 1:
        p_different = 2 * _tail(differences, 0.0, above=statistics.fmean(differences) > 0)
        p_equivalent = max(_tail(differences, -allowed, above=True), _tail(differences, allowed, above=False))
    return Comparison(level, mean(differences, confidence), allowed, p_different, p_equivalent, left_out)


def _tail(values: Sequence[float], centre: float, *, above: bool) -> float:
    """p of a one-sided t test: a mean as far above (or below) ``centre``, if that were the true one."""
    distance = statistics.fmean(values) - centre
    distance = distance if above else -distance
    error = _standard_error(values)
    if error == 0:  # all alike: certain, whichever way
        return 0.0 if distance > 0 else 0.5 if distance == 0 else 1.0
    return float(stdtr(len(values) - 1, -distance / error))


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))
