"""What runs would take, told without starting them: hours, GPU-hours, disk. What nobody measured is marked."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from launchers.local import choose_device, relative
from launchers.plan import Planned, count, plan
from launchers.progress import number
from optimus_cc import disk_budget
from optimus_cc.config import ConfigError, RunConfig
from optimus_cc.config.identity import without_dead_keys
from optimus_cc.config.launcher import SlurmConfig
from optimus_cc.config.schema import changed
from optimus_cc.records import from_json, to_json
from optimus_cc.runs import RunFolder, Status
from optimus_cc.simulation import predict, trust


@dataclass(frozen=True)
class StepTime:
    """How long a step takes, or at most takes."""

    seconds: float
    source: str
    at_most: bool = False


@dataclass(frozen=True)
class Forecast:
    """What one planned run would take."""

    planned: Planned
    device: str
    """``cpu`` or ``cuda``."""
    step_time: StepTime | None

    @property
    def ranks(self) -> int:
        return self.planned.config.parallel.world_size

    @property
    def nodes(self) -> int:
        return math.ceil(self.ranks / self.planned.config.cluster.ranks_per_node)

    @property
    def hours(self) -> float | None:
        """Of its training steps; validation, checkpoints and the start come on top. None: nobody knows."""
        if not self.planned.runs:
            return 0.0
        return None if self.step_time is None else self.step_time.seconds * self.planned.remaining_steps / 3600

    @property
    def gpu_hours(self) -> float | None:
        if self.device == "cpu":
            return 0.0
        return None if self.hours is None else self.hours * self.ranks

    @property
    def disk_nbytes(self) -> int:
        return disk_budget.most_nbytes(self.planned.config) if self.planned.runs else 0


def forecasts(planned: Sequence[Planned]) -> list[Forecast]:
    measured = {folder: _Measured(folder) for folder in {one.folder.path.parent for one in planned}}
    return [
        Forecast(one, device := device_kind(one.config), _step_time(one, device, measured[one.folder.path.parent]))
        for one in planned
    ]


def device_kind(config: RunConfig) -> str:
    """``cpu`` or ``cuda``; what has several nodes is not for this machine, whatever this one has."""
    if config.training.device != "auto":
        return config.training.device
    elsewhere = config.cluster.num_nodes > 1 or config.launcher.name != "local"
    return "cuda" if elsewhere else choose_device(config)[0]


def dry_run(configs: Sequence[RunConfig]) -> str:
    """What would happen to ``configs``, and what it would take, as a table; nothing is started or written."""
    planned = plan(configs)
    told = forecasts(planned)
    sources = list(dict.fromkeys(one.step_time.source for one in told if one.step_time and one.planned.runs))
    rows = [("", "ranks", "nodes", "hours", "GPU-hours", "disk", "", "run")]
    for one in told:
        mark = f"[{sources.index(one.step_time.source) + 1}]" if one.step_time and one.planned.runs else ""
        least = "<= " if one.step_time and one.step_time.at_most else ""
        rows.append(
            (
                one.planned.what,
                str(one.ranks),
                str(one.nodes),
                f"{least}{_hours(one.hours)}" if one.planned.runs else "",
                f"{least}{_hours(one.gpu_hours)}" if one.planned.runs and one.device == "cuda" else "",
                disk_budget.text(one.disk_nbytes) if one.planned.runs else "",
                mark,
                one.planned.folder.run_id,
            )
        )
    if len(told) > 1:
        disk = disk_budget.text(sum(one.disk_nbytes for one in told))
        hours, gpu_hours = (_total([getattr(one, name) for one in told]) for name in ("hours", "gpu_hours"))
        if any(one.step_time and one.step_time.at_most for one in told if one.planned.runs):
            hours, gpu_hours = f"<= {hours}", f"<= {gpu_hours}"
        on_gpus = any(one.planned.runs and one.device == "cuda" for one in told)
        rows.append(("total", "", "", hours, gpu_hours if on_gpus else "", disk, "", count(planned)))
    runs = f"{len(told)} run{'s' * (len(told) != 1)}"
    lines = [f"dry run of {runs}: nothing is started, nothing is written", "", *_aligned(rows), ""]
    lines += [f"{planned.folder.run_id}: {planned.remark}" for planned in planned if planned.remark]
    lines += [f"[{index}] {source}" for index, source in enumerate(sources, start=1)]
    if any(one.hours is None for one in told):
        lines.append("-   nothing like it was measured in its runs_dir, and no time limit holds for the whole run")
    lines += [f"notice  {text}" for text in _notices(told)]
    return "\n".join(lines)


# Where a step time comes from. The first source that knows one counts.


@dataclass(frozen=True)
class _Attempt:
    folder: RunFolder
    science: Mapping[str, Any]
    status: Status

    @cached_property
    def median_s(self) -> float | None:
        return median_step_time(self.folder)


class _Measured:
    """The runs of a folder, read once and only if somebody asks."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir = runs_dir
        self.predictions: dict[Any, float | None] = {}
        """Step times by all that they depend on: runs of a sweep differ in less."""

    @cached_property
    def attempts(self) -> list[_Attempt]:
        """The newest first."""
        found = list(self._read())
        return sorted(found, key=lambda attempt: attempt.status.updated or "", reverse=True)

    def _read(self) -> Iterator[_Attempt]:
        try:
            paths = sorted(self._runs_dir.iterdir())
        except OSError:
            return
        for folder in map(RunFolder, paths):
            science = (folder.provenance() or {}).get("scientific")
            status = folder.status()
            if isinstance(science, dict) and status is not None:
                yield _Attempt(folder, without_dead_keys(science), status)


def _of_this_run(planned: Planned, device: str, measured: _Measured) -> StepTime | None:
    status = planned.folder.status()
    if status is None or status.device != device:
        return None
    median = median_step_time(planned.folder)
    return StepTime(median, f"{_shown(median)} a step, as this run took before") if median is not None else None


def _of_runs_like_it(planned: Planned, device: str, measured: _Measured) -> StepTime | None:
    science = from_json(to_json(planned.config.scientific()))
    alike = [
        attempt
        for attempt in measured.attempts
        if attempt.status.device == device and _workload(attempt.science) == _workload(science)
    ]
    alike.sort(key=lambda attempt: attempt.science.get("technique") != science["technique"])
    for attempt in alike:
        if attempt.median_s is not None:
            same = attempt.science.get("technique") == science["technique"]
            return StepTime(
                attempt.median_s,
                f"{_shown(attempt.median_s)} a step, as {attempt.folder.run_id} took"
                f"{'' if same else ' with another technique'}",
            )
    return None


def _predicted(planned: Planned, device: str, measured: _Measured) -> StepTime | None:
    config = planned.config
    if device != "cuda" or not trust.is_calibrated(config):
        return None
    parts = (
        config.model,
        config.parallel,
        config.technique,
        changed(config.training, seed=0),
        config.cluster,
        config.tokenizer,
    )
    if parts not in measured.predictions:
        try:
            measured.predictions[parts] = predict(config, bandwidth="effective").days * 86400 / config.training.steps
        except ConfigError:  # it doesn't fit, which whoever starts it will see
            measured.predictions[parts] = None
    seconds = measured.predictions[parts]
    if seconds is None:
        return None
    return StepTime(
        seconds, f"{_shown(seconds)} a step, predicted, not measured: calibrated cluster={config.cluster.name}"
    )


def _by_time_limit(planned: Planned, device: str, measured: _Measured) -> StepTime | None:
    limit_h, steps = planned.config.launcher.time_limit_h, planned.remaining_steps
    goes_on = isinstance(planned.config.launcher, SlurmConfig) and planned.config.launcher.max_restarts > 0
    if limit_h is None or not steps or goes_on:  # a limit of each of several jobs
        return None
    return StepTime(3600 * limit_h / steps, f"not measured: launcher.time_limit_h={limit_h:g}", at_most=True)


_SOURCES: tuple[Callable[[Planned, str, _Measured], StepTime | None], ...] = (
    _of_this_run,
    _of_runs_like_it,
    _predicted,
    _by_time_limit,
)


def _step_time(planned: Planned, device: str, measured: _Measured) -> StepTime | None:
    return next(filter(None, (source(planned, device, measured) for source in _SOURCES)), None)


def median_step_time(folder: RunFolder) -> float | None:
    """Seconds, of its training records; None if there are none."""
    times = [record.get("step_time_s") for record in folder.metrics("train")]
    usable = [time for time in times if isinstance(time, float) and math.isfinite(time) and time > 0]
    return statistics.median(usable) if usable else None


def _workload(science: Mapping[str, Any]) -> Any:
    """What a step's time depends on, but for technique and machine."""
    training = science.get("training")
    keys = ("global_batch_size", "micro_batch_size", "precision", "recompute")
    batch = [training.get(key) for key in keys] if isinstance(training, Mapping) else None
    return [science.get("model"), science.get("parallel"), science.get("tokenizer"), batch]


# The table.


def _notices(told: Sequence[Forecast]) -> Iterator[str]:
    running = [one.planned.config for one in told if one.planned.runs]
    lines: dict[str, None] = {}
    for config in running:
        if config.launcher.name != "local":
            pass  # this machine has nothing to do with it
        elif config.cluster.num_nodes > 1:
            lines[
                f"cluster={config.cluster.name} has {config.cluster.num_nodes} nodes: launcher=local starts ranks on "
                "this machine only, so a real run needs launcher=slurm"
            ] = None
        else:
            try:
                lines.update(dict.fromkeys(choose_device(config)[1]))
            except ConfigError as error:
                lines.update(dict.fromkeys(f"on this machine it can't run: {p.sentence}" for p in error.problems))
        lines.update(dict.fromkeys(config.notices()))
    for runs_dir in dict.fromkeys(one.planned.folder.path.parent for one in told):
        here = [one for one in told if one.planned.folder.path.parent == runs_dir]
        need, free = sum(one.disk_nbytes for one in here), disk_budget.free_nbytes(runs_dir)
        if need > free:
            text = f"checkpoints may take {disk_budget.text(need)}, and {disk_budget.text(free)} are free"
            lines[f"{text} in {relative(runs_dir)}"] = None
    yield from lines


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - 1
    return [
        "  "
        + "  ".join(
            cell if index == last else f"{cell:<{width}}" if index == 0 else f"{cell:>{width}}"
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _total(values: Sequence[float | None]) -> str:
    """A sum of which a part may not be known."""
    known = sum(value for value in values if value is not None)
    if None not in values:
        return _hours(known)
    return f"{_hours(known)} + ?" if known else "-"


def _hours(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def _shown(seconds: float) -> str:
    return f"{number(seconds, 3)} s"
