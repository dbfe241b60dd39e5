"""The run folder: everything a run leaves behind. By which rules it is started, kept or refused: optimus_cc/claims.py.

``runs/<id>/`` holds

- ``config.yaml``      the resolved configuration, frozen when the run is queued or, without a queue, starts
- ``provenance.json``  commit, versions, machine, command; ``provenance.diff`` beside it if there were changes
- ``status.json``      :class:`Status`
- ``metrics.jsonl``    one JSON object per record, with ``kind`` and ``step`` (see :mod:`optimus_cc.records`)
- ``summary.json``     the result, written by the trainer when it is through
- ``trace.json``       one step as it was measured, if ``training.probes.trace_step`` asks for it
- ``logs/``            ``rank_N.log``, what ranks report to their supervisor, and ``launcher.log`` of a queued run
- ``slurm.json``      the job that runs it, if it was submitted to SLURM
- ``checkpoints/``, ``evaluation/``
- ``attempts/N/``      logs and metrics of attempts that did not finish
- ``previous/N/``      finished results that ``force=true`` set aside
- ``.lock``, ``.owner_N``  whose it is: see :mod:`optimus_cc.ownership`

Readers never raise because of what a folder holds or lacks.
"""

from __future__ import annotations

import fnmatch
import os
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from optimus_cc import ownership
from optimus_cc.ownership import HEARTBEAT_S as HEARTBEAT_S
from optimus_cc.ownership import STALE_S
from optimus_cc.provenance import utc_now
from optimus_cc.records import (
    append_json_line,
    last_json_line,
    read_json_lines,
    read_json_object,
    replace_file,
    to_json,
)

if TYPE_CHECKING:
    from optimus_cc.config import RunConfig

State = Literal["queued", "running", "preempted", "cancelled", "failed", "finished"]

SCHEDULER_RECORD = "slurm.json"
"""Which job of a scheduler the run is; it belongs to no attempt. Written by the launcher."""
DIVERGED = "the training loss became"
"""Part of the cause of a run that ended because its loss was no number any more."""
BENCHMARKS, SELFCHECKS = "benchmarks", "selfchecks"
NOT_RUNS = frozenset({BENCHMARKS, SELFCHECKS})
"""The folders beside the run folders that hold something else."""


class RunFailed(RuntimeError):
    """A run that did not finish. ``str()`` is ready to print; ``cause`` is its first line, without the log."""

    state: State = "failed"
    exit_code = 1

    def __init__(self, cause: str, details: str = "") -> None:
        super().__init__(cause, details)
        self.cause = cause
        self.details = details

    def __str__(self) -> str:
        return f"{self.cause}\n{self.details}" if self.details else self.cause


class RunCancelled(RunFailed):
    """Ended at once, because somebody asked for it."""

    state: State = "cancelled"
    exit_code = 130


class RunPreempted(RunFailed):
    """Ended at a step boundary, because somebody asked for it; can go on later."""

    state: State = "preempted"
    exit_code = 75


class RunBusy(RunFailed):
    """Another process runs this run."""


class RunConflict(RunFailed):
    """The folder holds another experiment under the same id, or something that isn't a run."""


FAILURES: Mapping[str, type[RunFailed]] = {kind.state: kind for kind in (RunFailed, RunCancelled, RunPreempted)}
"""What a run raises that ended in a state."""


@dataclass(frozen=True)
class Status:
    """Where a run stands, as its supervisor last said."""

    state: State
    cause: str | None = None
    """Why it ended, in one line."""
    step: int = 0
    total_steps: int | None = None
    started: str | None = None
    """UTC, ISO 8601; start of this attempt."""
    updated: str | None = None
    pid: int | None = None
    """The supervisor's; of a queued run, that of the process that queued it."""
    host: str | None = None
    restarts: int = 0
    device: str | None = None
    """``cpu`` or ``cuda``."""

    @property
    def never_began(self) -> bool:
        """It was queued, and nothing has happened since: there is no attempt to keep or to count."""
        return self.state == "queued" or (self.state in ("cancelled", "failed") and self.started is None)

    @property
    def abandoned(self) -> bool:
        """It says running, but its supervisor is gone."""
        if self.state != "running":
            return False
        if self._owner_is_gone:
            return True
        age = age_s(self.updated)
        return age is None or age > STALE_S

    @property
    def waits_for_another(self) -> bool:
        """Another process has queued it, and lives as far as can be told from here."""
        mine = self.host == socket.gethostname() and self.pid == os.getpid()
        return self.state == "queued" and self.pid is not None and not mine and not self._owner_is_gone

    @property
    def owner(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def how_it_ended(self) -> str:
        """For a sentence about a run that did not finish."""
        if self.state == "running":
            return f"was running until its supervisor ({self.owner}) died at step {self.step}"
        if self.cause is None or self.cause.startswith(self.state):
            return f"was {self.cause or self.state} at step {self.step}"
        return f"{self.state} at step {self.step} ({self.cause})"

    @property
    def _owner_is_gone(self) -> bool:
        return self.host == socket.gethostname() and self.pid is not None and not ownership.process_exists(self.pid)


class RunFolder:
    """Reads and writes one folder. Making one touches nothing; :func:`optimus_cc.claims.claim` starts a run in it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.yaml"
        self.provenance_path = self.path / "provenance.json"
        self.diff_path = self.path / "provenance.diff"
        self.status_path = self.path / "status.json"
        self.metrics_path = self.path / "metrics.jsonl"
        self.summary_path = self.path / "summary.json"
        self.trace_path = self.path / "trace.json"
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self.evaluation = self.path / "evaluation"

    @property
    def run_id(self) -> str:
        return self.path.name

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    # What readers get.

    def exists(self) -> bool:
        """Whether this looks like a run's folder at all."""
        return os.path.isfile(self.config_path) or os.path.isfile(self.status_path)  # without an error if unreadable

    def config(self) -> dict[str, Any] | None:
        """The frozen configuration, for :func:`optimus_cc.config.load`."""
        from optimus_cc.yaml_files import read_yaml

        try:
            return read_yaml(self.config_path)
        except (OSError, ValueError):
            return None

    def run_config(self) -> RunConfig:
        """The frozen configuration, checked and typed.

        Raises:
            RuntimeError: it can't be read.
            ConfigError: it is wrong.
        """
        from optimus_cc.config import load

        mapping = self.config()
        if mapping is None:
            raise RuntimeError(f"{self.config_path} can't be read")
        return load(mapping)

    def provenance(self) -> dict[str, Any] | None:
        return read_json_object(self.provenance_path)

    def status(self) -> Status | None:
        record = read_json_object(self.status_path)
        return None if record is None else _parse_status(record)

    def summary(self) -> dict[str, Any] | None:
        return read_json_object(self.summary_path)

    def metrics(self, kind: str | None = None) -> Iterator[dict[str, Any]]:
        """Records in the order they were written; only those of one kind, if given."""
        for record in read_json_lines(self.metrics_path):
            if kind is None or record.get("kind") == kind:
                yield record

    def latest(self, kind: str) -> dict[str, Any] | None:
        """The newest record of a kind, without reading the whole file."""
        return last_json_line(self.metrics_path, kind=kind)

    # What the owner of a run writes.

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        append_json_line(self.metrics_path, record)

    def cut_metrics(self, step: int, but_not: Collection[str] = (), last: Mapping[str, Any] | None = None) -> None:
        """Keep the records up to ``step``; of the step itself not those of the kinds ``but_not``. Add ``last``."""
        if not self.metrics_path.exists() and last is None:
            return
        kept = [
            record
            for record in self.metrics()
            if (at := record.get("step", 0)) < step or (at == step > 0 and record.get("kind") not in but_not)
        ]
        lines = [to_json(record) for record in (*kept, *([last] if last is not None else []))]
        replace_file(self.metrics_path, "".join(f"{line}\n" for line in lines))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        replace_file(self.summary_path, to_json(summary, indent=2) + "\n")

    def write_status(self, status: Status) -> Status:
        """Replace the status; ``updated`` becomes now."""
        status = replace(status, updated=utc_now())
        replace_file(self.status_path, to_json(asdict(status), indent=2) + "\n")
        return status


def folders_in(runs_dir: Path, patterns: Sequence[str] = ()) -> list[RunFolder]:
    """What may be run folders in ``runs_dir``, by name; ``exists()`` of each says whether it looks like one.

    Args:
        patterns: keep those whose id contains one of these, or matches it with ``*`` and ``?``; empty: all.

    Raises:
        OSError: ``runs_dir`` can't be read.
    """
    return [
        RunFolder(runs_dir / name)
        for name in sorted(os.listdir(runs_dir))
        if not name.startswith(".")
        and name not in NOT_RUNS
        and (not patterns or any(pattern in name or fnmatch.fnmatchcase(name, pattern) for pattern in patterns))
        and os.path.isdir(os.path.join(runs_dir, name))
    ]


def traffic_per_step(record: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Logical and wire bytes that all ranks send in one step, by traffic class, of a summary or a training record.

    What a damaged record lacks is left out.
    """
    classes = record.get("traffic")
    found: dict[str, dict[str, float]] = {}
    for name, counts in classes.items() if isinstance(classes, Mapping) else ():
        if not isinstance(counts, Mapping):
            continue
        # A summary holds totals under the plain names; a training record holds the step's own bytes there.
        suffix = "" if record.get("kind") == "train" else "_per_step"
        values = {kind: counts.get(f"{kind}{suffix}") for kind in ("logical_bytes", "wire_bytes")}
        if all(isinstance(value, (int, float)) for value in values.values()):
            found[str(name)] = {kind: float(value) for kind, value in values.items() if value is not None}
    return found


def _parse_status(record: Mapping[str, Any]) -> Status | None:
    known = {field.name: record[field.name] for field in fields(Status) if field.name in record}
    if known.get("state") not in get_args(State):
        return None
    for name, kinds in (
        ("cause", (str, type(None))),
        ("step", (int,)),
        ("total_steps", (int, type(None))),
        ("started", (str, type(None))),
        ("updated", (str, type(None))),
        ("pid", (int, type(None))),
        ("host", (str, type(None))),
        ("restarts", (int,)),
        ("device", (str, type(None))),
    ):
        if name in known and not isinstance(known[name], kinds):
            del known[name]
    return Status(**known)


def age_s(moment: str | None) -> float | None:
    """Seconds since ``moment`` (ISO 8601) by this host's clock; None if that isn't a time."""
    try:
        return time.time() - datetime.fromisoformat(moment or "").timestamp()
    except (ValueError, OverflowError, OSError):
        return None
