"""Fits a cluster's parameters to measured step times, and says how far that can be trusted.

Parameters stay within bounds that physics sets. What is measured inside one node tells of devices, launching and the
links inside; what spans nodes, of the links between them too. All is fitted at once, so one set of numbers stands for
all that was measured. Nothing is fitted to a speed-up that somebody claims.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from optimus_cc.config.cluster import CalibrationRecord, ClusterConfig, LinkConfig
from optimus_cc.config.errors import ConfigError, Problem
from optimus_cc.config.schema import changed
from optimus_cc.files import open_regular_text
from optimus_cc.simulation.hardware import hardware
from optimus_cc.simulation.measured import Sample, parts
from optimus_cc.simulation.plan import StepPlan, plan
from optimus_cc.simulation.step import price
from optimus_cc.simulation.trust import recorded
from optimus_cc.simulation.values import value_of, with_values

_BITS = 8 / 1e9


@dataclass(frozen=True)
class Parameter:
    """A key of :class:`ClusterConfig` to fit, where its fit begins, and between what."""

    key: str
    begin: float
    low: float
    high: float

    def bound_at(self, value: float) -> float | None:
        """The bound that ``value`` lies at, if any."""
        near = 2e-3 * (self.high - self.low)
        return self.low if value - self.low <= near else self.high if self.high - value <= near else None


DEVICE = (
    Parameter("device.efficiency.matmul_bf16", 0.85, 0.3, 0.93),  # nobody has seen more of a data sheet's peak
    Parameter("device.efficiency.matmul_depth", 20.0, 0.0, 1500.0),
    Parameter("device.efficiency.matmul_unaligned", 0.5, 0.05, 1.0),
    Parameter("device.efficiency.memory", 0.8, 0.4, 0.95),
    Parameter("device.efficiency.softmax", 0.5, 0.05, 0.95),
    Parameter("device.efficiency.kernel_us", 22.0, 2.0, 60.0),
    Parameter("device.efficiency.collective_us", 80.0, 0.0, 300.0),
    Parameter("device.efficiency.wait_us", 12.0, 0.0, 100.0),
    Parameter("device.efficiency.message_us", 400.0, 0.0, 2000.0),
    Parameter("device.efficiency.step_ms", 1.0, 0.0, 50.0),
    Parameter("intra_node.p2p_gbit_s", 300.0, 40.0, 2400.0),
)
"""What step times inside one node tell."""
SEVERAL_NODES = Parameter("device.efficiency.several_nodes", 0.93, 0.5, 1.0)
"""What sets passes over several nodes apart from those inside one; only both together tell it."""
_ACROSS = 0.25
"""What the rows over several nodes count for, all together, beside those inside one: they are often few, and single
ones take a third longer than others like them."""
_TOLERANCE = 0.02
"""Errors above this count less."""
WORST_PERCENT = 50.0
"""A fit that leaves a larger error than this has met something else than step times."""


def between_nodes(cluster: ClusterConfig, precision: str = "bf16") -> tuple[Parameter, ...]:
    """What step times over several nodes tell beyond that; links give at most their line rate."""
    line = cluster.inter_node.line_rate_gbit_s or 1e4
    most = line / cluster.ranks_per_node
    return (
        Parameter(f"device.efficiency.matmul_{precision}", 0.7, 0.05, 0.9),
        Parameter("inter_node.ring_gbit_s", 0.6 * most, 0.01 * most, most),
        Parameter("inter_node.p2p_gbit_s", 0.6 * most, 0.001 * most, most),
    )


def parameters_for(samples: Sequence[Sample], cluster: ClusterConfig) -> tuple[Parameter, ...]:
    """What ``samples`` tell, of the devices, of the links, or of both."""
    across = [spans_nodes(sample, cluster) for sample in samples]
    if not any(across):
        return DEVICE
    links = between_nodes(cluster)
    return links if all(across) else (*DEVICE, SEVERAL_NODES, *links[1:])


@dataclass(frozen=True)
class Measurements:
    """Samples with the plans of their steps, which no parameter changes."""

    samples: tuple[Sample, ...]
    plans: tuple[StepPlan, ...]

    @classmethod
    def of(cls, samples: Iterable[Sample], gradient_bytes: int = 4) -> Measurements:
        samples = tuple(samples)
        return cls(samples, tuple(_plan(sample, gradient_bytes) for sample in samples))

    def subset(self, samples: Sequence[Sample]) -> Measurements:
        wanted = {id(sample) for sample in samples}
        chosen = [index for index, sample in enumerate(self.samples) if id(sample) in wanted]
        return Measurements(tuple(self.samples[i] for i in chosen), tuple(self.plans[i] for i in chosen))

    def ratios(self, cluster: ClusterConfig) -> np.ndarray:
        """Predicted over measured step times on ``cluster``."""
        rates = {
            precision: hardware(cluster, precision, "effective")
            for precision in {sample.config.training.precision for sample in self.samples}
        }
        predicted = [price(one, rates[one.config.training.precision]).total_s for one in self.plans]
        ratios: np.ndarray = np.asarray(predicted) / np.asarray([sample.seconds for sample in self.samples])
        return ratios

    def error_percent(self, cluster: ClusterConfig) -> float:
        """Mean absolute percentage error."""
        return float(100 * np.abs(self.ratios(cluster) - 1).mean())


def fit(measured: Measurements, cluster: ClusterConfig, parameters: Sequence[Parameter]) -> ClusterConfig:
    """``cluster`` with the values of ``parameters`` that suit the measurements best.

    Least squares of the logarithm of predicted over measured, in which large errors count less.
    """
    from scipy.optimize import least_squares  # takes its time

    scale = np.array([max(parameter.begin, 1e-3) for parameter in parameters])
    weights = _weights(measured.samples, cluster)

    def cluster_of(values: np.ndarray) -> ClusterConfig:
        return with_values(cluster, dict(zip((p.key for p in parameters), values, strict=True)))

    def errors(values: np.ndarray) -> np.ndarray:
        relative = np.log(measured.ratios(cluster_of(values))) / _TOLERANCE
        soft: np.ndarray = np.sign(relative) * np.sqrt(2 * (np.sqrt(1 + relative**2) - 1))
        weighted: np.ndarray = weights * soft
        return weighted

    found = least_squares(
        errors,
        [parameter.begin for parameter in parameters],
        bounds=([p.low for p in parameters], [p.high for p in parameters]),
        x_scale=scale,
        diff_step=1e-3,
        ftol=3e-4,
        max_nfev=25,
    )
    bounds = [parameter.bound_at(value) for parameter, value in zip(parameters, found.x, strict=True)]
    values = [value if bound is None else bound for value, bound in zip(found.x, bounds, strict=True)]
    return cluster_of(np.array([float(f"{value:.4g}") for value in values]))


def _weights(samples: Sequence[Sample], cluster: ClusterConfig) -> np.ndarray:
    """Of each measurement, so that those over several nodes count for :data:`_ACROSS` of all."""
    across = np.array([spans_nodes(sample, cluster) for sample in samples])
    if not across.any() or across.all():
        return np.ones(len(samples))
    shares = np.where(across, _ACROSS / across.sum(), (1 - _ACROSS) / (~across).sum())
    weights: np.ndarray = np.sqrt(len(samples) * shares)
    return weights


@dataclass(frozen=True)
class Calibration:
    """A fitted cluster, and what it was worth."""

    cluster: ClusterConfig
    parameters: tuple[Parameter, ...]
    error_percent: float
    """On all measurements, after a fit on all."""
    held_out_percent: tuple[float, ...]
    """On each part, after a fit on the others."""
    held_out_ratios: tuple[tuple[Sample, float], ...]
    """Of each sample, predicted over measured by the fit that had not seen it."""

    @property
    def held_out_error_percent(self) -> float:
        return mean_error_percent(ratio for _, ratio in self.held_out_ratios)

    def held_out_of(self, *, across: bool) -> float | None:
        """The same of the measurements over several nodes, or of those inside one."""
        ratios = [r for sample, r in self.held_out_ratios if spans_nodes(sample, self.cluster) is across]
        return mean_error_percent(ratios) if ratios else None


def mean_error_percent(ratios: Iterable[float]) -> float:
    return float(100 * np.mean([abs(ratio - 1) for ratio in ratios]))


def calibrate(
    measured: Measurements,
    cluster: ClusterConfig,
    parameters: Sequence[Parameter],
    *,
    folds: int = 5,
    source: str = "",
) -> Calibration:
    """Fit ``parameters``, and cross-validate: every measurement is also predicted by a fit that has not seen it.

    The parts depend on what was run, not on the order in the file or on chance. There are at most as many as
    measurements; of one measurement nothing is held out.

    Raises:
        ConfigError: what was measured can't be step times of what is said to have run.
    """
    fitted = fit(measured, cluster, parameters)
    error = measured.error_percent(fitted)
    if error > WORST_PERCENT:
        raise ConfigError(_no_step_times(measured, fitted, error))
    folds = min(folds, len(measured.samples))
    held_out: list[tuple[Sample, float]] = []
    errors = []
    for part in parts(measured.samples, folds) if folds > 1 else ():
        seen = {id(sample) for sample in part}
        rest = measured.subset([sample for sample in measured.samples if id(sample) not in seen])
        here = measured.subset(part)
        unseeing = fit(rest, cluster, parameters)
        errors.append(here.error_percent(unseeing))
        held_out += zip(here.samples, map(float, here.ratios(unseeing)), strict=True)
    result = Calibration(fitted, tuple(parameters), error, tuple(errors), tuple(held_out))
    inside, across = (result.held_out_of(across=across) for across in (False, True))
    ranges: dict[str, Any] = dict(measured_range(measured.samples))
    record = CalibrationRecord(
        source=source,
        fitted=tuple(parameter.key for parameter in parameters),
        error_percent=round(result.error_percent, 2),
        held_out_error_percent=round(result.held_out_error_percent, 2) if held_out else None,
        held_out=f"each of {len(held_out)} measurements, by fits on the other {folds - 1} of {folds} parts"
        if held_out
        else None,
        held_out_inside_percent=None if inside is None else round(inside, 2),
        held_out_across_percent=None if across is None else round(across, 2),
        at_bound=at_bound(fitted, parameters),
        **ranges,
    )
    return replace(result, cluster=recorded(fitted, record))


def _no_step_times(measured: Measurements, fitted: ClusterConfig, error: float) -> Problem:
    ratios = measured.ratios(fitted)
    times = float(np.exp(np.log(ratios).mean()))
    return Problem(
        "simulation.measured",
        f"step times of which the best fit is {error:,.0f} % off on average",
        f"step times in milliseconds that some rates within bounds come within {WORST_PERCENT:g} % of (typically the "
        f"predicted time is {times:.3g} times what the file says)",
        "write iteration_time_ms in milliseconds, not in seconds; check layouts and batches",
    )


def at_bound(fitted: ClusterConfig, parameters: Sequence[Parameter]) -> tuple[str, ...]:
    """The keys of all ``parameters`` that came out as large or as small as they may be."""
    values = [(parameter, value_of(fitted, parameter.key)) for parameter in parameters]
    return tuple(p.key for p, value in values if value is not None and p.bound_at(value) is not None)


def measured_range(samples: Sequence[Sample]) -> dict[str, tuple[int, int]]:
    """Smallest and largest of what measurements differ in."""
    values: dict[str, list[int]] = {
        "hidden_size": [sample.config.model.hidden_size for sample in samples],
        "ranks": [sample.config.parallel.world_size for sample in samples],
        "micro_batch_size": [sample.config.training.micro_batch_size for sample in samples],
        "tensor_parallel_size": [sample.config.parallel.tensor_parallel_size for sample in samples],
        "pipeline_parallel_size": [sample.config.parallel.pipeline_parallel_size for sample in samples],
        "data_parallel_size": [sample.config.parallel.data_parallel_size for sample in samples],
    }
    return {name: (min(found), max(found)) for name, found in values.items()}


def ring_inside(folder: str | Path, link: LinkConfig) -> LinkConfig:
    """``link`` with ring bandwidth and latency fitted to times of all-reduces.

    Args:
        folder: files ``gpus_N.csv`` with columns ``bytes`` and ``time_ns``.

    Raises:
        ConfigError: a file has no such columns.
    """
    rows, seconds = [], []
    for path in sorted(Path(folder).glob("gpus_*.csv")):
        try:
            ranks = int(path.stem.partition("_")[2])
            with open_regular_text(path, encoding="utf-8-sig", newline="") as file:
                read = [(float(row["bytes"]), float(row["time_ns"]) / 1e9) for row in csv.DictReader(file)]
            if ranks < 2 or not read or not all(0 < value < math.inf for row in read for value in row):
                raise ValueError("two ranks or more, and rows of finite numbers above 0")
        except (KeyError, TypeError, ValueError, OSError, csv.Error) as error:
            raise ConfigError(
                Problem("simulation.collectives", str(path), f"columns bytes and time_ns ({error})", "mend it")
            ) from None
        for nbytes, taken in read:
            rows.append([1.0, 2 * (ranks - 1), nbytes * 2 * (ranks - 1) / ranks])
            seconds.append(taken)
    # Relative errors count; neither time nor rate is negative.
    weights = 1 / np.asarray(seconds)
    from scipy.optimize import nnls

    matrix = np.asarray(rows) * weights[:, None]
    scale = np.abs(matrix).max(axis=0)
    (_, latency_s, per_byte), _ = nnls(matrix / scale, np.ones(len(rows)))
    latency_s, per_byte = latency_s / scale[1], per_byte / scale[2]
    return changed(
        link,
        ring_gbit_s=float(f"{_BITS / per_byte:.4g}") if per_byte else None,
        latency_us=float(f"{latency_s * 1e6:.4g}"),
    )


def spans_nodes(sample: Sample, cluster: ClusterConfig) -> bool:
    return sample.config.parallel.world_size > cluster.ranks_per_node


def _plan(sample: Sample, gradient_bytes: int) -> StepPlan:
    """Megatron pads the vocabulary so that tensor-parallel ranks can share it; the measured runs without them took as
    long as one that isn't padded."""
    return plan(sample.config, gradient_bytes, padded=sample.config.parallel.tensor_parallel_size > 1)


def grouped(calibration: Calibration, key: str) -> dict[str, tuple[int, float, float]]:
    """Held-out measurements by ``hidden_size``, ``layout``, ``micro_batch_size`` or ``ranks``: how many there are, and
    their mean error in percent, with its sign and without."""
    groups: dict[str, list[float]] = {}
    for sample, ratio in calibration.held_out_ratios:
        config = sample.config
        name = {
            "hidden_size": str(config.model.hidden_size),
            "layout": config.parallel.label,
            "micro_batch_size": str(config.training.micro_batch_size),
            "ranks": str(config.parallel.world_size),
        }[key]
        groups.setdefault(name, []).append(100 * (ratio - 1))
    order = sorted(groups, key=lambda name: (len(name) if name.isdigit() else 0, name))
    return {
        name: (len(groups[name]), math.fsum(groups[name]) / len(groups[name]), float(np.abs(groups[name]).mean()))
        for name in order
    }
