"""Runs configurations as the launcher of each says."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launchers.sweep import Outcome
    from optimus_cc.config import RunConfig


def run_all(configs: Sequence[RunConfig]) -> list[Outcome]:
    """Run all of ``configs``: on this machine (:func:`launchers.sweep.run_all`) or as jobs of SLURM.

    Returns:
        an outcome for each of ``configs``, in their order.

    Raises:
        ConfigError: one of them can't run, or its runs_dir can't be written; nothing of its launcher's was started.
    """
    for runs_dir in dict.fromkeys(config.runs_dir for config in configs if not config.launcher.dry_run):
        check_can_be_written(runs_dir)
    outcomes: dict[int, Outcome] = {}
    for name in dict.fromkeys(config.launcher.name for config in configs):
        mine = [index for index, config in enumerate(configs) if config.launcher.name == name]
        if name == "slurm":
            from launchers.slurm import submit  # submitit and what it needs

            run = submit.run_all
        else:
            from launchers import sweep

            run = sweep.run_all
        outcomes |= zip(mine, run([configs[index] for index in mine]), strict=True)
    return [outcomes[index] for index in range(len(configs))]


def check_can_be_written(runs_dir: str) -> None:
    """By doing it: permissions alone don't tell of a file system that is read-only, full or gone.

    Raises:
        ConfigError: it can't.
    """
    from optimus_cc.config import ConfigError, Problem

    place = Path(runs_dir)
    missing = []
    try:
        missing = [folder for folder in (place, *place.parents) if not folder.exists()]
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"1")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        problem = Problem("runs_dir", runs_dir, f"a folder that can be written ({reason})", "runs_dir=FOLDER")
        raise ConfigError(problem) from None
    finally:
        for folder in missing:  # until something is to be kept in it
            with suppress(OSError):
                folder.rmdir()
