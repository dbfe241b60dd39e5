"""``python -m launchers.slurm.job RUNS_FILE``: what a job of an array runs on its first node. It trains the run in the
line of its number, as :mod:`launchers.job` does, with the ranks started by srun on all nodes of the job.

When SLURM ends the job before the run is through, the run is put back into the queue, and the job with it. With
``--unbegun`` that is all: SLURM has asked the job to end before this program could listen. Exit code: that of
:mod:`launchers.job`; a failed run is a failed job.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from launchers import job, local
from launchers.cancel import CAUSE
from launchers.slurm import after, commands, record
from launchers.slurm.commands import SlurmError
from launchers.slurm.node import LATE_FILE_S, Verdict, read_verdict
from launchers.slurm.record import Record
from launchers.slurm.resources import Resources
from launchers.slurm.script import srun_command
from launchers.supervise import PatientStop, Stop, last_lines
from optimus_cc import command, ownership
from optimus_cc.claims import queue, withdraw
from optimus_cc.config import ConfigError, RunConfig
from optimus_cc.config.launcher import SlurmConfig
from optimus_cc.runs import FAILURES, RunBusy, RunCancelled, RunFailed, RunFolder, RunPreempted

SCANCEL = "scancel"
_POLL_S = 0.2
_LOOK_S = 2.0
"""How often a job looks whether somebody wants it to stop."""
_SRUN_ENDS_S = 60.0
"""How long srun may take to give up, beyond the ranks' grace, after a node has told of a failure."""


@dataclass(frozen=True)
class ThisJob:
    """What SLURM tells a job about itself."""

    id: str
    """``12_3``."""
    runs: Path
    """The list of its array's runs."""
    index: int
    starts: int
    """How often SLURM has started it before."""

    @classmethod
    def of_environment(cls, runs: Path) -> ThisJob:
        env = os.environ
        index = int(env["SLURM_ARRAY_TASK_ID"])
        return cls(f"{env['SLURM_ARRAY_JOB_ID']}_{index}", runs, index, int(env.get("SLURM_RESTART_COUNT", "0")))

    def fate(self) -> str:
        """What SLURM means to do with this job, which was asked to end: ``cancelled``, ``requeued`` (SLURM puts it back
        into the queue itself) or ``ends``."""
        try:
            told = commands.show(self.id)
        except SlurmError:
            return "ends"
        if int(told.get("Restarts", "0")) > self.starts:
            return "requeued"
        if told.get("JobState") not in ("COMPLETING", "CANCELLED"):
            return "ends"  # it was only asked
        if told.get("PreemptTime", "None") not in ("None", "") or _time_is_up(told):
            return "ends"
        return "cancelled"


def _time_is_up(told: Any) -> bool:
    """Whether a job that has just ended had run for as long as its limit."""
    try:
        start, end = (time.mktime(time.strptime(told[name], "%Y-%m-%dT%H:%M:%S")) for name in ("StartTime", "EndTime"))
        days, _, clock = told["TimeLimit"].rpartition("-")
        hours, minutes, seconds = map(int, clock.split(":"))
    except (KeyError, ValueError):
        return False
    return end - start >= 86400 * int(days or 0) + 3600 * hours + 60 * minutes + seconds - 1


def run(folder: RunFolder, this: ThisJob, stop: Stop) -> int:
    """Train the run in ``folder`` to its end, or to that of this job; the exit code."""
    return _if_mine(folder, this, lambda config, mine: _run(folder, this, stop, config, mine))


def go_on_later(folder: RunFolder, this: ThisJob, pid: int) -> int:
    """Put the run and this job back into the queue, because process ``pid`` of this host, which was to train the run,
    has died of being asked to end; the exit code."""

    found, status = record.read(folder), folder.status()
    if found is not None and (found.pid, found.host) == (pid, socket.gethostname()):  # it was through, and has done it
        return FAILURES[status.state].exit_code if status is not None and status.state in FAILURES else 0

    def put_back(config: RunConfig, mine: Record) -> int:
        if this.fate() == "cancelled":
            withdraw(folder, "cancelled", CAUSE)
            return RunCancelled.exit_code
        if (status := folder.status()) is None or status.state != "queued":
            return 0  # there is nothing to do any more
        record.write(folder, replace(mine, unbegun=mine.unbegun + 1))
        return _go_on_later(folder, config, this)

    return _if_mine(folder, this, put_back)


def _if_mine(folder: RunFolder, this: ThisJob, then: Callable[[RunConfig, Record], int]) -> int:
    """The exit code of ``then``, with the run in the queue, if this job is to run it and may."""
    mine = record.read(folder)
    if mine is None or mine.runs != str(this.runs) or (mine.job_id or this.id) != this.id:
        print(f"{folder.run_id} was given to another job; this one, {this.id}, does nothing")
        return 0
    try:
        if mine.stop:
            withdraw(folder, "cancelled", CAUSE)
            return RunCancelled.exit_code
        config = folder.run_config()
        if config.launcher.name != "slurm":
            print(f"{folder.run_id} was started without SLURM meanwhile; this job, {this.id}, does nothing")
            return 0
        refused = _queue_again(folder, config, mine)
    except (RuntimeError, ConfigError):
        return job.run(folder)  # says what is wrong
    if refused is not None:
        print(refused, file=sys.stderr)
        return 1
    return then(config, mine)


def _run(folder: RunFolder, this: ThisJob, stop: Stop, config: RunConfig, mine: Record) -> int:
    # Before the run is claimed, so that whoever starts this job again knows whose claim it was.
    record.write(folder, replace(record.read(folder) or mine, pid=os.getpid(), host=socket.gethostname()))
    start, ranks_here = partial(run_ranks, this), Resources.of(config).ranks_per_node
    code = job.run(folder, partial(local.train, start=start, ranks_here=ranks_here, stop=stop))
    status = folder.status()
    if code != RunPreempted.exit_code or status is None or status.state != "preempted":
        return code
    return _go_on_later(folder, config, this)


def _queue_again(folder: RunFolder, config: RunConfig, mine: Record) -> str | None:
    """Put the run back into the queue if SLURM started this job again without its last attempt having done so; why not,
    if it has had enough restarts."""
    status = folder.status()
    if status is None or status.state == "queued" or status.state == "finished":
        return None
    if status.state == "running" and (status.pid, status.host) != (mine.pid, mine.host):
        return None  # somebody else runs it; the claim will say so
    if status.state == "running" and mine.pid is not None and mine.host is not None:
        ownership.declare_over(folder.path, mine.pid, mine.host)
    if status.state not in ("running", "preempted"):
        return None
    return _put_back(folder, config)


def _put_back(folder: RunFolder, config: RunConfig) -> str | None:
    """Put the run back into the queue; why not, if it was interrupted too often or isn't the same any more."""
    if folder.run_id not in config.run_ids:
        return f"{folder.run_id} does not go on: a file that it reads has changed, and with it what it computes"
    queue(config)
    mine, status, launcher = record.read(folder), folder.status(), config.launcher
    assert isinstance(launcher, SlurmConfig)
    if mine is None or status is None:
        return None
    if status.restarts - mine.restarts_before + mine.unbegun <= launcher.max_restarts:
        return None
    cause = f"interrupted {launcher.max_restarts + 1} times: launcher.max_restarts={launcher.max_restarts}"
    withdraw(folder, "failed", cause)
    return f"{folder.run_id} {cause}"


def _go_on_later(folder: RunFolder, config: RunConfig, this: ThisJob) -> int:
    """Put the run and this job back into the queue; the exit code, if SLURM doesn't end this process before."""
    mine = record.read(folder)
    fate = this.fate()
    if mine is None or mine.stop:
        return RunPreempted.exit_code
    if fate == "cancelled":
        print(f"{folder.run_id} saved what it had; its job was cancelled, so it does not go on by itself")
        return RunPreempted.exit_code
    if (told := _put_back(folder, config)) is not None:
        print(told, file=sys.stderr)
        return 1
    print(f"{folder.run_id} goes on later", flush=True)
    if fate == "requeued":
        return RunPreempted.exit_code
    try:
        commands.requeue(this.id)
    except SlurmError as error:
        print(f"SLURM does not requeue the job ({error}); it is submitted once more", flush=True)
        try:
            again = commands.sbatch(
                this.runs.with_suffix(".sh"), f"--array={mine.index}", f"--dependency=afterany:{this.id}"
            )
        except SlurmError as refused:
            withdraw(folder, "failed", f"SLURM takes it back neither by requeue nor by sbatch: {refused}")
            return 1
        record.write(folder, replace(mine, job_id=f"{again}_{mine.index}"))
        with contextlib.suppress(SlurmError, OSError):
            after.wait_for_all(this.runs.parent)
    return RunPreempted.exit_code


def run_ranks(
    this: ThisJob,
    command: list[str],
    ranks: int,
    config: RunConfig,
    device: str,
    folder: RunFolder,
    stop: Stop,
    on_poll: Callable[[], None],
) -> None:
    """Run the ranks on all nodes of this job; as :func:`launchers.local.run_ranks` does on one machine.

    Raises:
        RunPreempted: they were asked to end and did, or a node was lost.
        RunFailed, RunCancelled: as there.
    """
    resources, launcher = Resources.of(config), config.launcher
    assert isinstance(launcher, SlurmConfig)
    python = sys.executable if launcher.container.engine == "none" else launcher.container.python
    if stop.requested:
        raise RunPreempted(f"preempted by {stop.reason}")
    rendezvous = f"tcp://{socket.gethostname()}:{_free_port()}"
    node_command = [python, "-m", "launchers.slurm.node", str(folder.path), device, rendezvous]
    log = folder.logs / "srun.log"
    with log.open("ab") as output:
        popen = subprocess.Popen(
            srun_command(resources, node_command),
            env={**os.environ, **local.import_path()},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        _watch(popen, this, resources.nodes, launcher, folder, stop, on_poll)
        _judge(popen, resources.nodes, folder, stop, log)
    except RunPreempted:
        if this.fate() == "cancelled":  # SLURM signals the ranks as well, and they may have ended before this looked
            raise RunCancelled(f"cancelled by {SCANCEL}") from None
        raise
    finally:
        if popen.poll() is None:
            popen.kill()  # SLURM ends the ranks with the job


def _watch(
    popen: subprocess.Popen[bytes],
    this: ThisJob,
    nodes: int,
    launcher: SlurmConfig,
    folder: RunFolder,
    stop: Stop,
    on_poll: Callable[[], None],
) -> None:
    """Until srun has ended, or should have."""
    asked = False
    looked_at = time.monotonic()
    failed_at: float | None = None
    while popen.poll() is None:
        if time.monotonic() - looked_at > _LOOK_S:
            looked_at = time.monotonic()
            if (mine := record.read(folder)) is not None and mine.stop:
                stop.request("cancel --save")
        if stop.requested and not asked and all(_state(folder, node) for node in range(nodes)):  # they listen
            asked = True
            if this.fate() == "cancelled":
                stop.request(SCANCEL, at_once=True)
            else:
                popen.send_signal(signal.SIGUSR2)  # srun passes it on
        if stop.at_once:
            raise RunCancelled(f"cancelled by {stop.reason}")
        on_poll()
        if failed_at is None and any(_state(folder, node) == "failed" for node in range(nodes)):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > launcher.stop_grace_s + _SRUN_ENDS_S:
            return
        time.sleep(_POLL_S)


def _judge(popen: subprocess.Popen[bytes], nodes: int, folder: RunFolder, stop: Stop, log: Path) -> None:
    """Say how the ranks of all nodes ended. Returns if they ended well."""
    deadline = time.monotonic() + LATE_FILE_S
    while True:
        verdicts = [read_verdict(folder, node) for node in range(nodes)]
        failed = [verdict for verdict in verdicts if verdict is not None and verdict.state == "failed"]
        culprits = [verdict for verdict in failed if not verdict.others]
        if culprits:
            raise _failure(min(culprits, key=lambda verdict: verdict.time))
        silent = [node for node, verdict in enumerate(verdicts) if verdict is None or verdict.state == "running"]
        if not silent or stop.requested or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    hosts = [verdict.host if verdict else f"node {node}" for node, verdict in enumerate(verdicts) if node in silent]
    if silent and failed:  # the others have lost contact with it
        raise RunPreempted(f"preempted by the loss of {' and '.join(hosts)}")
    preempted = [verdict.cause for verdict in verdicts if verdict is not None and verdict.state == "preempted"]
    if stop.requested and (silent or preempted):
        raise RunPreempted(f"preempted by {stop.reason}")
    if silent and any(verdicts):
        raise RunPreempted(f"preempted by the loss of {' and '.join(hosts)}")
    if silent:
        said = "\n".join(f"    {line}" for line in last_lines(log))
        raise RunFailed(f"srun started no ranks: it exited with code {popen.returncode}", f"  {log}:\n{said}")
    if failed:
        raise _failure(min(failed, key=lambda verdict: verdict.time))
    if preempted:
        raise RunPreempted(max(preempted, key=len))  # one node may have been asked, and its ranks have told the others


def _failure(verdict: Verdict) -> RunFailed:
    return RunFailed(f"{verdict.cause} on {verdict.host}", verdict.details)


def _state(folder: RunFolder, node: int) -> str:
    verdict = read_verdict(folder, node)
    return "" if verdict is None else verdict.state


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m launchers.slurm.job", description="Train one run of an array.")
    parser.add_argument("runs", type=Path, metavar="RUNS_FILE")
    parser.add_argument("--unbegun", type=int, metavar="PID", help="put it back into the queue, which PID could not do")
    options = parser.parse_args(arguments)
    this = ThisJob.of_environment(options.runs)
    folder = record.read_runs(this.runs)[this.index]
    job.go_where_it_was_composed(folder)
    try:
        if options.unbegun is not None:
            return go_on_later(folder, this, options.unbegun)
        with PatientStop().on_signals() as stop:
            return run(folder, this, stop)
    except (RunFailed, SlurmError) as error:
        print(error, file=sys.stderr)
        return RunBusy.exit_code


if __name__ == "__main__":
    sys.exit(command.run(main))
