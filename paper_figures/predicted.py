"""Rows that several items make in the same way from predictions of the simulator."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pandas as pd

from paper_figures.data import Data
from paper_figures.item import Configurations, Missing, Query
from paper_figures.measure import gains

if TYPE_CHECKING:
    from optimus_cc.config import RunConfig

EFFECTIVE, LINE_RATE = "effective", "line_rate"
"""What links were seen to give, as far as the cluster's file knows; and what they are sold as."""
PAPER = "task=simulate"
"""Which asks for the paper's training, optimizer, vocabulary size and cluster, unless something else is said."""
LAYOUT = "parallel=tp8_pp4_dp4"
MODELS = ("gpt_2_5b", "gpt_8_3b")
GAIN = ("baseline", "cb_fe_sc")
GBIT_S = (10, 25, 50, 100, 200, 400, 800)


def _asked(*parts: Sequence[str]) -> Configurations:
    """Every combination of some parts of a command line, the last one varied fastest."""
    lines = [""]
    for part in parts:
        lines = [f"{line} {one}".strip() for line in lines for one in part]
    return Configurations(tuple(f"{line} {PAPER}" for line in lines))


def _options(group: str, names: Sequence[str]) -> list[str]:
    return [f"{group}={name}" for name in names]


PRETRAINING = _asked(
    [LAYOUT], _options("model", MODELS), _options("technique", ("baseline", "cb", "cb_fe", "cb_fe_sc"))
)
BREAKDOWN = PRETRAINING
MOTIVATION = _asked([LAYOUT], ["model=gpt_2_5b training.steps=125000"], _options("technique", ("baseline", "naive_dp")))
LAYOUTS = _asked(
    _options("parallel", ("tp8_pp4_dp4", "tp8_pp2_dp8", "tp8_pp8_dp2", "tp4_pp8_dp4")),
    ["model=gpt_8_3b"],
    _options("technique", GAIN),
)
SCALING = _asked(
    [f"{LAYOUT} cluster.num_nodes=64 simulation.ignore_memory=true"],
    _options("model", (*MODELS, "gpt_175b")),
    _options("parallel.data_parallel_size", ("4", "8", "16")),
    _options("technique", GAIN),
)
NETWORK = _asked(
    [f"{LAYOUT} model=gpt_8_3b"],
    [f"cluster.inter_node.line_rate_gbit_s={rate}" for rate in GBIT_S],
    ["technique=baseline", "+ablation=cb", "+ablation=cb_no_epilogue"],
)
TIMELINE = _asked([f"{LAYOUT} model=gpt_8_3b training.global_batch_size=256"], _options("technique", GAIN))


def faster(
    data: Data,
    need: Configurations,
    key: Callable[[RunConfig], Hashable],
    bandwidth: str = EFFECTIVE,
    of: str = "step_time_s",
) -> Iterator[tuple[RunConfig, float]]:
    """Each configuration that is no baseline, and how many per cent faster it is than the one with the same ``key``.

    Args:
        of: ``step_time_s`` once everything is compressed, or ``days`` of the whole training, its warm-up included.
    """
    found = [(config, float(getattr(one, of))) for config, one in data.predict(need, bandwidth)]
    baseline = {key(config): time for config, time in found if config.technique.label == "baseline"}
    for config, time in found:
        if config.technique.label != "baseline" and key(config) in baseline:
            yield config, 100 * (baseline[key(config)] / time - 1)


def pretraining_days(data: Data) -> list[dict[str, Any]]:
    """At the effective bandwidth and at the line rate; one of them, if the cluster's file knows no other."""
    from optimus_cc.simulation.family import spread

    found = []
    for config, _ in data.predict(PRETRAINING):
        if (over := spread(config)) is not None:
            which = f"{config.model.name} {config.technique.label}"
            data.note(f"Predicted, over {over.members} fits that meet the same step times: {which}: {over.sentence}.")
    for bandwidth in (EFFECTIVE, LINE_RATE):
        gains: dict[tuple[str, ...], float] = {
            (config.model.name, config.technique.label): percent
            for config, percent in faster(data, PRETRAINING, lambda config: config.model.name, bandwidth, "days")
        }
        for config, one in data.predict(PRETRAINING, bandwidth):
            if bandwidth == LINE_RATE or has_effective(config):
                row = {"bandwidth": bandwidth.replace("_", " "), "days": one.days, "step_time_s": one.step_time_s}
                labels = {"model": config.model.name, "technique": config.technique.label}
                found.append({**labels, **row, "faster_percent": gains.get(tuple(labels.values()))})
    return found


def has_effective(config: RunConfig) -> bool:
    """Whether the cluster's file says what links between nodes were seen to give."""
    link = config.cluster.inter_node
    return link.ring_gbit_s is not None or link.p2p_gbit_s is not None


def _labels(config: RunConfig) -> dict[str, Any]:
    return {"kind": "predicted", "model": config.model.name, "technique": config.technique.label}


def motivation_days(data: Data) -> list[dict[str, Any]]:
    return [
        {**_labels(config), "quantity": "pre-training time", "unit": "days", "value": one.days}
        for config, one in data.predict(MOTIVATION)
    ]


def breakdown_parts(data: Data) -> list[dict[str, Any]]:
    return [
        {**_labels(config), "quantity": part.removesuffix("_s"), "unit": "s", "value": seconds}
        for config, one in data.predict(BREAKDOWN)
        for part, seconds in asdict(one.breakdown).items()
    ]


def predicted_gains(data: Data, need: Configurations) -> list[dict[str, Any]]:
    """By layout, and by the number of ranks."""
    return [
        {
            **_labels(config),
            "layout": config.parallel.label,
            "ranks": config.parallel.world_size,
            "quantity": "faster",
            "unit": "%",
            "value": percent,
        }
        for config, percent in faster(data, need, lambda config: (config.model.name, config.parallel.label))
    ]


def all_gains(data: Data, query: Query, varied: str, need: Configurations, what: str) -> pd.DataFrame:
    """Measured and predicted gains, over values of ``varied``; which of the two is not there is noted.

    Raises:
        Missing: both; ``what``: of what there are no runs.
    """
    found = gains(data, query, ("model", "total_steps"), varied)
    if not found:
        data.note(f"Missing: runs of {' and '.join(query.techniques)} {what}. To make it: {query.command}")
    try:
        found += predicted_gains(data, need)
    except Missing as missing:
        data.note(f"Missing: {missing}. To make it: {missing.command}")
    if not found:
        raise Missing(f"runs {what}, and the simulator", query.command)
    return pd.DataFrame(found)


def network_gains(data: Data) -> list[dict[str, Any]]:
    """Links give what the x axis says, so the line rate is set to it."""

    def rate(config: RunConfig) -> float:
        return config.cluster.inter_node.line_rate_gbit_s or 0.0

    found: list[dict[str, Any]] = [
        {**_labels(config), "gbit_s": rate(config), "quantity": "faster", "unit": "%", "value": percent}
        for config, percent in faster(data, NETWORK, rate, LINE_RATE)
    ]
    same = float(data.paper["network"]["same_speed_above_gbit_s"])
    return [*found, {"kind": "paper", "quantity": "same speed from", "unit": "Gb/s", "gbit_s": same}]


def timeline_events(data: Data) -> list[dict[str, Any]]:
    found = []
    for config, _ in data.predict(TIMELINE):
        from optimus_cc.simulation.plan import plan
        from optimus_cc.simulation.predict import predict_plan

        for event in predict_plan(plan(config))[1].events():
            if event.end_s > event.begin_s:
                times = {"begin_s": event.begin_s, "end_s": event.end_s}
                found.append(
                    {
                        **_labels(config),
                        "stage": event.rank,
                        "event": {"encode": "codec", "decode": "codec"}.get(event.kind, event.kind),
                        **times,
                    }
                )
    return found
