"""What a cluster's fit leaves open: other numbers that meet its measurements as well, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from optimus_cc.config.cluster import ClusterConfig
from optimus_cc.config.run import RunConfig
from optimus_cc.config.schema import changed
from optimus_cc.simulation.predict import baseline_of, predict, speedup_percent
from optimus_cc.simulation.values import with_values


@dataclass(frozen=True)
class Spread:
    """Smallest and largest of what the members of a family predict."""

    members: int
    step_time_s: tuple[float, float]
    days: tuple[float, float]
    speedup_percent: tuple[float, float]
    """Against the same run without compression."""

    @property
    def sentence(self) -> str:
        (step, step_most), (days, days_most), (gain, gain_most) = self.step_time_s, self.days, self.speedup_percent
        return (
            f"a step takes {step:.2f} to {step_most:.2f} s, training {days:.2f} to {days_most:.2f} days, and is "
            f"{gain:.1f} to {gain_most:.1f} % faster than the baseline"
        )


def clusters(cluster: ClusterConfig) -> list[ClusterConfig]:
    """``cluster`` with each set of numbers that its calibration says would do as well; none if it names none."""
    record = cluster.calibration
    if record is None:
        return []
    return [with_values(cluster, dict(zip(record.family_keys, values, strict=True))) for values in record.family]


def spread(config: RunConfig) -> Spread | None:
    """What the family of ``config.cluster`` predicts, at effective bandwidth; None: nothing is known of a family.

    Raises:
        ConfigError: as :func:`predict` does.
    """
    members = clusters(config.cluster)
    if not members:
        return None
    found = []
    for member in members:
        this = changed(config, cluster=member)
        one, plain = predict(this, bandwidth="effective"), predict(baseline_of(this), bandwidth="effective")
        found.append((one.step_time_s, one.days, speedup_percent(plain, one)))
    steps, days, gains = (_range(values) for values in zip(*found, strict=True))
    return Spread(len(members), steps, days, gains)


def _range(values: Iterable[float]) -> tuple[float, float]:
    values = list(values)
    return min(values), max(values)
