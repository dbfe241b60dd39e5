"""The scripts that sbatch gets. Text only; submitit writes their options."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import _make_sbatch_string

from launchers.slurm import record
from launchers.slurm.resources import Part, Resources
from optimus_cc.config.launcher import SlurmConfig

_PASS_ON_SIGNALS = (
    "asked= job=",
    'pass_on() { asked=$1; [ -z "$job" ] || kill -s "$1" "$job" 2>/dev/null; }',
    "trap 'pass_on USR2' USR2",
    "trap 'pass_on TERM' TERM",
)
"""What precedes a job in the background, so that a signal is passed on at once, whatever runs there. The job's program
takes it as a request to end; what comes before that program, modules and imports, dies of it."""
_UNTIL_IT_ENDS = (
    "job=$!",
    '[ -z "$asked" ] || kill -s "$asked" "$job"',
    'while wait "$job"; kill -0 "$job" 2>/dev/null; do :; done',
    'wait "$job"  # each signal ends a wait',
    "code=$?",
    "case $code in",
    '140 | 143) [ -n "$asked" ] || sleep 1 ;;  # it died of one, which may be on its way to this shell, too',
    "*) asked= ;;",
    "esac",
    "trap '' USR2 TERM",
)
"""``code`` is how it ended then; ``asked`` is set if it was asked to end when it did not listen."""


@dataclass(frozen=True)
class Place:
    """Where jobs run, and from what."""

    code: Path
    """Folder that holds the packages."""
    work: Path
    """What paths in configurations are relative to."""
    python: str = sys.executable

    def lines(self) -> list[str]:
        return [
            f"export PYTHONPATH={shlex.quote(str(self.code))}${{PYTHONPATH:+:$PYTHONPATH}}",
            f"cd {shlex.quote(str(self.work))}",
        ]


def array_script(resources: Resources, part: Part, runs: Path, place: Place, name: str = "optimus_cc") -> str:
    """An array of jobs, each of which trains one run.

    Args:
        runs: file with a run folder in each line, of which job N takes line N, from 0; the jobs' output goes beside it.
    """
    launcher = resources.launcher
    options = {
        "nodes": resources.nodes,
        "ntasks_per_node": 1,
        "cpus_per_task": resources.cpus_per_node,
        "gpus_per_node": resources.ranks_per_node if resources.gpus else None,
        "exclusive": launcher.exclusive or None,
        "mem": _memory(launcher),
        "time": _minutes(launcher),
    }
    more = {
        "array": f"0-{part.size - 1}" + (f"%{part.throttle}" if part.throttle else ""),
        "output": str(record.output_path(Path(_literal(runs)), "%a")),
        "signal": f"B:USR2@{launcher.warning_s}",
        **({} if "--no-requeue" in launcher.sbatch else {"requeue": True}),
        **_flags(launcher.sbatch),
    }
    job = [place.python, "-m", "launchers.slurm.job"]
    before = [*_PASS_ON_SIGNALS, "(", *_setup(launcher, place)]
    command = [f"exec {shlex.join([*job, str(runs)])}", ") &", *_UNTIL_IT_ENDS]
    again = f'exec {shlex.join([*job, str(runs)])} --unbegun "$job"'
    command += ['if [ -n "$asked" ]; then', *place.lines(), again, "fi", "exit $code"]
    return _script(resources, name, options, more, before, command)


def after_script(
    resources: Resources, output: Path, commands: Sequence[str], place: Place, ranks: int | None = None
) -> str:
    """A job that runs ``commands`` when all arrays have ended.

    Args:
        ranks: how many ranks they start on its node; None: none, and one core will do.
    """
    launcher = resources.launcher
    options: dict[str, Any] = {"nodes": 1, "ntasks_per_node": 1, "cpus_per_task": 1}
    if ranks is not None:
        options |= {
            "cpus_per_task": ranks * launcher.cpus_per_rank,
            "gpus_per_node": ranks if resources.gpus else None,
            "mem": _memory(launcher),
            "time": _minutes(launcher),
        }
    more = {"output": _literal(output)}
    return _script(resources, "optimus_cc_after", options, more, _setup(launcher, place), commands)


def _memory(launcher: SlurmConfig) -> str | None:
    return None if launcher.memory_per_node_gb is None else f"{round(launcher.memory_per_node_gb * 1024)}M"


def _minutes(launcher: SlurmConfig) -> int | None:
    return None if launcher.time_limit_h is None else round(launcher.time_limit_h * 60)


def _setup(launcher: SlurmConfig, place: Place) -> list[str]:
    modules = [f"module load {shlex.quote(module)}" for module in launcher.modules]
    return ["set -e", *modules, *launcher.setup, *place.lines()]


def _literal(path: Path) -> str:
    """A path for an option in which % stands for something."""
    return str(path).replace("%", "%%")


def _script(
    resources: Resources,
    name: str,
    options: dict[str, Any],
    more: dict[str, Any],
    before: Sequence[str],
    commands: Sequence[str],
) -> str:
    launcher = resources.launcher
    mail = {"mail_user": launcher.mail, "mail_type": "END,FAIL"} if launcher.mail else {}
    common = {
        "partition": launcher.partition,
        "account": launcher.account,
        "qos": launcher.qos,
        "constraint": launcher.constraint,
        **mail,
    }
    given = {key: value for key, value in {**common, **options}.items() if value is not None}
    if "time" not in given:
        more = {**more, "time": None}
    text = _make_sbatch_string(
        "\n".join(commands),
        folder="/",  # its own output file, in place of which ours stands
        job_name=name,
        setup=list(before),
        additional_parameters=more,
        stderr_to_stdout=True,
        use_srun=False,
        **given,
    )
    dropped: tuple[str, ...] = ("#SBATCH --wckey=", "#SBATCH --time=None", "export SUBMITIT_EXECUTOR")
    if name != "optimus_cc":
        dropped += ("#SBATCH --signal=",)
    return "".join(f"{line}\n" for line in text.splitlines() if not line.startswith(dropped))


def _flags(options: Sequence[str]) -> dict[str, Any]:
    pairs = (option.removeprefix("--").partition("=") for option in options)
    return {key: value if equals else True for key, equals, value in pairs}


def srun_command(resources: Resources, command: Sequence[str]) -> list[str]:
    """What starts ``command`` once on each node of a job."""
    launcher, container = resources.launcher, resources.launcher.container
    line = [
        "srun",
        f"--nodes={resources.nodes}",
        f"--ntasks={resources.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={resources.cpus_per_node}",  # srun does not take over the job's
        *([f"--gpus-per-node={resources.ranks_per_node}"] if resources.gpus else []),
        "--kill-on-bad-exit=1",
        "--unbuffered",
    ]
    inside: list[str] = []
    mounts = ",".join(container.mounts)
    if container.engine == "pyxis":
        line += [f"--container-image={container.image}", *([f"--container-mounts={mounts}"] if mounts else [])]
    elif container.engine == "apptainer":
        inside = ["apptainer", "exec", *(["--nv"] if resources.gpus else [])]
        inside += [*(["--bind", mounts] if mounts else []), str(container.image)]
    return [*line, *launcher.srun, *inside, *command]
