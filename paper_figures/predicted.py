"""Rows that several items make in the same way from predictions of the simulator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from paper_figures.data import Data
from paper_figures.item import Configurations

if TYPE_CHECKING:
    from optimus_cc.config import RunConfig

PAPER = "training=paper optimizer=paper cluster=a100_hdr200 task=simulate"
LAYOUT = "parallel=tp8_pp4_dp4"
MODELS = ("gpt_2_5b", "gpt_8_3b")
GAIN = ("baseline", "cb_fe_sc")
GBIT_S = (10, 25, 50, 100, 200, 400, 800)
DAY_S = 86400.0


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
    [f"{LAYOUT} cluster.num_nodes=64"],
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


def _predictions(data: Data, need: Configurations) -> Iterator[tuple[RunConfig, Any]]:
    for _, config, prediction in data.predict(need):
        yield config, prediction


def _ranks(config: RunConfig) -> int:
    return config.parallel.world_size


def _faster_percent(data: Data, need: Configurations, key: Any) -> Iterator[tuple[RunConfig, float]]:
    """Each configuration that is no baseline, and how much faster it is than the baseline with the same ``key``."""
    found = list(_predictions(data, need))
    baseline = {key(config): step_s(one) for config, one in found if config.technique.label == "baseline"}
    for config, one in found:
        if config.technique.label != "baseline":
            yield config, 100 * (baseline[key(config)] / step_s(one) - 1)


def step_s(prediction: Any) -> float:
    return float(prediction.step_time_s)


def pretraining_days(data: Data) -> list[dict[str, Any]]:
    gains = {
        (config.model.name, config.technique.label): percent
        for config, percent in _faster_percent(data, PRETRAINING, lambda config: config.model.name)
    }
    return [
        {
            "model": config.model.name,
            "technique": config.technique.label,
            "days": step_s(one) * config.training.steps / DAY_S,
            "step_time_s": step_s(one),
            "faster_percent": gains.get((config.model.name, config.technique.label)),
        }
        for config, one in _predictions(data, PRETRAINING)
    ]


def motivation_days(data: Data) -> list[dict[str, Any]]:
    return [
        {
            "kind": "predicted",
            "quantity": "pre-training time",
            "unit": "days",
            "model": config.model.name,
            "technique": config.technique.label,
            "value": step_s(one) * config.training.steps / DAY_S,
        }
        for config, one in _predictions(data, MOTIVATION)
    ]


def breakdown_parts(data: Data) -> list[dict[str, Any]]:
    return [
        {
            "kind": "predicted",
            "model": config.model.name,
            "technique": config.technique.label,
            "quantity": part,
            "unit": "s",
            "value": seconds,
        }
        for config, one in _predictions(data, BREAKDOWN)
        for part, seconds in one.parts_s.items()
    ]


def predicted_gains(data: Data, need: Configurations) -> list[dict[str, Any]]:
    """By layout, and by the number of ranks."""

    def key(config: RunConfig) -> tuple[str, str]:
        return config.model.name, config.parallel.label

    return [
        {
            "kind": "predicted",
            "quantity": "faster",
            "unit": "%",
            "model": config.model.name,
            "layout": config.parallel.label,
            "ranks": _ranks(config),
            "value": percent,
        }
        for config, percent in _faster_percent(data, need, key)
    ]


def network_gains(data: Data) -> list[dict[str, Any]]:
    def rate(config: RunConfig) -> float:
        return config.cluster.inter_node.line_rate_gbit_s or 0.0

    same = data.paper["network"]["same_speed_above_gbit_s"]
    found: list[dict[str, Any]] = [
        {
            "kind": "predicted",
            "quantity": "faster",
            "unit": "%",
            "technique": config.technique.label,
            "gbit_s": rate(config),
            "value": percent,
        }
        for config, percent in _faster_percent(data, NETWORK, rate)
    ]
    return [*found, {"kind": "paper", "quantity": "same speed from", "unit": "Gb/s", "gbit_s": float(same)}]


def timeline_events(data: Data) -> list[dict[str, Any]]:
    return [
        {
            "kind": "predicted",
            "technique": config.technique.label,
            "stage": event.rank,
            "event": event.kind,
            "begin_s": event.begin_s,
            "end_s": event.end_s,
        }
        for config, one in _predictions(data, TIMELINE)
        for event in one.events
    ]


def verdict(data: Data, claim: Any) -> Any:
    """What the simulator says of a claim."""
    from paper_figures.verdicts import Verdict

    data.predict(PRETRAINING)
    return Verdict("not tested here", "")
