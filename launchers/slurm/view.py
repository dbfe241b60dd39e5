"""How SLURM says that runs stand, laid over what their folders say. Never raises; without SLURM it changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from launchers.slurm import commands, record
from launchers.slurm.commands import Job, SlurmError
from optimus_cc.runs import RunFolder

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
    ids = {}
    for run in runs:
        if run.state in ("queued", "running", "preempted", abandoned):
            found = record.read(RunFolder(run.folder))
            if found is not None and found.id is not None:
                ids[run.folder] = found.id
    jobs = _ask(ids.values())
    if jobs is None:
        return list(runs)
    return [
        _with_job(run, ids[run.folder], jobs.get(ids[run.folder]), read, abandoned) if run.folder in ids else run
        for run in runs
    ]


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


def _with_job(run: Run, name: str, job: Job | None, read: Callable[[RunFolder], Run], abandoned: str) -> Run:
    if job is None or not job.live:
        again = read(RunFolder(run.folder))  # a job ends after its run
        if again.state not in ("queued", "running", abandoned):
            return again
        state = "gone from SLURM" if job is None else job.state
        return replace(again, state=abandoned, live=False, cause=f"its job {name} is over: {state}")
    if job.state == "PENDING":
        why = f": {job.reason}" if job.reason else ""
        return replace(run, state="queued", live=True, cause=f"job {name} waits{why}", time_left_s=None)
    where = f" on {job.nodes}" if job.nodes else ""
    if run.state == "running":
        return replace(run, live=True)
    if run.state == abandoned:  # nothing was heard of it for a while, but SLURM runs it
        return replace(run, state="running", live=True, cause=f"job {name}{where}; it has not been heard of lately")
    return replace(run, live=True, cause=f"job {name} is {job.state.lower()}{where}")
