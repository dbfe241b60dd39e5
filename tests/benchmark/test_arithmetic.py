"""What timings are said to mean, against exact data and exact probabilities."""

from __future__ import annotations

import itertools
import math
import statistics
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_cc.benchmark.arithmetic import fit_line, median_with_interval, ratio_of_pairs

SIZES = [1024.0 * 4**power for power in range(8)]


@pytest.mark.parametrize("n", range(1, 15))
def test_the_interval_covers_the_median_as_often_as_it_says(n: int) -> None:
    """Every way in which n values can fall on the two sides of a median, each equally likely; and no narrower one."""
    values = [float(value) for value in range(1, n + 1)]
    median = median_with_interval(values)

    def covered(low: float, high: float) -> Fraction:
        """How often a median that lies after the first s values, s binomial, is between two of the values."""
        hits = sum(low <= sum(sides) < high for sides in itertools.product((0, 1), repeat=n))
        return Fraction(hits, 2**n)

    assert median.value == statistics.median(values)
    if median.low is None:
        assert median.high is None
        assert covered(values[0], values[-1]) < Fraction(95, 100)
        return
    assert median.high is not None
    assert covered(median.low, median.high) >= Fraction(95, 100)
    assert median.low + median.high == n + 1, "not symmetric"
    if median.low + 1 < median.high - 1:
        assert covered(median.low + 1, median.high - 1) < Fraction(95, 100), "wider than it need be"


def test_the_interval_of_a_hundred_is_the_one_in_the_tables() -> None:
    """Order statistics 40 and 61 of 100 (for example Conover, Practical Nonparametric Statistics)."""
    median = median_with_interval([float(value) for value in range(100, 0, -1)])
    assert (median.value, median.low, median.high, median.samples) == (50.5, 40.0, 61.0, 100)


@given(
    st.lists(st.floats(0.5, 2.0), min_size=6, max_size=40),
    st.lists(st.floats(1e-3, 1e3), min_size=40, max_size=40),
)
def test_what_both_members_of_a_pair_share_drops_out(ratios: list[float], drift: list[float]) -> None:
    base = drift[: len(ratios)]
    found = ratio_of_pairs(base, [time * ratio for time, ratio in zip(base, ratios, strict=True)])
    expected = median_with_interval(ratios)
    assert (found.value, found.low, found.high) == pytest.approx((expected.value, expected.low, expected.high))


@given(st.floats(0, 1e-3), st.floats(1e6, 1e12))
def test_an_exact_line_is_found(latency_s: float, bytes_per_s: float) -> None:
    times = [latency_s + size / bytes_per_s for size in SIZES]
    line = fit_line(SIZES, times)
    assert line.worst_error < 1e-6
    assert line.bytes_per_s is not None
    fitted = [line.latency_s + size / line.bytes_per_s for size in SIZES]
    assert fitted == pytest.approx(times, rel=1e-6)
    if times[-1] > 2 * latency_s > SIZES[0] / bytes_per_s:  # both matter somewhere
        assert line.latency_s == pytest.approx(latency_s, rel=1e-3)
        assert line.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-3)


@pytest.mark.parametrize("disturbed", [(0,), (7,), (3,), (0, 4), (2, 7)])
@pytest.mark.parametrize("factor", [2.0, 10.0])
def test_sizes_that_were_held_up_do_not_bend_it(disturbed: tuple[int, ...], factor: float) -> None:
    times = [20e-6 + size / 1e9 for size in SIZES]
    for index in disturbed:
        times[index] *= factor
    line = fit_line(SIZES, times)
    assert line.latency_s == pytest.approx(20e-6, rel=1e-6)
    assert line.gbit_s == pytest.approx(8.0, rel=1e-6)
    assert line.worst_error == pytest.approx(abs(1 / factor - 1), rel=1e-3), "a poor fit must be seen to be one"


def test_no_latency_is_negative_and_no_bandwidth() -> None:
    """A line that overtakes itself would have its latency below zero, one that falls its bandwidth."""
    steep = fit_line(SIZES, [size**1.2 / 1e9 for size in SIZES])
    assert steep.latency_s >= 0
    assert steep.worst_error > 0.1
    falling = fit_line(SIZES, [1e-3 - index * 1e-5 for index in range(len(SIZES))])
    assert falling.bytes_per_s is None
    assert falling.gbit_s is None
    assert 1e-3 - 7e-5 <= falling.latency_s <= 1e-3


@given(st.lists(st.floats(1e-6, 1e-2), min_size=8, max_size=8), st.floats(0, 1e-2), st.floats(1e-13, 1e-5))
def test_no_other_line_is_closer(times: list[float], latency_s: float, s_per_byte: float) -> None:
    line = fit_line(SIZES, times)

    def error(latency_s: float, s_per_byte: float) -> float:
        return math.fsum(abs(latency_s + s_per_byte * x - t) / t for x, t in zip(SIZES, times, strict=True))

    best = error(line.latency_s, 1 / line.bytes_per_s if line.bytes_per_s else 0.0)
    assert best <= error(latency_s, s_per_byte) * (1 + 1e-9)
    assert math.isfinite(best)
