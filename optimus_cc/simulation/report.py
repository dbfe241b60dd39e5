"""``task=simulate``: predictions as a table, and how far they can be trusted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from optimus_cc.config.errors import ConfigError, Problem
from optimus_cc.config.run import RunConfig
from optimus_cc.simulation import trust
from optimus_cc.simulation.family import Spread, spread
from optimus_cc.simulation.memory import GIB
from optimus_cc.simulation.plan import plan
from optimus_cc.simulation.predict import Prediction, baseline_of, predict, predict_plan, speedup_percent
from optimus_cc.simulation.step import StepTime

_BOTH = ("effective", "line_rate")
_COLUMNS = (
    ("forward", "forward_s"),
    ("backward", "backward_s"),
    ("bubble", "bubble_s"),
    ("stages", "inter_stage_s"),
    ("gradients", "data_parallel_s"),
    ("embedding", "embedding_s"),
    ("codec", "codec_s"),
    ("optimizer", "optimizer_s"),
    ("gather", "parameter_gather_s"),
    ("other", "overhead_s"),
)


@dataclass(frozen=True)
class Simulated:
    """One configuration beside its baseline, at both bandwidths."""

    config: RunConfig
    predictions: dict[str, Prediction]
    baselines: dict[str, Prediction]
    time: StepTime
    """At the bandwidth that was asked for."""
    spread: Spread | None
    """Over all numbers that meet the cluster's measurements as well."""

    @property
    def chosen(self) -> Prediction:
        return self.predictions[self.config.simulation.bandwidth]

    def speedup_percent(self, bandwidth: str) -> float:
        return speedup_percent(self.baselines[bandwidth], self.predictions[bandwidth])

    def to_mapping(self) -> dict[str, Any]:
        return {
            "predicted": self.chosen.to_mapping(),
            "speedup_percent": {name: self.speedup_percent(name) for name in _BOTH},
            "step_time_s": {name: self.predictions[name].step_time_s for name in _BOTH},
            "days": {name: self.predictions[name].days for name in _BOTH},
            "family": None if self.spread is None else asdict(self.spread),
            "calibrated": trust.is_calibrated(self.config),
            "remarks": list(trust.remarks(self.config)),
        }


def simulated(config: RunConfig, baselines: dict[str, dict[str, Prediction]] | None = None) -> Simulated:
    """Predict ``config`` and its baseline.

    Args:
        baselines: those that were predicted already; what is missing is added.

    Raises:
        ConfigError: as :func:`predict` does.
    """
    step_plan = plan(config)
    both = {name: predict_plan(step_plan, bandwidth=name) for name in _BOTH}
    plain = baseline_of(config)
    known = {} if baselines is None else baselines
    key = repr((plain.model, plain.parallel, plain.training, plain.cluster, plain.tokenizer, plain.simulation))
    if key not in known:
        known[key] = {name: predict(plain, bandwidth=name) for name in _BOTH}
    predictions = {name: prediction for name, (prediction, _) in both.items()}
    return Simulated(config, predictions, known[key], both[config.simulation.bandwidth][1], spread(config))


def simulate(config: RunConfig) -> dict[str, Any]:
    """Print the prediction of ``config``, write what it asks for, and return its numbers."""
    (found,) = simulate_all([config])
    return found.to_mapping()


def simulate_all(configs: Sequence[RunConfig]) -> list[Simulated]:
    """The same of all of ``configs``, in one table.

    Raises:
        ConfigError: one of them can't be predicted, or they would write the same file; nothing was printed or written.
    """
    _check_files(configs)
    baselines: dict[str, dict[str, Prediction]] = {}
    every = []
    for config in configs:
        try:
            every.append(simulated(config, baselines))
        except ConfigError as error:
            where = f"{config.model.name} {config.parallel.label} {config.technique.label}" if len(configs) > 1 else ""
            raise ConfigError(error.problems, where) from None
    print(table(every))
    for one in every:
        _write_files(one)
    return every


def table(every: Sequence[Simulated]) -> str:
    """All of ``every``, the columns that differ, and in plain sentences what they rest on."""
    chosen = {one.config.simulation.bandwidth for one in every}
    about = "effective bandwidth" if chosen == {"effective"} else " and ".join(sorted(chosen)).replace("_", " ")
    lines = [f"predicted, not measured, at {about}; seconds of a step's critical path", ""]
    names = _names(every)
    used = [column for column in _COLUMNS if any(getattr(one.chosen.breakdown, column[1]) >= 5e-4 for one in every)]
    header = ["", "step (s)", "days", "speed-up", "at line rate", *(name for name, _ in used), "GiB", "TFLOP/s"]
    rows = [header]
    for name, one in zip(names, every, strict=True):
        prediction = one.chosen
        line = one.predictions["line_rate"]
        rows.append(
            [
                name,
                f"{prediction.step_time_s:.3f}",
                f"{prediction.days:,.2f}",
                f"{one.speedup_percent(one.config.simulation.bandwidth):+.1f} %",
                f"{line.step_time_s:.3f} s {one.speedup_percent('line_rate'):+.1f} %",
                *(f"{getattr(prediction.breakdown, field):.3f}" for _, field in used),
                f"{prediction.memory.total / GIB:.1f}",
                f"{prediction.tflops_per_rank:.1f}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    lines.append("")
    lines += [f"- {remark}" for remark in dict.fromkeys(line for one in every for line in _remarks(one))]
    for name, one in zip(names, every, strict=True):
        if one.spread is not None:
            members = f"over {one.spread.members} fits that meet what was measured"
            lines.append(f"- {name}, {members}: {one.spread.sentence}.")
    return "\n".join(lines)


def _remarks(one: Simulated) -> list[str]:
    config = one.config
    cluster = config.cluster
    links = cluster.inter_node if config.parallel.world_size > cluster.ranks_per_node else cluster.intra_node
    where = "between nodes" if links is cluster.inter_node else "inside a node"
    sharing = cluster.ranks_per_node if links is cluster.inter_node else 1
    said = [
        f"{kind} {rate * sharing:g}"
        for kind, rate in (("rings", links.ring_gbit_s), ("messages", links.p2p_gbit_s))
        if rate
    ]
    effective = f"effective {' and '.join(said)}" if said else "nothing else known"
    line = "unknown" if links.line_rate_gbit_s is None else f"{links.line_rate_gbit_s:g}"
    per = "of a node" if links is cluster.inter_node else "of a rank"
    lines = [
        f"Links {where}, Gbit/s {per}: line rate {line}, {effective}. Speed-up: against the same run with "
        "technique=baseline; the column after it says what line rate would give."
    ]
    lines += trust.remarks(config)
    warmup = config.technique.sc.warmup_steps
    if config.technique.sc.enabled and warmup:
        lines.append(
            f"days: selective stage compression starts after {warmup:,} of {config.training.steps:,} steps; step time "
            "and speed-up are those after that."
        )
    return lines


def _names(every: Sequence[Simulated]) -> list[str]:
    """What tells the configurations apart: model, layout and technique, and whatever else differs."""
    columns = list(zip(*(_parts(one.config) for one in every), strict=True))
    shown = [column for index, column in enumerate(columns) if index < 3 or len(set(column)) > 1]
    widths = [max(map(len, column)) for column in shown]
    return [
        "  ".join(part.ljust(width) for part, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*shown, strict=True)
    ]


def _parts(config: RunConfig) -> tuple[str, ...]:
    training, parallel = config.training, config.parallel
    options = ("sequence_parallel", "split_over_tensor_parallel", "overlap_grad_reduce", "distributed_optimizer")
    return (
        config.model.name,
        parallel.label,
        config.technique.label,
        config.cluster.name,
        f"{config.cluster.inter_node.line_rate_gbit_s or 0:g} Gbit/s",
        f"batch {training.global_batch_size}",
        f"micro-batch {training.micro_batch_size}",
        training.precision,
        f"recompute {training.recompute}",
        ",".join(name for name in options if getattr(parallel, name)),
        f"rank {_rank(config)}",
        config.simulation.bandwidth,
    )


def _rank(config: RunConfig) -> str:
    technique = config.technique
    return "/".join(str(getattr(node.codec, "rank", "-")) for node in (technique.cb, technique.sc))


def _check_files(configs: Sequence[RunConfig]) -> None:
    for key in ("trace", "gantt"):
        files = [Path(value) for config in configs if (value := getattr(config.simulation, key)) is not None]
        if len(set(files)) < len(files):
            raise ConfigError(
                Problem(f"simulation.{key}", str(files[0]), "a file for each run of a sweep", f"simulation.{key}=null")
            )


def _write_files(one: Simulated) -> None:
    simulation = one.config.simulation
    if simulation.trace is not None:
        from optimus_cc.simulation.trace import write

        with can_be_written("simulation.trace", simulation.trace):
            write(Path(simulation.trace), one.time)
        print(f"trace      {simulation.trace}")
    if simulation.gantt is not None:
        from optimus_cc.simulation.gantt import draw

        with can_be_written("simulation.gantt", simulation.gantt):
            draw(Path(simulation.gantt), one.time)
        print(f"figure     {simulation.gantt}")


@contextmanager
def can_be_written(key: str, path: str) -> Iterator[None]:
    """Writes the file that ``key`` names.

    Raises:
        ConfigError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        allowed = f"a file that can be written ({error.strerror or error})"
        raise ConfigError(Problem(key, path, allowed, f"another path, or {key}=null")) from None
