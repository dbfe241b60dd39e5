"""What a job does when all runs of a sweep have ended: ``launcher.after``."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from launchers.plan import Planned
from launchers.slurm import commands, record
from launchers.slurm.resources import Resources
from launchers.slurm.script import Place, after_script
from optimus_cc.config import RunConfig
from optimus_cc.config.evaluation import EvaluationConfig
from optimus_cc.config.launcher import SlurmConfig
from optimus_cc.config.parallel import ParallelConfig
from optimus_cc.files import read_text

_WORDS = ("null", "true", "false", "nan", "inf")
"""What Hydra does not take for text."""


def script(
    folder: Path, planned: Sequence[Planned], launcher: SlurmConfig, resources: Resources, place: Place
) -> tuple[Path, str]:
    """The script and its text; what it prints goes into ``after.out`` beside it."""
    lines = [command for name in launcher.after for command in _commands(name, planned, place)]
    ranks = None
    if "evaluate" in launcher.after:
        lines.append("exit ${failed:-0}")
        ranks = max(evaluated_layout(one.config).world_size for one in planned)
    return script_path(folder), after_script(resources, folder / "after.out", lines, place, ranks)


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
    ids = [read_text(record.id_path(runs)).strip() for runs in lists]
    found = [record.read(run) for runs in lists for run in record.read_runs(runs)]
    ids += [one.job_id for one in found if one is not None and one.job_id is not None]
    commands.wait_for(read_text(job).strip(), ids)


def evaluated_layout(config: RunConfig) -> ParallelConfig:
    """The run's own layout if one node holds it; else one with fewer replicas, then fewer stages, then fewer shards."""
    own, most = config.parallel, config.cluster.ranks_per_node
    tensor = _largest_part(own.tensor_parallel_size, most)
    pipeline = _largest_part(own.pipeline_parallel_size, most // tensor)
    data = _largest_part(own.data_parallel_size, most // (tensor * pipeline))
    return ParallelConfig(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, data_parallel_size=data)


def _largest_part(size: int, room: int) -> int:
    return next(part for part in range(min(size, room), 0, -1) if size % part == 0)


def _evaluation(one: Planned, place: Place) -> str:
    """The command that evaluates one run; one that fails doesn't stop those after it."""
    config, layout = one.config, evaluated_layout(one.config)
    command = [place.python, str(place.code / "run.py"), "task=evaluate", f"run={_quoted(str(one.folder.path))}"]
    if layout.world_size != config.parallel.world_size:
        names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        command += ["parallel=single", *(f"parallel.{name}={getattr(layout, name)}" for name in names)]
    command.append(f"cluster.ranks_per_node={layout.world_size}")
    defaults: Any = EvaluationConfig()
    for field in fields(defaults):
        value = getattr(config.evaluation, field.name)
        if field.name != "after_training" and value != getattr(defaults, field.name):
            command.append(f"evaluation.{field.name}={_quoted(value)}")
    return f"{shlex.join(command)} || failed=1"


def _quoted(value: Any) -> str:
    """A value as an override of Hydra's."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_quoted, value))}]"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_/][\w./-]*", value) and value.lower() not in _WORDS:
        return value
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return "null" if value is None else str(value).lower()


def _commands(name: str, planned: Sequence[Planned], place: Place) -> list[str]:
    runs_dir = planned[0].folder.path.parent
    ids = [one.folder.run_id for one in planned]
    if name == "collect":
        table = [sys.executable, "-m", "analysis", "table", str(runs_dir), *ids]
        return [shlex.join(table)]
    if name == "evaluate":
        return [_evaluation(one, place) for one in planned]
    raise ValueError(name)
