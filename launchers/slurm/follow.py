"""Follows runs that SLURM has until all have ended. Nothing depends on it: jobs live without it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launchers.local import relative
from launchers.overview import Overview, Watched
from launchers.plan import Planned
from launchers.progress import duration
from launchers.slurm import commands, record
from launchers.slurm.commands import Job, SlurmError
from launchers.supervise import Stop
from launchers.sweep import Outcome
from optimus_cc.claims import withdraw
from optimus_cc.runs import FAILURES, RunCancelled, RunFailed, RunPreempted

FIRST_LOOK_S = 1.0
LONGEST_S = 30.0
"""Between two queries of the queue; it is asked ever more seldom, and more often when something happens."""
GONE_AFTER_S = 10.0
"""How long SLURM may know nothing of a job before it counts as over."""


def how_to(planned: Sequence[Planned]) -> str:
    """What can be done about runs without this process."""
    runs_dir = relative(planned[0].folder.path.parent) if planned else "runs"
    option = "" if runs_dir == "runs" else f" --runs-dir {runs_dir}"
    return (
        f"The jobs go on without this process. Follow: python -m launchers watch{option}   "
        f"end: python -m launchers cancel{option} RUN"
    )


@dataclass
class _Followed:
    planned: Planned
    watched: Watched | None = None
    """Once it runs."""
    restarts: int | None = None
    gone_since: float | None = None


def follow(
    planned: Sequence[Planned],
    *,
    stop: Stop | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[Path, Outcome]:
    """Say how runs go on until all have ended, or until a signal asks for the end of that; an outcome for each."""
    if not planned:
        return {}
    with (stop or Stop()).on_signals() as asked:
        return _Follower(planned, asked, sleep).follow()


class _Follower:
    def __init__(self, planned: Sequence[Planned], stop: Stop, sleep: Callable[[float], None]) -> None:
        self._planned = planned
        self._live = [_Followed(one) for one in planned]
        self._stop = stop
        self._sleep = sleep
        self._overview = Overview(len(planned))
        self._outcomes: dict[Path, Outcome] = {}
        self._interval_s = FIRST_LOOK_S
        self._silent = False

    def follow(self) -> dict[Path, Outcome]:
        began = time.monotonic()
        try:
            while self._live and not self._stop.requested:
                self._look()
                self._wait()
        finally:
            self._overview.close()
        counts = ", ".join(f"{count} {state}" for state, count in self._counts().items())
        if self._live:
            self._overview.say(f"{self._stop.reason}: nothing is followed any more. {how_to(self._planned)}")
            for one in self._live:
                error = RunCancelled("its job goes on") if self._stop.at_once else RunPreempted("its job goes on")
                self._outcomes[one.planned.folder.path] = Outcome(one.planned, error, interrupted=True)
        else:
            self._overview.say(f"sweep   {counts} in {duration(time.monotonic() - began)}")
        return self._outcomes

    def _wait(self) -> None:
        deadline = time.monotonic() + self._interval_s
        while time.monotonic() < deadline and self._live and not self._stop.requested:
            self._sleep(0.1)
            running = [one.watched for one in self._live if one.watched is not None]
            self._overview.show(running, [one.planned for one in self._live if one.watched is None], self._counts())
        self._interval_s = min(LONGEST_S, self._interval_s * 1.3)

    def _look(self) -> None:
        found = {one.planned.folder.path: record.read(one.planned.folder) for one in self._live}
        ids = {path: one.id for path, one in found.items() if one is not None and one.id is not None}
        try:
            jobs = commands.jobs(ids.values())
        except SlurmError as error:
            if not self._silent:
                self._overview.say(f"SLURM does not answer, and is asked again: {error}")
            self._silent = True
            self._interval_s = LONGEST_S
            return
        self._silent = False
        before = len(self._live)
        for one in list(self._live):
            self._look_at(one, jobs.get(ids.get(one.planned.folder.path, "")))
        if len(self._live) < before:
            self._interval_s = FIRST_LOOK_S

    def _look_at(self, one: _Followed, job: Job | None) -> None:
        folder = one.planned.folder
        status = folder.status()  # after the queue was asked: a job ends after its run
        live = job is not None and job.live
        if status is not None and status.state == "finished":
            return self._end(one, None)
        if status is not None and status.state in ("failed", "cancelled"):
            return self._end(one, FAILURES[status.state](status.cause or status.state))
        if live and status is not None:
            one.gone_since = None
            self._tell(one, status.state, status.restarts, job)
            return None
        now = time.monotonic()
        one.gone_since = one.gone_since or now
        if now - one.gone_since < GONE_AFTER_S:
            return None
        state = job.state if job is not None else "gone"
        cause = f"its job ended ({state})"
        if status is not None and status.state == "queued":
            mine = record.read(folder)
            cause = f"its job ended ({state}) before it began{f'; {mine.see}' if mine is not None else ''}"
            withdraw(folder, "cancelled" if state == "CANCELLED" else "failed", cause)
        elif status is not None and status.state == "preempted":
            return self._end(one, RunPreempted(status.cause or "preempted"))
        return self._end(one, RunCancelled(cause) if state == "CANCELLED" else RunFailed(cause))

    def _tell(self, one: _Followed, state: str, restarts: int, job: Job | None) -> None:
        run_id = one.planned.folder.run_id
        if state == "running" and (one.watched is None or one.restarts != restarts):
            where = f" on {job.nodes}" if job is not None and job.nodes else ""
            again = f", attempt {restarts + 1}" if restarts else ""
            self._overview.say(f"running    {run_id}{where}{again}")
            one.watched, one.restarts = Watched(one.planned, time.monotonic()), restarts
            self._interval_s = FIRST_LOOK_S
        elif state != "running" and one.watched is not None:
            self._overview.say(f"waiting    {run_id} was interrupted and goes on later")
            one.watched = None

    def _end(self, one: _Followed, error: RunFailed | None) -> None:
        self._live.remove(one)
        outcome = Outcome(one.planned, error)
        self._outcomes[one.planned.folder.path] = outcome
        for line in (str(outcome), *(outcome.logs() if error is not None else ())):
            self._overview.say(line)

    def _counts(self) -> Counter[str]:
        return Counter(outcome.state for outcome in self._outcomes.values())
