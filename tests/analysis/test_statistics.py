"""Statistics over seeds: printed tables, exact arithmetic, scipy's tests, and simulated seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from analysis import statistics
from analysis.statistics import compare, mean


@pytest.mark.parametrize(
    ("confidence", "n", "quantile"),
    # Student's t as statistical tables print it, by degrees of freedom n - 1.
    [(0.95, 2, 12.706), (0.95, 3, 4.303), (0.95, 6, 2.571), (0.95, 31, 2.042), (0.90, 3, 2.920), (0.99, 5, 4.604)],
)
def test_intervals_have_the_width_of_printed_tables(confidence: float, n: int, quantile: float) -> None:
    values = [float(index) for index in range(n)]
    found = mean(values, confidence)
    error = math.sqrt(n * (n + 1) / 12) / math.sqrt(n)  # of 0, 1, ... n - 1
    assert found.half_width is not None
    assert found.half_width / error == pytest.approx(quantile, abs=5e-4)
    assert found.value == (n - 1) / 2
    assert found.n == n


def test_a_mean_of_one_has_no_interval_and_says_so() -> None:
    found = mean([3.0])
    assert (found.value, found.low, found.high, found.half_width) == (3.0, None, None, None)
    assert "no interval" in found.text()
    with pytest.raises(ValueError, match="no values"):
        mean([])


@pytest.mark.parametrize("values", [[1.0, math.nan], [math.inf, -math.inf, 1.0]])
def test_a_mean_of_what_is_not_finite_has_none_either(values: list[float]) -> None:
    found = mean(values)
    assert math.isnan(found.value)
    assert (found.low, found.n) == (None, len(values))


def test_intervals_hold_the_true_mean_as_often_as_they_say() -> None:
    random = np.random.default_rng(0)
    trials = 4000
    for n in (2, 3, 5):
        draws = random.normal(5.0, 2.0, (trials, n)).tolist()
        held = sum((one := mean(row)).low <= 5.0 <= one.high for row in draws)  # type: ignore[operator]
        assert abs(held / trials - 0.95) < 4 * math.sqrt(0.95 * 0.05 / trials)


def test_seeds_are_paired() -> None:
    """Seeds differ by far more than the techniques; only pairing sees the difference."""
    baseline = {1: 10.0, 2: 20.0, 3: 30.0}
    found = compare(baseline, {3: 31.1, 1: 11.0, 2: 20.9})
    assert found.difference.value == pytest.approx(1.0)
    assert found.verdict == "different"
    # By hand: differences 1, 0.9, 1.1 with deviation 0.1; t = 1 / (0.1 / sqrt 3) = 17.32 with 2 degrees of freedom.
    assert found.p_different == pytest.approx(0.00332, abs=1e-5)
    assert found.difference.half_width == pytest.approx(4.30265 * 0.1 / math.sqrt(3), rel=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_p_values_are_scipys(seed: int) -> None:
    random = np.random.default_rng(seed)
    one = random.normal(100, 1, 5)
    other = one + random.normal(0.3, 0.5, 5)
    found = compare(dict(enumerate(one)), dict(enumerate(other)), margin=0.01)
    assert found.p_different == pytest.approx(scipy.stats.ttest_rel(other, one).pvalue)
    margin = 0.01 * one.mean()
    lower = scipy.stats.ttest_1samp(other - one, -margin, alternative="greater").pvalue
    upper = scipy.stats.ttest_1samp(other - one, margin, alternative="less").pvalue
    assert found.p_equivalent == pytest.approx(max(lower, upper))
    assert found.margin == pytest.approx(margin)


def test_equivalent_is_a_90_percent_interval_within_the_margin() -> None:
    """The other way to do two one-sided tests at 5 %."""
    random = np.random.default_rng(1)
    verdicts = set()
    for _ in range(200):
        one = random.normal(100, 1, 4)
        other = one + random.normal(0.4, 0.6, 4)
        found = compare(dict(enumerate(one)), dict(enumerate(other)))
        inner = mean((other - one).tolist(), 0.90)
        assert inner.low is not None
        assert inner.high is not None
        assert (found.verdict == "equivalent") == (-found.margin < inner.low and inner.high < found.margin)
        verdicts.add(found.verdict)
    assert verdicts == {"equivalent", "inconclusive", "different"}


def test_a_difference_as_large_as_the_margin_is_rarely_called_equivalent() -> None:
    random = np.random.default_rng(2)
    trials = 3000
    baseline = dict.fromkeys(range(4), 100.0)
    wrong = 0
    for row in random.normal(1.0, 0.2, (trials, 4)):
        found = compare(baseline, {seed: 100.0 + float(value) for seed, value in enumerate(row)})
        wrong += found.verdict == "equivalent"
    assert abs(wrong / trials - 0.05) < 4 * math.sqrt(0.05 * 0.95 / trials)


def test_what_is_significant_and_small_is_equivalent() -> None:
    found = compare({1: 100.0, 2: 110.0, 3: 120.0}, {1: 100.2, 2: 110.21, 3: 120.19})
    assert found.p_different is not None
    assert found.p_different < 0.05
    assert found.verdict == "equivalent"


def test_few_or_unequal_seeds() -> None:
    one = compare({1: 100.0}, {1: 90.0})
    assert (one.verdict, one.p_different, one.p_equivalent) == ("inconclusive", None, None)
    assert "no interval" in one.text()
    some = compare({1: 1.0, 2: 2.0, 3: 3.0, 4: math.nan}, {2: 2.5, 3: 3.6, 4: 4.0, 5: 5.0})
    assert (some.difference.n, some.left_out) == (2, (1, 4, 5))
    with pytest.raises(ValueError, match="no seed"):
        compare({1: 1.0}, {2: 1.0})
    with pytest.raises(ValueError, match="no seed"):
        compare({1: 1.0}, {1: math.inf})


@pytest.mark.parametrize(("shift", "verdict"), [(0.0, "equivalent"), (0.5, "equivalent"), (2.0, "different")])
def test_seeds_without_any_spread(shift: float, verdict: str) -> None:
    found = compare({1: 100.0, 2: 100.0}, {1: 100.0 + shift, 2: 100.0 + shift})
    assert found.verdict == verdict
    assert found.p_different == (1.0 if shift == 0 else 0.0)


def test_the_margin_is_the_callers() -> None:
    values = {1: 100.0, 2: 101.0, 3: 99.0}, {1: 102.0, 2: 103.1, 3: 100.9}
    assert compare(*values, margin=0.01).verdict == "different"
    assert compare(*values, margin=0.05).verdict == "equivalent"
    assert statistics.MARGIN == 0.01
