"""Ends runs: ``python -m launchers cancel``."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from launchers.status import NothingFound, read, select
from optimus_cc import ownership
from optimus_cc.claims import withdraw
from optimus_cc.runs import RunFailed, RunFolder

CAUSE = "cancelled before it began"
WAIT_S = 30.0
"""How long ends are waited for; ranks get launcher.stop_grace_s before they are killed."""
_ATTEMPTS = 5
_BETWEEN_S = 0.1
"""So that two signals of one number are not taken for one."""

Result = Literal["done", "asked", "refused"]


def cancel(runs_dir: Path, pattern: str, *, save: bool, sleep: Callable[[float], None] = time.sleep) -> int:
    """End the runs whose ids match: those that run on this host by a signal to their supervisor, queued ones by taking
    them out of the queue. Of others it says where they can be ended.

    Args:
        save: at the next step boundary, with a checkpoint; otherwise at once.

    Returns:
        the exit code: 0 if all of them are ended or, with ``save``, have been asked to end.

    Raises:
        NothingFound: there is nothing to cancel.
    """
    live = [run for run in select(runs_dir, pattern) if run.state in ("queued", "running")]
    if not live:
        raise NothingFound(f"nothing to cancel: no run in {runs_dir} that matches {pattern!r} is queued or running")
    folders = [RunFolder(runs_dir / run.run_id) for run in live]
    results: list[Result] = []
    asked = []
    jobs = _cancel_jobs(folders, save)
    for folder in folders:
        result = jobs.get(folder.path) or _cancel(folder, save, sleep)
        results.append(result)
        if result == "asked" and not save:
            asked.append(folder)
    deadline = time.monotonic() + WAIT_S
    for folder in asked:
        while _goes_on(folder, folder.path in jobs) and time.monotonic() < deadline:
            sleep(0.2)
        ended = read(folder)
        if ended.state == "running":
            print(f"{folder.run_id}  has not ended yet, after {WAIT_S:.0f} s")
            results.append("refused")
        else:
            print(f"{folder.run_id}  is {ended.state}, at step {ended.step}")
    return 1 if "refused" in results else 0


def _goes_on(folder: RunFolder, is_job: bool) -> bool:
    return read(folder).state == "running" if is_job else ownership.holder_here(folder.path) is not None


def _cancel_jobs(folders: Sequence[RunFolder], save: bool) -> dict[Path, Result]:
    """End those runs that SLURM has, with one command; what became of each of them."""
    from launchers.slurm import commands, record

    found = {folder.path: one for folder in folders if (one := record.read(folder)) is not None}
    ids = {path: one.id for path, one in found.items() if one.id is not None}
    try:
        jobs = commands.jobs(ids.values())
        results: dict[Path, Result] = {}
        running: list[RunFolder] = []
        waiting: list[RunFolder] = []
        for folder in folders:
            job = jobs.get(ids.get(folder.path, ""))
            if job is None or not job.live:
                continue
            # It does not go on elsewhere; and a job that runs looks at this, and saves.
            record.write(folder, replace(found[folder.path], stop=True))
            waits = job.state == "PENDING"
            results[folder.path] = "done" if waits else "asked"
            (waiting if waits else running).append(folder)
            how = "was queued, is cancelled" if waits else "saves at its next step and stops" if save else "ends now"
            print(f"{folder.run_id}  {how}: job {ids[folder.path]} of SLURM")
        ended = waiting if save else [*waiting, *running]
        commands.cancel([ids[folder.path] for folder in ended])
    except commands.SlurmError as error:
        print(f"SLURM can't be asked: {error}")
        return dict.fromkeys(ids, "refused") if ids else {}
    for folder in waiting:
        with contextlib.suppress(RunFailed):
            withdraw(folder, "cancelled", CAUSE)
    return results


def _cancel(folder: RunFolder, save: bool, sleep: Callable[[float], None]) -> Result:
    for _ in range(_ATTEMPTS):
        status = folder.status()
        if status is None or status.state not in ("queued", "running") or status.abandoned:
            print(f"{folder.run_id}  has ended by itself")
            return "done"
        if status.state == "running" and status.host != socket.gethostname():
            # Not ours to signal: a number of this host would name another process.
            signal_name = "TERM" if save else "INT"
            print(f"{folder.run_id}  runs as {status.owner}; there: kill -{signal_name} {status.pid}")
            return "refused"
        if status.state == "running" and status.pid is not None and _signal(folder, status.pid, save):
            how = "saves at its next step and stops" if save else "ends now"
            print(f"{folder.run_id}  {how}: signal to process {status.pid}")
            return "asked"
        try:
            if status.state == "queued" and withdraw(folder, "cancelled", CAUSE):
                print(f"{folder.run_id}  was queued, is cancelled")
                return "done"
        except RunFailed as error:
            print(f"{folder.run_id}  {error}")
            return "refused"
        sleep(0.5)  # it is being started, or is ending
    print(f"{folder.run_id}  is left alone: it can't be told which process on this host is its supervisor")
    return "refused"


def _signal(folder: RunFolder, pid: int, save: bool) -> bool:
    """Signal the supervisor; False if it isn't certain that the process with this number is the one."""
    try:
        process = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    except OSError:
        return False
    try:
        # The lock is held now by the process of this number. It was there when the descriptor was opened, so whatever
        # gets its number later is not what is signalled.
        if ownership.holder_here(folder.path) != pid:
            return False

        def send(number: signal.Signals) -> None:
            with contextlib.suppress(ProcessLookupError):
                if process is not None:
                    signal.pidfd_send_signal(process, number)
                else:
                    os.kill(pid, number)

        if save:
            send(signal.SIGTERM)
            return True
        for number in (signal.SIGINT, signal.SIGHUP):  # a script's background job ignores the one, nohup the other
            if not _ignores(pid, number):
                send(number)
                return True
        send(signal.SIGTERM)
        time.sleep(_BETWEEN_S)
        send(signal.SIGTERM)  # the second one is at once, too
        return True
    finally:
        if process is not None:
            os.close(process)


def _ignores(pid: int, number: signal.Signals) -> bool:
    """Whether a process ignores a signal, where the kernel tells."""
    try:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return bool(int(fields["SigIgn"], 16) >> (number - 1) & 1)
    except (OSError, KeyError, ValueError):
        return False
