"""How SLURM says that runs stand, laid over what their folders say. Never raises; without SLURM it changes nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launchers.slurm import commands, record
from launchers.slurm.commands import Job, SlurmError
from launchers.slurm.record import Record
from optimus_cc import ownership
from optimus_cc.runs import RunFailed, RunFolder

if TYPE_CHECKING:
    from launchers.status import Run

FRESH_S = 5.0
"""How long an answer of SLURM's is good enough."""
_answers: dict[frozenset[str], tuple[float, dict[str, Job]]] = {}


def laid_over(runs: Sequence[Run], read: Callable[[RunFolder], Run], abandoned: str) -> list[Run]:
    """``runs`` with what SLURM knows about those that are not over, from one query.

    Args:
        read: how a run stands by its folder.
        abandoned: the state of a run that says it isn't over, but whose job is.
    """
    records = {}
    for run in runs:
        if run.state in ("queued", "running", "preempted", abandoned):
            found = record.read(RunFolder(run.folder))
            if found is not None and found.id is not None:
                records[run.folder] = found
    jobs = _ask(found.id for found in records.values() if found.id is not None)
    if jobs is None:
        return list(runs)
    return [
        _with_job(run, records[run.folder], jobs.get(records[run.folder].id or ""), read, abandoned)
        if run.folder in records
        else run
        for run in runs
    ]


def over(folders: Iterable[RunFolder]) -> dict[Path, str]:
    """Those whose job is over, so that nobody runs them any more or is going to, whatever their folders say: why, by
    folder. Empty if SLURM doesn't answer."""
    ids = {}
    for folder in folders:
        found, status = record.read(folder), folder.status()
        if found is None or found.id is None or status is None or status.state == "finished":
            continue
        if status.state != "running" or (found.pid, found.host) == (status.pid, status.host):
            ids[folder.path] = found.id
    jobs = _ask(ids.values())
    if jobs is None:
        return {}
    found_jobs = {path: jobs.get(name) for path, name in ids.items()}
    return {path: _how_it_is_over(ids[path], job) for path, job in found_jobs.items() if job is None or not job.live}


def let_go(folders: Iterable[RunFolder]) -> None:
    """Have such runs belong to nobody, so that they can be started again at once, with other resources or without
    SLURM."""
    from optimus_cc.claims import withdraw

    for path, why in over(folders).items():
        folder = RunFolder(path)
        status = folder.status()
        if status is None or status.state == "finished":
            continue
        with contextlib.suppress(OSError, RunFailed):  # whoever starts it will say so
            if status.state == "running" and status.pid is not None and status.host is not None:
                ownership.declare_over(path, status.pid, status.host)
            elif status.state == "queued":
                withdraw(folder, "failed", why)
            record.remove(folder)


def _how_it_is_over(name: str, job: Job | None) -> str:
    return f"its job {name} is over: {'gone from SLURM' if job is None else job.state}"


def live_job(folder: RunFolder) -> str | None:
    """The job that has a run, if SLURM has it still.

    Raises:
        SlurmError: SLURM doesn't answer.
    """
    found = record.read(folder)
    if found is None or found.id is None:
        return None
    job = commands.jobs([found.id]).get(found.id)
    return found.id if job is not None and job.live else None


def _ask(ids: Iterable[str]) -> dict[str, Job] | None:
    wanted, now = frozenset(ids), time.monotonic()
    if not wanted:
        return {}
    asked, answer = _answers.get(wanted, (0.0, {}))
    if wanted not in _answers or now - asked > FRESH_S:
        try:
            answer = commands.jobs(wanted)
        except SlurmError:
            return None
        _answers.clear()
        _answers[wanted] = (now, answer)
    return answer


def _with_job(run: Run, mine: Record, job: Job | None, read: Callable[[RunFolder], Run], abandoned: str) -> Run:
    name = str(mine.id)
    if job is None or not job.live:
        again = read(RunFolder(run.folder))  # a job ends after its run
        if again.state not in ("queued", "running", abandoned):
            return again
        why = f"; {mine.see}" if again.state == "queued" else ""
        return replace(again, state=abandoned, live=False, cause=f"{_how_it_is_over(name, job)}{why}")
    if job.state == "PENDING":
        why = f": {job.reason}" if job.reason else ""
        return replace(run, state="queued", live=True, cause=f"job {name} waits{why}", time_left_s=None)
    where = f" on {job.nodes}" if job.nodes else ""
    if run.state == "running":
        return replace(run, live=True)
    if run.state == abandoned:  # nothing was heard of it for a while, but SLURM runs it
        return replace(run, state="running", live=True, cause=f"job {name}{where}; it has not been heard of lately")
    return replace(run, live=True, cause=f"job {name} is {job.state.lower()}{where}")
