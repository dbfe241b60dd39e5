"""Runs whose ranks are scripts, trained by the real job in a process of its own."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from optimus_cc.config import RunConfig
from optimus_cc.runs import RunFolder
from tests.configurations import tiny

FINISH = """
from optimus_cc.runs import RunFolder
folder = RunFolder(os.environ["TEST_FOLDER"])
if RANK == 0:
    with open(folder.path.parent / "started.txt", "a") as file:
        file.write(folder.run_id + "\\n")
    for step in range(1, 5):
        folder.append_metrics({"kind": "train", "step": step, "loss": 5.0 / step, "step_time_s": 0.5})
    folder.write_summary({"steps": 4, "validation": {"loss": float(os.environ["TEST_SEED"]), "perplexity": 2.0}})
"""
FAIL = "print('why'); sys.exit(3)"
WAIT = """
if RANK == 0:
    from optimus_cc.runs import RunFolder
    folder = RunFolder(os.environ["TEST_FOLDER"])
    folder.append_metrics({"kind": "train", "step": 2, "loss": 2.5, "step_time_s": 0.5})
    with open(folder.path.parent / "started.txt", "a") as file:
        file.write(folder.run_id + "\\n")
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
time.sleep(1000)
"""
"""Until somebody ends it; asked to stop at a step boundary, it does."""
DEAF = WAIT.replace("os._exit(75)", "None").replace("time.sleep(1000)", "while True: time.sleep(1)")
"""Until it is killed: its step never ends."""

_JOB = """
import os, sys
from launchers import job, local
from optimus_cc.runs import RunFolder
from optimus_cc.training import corpus
from tests.launchers.processes import rank_command

corpus.is_prepared = lambda config: True
corpus.prepare = lambda config, report: None
folder = RunFolder(sys.argv[1])
seed = folder.config()["training"]["seed"]
os.environ.update(TEST_FOLDER=str(folder.path), TEST_SEED=str(seed))
script = {scripts!r}.get(seed, {default!r})
local.rank_command = lambda folder, config: rank_command(script)
sys.exit(job.main(sys.argv[1:]))
"""


def command_of(
    place: Path, scripts: Mapping[int, str] | None = None, default: str = FINISH
) -> Callable[[RunFolder], list[str]]:
    """A job whose ranks run the script of their configuration's seed; ``place``: a folder for it."""
    file = place / "job.py"
    file.write_text(textwrap.dedent(_JOB).format(scripts=dict(scripts or {}), default=default))
    return lambda folder: [sys.executable, str(file), str(folder.path)]


def configuration(runs_dir: Path, seed: int = 1, *, force: bool = False, **launcher: Any) -> RunConfig:
    config: Any = tiny("pp2", num_microbatches=4, device="cpu", seed=seed)
    settings: Any = dataclasses.replace(config.launcher, stop_grace_s=0.5, **launcher)
    changed: RunConfig = dataclasses.replace(config, runs_dir=str(runs_dir), launcher=settings, force=force)
    return changed


def folder_of(config: RunConfig) -> RunFolder:
    return RunFolder(Path(config.runs_dir) / config.run_id)


def state_of(config: RunConfig) -> tuple[str, str | None, int]:
    """State, cause, restarts."""
    status = folder_of(config).status()
    assert status is not None
    return status.state, status.cause, status.restarts


def started(runs_dir: Path) -> list[str]:
    """The run ids whose ranks started, in order, as often as they did."""
    path = runs_dir / "started.txt"
    return path.read_text().split() if path.exists() else []
