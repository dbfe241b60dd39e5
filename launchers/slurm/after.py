"""What a job does when all runs of a sweep have ended: ``launcher.after``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from launchers.plan import Planned
from launchers.slurm import commands, record
from launchers.slurm.resources import Resources
from launchers.slurm.script import Place, after_script
from optimus_cc.config.launcher import SlurmConfig


def script(
    folder: Path, planned: Sequence[Planned], launcher: SlurmConfig, resources: Resources, place: Place
) -> tuple[Path, str]:
    """The script and its text; what it prints goes into ``after.out`` beside it."""
    lines = [command for name in launcher.after for command in _commands(name, planned)]
    return script_path(folder), after_script(resources, folder / "after.out", lines, place)


def script_path(folder: Path) -> Path:
    return folder / "after.sh"


def wait_for_all(folder: Path) -> None:
    """Have the job wait for all runs of a submission, those that had to be submitted once more included.

    Raises:
        SlurmError: SLURM refuses.
        OSError: the submission's files can't be read.
    """
    job = record.id_path(script_path(folder))
    if not job.exists():
        return
    lists = sorted(folder.glob("array_*.runs"))
    ids = [record.id_path(runs).read_text().strip() for runs in lists]
    found = [record.read(run) for runs in lists for run in record.read_runs(runs)]
    ids += [one.job_id for one in found if one is not None and one.job_id is not None]
    commands.wait_for(job.read_text().strip(), ids)


def _commands(name: str, planned: Sequence[Planned]) -> list[str]:
    runs_dir = planned[0].folder.path.parent
    ids = [one.folder.run_id for one in planned]
    if name == "collect":
        table = [sys.executable, "-m", "analysis", "table", str(runs_dir), *ids]
        return [shlex.join(table)]
    raise ValueError(name)
