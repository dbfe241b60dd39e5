"""The paper's cluster: what its rates have to be for the paper's baselines, and what follows for everything else.

Three step times that the paper states are fitted, none of them with a technique of the paper's: the two baselines, and
the motivational run whose data-parallel gradients are all compressed. Three rates come out: what matrix products reach,
and what one rank sends in rings and in messages. Three times can't tell more than three numbers: with another
``matmul_depth`` they come out as well. So a fit records a family, over which every prediction has a range. Optimus-CC's
own speed-ups are predicted, never fitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optimus_cc.config.cluster import CalibrationRecord, ClusterConfig
from optimus_cc.config.run import RunConfig
from optimus_cc.simulation.calibrate import Measurements, at_bound, between_nodes, fit, measured_range
from optimus_cc.simulation.measured import Sample
from optimus_cc.simulation.plan import plan
from optimus_cc.simulation.predict import Prediction, predict
from optimus_cc.simulation.trust import recorded
from optimus_cc.simulation.values import value_of, with_values

SOURCE = "Optimus-CC, ASPLOS 2023, arXiv 2301.09830"
_DAY_S = 86400.0


@dataclass(frozen=True)
class Stated:
    """A training that the paper gives a length in days."""

    model: str
    technique: str
    days: float
    steps: int

    @property
    def step_time_s(self) -> float:
        return self.days * _DAY_S / self.steps


def asked_step_time_s(days: float, baseline: Stated, warmup_steps: int) -> float:
    """What a step has to take after ``warmup_steps`` of the baseline's, for as many steps to end in ``days``."""
    rest = days * _DAY_S - warmup_steps * baseline.step_time_s
    return rest / (baseline.steps - warmup_steps)


FITTED = (
    Stated("gpt_2_5b", "baseline", 14.72, 230_000),
    Stated("gpt_8_3b", "baseline", 37.27, 230_000),
    Stated("gpt_2_5b", "naive_dp", 6.97, 125_000),  # against 8.00 days for as many steps of the baseline
)
DEPTH = "device.efficiency.matmul_depth"
DEPTHS = (0.0, 50.0, 100.0, 200.0, 315.0, 450.0, 600.0)
"""Values of :data:`DEPTH` that the three step times are fitted with as well: they don't tell it."""
_SAME_PERCENT = 1.0
"""A fit that is this close meets the three step times as well as the model could be trusted to."""
LAYOUT = "parallel=tp8_pp4_dp4 training=paper optimizer=paper tokenizer=bpe_50k cluster=a100_hdr200"
"""The paper's runs, as its released scripts start them: fp32, and tensor-parallel ranks share messages out."""


def calibrate_paper(configs: Mapping[tuple[str, str], RunConfig], cluster: ClusterConfig) -> ClusterConfig:
    """``cluster`` with the three rates that :data:`FITTED` asks for.

    Args:
        configs: by model and technique, composed as :data:`LAYOUT` says.
        cluster: the paper's, with devices that were calibrated elsewhere.
    """
    samples = [Sample(configs[one.model, one.technique], one.step_time_s) for one in FITTED]
    measured = Measurements(tuple(samples), tuple(plan(sample.config) for sample in samples))
    parameters = between_nodes(cluster, "fp32")
    fitted = fit(measured, cluster, parameters)
    keys = (DEPTH, *(parameter.key for parameter in parameters))
    every = [fit(measured, with_values(cluster, {DEPTH: depth}), parameters) for depth in DEPTHS]
    same = [member for member in every if measured.error_percent(member) <= _SAME_PERCENT]
    ranges: dict[str, Any] = dict(measured_range(samples))
    record = CalibrationRecord(
        source=f"two baselines and one run without Optimus-CC of {SOURCE}; devices as fitted in a100_hdr800",
        fitted=tuple(parameter.key for parameter in parameters),
        error_percent=round(measured.error_percent(fitted), 2),
        at_bound=at_bound(fitted, parameters),
        family_keys=keys,
        family=tuple(tuple(value_of(member, key) or 0.0 for key in keys) for member in same),
        **ranges,
    )
    return recorded(fitted, record)


def compare(
    configs: Mapping[tuple[str, str], RunConfig], stated: Mapping[tuple[str, str], float]
) -> list[dict[str, Any]]:
    """Days that the paper states beside what is predicted, at effective bandwidths and at line rate.

    Args:
        configs: by model and technique; each model's ``baseline`` is among them.
        stated: days, by the same.
    """
    rows = []
    predictions: dict[tuple[str, str], tuple[Prediction, Prediction]] = {
        key: (predict(config, bandwidth="effective"), predict(config, bandwidth="line_rate"))
        for key, config in configs.items()
    }
    fitted = {(one.model, one.technique) for one in FITTED}
    for (model, technique), (effective, line) in predictions.items():
        base, base_line = predictions[model, "baseline"]
        days = stated.get((model, technique))
        rows.append(
            {
                "model": model,
                "technique": technique,
                "fitted": (model, technique) in fitted,
                "stated_days": days,
                "days": effective.days,
                "error_percent": None if days is None else 100 * (effective.days / days - 1),
                "line_rate_days": line.days,
                "speedup_percent": 100 * (base.days / effective.days - 1),
                "line_rate_speedup_percent": 100 * (base_line.days / line.days - 1),
            }
        )
    return rows
