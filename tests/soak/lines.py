"""One command line: refused in one clear error, or trained for a step."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import tempfile
import time
from pathlib import Path

from launchers.processes.preloaded import Parents
from optimus_cc.config import RunConfig, load
from tests.config.command_line import composed_once
from tests.soak.chains import Attempt, Broken, with_corpus
from tests.soak.command_lines import Refused, classify, generate, is_small
from tests.soak.kills import processes_of


def run_line(seed: int, parents: Parents, workplace: Path) -> str:
    """Give a random command line to ``run.py``, and train what it accepts, if a CPU can do that in seconds.

    Returns:
        what became of it, in words.

    Raises:
        AssertionError: it was neither refused clearly nor trained.
    """
    argv = generate(seed)
    with tempfile.TemporaryDirectory(prefix=f"line_{seed}_", dir=workplace) as place:
        with contextlib.chdir(place), composed_once():
            outcome = classify(argv)
        if isinstance(outcome, Refused):
            return f"refused: {shlex.join(argv)}"
        small = [config for config in outcome.configs if is_small(config)]
        if not small:
            return f"accepted, not for training here: {shlex.join(argv)}"
        train_a_step(small[0], parents, Path(place), workplace)
    return f"trained: {shlex.join(argv)}"


def train_a_step(config: RunConfig, parents: Parents, place: Path, workplace: Path) -> None:
    """The corpus is a small one; its run ends with its first step.

    Raises:
        Broken: it ends otherwise.
    """
    mapping = with_corpus(config, workplace).to_mapping()
    mapping["runs_dir"], mapping["training"]["device"], mapping["tracking"] = str(place), "cpu", {"name": "none"}
    mapping["evaluation"]["after_training"] = False
    attempt = Attempt(load(mapping), parents)
    while attempt.running() and attempt.step() < 1:
        if attempt.overdue():
            break
        time.sleep(0.005)
    if attempt.step() < 1:
        attempt.end()
        raise Broken(f"accepted, but it ended with {attempt.code} before a step:\n{attempt.output}")
    for process in processes_of(attempt.folder, attempt.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    attempt.end()
