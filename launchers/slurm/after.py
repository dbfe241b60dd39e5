"""What a job does when all runs of a sweep have ended: ``launcher.after``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from launchers.plan import Planned
from launchers.slurm.resources import Resources
from launchers.slurm.script import Place, after_script
from optimus_cc.config.launcher import SlurmConfig


def script(
    folder: Path, planned: Sequence[Planned], launcher: SlurmConfig, resources: Resources, place: Place
) -> tuple[Path, str]:
    """The script and its text; what it prints goes into ``after.out`` beside it."""
    commands = [command for name in launcher.after for command in _commands(name, planned)]
    return folder / "after.sh", after_script(resources, folder / "after.out", commands, place)


def _commands(name: str, planned: Sequence[Planned]) -> list[str]:
    runs_dir = planned[0].folder.path.parent
    ids = [one.folder.run_id for one in planned]
    if name == "collect":
        table = [sys.executable, "-m", "analysis", "table", str(runs_dir), *ids]
        return [shlex.join(table)]
    raise ValueError(name)
