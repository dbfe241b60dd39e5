"""How runs stand, read from their folders, and from SLURM's queue if they are jobs: ``python -m launchers status``.

It works while they run and after whoever started them is gone, takes whatever it finds, and imports little.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args

from launchers.progress import duration, number
from launchers.slurm.view import laid_over
from launchers.supervise import printable, shortened
from optimus_cc.records import json_lines_from_end, to_json
from optimus_cc.runs import RunFolder, State, age_s, folders_in

ABANDONED, UNKNOWN = "abandoned", "unknown"
STATES: tuple[str, ...] = (*get_args(State), ABANDONED, UNKNOWN)
"""A run's own, that of one which says running and whose supervisor is gone, that of one whose status can't be read."""
_RECORDS = 5
"""Whose step times tell how long the rest takes."""
_READ_BYTES = 2**20
_LARGEST = 2**53


class NothingFound(Exception):
    """There is no such folder or run. ``str()`` says which, in one line."""


@dataclass(frozen=True)
class Run:
    """One run, as its folder tells. None: not known."""

    run_id: str
    folder: str
    state: str
    """One of :data:`STATES`."""
    cause: str | None = None
    """Why it ended, in one line."""
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    """Training loss of the newest record."""
    step_time_s: float | None = None
    """Median over the newest records."""
    time_left_s: float | None = None
    """Of a running one: the steps that are left, without validation and checkpoints."""
    restarts: int | None = None
    started: str | None = None
    """UTC, ISO 8601; start of the newest attempt."""
    updated: str | None = None
    """UTC, ISO 8601; the last sign of life."""
    pid: int | None = None
    """The supervisor's; of a queued one, that of the process that queued it."""
    host: str | None = None
    live: bool = False
    """It runs, or waits for a process that lives."""


def status(runs_dir: Path, pattern: str | None, states: Sequence[str], *, as_json: bool, width: int | None) -> int:
    """Print how runs stand.

    Args:
        pattern, states: see :func:`select`.
        width: columns of the terminal; None: nothing is cut.

    Raises:
        NothingFound: there are none.
    """
    runs = select(runs_dir, pattern, states)
    if as_json:
        print(to_json({"runs": [asdict(run) for run in runs], "counts": counts(runs)}, indent=2))
    else:
        header, lines = table(runs, width)
        print("\n".join([header, *lines, counted(runs)]))
    return 0


def select(runs_dir: Path, pattern: str | None = None, states: Sequence[str] = ()) -> list[Run]:
    """The runs in a folder, in the order in which they were started.

    Args:
        pattern: those whose id contains it, or matches it with ``*`` and ``?``; None: all.
        states: those that are in one of :data:`STATES`; empty: all.

    Raises:
        NothingFound: there are none.
    """
    try:
        folders = folders_in(runs_dir, [pattern] if pattern else [])
    except OSError as error:
        why = "there is no folder" if isinstance(error, FileNotFoundError) else f"{error.strerror}:"
        raise NothingFound(f"{why} {runs_dir}") from None
    runs = laid_over(
        [read(folder) for folder in folders if folder.exists() or not os.access(folder.path, os.R_OK | os.X_OK)],
        read,
        ABANDONED,
    )
    chosen = [run for run in runs if not states or run.state in states]
    if not chosen:
        conditions = [f"matches {pattern!r}"] if pattern else []
        conditions += [f"is {' or '.join(states)}"] if states else []
        raise NothingFound(" ".join([f"no run in {runs_dir}", " and ".join(conditions)]).rstrip())
    return sorted(chosen, key=lambda run: (run.started or "", run.run_id))


def look(folder: RunFolder) -> Run:
    """How one run stands, by its folder and, if it is a job, by SLURM. Never raises."""
    return laid_over([read(folder)], read, ABANDONED)[0]


def read(folder: RunFolder) -> Run:
    """How one run stands, by its folder alone. Never raises."""
    run_id, path = _text(folder.run_id) or "", _text(str(folder.path)) or ""
    found = folder.status()
    if found is None:
        if not os.access(folder.path, os.R_OK | os.X_OK):
            return Run(run_id, path, UNKNOWN, "its folder can't be read")
        there = os.path.lexists(folder.status_path)
        return Run(run_id, path, UNKNOWN, "its status can't be read" if there else "it has no status yet")
    state = ABANDONED if found.abandoned else found.state
    live = state == "running" or found.waits_for_another
    step, total = _count(found.step), _count(found.total_steps)
    loss = step_time_s = left_s = None
    if step:  # before the first step of an attempt the records are another one's
        records = _newest_records(folder)
        loss = _number(records[0].get("loss")) if records else None
        times = [_number(record.get("step_time_s")) for record in records]
        finite = [time for time in times if time is not None and math.isfinite(time)]
        step_time_s = statistics.median(finite) if finite else None
        if state == "running" and step_time_s is not None and total is not None:
            left_s = max(0, total - step) * step_time_s
    return Run(
        run_id=run_id,
        folder=path,
        state=state,
        cause=f"its supervisor, {_text(found.owner)}, is gone" if state == ABANDONED else _text(found.cause),
        step=step,
        total_steps=total,
        loss=loss,
        step_time_s=step_time_s,
        time_left_s=left_s,
        restarts=_count(found.restarts),
        started=_text(found.started),
        updated=_text(found.updated),
        pid=_count(found.pid),
        host=_text(found.host),
        live=live,
    )


def table(runs: Iterable[Run], width: int | None = None) -> tuple[str, list[str]]:
    """A heading and a line for each run, with a second one, indented, where there is a cause; cut to ``width``."""
    rows = [("run", "state", "step", "loss", "left", "restarts", "updated"), *map(_row, runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    if width is not None:
        widths[0] = max(24, min(widths[0], width - sum(widths[1:]) - 2 * (len(widths) - 1)))
    lines = []
    for row, cause in zip(rows, ["", *(run.cause for run in runs)], strict=True):
        cells = [_shortened_id(row[0], widths[0]).ljust(widths[0]), row[1].ljust(widths[1])]
        cells += [cell.rjust(size) for cell, size in zip(row[2:], widths[2:], strict=True)]
        line = "  ".join(cells)[:width].rstrip()
        if cause:
            line += "\n" + shortened(f"    {cause}", width if width is not None else len(cause) + 4)
        lines.append(line)
    return lines[0], lines[1:]


def counts(runs: Iterable[Run]) -> dict[str, int]:
    """Number of runs in each state that there is."""
    number_of = Counter(run.state for run in runs)
    return {state: number_of[state] for state in STATES if number_of[state]}


def counted(runs: Sequence[Run]) -> str:
    """Those numbers as a line."""
    parts = ", ".join(f"{count} {state}" for state, count in counts(runs).items())
    return f"{len(runs)} run{'s' * (len(runs) != 1)}: {parts}"


def step_of(run: Run) -> str:
    """``step/total``."""
    return "-" if run.step is None else f"{run.step}/{'?' if run.total_steps is None else run.total_steps}"


def _row(run: Run) -> tuple[str, ...]:
    left = duration(run.time_left_s) if run.time_left_s is not None else "-"
    restarts = "-" if run.restarts is None else str(run.restarts)
    return run.run_id, run.state, step_of(run), number(run.loss), left, restarts, _ago(run.updated)


def _ago(moment: str | None) -> str:
    age = age_s(moment)
    if age is None:
        return "-"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if age >= size:
            return f"{age / size:.0f} {unit} ago"
    return f"{max(0, age):.0f} s ago"


def _shortened_id(run_id: str, width: int) -> str:
    """The hash at the end stays."""
    if len(run_id) <= width:
        return run_id
    tail = run_id[-9:]
    return f"{run_id[: width - len(tail) - 3]}...{tail}"


def _newest_records(folder: RunFolder) -> list[dict[str, Any]]:
    """The last training records of this attempt, newest first."""
    records = json_lines_from_end(folder.metrics_path, _READ_BYTES)
    attempt = takewhile(lambda record: record.get("kind") != "resume", records)
    trained = (record for record in attempt if record.get("kind") == "train")
    return [record for record, _ in zip(trained, range(_RECORDS), strict=False)]


def _text(value: str | None) -> str | None:
    return None if value is None else printable(value)


def _count(value: int | None) -> int | None:
    return value if value is not None and 0 <= value < _LARGEST else None


def _number(value: Any) -> float | None:
    if isinstance(value, float):
        return value
    return float(value) if isinstance(value, int) and abs(value) < _LARGEST else None
