"""Evaluates a checkpoint of a run on this machine, or at the end of its training: one process per rank."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launchers import own_folder
from launchers.local import RunRanks, choose_device, import_path, rank_command, relative, run_ranks
from launchers.progress import PLAIN_INTERVAL_S, Progress
from launchers.scores import table
from launchers.supervise import Stop, last_lines
from optimus_cc import checkpoints
from optimus_cc.checkpoints import Checkpoint
from optimus_cc.claims import folder_of
from optimus_cc.config import ConfigError, Problem, RunConfig
from optimus_cc.config.evaluation import TASKS
from optimus_cc.config.launcher import SlurmConfig
from optimus_cc.config.run import TaskConfig
from optimus_cc.config.schema import changed
from optimus_cc.evaluation import items, results, trained
from optimus_cc.process import log_path
from optimus_cc.runs import RunFailed, RunFolder
from optimus_cc.training.errors import DataError

if TYPE_CHECKING:
    from launchers.sweep import Outcome

_ATTEMPTS = 3
"""How often another checkpoint is taken when a training that goes on has removed the one that was to be evaluated."""
_PACKAGES = ("lm_eval", "datasets")


def evaluate(config: RunConfig) -> dict[str, Any]:
    """Measure what ``config.evaluation`` says of the checkpoint that ``config`` names.

    What is there already is not measured again, unless ``config.force``. It leaves a file for each kind of measurement
    in ``evaluation/`` of the run's folder, and logs in ``evaluation/logs/``.

    Returns:
        the results by their kind.

    Raises:
        ConfigError: it can't run on this machine, or its data is not there; nothing was started.
        RunFailed: a rank failed, or somebody asked for an end.
    """
    if config.launcher.name != "local":
        fix = "launcher=local on a node of the cluster, or launcher.after=[evaluate] when the runs are submitted"
        raise ConfigError(Problem("launcher", config.launcher.name, "local with task=evaluate", fix))
    check(config)
    with Stop().on_signals() as stop:
        found = _with_ranks(config, stop, run_ranks, None)
    return {result["kind"]: result for result in found}


def after_training(
    config: RunConfig, folder: RunFolder, stop: Stop, start: RunRanks = run_ranks, ranks_here: int | None = None
) -> list[dict[str, Any]]:
    """Measure a finished run as its ``config.evaluation`` says, in its own layout, where its training ran.

    Raises:
        RunFailed: it could not be; the training is as finished as before.
    """
    try:
        return _with_ranks(of_training(config, folder), stop, start, ranks_here)
    except (ConfigError, RunFailed) as error:
        cause = error.cause if isinstance(error, RunFailed) else f"ConfigError: {error.problems[0].sentence}"
        kind = type(error) if isinstance(error, RunFailed) else RunFailed
        details = [error.details] if isinstance(error, RunFailed) and error.details else []
        details.append("  Its training is finished. The same command evaluates it and trains nothing.")
        raise kind(f"the evaluation of {folder.run_id} ended: {cause}", "\n".join(details)) from None


def check_before_training(configs: Sequence[RunConfig]) -> None:
    """Look at what the evaluations after these trainings, or by a job of their own, will need.

    Raises:
        ConfigError: as :func:`check`.
    """
    seen = []
    for config in configs:
        by_job = isinstance(config.launcher, SlurmConfig) and "evaluate" in config.launcher.after
        folder = folder_of(config)
        status = folder.status()
        through = status is not None and status.state == "finished" and not config.force
        wanted = by_job or (config.evaluation.after_training and not (through and not is_due(config, folder)))
        if wanted and config.evaluation not in seen:
            seen.append(config.evaluation)
            check(config)


def after_sweep(outcomes: Sequence[Outcome], stop: Stop) -> list[Outcome]:
    """Evaluate, one after the other, the runs of a sweep that were finished before it and have not been evaluated."""
    told = []
    for outcome in outcomes:
        if outcome.state == "skipped" and not stop.requested and is_due(outcome.config, outcome.folder):
            try:
                after_training(outcome.config, outcome.folder, stop)
            except RunFailed as failure:
                print(failure, flush=True)
                outcome = replace(outcome, error=failure, interrupted=stop.requested)
        told.append(outcome)
    return told


def is_due(config: RunConfig, folder: RunFolder) -> bool:
    """Whether a finished run is still to be evaluated."""
    if not config.evaluation.after_training:
        return False
    found = checkpoints.newest(folder.checkpoints)
    try:
        return found is not None and bool(results.missing(folder, results.describe(found), of_training(config, folder)))
    except (OSError, DataError):
        return True  # the evaluation will say what is wrong


def of_training(config: RunConfig, folder: RunFolder) -> RunConfig:
    """The configuration of the evaluation that belongs to a training."""
    path = folder.path.absolute()
    return changed(config, task=TaskConfig(name="evaluate"), run=str(path), runs_dir=str(path.parent), force=False)


def check(config: RunConfig) -> None:
    """Look at what an evaluation needs: packages, names of tasks, their items, here or from the hub, and documents.

    Raises:
        ConfigError: something is not there.
    """
    settings = config.evaluation
    wrong = list(items.document_problems(settings))
    if wrong:
        raise ConfigError(wrong)
    if not settings.tasks:
        return
    lacking = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if lacking:
        allowed = f"[] without the packages {' and '.join(lacking)}"
        raise ConfigError(
            Problem("evaluation.tasks", list(settings.tasks), allowed, "python -m pip install -e '.[evaluation]'")
        )
    if settings.data_dir is not None:
        wrong = list(items.problems(settings.data_dir, settings.tasks, settings.num_fewshot))
    if not wrong and (settings.data_dir is None or not set(settings.tasks) <= set(TASKS)):
        wrong = _prepare(config)
    if wrong:
        raise ConfigError(wrong)


def _prepare(config: RunConfig) -> list[Problem]:
    """What lm-eval finds wrong with the tasks, or the hub with their items, which are on this machine afterwards."""
    with tempfile.TemporaryDirectory(prefix="optimus_cc_") as scratch:
        path = Path(scratch) / "evaluation.json"
        path.write_text(json.dumps(config.to_mapping()["evaluation"]), encoding="utf-8")
        command = [sys.executable, "-m", "optimus_cc.evaluation.prepare", str(path)]
        result = subprocess.run(
            command, env={**os.environ, **import_path()}, capture_output=True, text=True, check=False
        )
    try:
        found = json.loads(result.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        tail = "\n".join(f"    {line}" for line in result.stderr.splitlines()[-15:])
        raise RunFailed("the tasks could not be looked at", tail) from None
    return [Problem(**problem) for problem in found]


def _with_ranks(config: RunConfig, stop: Stop, start: RunRanks, ranks_here: int | None) -> list[dict[str, Any]]:
    """Evaluate one checkpoint; another one if it is removed meanwhile."""
    run = trained.run_folder(config)
    for attempt in range(1, _ATTEMPTS + 1):
        found = trained.chosen(config)
        try:
            return _evaluate(config, run, found, stop, start, ranks_here)
        except (RunFailed, OSError) as error:
            if found.path.exists() or stop.requested:
                raise
            cause = f"the checkpoint of step {found.step} was removed while it was being evaluated"
            if config.checkpoint is not None or attempt == _ATTEMPTS:
                details = "  Its training goes on and keeps training.checkpoint.keep_last of them."
                raise RunFailed(cause, details) from error
            print(f"note       {cause}; going on with the newest one", flush=True)
    raise AssertionError("unreachable")


def _evaluate(
    config: RunConfig, run: RunFolder, found: Checkpoint, stop: Stop, start: RunRanks, ranks_here: int | None
) -> list[dict[str, Any]]:
    try:
        trained.corpus_folder(config)  # which holds the vocabulary
        checkpoint = results.describe(found)
        missing = results.kinds(config) if config.force else results.missing(run, checkpoint, config)
    except (OSError, DataError) as error:
        raise RunFailed(f"the data can't be read: {error}") from None
    progress = Progress(0)
    if not missing:
        progress.print(f"evaluate   {run.run_id}, step {found.step}: measured already; force=true measures it again")
    else:
        fixed = changed(config, checkpoint=found.step)
        _measure(fixed, run, found, missing, stop, start, ranks_here, progress)
    there = results.there(run, checkpoint, config)
    for result in there:
        progress.print(table(result))
        path = results.path_of(run, found.step, result["kind"], result["settings"])
        progress.print(f"{'file':<11}{relative(path)}")
    return there


def _measure(
    config: RunConfig,
    run: RunFolder,
    found: Checkpoint,
    missing: list[str],
    stop: Stop,
    start: RunRanks,
    ranks_here: int | None,
    progress: Progress,
) -> None:
    ranks = config.parallel.world_size
    device, notices = choose_device(config, ranks_here)
    folder = own_folder.make_folder(config, f"{run.run_id}/evaluation/logs", f"step_{found.step:08d}")
    kinds = " and ".join(kind.replace("_", "-") for kind in missing)
    text = f"{run.run_id}, step {found.step}, {kinds}"
    own_folder.show_heading(progress, "evaluate", text, ranks, device, folder, notices)
    own_folder.run(rank_command(folder, config), ranks, config, device, folder, stop, progress, _shown(progress), start)
    if folder.summary() is None:
        said = "\n".join(f"    {line}" for line in last_lines(log_path(folder.logs, 0)))
        raise RunFailed("the ranks ended without a result", f"  See their logs in {folder.logs}.\n{said}")


def _shown(progress: Progress) -> Callable[[list[dict[str, Any]]], None]:
    """What shows, from their records, how far the ranks are."""
    what, told = "", 0.0

    def on_records(records: list[dict[str, Any]]) -> None:
        nonlocal what, told
        for record in records:
            if record["kind"] == "begin":
                what = record["what"].replace("_", "-")
                progress.phase(f"{what} ...")
            elif time.monotonic() - told >= PLAIN_INTERVAL_S:
                told = time.monotonic()
                progress.phase(f"{what}: {record['done']}/{record['total']} rows of a rank")

    return on_records
