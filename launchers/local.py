"""Runs training on this machine: one process per rank."""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from launchers.processes.preloaded import Borrowed, Lender, Parents
from launchers.progress import Progress, format_summary
from launchers.supervise import Stop, last_lines, supervise, threads_of_each
from optimus_cc import checkpoints, disk_budget, process
from optimus_cc.claims import Claim, claim
from optimus_cc.config import ConfigError, Problem, RunConfig
from optimus_cc.records import JsonLinesTail
from optimus_cc.runs import HEARTBEAT_S, RunCancelled, RunFailed, RunFolder, RunPreempted

STATUS_INTERVAL_S = 1.0

RunRanks = Callable[[list[str], int, RunConfig, str, RunFolder, Stop, Callable[[], None]], None]
"""Command, number of ranks, configuration, device, the run's folder, who may ask for an end, what to call meanwhile."""


def train(
    config: RunConfig,
    take: Callable[[RunConfig], Claim] = claim,
    start: RunRanks | None = None,
    ranks_here: int | None = None,
    stop: Stop | None = None,
) -> dict[str, Any]:
    """Train one configuration to the end, or return what a finished run of it left.

    Args:
        take: claims the run's folder.
        start: runs the ranks, if not all of them run on this machine; as :func:`run_ranks` does here.
        ranks_here: how many of them do then.
        stop: is asked by this process's signals for an end; by default a new one.

    Returns:
        the run's summary.

    Raises:
        ConfigError: it can't run on this machine; nothing was started.
        RunFailed: it did not finish; RunCancelled or RunPreempted if it was asked to end. Its text is ready to print.
            Also if it is finished and its evaluation (evaluation.after_training) is not.
    """
    if config.launcher.dry_run:
        from launchers.forecast import dry_run

        print(dry_run([config]))
        return {}
    from launchers import evaluate

    device, notices = choose_device(config, ranks_here)
    if take is claim:  # what was queued was looked at then
        evaluate.check_before_training([config])
    with (stop or Stop()).on_signals() as stop, take(config) as run, _parents(start) as parents:
        start = start or partial(run_ranks, parents=parents)
        progress = Progress(config.training.steps)
        disk, warnings = disk_budget.told(config, run.folder.path)
        for line in (*_heading(config, run, device), f"disk    {disk}"):
            progress.print(line)
        for notice in (*notices, *config.notices(), *warnings):
            progress.print(textwrap.fill(f"notice  {notice}", 118, subsequent_indent=" " * 8, break_on_hyphens=False))
        for note in run.notes:
            progress.print(f"note    {note}")
        summary = (
            (run.folder.summary() or {}) if run.finished else _run(config, run, device, stop, progress, start, parents)
        )
        progress.print(format_summary(summary))
        if evaluate.is_due(config, run.folder):
            evaluate.after_training(config, run.folder, stop, start, ranks_here)
        return summary


@contextlib.contextmanager
def _parents(start: RunRanks | None) -> Iterator[Lender | None]:
    """Have what forks the processes of a run, as far as they run here: those of the sweep, or else its own."""
    borrowed = Borrowed.here()
    if start is not None or borrowed is not None:
        yield borrowed
        return
    with Parents() as parents:
        yield parents


def choose_device(config: RunConfig, ranks: int | None = None) -> tuple[str, list[str]]:
    """``cpu`` or ``cuda`` for all ranks, and what to say about the choice; ``ranks``: if not those of the layout.

    Raises:
        ConfigError: training.device=cuda, and there are fewer usable GPUs than ranks.
    """
    wanted, ranks = config.training.device, ranks or config.parallel.world_size
    if wanted == "cpu":
        return "cpu", []
    gpus = count_gpus()
    cpu_build = _torch_is_cpu_build()
    if gpus >= ranks and not cpu_build:
        return "cuda", []
    lack = "the installed torch has no CUDA" if cpu_build else f"{gpus} GPU{'s' * (gpus != 1)} visible"
    if wanted == "cuda":
        raise ConfigError(
            Problem(
                "training.device",
                wanted,
                f"cuda with a GPU for each of the {ranks} ranks; {lack}",
                "training.device=cpu, a smaller parallel layout, or a machine with more GPUs",
            )
        )
    if gpus == 0:
        return "cpu", []
    return "cpu", [f"training on the CPU: {ranks} ranks, {lack} (training.device=auto)"]


def count_gpus() -> int:
    """NVIDIA GPUs that a process started from here would see. Does not import torch."""
    return len(visible_gpus())


def visible_gpus() -> list[str]:
    """Those GPUs, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    installed = len([path for path in glob.glob("/dev/nvidia*") if re.fullmatch(r"/dev/nvidia\d+", path)])
    if visible is None:
        return [str(number) for number in range(installed or _count_by_nvidia_smi())]
    names = []
    for entry in visible.split(","):
        name = entry.strip()
        if not name or name.startswith("-") or (installed and name.isdigit() and int(name) >= installed):
            break  # CUDA ignores everything from the first invalid entry on
        names.append(name)
    return names if installed or _count_by_nvidia_smi() else []


def _count_by_nvidia_smi() -> int:
    """For machines that have no device files, such as WSL."""
    try:
        result = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in result.stdout.splitlines())


def _torch_is_cpu_build() -> bool:
    try:
        return "cpu" in importlib.metadata.version("torch").partition("+")[2]
    except importlib.metadata.PackageNotFoundError:
        return False


def _heading(config: RunConfig, run: Claim, device: str) -> list[str]:
    training, ranks = config.training, config.parallel.world_size
    return [
        f"run     {run.folder.run_id}",
        f"folder  {relative(run.folder.path)}",
        f"layout  {config.parallel.label}: {ranks} rank{'s' * (ranks != 1)} on {device}, {training.steps} steps of "
        f"{training.global_batch_size} x {config.model.sequence_length} tokens in {config.num_microbatches} "
        f"micro-batch{'es' * (config.num_microbatches != 1)}",
    ]


def _run(
    config: RunConfig,
    run: Claim,
    device: str,
    stop: Stop,
    progress: Progress,
    start: RunRanks,
    parents: Lender | None,
) -> dict[str, Any]:
    """The two stages, corpus and ranks, and the status that they end with."""
    run.update(device=device)
    watch = _Watch(config, run, stop)
    try:
        _prepare_corpus(config, run, stop, progress, watch, parents if device == "cpu" else None)
        summary = _train(config, run, device, stop, progress, watch, start)
    except RunFailed as error:
        progress.close()
        _end(run, progress.step, error)
        raise type(error)(*_told(run.folder, progress.step, error)) from None
    except BaseException as error:
        progress.close()
        _end(run, progress.step, RunFailed(f"{type(error).__name__}: {error}"))
        raise
    run.update(state="finished", step=max(progress.step, int(summary.get("steps") or 0)), cause=None)
    return summary


def _prepare_corpus(
    config: RunConfig, run: Claim, stop: Stop, progress: Progress, watch: _Watch, parents: Lender | None
) -> None:
    from optimus_cc.training.corpus import DataError, is_prepared, prepare

    try:
        if is_prepared(config):
            prepare(config, report=progress.print)  # checks that it suits this run, and builds nothing
            return
    except DataError as error:
        raise RunFailed(f"the corpus can't be prepared: {error}") from None
    progress.print("preparing the corpus")
    log_dir = run.folder.logs / "corpus"
    log = process.log_path(log_dir, 0)
    echo = _Echo(log, progress)

    def on_poll() -> None:
        echo.copy()
        watch.look(0)

    try:
        supervise(
            corpus_command(run.folder),
            1,
            log_dir=log_dir,
            stop=stop,
            env=import_path(),
            # It computes nothing with them; a parent of the ranks can fork it, too.
            threads_per_rank=config.launcher.threads_per_rank or threads_of_each(config.parallel.world_size),
            grace_s=config.launcher.stop_grace_s,
            on_poll=on_poll,
            name="the corpus preparation",
            parents=parents,
        )
    except (RunCancelled, RunPreempted):
        raise
    except RunFailed as error:
        lines = last_lines(log)
        for index in reversed(range(len(lines))):
            if re.match(r"[\w.]*Error\b", lines[index]):  # it said what is wrong; its log was shown as it ran
                rest = "\n".join(lines[index + 1 :])
                raise RunFailed(f"the corpus can't be prepared: {lines[index]}", rest) from None
        raise RunFailed(f"the corpus can't be prepared: {error.cause}", error.details) from None
    finally:
        echo.copy()


def _train(
    config: RunConfig,
    run: Claim,
    device: str,
    stop: Stop,
    progress: Progress,
    watch: _Watch,
    start: RunRanks,
) -> dict[str, Any]:
    ranks = config.parallel.world_size
    tail = JsonLinesTail(run.folder.metrics_path)
    tail.new_records()  # those of an earlier attempt are no news

    def on_poll() -> None:
        progress.update(tail.new_records())
        watch.look(progress.step)

    progress.phase(f"starting {ranks} rank{'s' * (ranks != 1)} ...")
    try:
        start(rank_command(run.folder, config), ranks, config, device, run.folder, stop, on_poll)
    finally:
        progress.update(tail.new_records())
        progress.close()
    summary = run.folder.summary()
    if summary is None:
        raise RunFailed("the ranks ended without a summary", f"  See their logs in {run.folder.logs}.")
    return summary


def run_ranks(
    command: list[str],
    ranks: int,
    config: RunConfig,
    device: str,
    folder: RunFolder,
    stop: Stop,
    on_poll: Callable[[], None],
    parents: Lender | None = None,
) -> None:
    """Run ``command`` once per rank, on ``device``, as ``config`` says; see :func:`supervise`.

    Args:
        parents: may fork them, on the CPU; by default they are there for this call.
    """
    with Parents() as own:
        supervise(
            command,
            ranks,
            log_dir=folder.logs,
            stop=stop,
            env={process.DEVICE: device, **import_path()},
            threads_per_rank=config.launcher.threads_per_rank,
            grace_s=config.launcher.stop_grace_s,
            timeout_s=config.training.timeout_s,
            on_poll=on_poll,
            parents=(parents or own) if device == "cpu" else None,
        )


def import_path() -> dict[str, str]:
    """Lets processes import this very package, installed or not, from whatever folder they are started in."""
    mine, others = str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {"PYTHONPATH": os.pathsep.join([mine, *(place for place in others if place not in ("", mine))])}


def rank_command(folder: RunFolder, config: RunConfig) -> list[str]:
    """What each rank executes for the configuration that is frozen in a folder."""
    module = "optimus_cc.evaluation" if config.task.name == "evaluate" else "optimus_cc.training"
    return [sys.executable, "-m", module, str(folder.path)]


def corpus_command(folder: RunFolder) -> list[str]:
    return [sys.executable, "-m", "optimus_cc.training.corpus", str(folder.config_path)]


def _end(run: Claim, step: int, error: RunFailed) -> None:
    with contextlib.suppress(OSError):  # a full disk; the error itself is what has to be seen
        run.update(state=error.state, step=step, cause=error.cause)


def _told(folder: RunFolder, step: int, error: RunFailed) -> tuple[str, str]:
    """Cause and details for the person at the screen."""
    where = f"at step {step}" if step else "before the first step"
    by_request = error.cause.startswith(error.state)
    details = [error.details] if error.details else []
    last = checkpoints.newest(folder.checkpoints)
    how = f"goes on from its checkpoint of step {last.step}" if last else "starts it again"
    details.append(f"  Folder: {relative(folder.path)}. The same command {how}.")
    cause = f"{error.cause} {where}" if by_request else f"{error.state} {where}: {error.cause}"
    return f"{folder.run_id} {cause}", "\n".join(details)


def relative(path: Path) -> str:
    """As short as it can be said from here."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


class _Watch:
    """Keeps status.json current without writing it at every poll, and the time limit."""

    def __init__(self, config: RunConfig, run: Claim, stop: Stop) -> None:
        # A job of SLURM is told before its time is over.
        self._limit_h = config.launcher.time_limit_h if config.launcher.name == "local" else None
        self._run = run
        self._stop = stop
        self._began = self._written = time.monotonic()

    def look(self, step: int) -> None:
        now = time.monotonic()
        if self._limit_h is not None and now - self._began > 3600 * self._limit_h and not self._stop.requested:
            self._stop.request(f"launcher.time_limit_h={self._limit_h:g}")
        waited = now - self._written
        if waited < STATUS_INTERVAL_S or (step == self._run.status.step and waited < HEARTBEAT_S):
            return
        self._written = now
        with contextlib.suppress(OSError):  # a full disk must not end a run that may still finish
            self._run.update(step=step)


class _Echo:
    """Shows what a process writes to its log."""

    def __init__(self, log: Path, progress: Progress) -> None:
        self._log = log
        self._progress = progress
        self._offset = 0

    def copy(self) -> None:
        """Show the complete lines since the last call."""
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
            end = data.rfind(b"\n") + 1
            self._offset += end
            for line in data[:end].decode("utf-8", errors="replace").splitlines():
                self._progress.print(f"  {line}")
