"""Runs several trainings on this machine, some at a time: each in a process of its own (:mod:`launchers.job`)."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launchers import evaluate
from launchers.forecast import dry_run
from launchers.job import EXIT_BUSY, log_path
from launchers.local import choose_device, import_path, relative, visible_gpus
from launchers.overview import Overview, Watched
from launchers.plan import Planned, count, plan
from launchers.processes.preloaded import LENT, Parents
from launchers.progress import duration, number
from launchers.supervise import Guard, Stop, last_lines, num_cores
from optimus_cc import process, provenance
from optimus_cc.claims import queue, withdraw
from optimus_cc.config import ConfigError, Problem, RunConfig
from optimus_cc.config.schema import changed
from optimus_cc.runs import FAILURES, RunBusy, RunCancelled, RunFailed, RunFolder, RunPreempted

POLL_S = 0.1
NEVER_BEGAN = "the sweep was stopped before it began"
_KILL_AFTER_S = 30.0
"""Beyond what its ranks may take: how long a job has to end at once."""


@dataclass(frozen=True)
class Outcome:
    """How one run of a sweep stands when the sweep is over."""

    planned: Planned
    error: RunFailed | None = None
    """Why it isn't finished; None if it is, or in a dry run."""
    skipped: bool = False
    """It was finished already, or another process finished it."""
    interrupted: bool = False
    """Somebody stopped the whole sweep before this run had ended."""

    @property
    def config(self) -> RunConfig:
        return self.planned.config

    @property
    def folder(self) -> RunFolder:
        return self.planned.folder

    @property
    def state(self) -> str:
        if self.error is None:
            return "skipped" if self.skipped else "finished"
        return "elsewhere" if isinstance(self.error, RunBusy) else self.error.state

    @property
    def validation_loss(self) -> float:
        """The final one; NaN if the folder doesn't say."""
        validation = (self.folder.summary() or {}).get("validation")
        loss = validation.get("loss") if isinstance(validation, dict) else None
        return float(loss) if isinstance(loss, (int, float)) else math.nan

    def __str__(self) -> str:
        result = f": {self.error.cause}" if self.error is not None else ""
        if self.state == "finished":
            result = f"  validation loss {number(self.validation_loss)}"
        return f"{self.state:<9}  {self.folder.run_id}{result}"

    def logs(self) -> list[str]:
        """A line that says where its log is, if there is one."""
        log = log_path(self.folder)
        return [f"           log: {relative(log)}"] if log.exists() else []

    def value(self) -> float:
        """What is minimised: the final validation loss.

        Raises:
            RunFailed: the run isn't finished.
        """
        if self.error is not None:
            raise self.error
        return self.validation_loss


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """0 if all are finished; of a sweep that was stopped 130 (at once) or 75 (they saved); else 1 if any failed, else
    that of runs which were ended one by one: 130 cancelled, 75 preempted."""
    codes = {outcome.error.exit_code for outcome in outcomes if outcome.error is not None}
    stopped = any(outcome.interrupted for outcome in outcomes)
    return RunFailed.exit_code if RunFailed.exit_code in codes and not stopped else max(codes, default=0)


def job_command(folder: RunFolder) -> list[str]:
    return [sys.executable, "-m", "launchers.job", str(folder.path)]


def run_all(
    configs: Sequence[RunConfig], *, job_command: Callable[[RunFolder], list[str]] = job_command
) -> list[Outcome]:
    """Train all of ``configs``, ``launcher.max_parallel`` at a time; what is finished already is not run again.

    Whatever happens, no job and no rank is left when this returns. One failure does not stop the others. The first
    SIGTERM or SIGUSR2 asks the running ones to save and to stop; a second one, Ctrl-C or SIGHUP ends them at once. Then
    nothing more starts, and what has not begun leaves the queue.

    Args:
        job_command: what trains the run that is queued in a folder, and ends like :mod:`launchers.job`.

    Returns:
        an outcome for each of ``configs``, in their order.

    Raises:
        ConfigError: one of them can't run on this machine; nothing was started.
    """
    check_together(configs, ("max_parallel", "dry_run"))
    if any(config.launcher.dry_run for config in configs):
        print(dry_run(configs))
        return [Outcome(planned) for planned in plan(configs)]
    evaluate.check_before_training(configs)
    planned = plan(configs)
    machine = _Machine.of([one.config for one in planned if one.runs])
    with Stop().on_signals() as stop:
        return evaluate.after_sweep(_Sweep(planned, machine, stop, job_command).run(), stop)


def check_together(configs: Sequence[RunConfig], keys: Sequence[str]) -> None:
    """Raises:
    ConfigError: runs of a sweep say different things about one of the launcher's keys that are about all of it.
    """
    for key in keys:
        values = {str(getattr(config.launcher, key)) for config in configs}
        if len(values) > 1:
            fix = f"launcher.{key}=VALUE"
            said = ",".join(sorted(values))
            raise ConfigError(Problem(f"launcher.{key}", said, "one value for all runs of a sweep", fix))


@dataclass
class _Machine:
    """What is shared out over jobs that run at the same time."""

    parallel: int
    devices: list[str]
    """Of each configuration."""
    free_gpus: list[str]
    notices: list[str]

    @classmethod
    def of(cls, configs: Sequence[RunConfig]) -> _Machine:
        """Raises:
        ConfigError: a layout doesn't fit.
        """
        choices = [choose_device(config) for config in configs]
        notices = [text for _, told in choices for text in told]
        notices += [text for config in configs for text in config.notices()]
        parallel = max((config.launcher.max_parallel or 1 for config in configs), default=1)
        devices = [device for device, _ in choices]
        return cls(parallel, devices, visible_gpus() if "cuda" in devices else [], list(dict.fromkeys(notices)))

    def shared(self, config: RunConfig, device: str) -> RunConfig:
        """``config`` with its share of the cores, if jobs run beside it."""
        if self.parallel == 1 or device != "cpu" or config.launcher.threads_per_rank is not None:
            return config
        threads = max(1, num_cores() // (self.parallel * config.parallel.world_size))
        return changed(config, launcher=changed(config.launcher, threads_per_rank=threads))


@dataclass
class _Job:
    watched: Watched
    popen: subprocess.Popen[bytes]
    output: Path
    """What it printed before it had claimed its folder."""
    gpus: list[str]

    @property
    def planned(self) -> Planned:
        return self.watched.planned

    @property
    def how(self) -> str:
        """How the process ended."""
        code = self.popen.returncode
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


class _Sweep:
    def __init__(
        self, planned: Sequence[Planned], machine: _Machine, stop: Stop, job_command: Callable[[RunFolder], list[str]]
    ) -> None:
        self._planned = planned
        self._machine = machine
        self._stop = stop
        self._job_command = job_command
        self._overview = Overview(machine.parallel)
        self._device = dict(zip((one.folder.path for one in planned if one.runs), machine.devices, strict=True))
        self._waiting: list[Planned] = []
        self._running: list[_Job] = []
        self._outcomes: dict[Path, Outcome] = {}
        self._began = time.monotonic()
        self._asked_at: float | None = None
        self._at_once_at: float | None = None

    def run(self) -> list[Outcome]:
        self._open()
        self._queue()
        scratch = Path(tempfile.mkdtemp(prefix="optimus_cc_sweep_"))
        self._guard = Guard(scratch)
        self._parents = Parents()
        try:
            while self._running or (self._waiting and not self._stop.requested):
                self._pass_on_the_stop()
                self._start_what_fits(scratch)
                time.sleep(POLL_S)
                self._parents.serve()
                for job in [job for job in self._running if job.popen.poll() is not None]:
                    self._end(job)
                running = [job.watched for job in self._running]
                self._overview.show(running, self._waiting, self._counts())
        finally:
            self._overview.close()
            self._guard.close()  # kills what is left
            self._parents.close()
        self._withdraw_the_rest()
        self._look_elsewhere()
        self._close()
        return [self._outcomes[one.folder.path] for one in self._planned]

    # Before.

    def _open(self) -> None:
        runs = f"{len(self._planned)} run{'s' * (len(self._planned) != 1)}"
        self._say(f"sweep   {runs}, {self._machine.parallel} at a time: {count(self._planned)}")
        for one in self._planned:
            self._say(f"  {one}")
        for notice in self._machine.notices:
            self._say(textwrap.fill(f"notice  {notice}", 118, subsequent_indent=" " * 8, break_on_hyphens=False))

    def _queue(self) -> None:
        """Freeze everything before anything starts."""
        code = provenance.code_version()
        for one in self._planned:
            if one.action == "twice" or self._stop.requested:
                continue
            if one.action == "finished":
                self._outcomes[one.folder.path] = Outcome(one, skipped=True)
                continue
            try:
                config = self._machine.shared(one.config, self._device[one.folder.path]) if one.runs else one.config
                claimed = queue(config, code)
            except RunFailed as failure:
                self._outcome(one, failure)
                continue
            if claimed.finished:
                self._outcome(one, None, skipped=True)
            else:
                self._waiting.append(one)

    # While they run.

    def _start_what_fits(self, scratch: Path) -> None:
        while self._waiting and len(self._running) < self._machine.parallel and not self._stop.requested:
            one = self._waiting[0]
            needed = one.config.parallel.world_size if self._device.get(one.folder.path) == "cuda" else 0
            if needed > len(self._machine.free_gpus):
                return
            self._waiting.pop(0)
            if not self._has_ended_otherwise(one):
                gpus, self._machine.free_gpus = self._machine.free_gpus[:needed], self._machine.free_gpus[needed:]
                self._start(one, gpus, scratch / one.folder.run_id)

    def _has_ended_otherwise(self, one: Planned) -> bool:
        """Whether somebody else has cancelled or run it since it was queued."""
        status = one.folder.status()
        if status is None or status.state == "queued":
            return False
        if status.abandoned:
            with contextlib.suppress(RunFailed):  # its job says what is wrong
                queue(one.config)
            return False
        if status.state == "finished":
            self._outcome(one, None, skipped=True)
        elif status.state == "running":
            self._outcome(one, RunBusy(f"it is being run by {status.owner}"))
        else:
            self._outcome(one, FAILURES[status.state](status.cause or status.state))
        return True

    def _start(self, one: Planned, gpus: list[str], output: Path) -> None:
        env = {**os.environ, **import_path(), process.SUPERVISOR_PID: str(os.getpid())}
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        with self._parents.lend() as lent, output.open("wb", buffering=0) as file:
            env[LENT] = str(lent.fileno())
            popen = subprocess.Popen(
                self._job_command(one.folder),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[lent.fileno()],
            )
        self._guard.add(popen.pid)
        self._running.append(_Job(Watched(one, time.monotonic()), popen, output, gpus))
        on = f"  on GPU {','.join(gpus)}" if gpus else ""
        self._say(f"started    {one.folder.run_id}{on}")

    def _pass_on_the_stop(self) -> None:
        if not self._stop.requested:
            return
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
            if not self._stop.at_once:
                self._say(f"{self._stop.reason}: the running ones save and stop; nothing more starts")
                self._signal(signal.SIGTERM)
                return
        if self._stop.at_once and self._at_once_at is None:
            self._at_once_at = now
            self._say(f"{self._stop.reason}: the running ones end now; nothing more starts")
            # A job that has been asked to save takes a second SIGTERM for this, and tells the reason as it was.
            asked_before = self._asked_at < now and self._stop.reason not in ("Ctrl-C", "SIGHUP")
            at_once = signal.SIGHUP if self._stop.reason == "SIGHUP" else signal.SIGINT
            self._signal(signal.SIGTERM if asked_before else at_once)
        if self._at_once_at is not None:
            for job in self._running:
                if now - self._at_once_at > job.planned.config.launcher.stop_grace_s + _KILL_AFTER_S:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(job.popen.pid, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        for job in self._running:
            job.popen.send_signal(number)

    def _end(self, job: _Job) -> None:
        self._running.remove(job)
        self._guard.remove(job.popen.pid)
        self._machine.free_gpus += job.gpus
        one, status = job.planned, job.planned.folder.status()
        printed = last_lines(job.output)
        said = "\n".join(f"    {line}" for line in printed)
        if job.popen.returncode == EXIT_BUSY:
            self._outcome(one, RunBusy(printed[0].strip() if printed else "it is run elsewhere"))
        elif status is not None and status.state == "finished":
            code = job.popen.returncode
            kind = next((kind for kind in FAILURES.values() if kind.exit_code == code), RunFailed)
            error = None if code == 0 else kind(f"it is trained, but its job {job.how} afterwards", said)
            self._outcome(one, error, took_s=time.monotonic() - job.watched.began)
        elif status is not None and status.state in FAILURES:
            self._outcome(one, FAILURES[status.state](status.cause or status.state, said))
        elif status is not None and status.state == "queued":
            if self._stop.requested:
                self._waiting.insert(0, one)  # it ended before it had begun
                return
            cause = f"its job {job.how} before it began"
            withdraw(one.folder, "failed", cause)
            self._outcome(one, RunFailed(cause, said))
        elif self._at_once_at is not None:
            self._outcome(one, RunCancelled(f"cancelled by {self._stop.reason}: its job {job.how}"))
        else:
            self._outcome(one, RunFailed(f"its job {job.how}"))

    # Afterwards.

    def _withdraw_the_rest(self) -> None:
        kind = RunCancelled if self._stop.at_once else RunPreempted
        for one in self._planned:
            if one.folder.path in self._outcomes:
                continue
            status = one.folder.status()
            if status is not None and not status.waits_for_another:
                with contextlib.suppress(RunFailed):
                    withdraw(one.folder, "cancelled", NEVER_BEGAN)
            self._outcomes[one.folder.path] = Outcome(one, kind(NEVER_BEGAN), interrupted=True)

    def _look_elsewhere(self) -> None:
        """What another process ran may be through by now."""
        for path, outcome in self._outcomes.items():
            status = outcome.folder.status() if isinstance(outcome.error, RunBusy) else None
            if status is not None and status.state == "finished":
                self._outcomes[path] = Outcome(outcome.planned, skipped=True)

    def _close(self) -> None:
        took = duration(time.monotonic() - self._began)
        self._say(f"sweep   {_enumerated(self._counts())} in {took}")
        never = []
        for outcome in self._outcomes.values():
            error = outcome.error
            if error is None:
                continue
            if error.cause == NEVER_BEGAN:
                never.append(outcome)
                continue
            self._say(str(outcome))
            if error.details:
                self._say(error.details)
            for line in outcome.logs():
                self._say(line)
        for outcome in never:
            self._say(f"not begun  {outcome.folder.run_id}")
        if any(outcome.error is not None for outcome in self._outcomes.values()):
            self._say("The same command goes on where it was.")

    def _outcome(
        self, one: Planned, error: RunFailed | None, skipped: bool = False, took_s: float | None = None
    ) -> None:
        outcome = Outcome(one, error, skipped, interrupted=error is not None and self._stop.requested)
        self._outcomes[one.folder.path] = outcome
        took = f"  {duration(took_s)}" if outcome.state == "finished" else ""
        self._say(f"{outcome}{took}")

    def _counts(self) -> Counter[str]:
        return Counter(
            "not begun" if outcome.error is not None and outcome.error.cause == NEVER_BEGAN else outcome.state
            for outcome in self._outcomes.values()
        )

    def _say(self, text: str) -> None:
        self._overview.say(text)


def _enumerated(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.items()) or "nothing to do"
