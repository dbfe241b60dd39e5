"""``launcher``: how ranks are started."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from optimus_cc.config.errors import Problem
from optimus_cc.config.schema import Hours, NonNegativeInt, PositiveFloat, PositiveInt, Seconds, Threads, strict


@strict
class LauncherConfig:
    name: Literal["local"] = "local"
    threads_per_rank: Threads | None = None
    """Threads of each rank on CPU; null: the machine's cores shared out, at least one each."""
    stop_grace_s: Seconds = 5.0
    """How long ranks get to end by themselves before they are killed."""
    max_parallel: PositiveInt = 1
    """Runs of a sweep that train at the same time. Runs that share cores spoil each other's step times."""
    time_limit_h: Hours | None = None
    """Hours after which a run is asked to save and stop; null: none."""
    dry_run: bool = False
    """Say what would be started and what it would take; start and write nothing."""

    def problems(self) -> Iterator[Problem]:
        return iter(())


@strict
class ContainerConfig:
    """An image in which the ranks run. What surrounds them runs in the environment that has submitted them."""

    engine: Literal["none", "pyxis", "apptainer"] = "none"
    """``pyxis``: srun starts an enroot image itself; ``apptainer``: by its command, with --nv on GPUs."""
    image: str | None = None
    """As the engine names it: a file, or a registry's address."""
    mounts: tuple[str, ...] = ()
    """``SOURCE:TARGET``. The run folders, the code and the corpus cache have to be there under the same paths."""
    python: str = "python"
    """The interpreter in the image that has this project's dependencies."""


@strict
class SlurmConfig:
    """One job per run, in arrays. What is null is left to the cluster's own defaults."""

    name: Literal["slurm"] = "slurm"
    threads_per_rank: Threads | None = None
    """Threads of each rank on CPU; null: as many as cpus_per_rank."""
    stop_grace_s: Seconds = 5.0
    """How long ranks get to end by themselves before they are killed."""
    max_parallel: PositiveInt | None = None
    """Runs of a sweep that train at the same time; null: as many as the cluster lets."""
    time_limit_h: Hours | None = None
    """Hours of one job. Before they are over the run saves, and goes on in the next one."""
    dry_run: bool = False
    """Show the arrays and their scripts; submit and write nothing."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    cpus_per_rank: PositiveInt = 1
    """Cores, its data workers' included."""
    memory_per_node_gb: PositiveFloat | None = None
    exclusive: bool = False
    """Whole nodes, shared with nobody."""
    mail: str | None = None
    """Address that hears when a job ends or fails."""
    modules: tuple[str, ...] = ()
    """Loaded with ``module load`` before anything else."""
    setup: tuple[str, ...] = ()
    """Lines of bash, after the modules and before the job: exports, for example."""
    container: ContainerConfig = ContainerConfig()
    sbatch: tuple[str, ...] = ()
    """More options of sbatch: ``[--reservation=mine, --contiguous]``."""
    srun: tuple[str, ...] = ()
    """More options of srun: ``[--cpu-bind=none]``."""
    save_before_end_s: Annotated[int, Field(ge=1, le=65535)] = 120
    """How long before its time limit a job is asked to save; a quarter of the limit if that is less. SLURM may ask up
    to a minute earlier."""
    max_restarts: NonNegativeInt = 20
    """How often a run goes on after a time limit, a preemption or a failure of a node; failures of its own are final.
    """
    after: tuple[Literal["evaluate", "collect"], ...] = ()
    """What a job does when all runs have ended: ``collect`` writes the table of the sweep's runs."""
    copy_code: bool = False
    """Run from a copy of the code as it was when the jobs were submitted."""
    wait: bool = True
    """Follow the jobs until all have ended; Ctrl-C leaves them alone and ends only that."""

    @property
    def warning_s(self) -> int:
        """How long before the end of a job it is asked to save."""
        if self.time_limit_h is None:
            return self.save_before_end_s
        return min(self.save_before_end_s, int(self.time_limit_h * 3600 / 4))

    def problems(self) -> Iterator[Problem]:
        if self.time_limit_h is not None and self.time_limit_h < 1 / 60:
            yield Problem(
                "launcher.time_limit_h", self.time_limit_h, "at least a minute: 0.0167", "launcher.time_limit_h=1"
            )
        if (self.container.engine == "none") != (self.container.image is None):
            yield Problem(
                "launcher.container.image",
                self.container.image,
                "an image if there is an engine, and none without one",
                "launcher.container.engine=pyxis launcher.container.image=IMAGE",
            )
        for option in (*self.sbatch, *self.srun):
            key = "launcher.sbatch" if option in self.sbatch else "launcher.srun"
            match = re.fullmatch(r"--([a-z][a-z0-9-]*)(=.*)?", option)
            if match is None:
                yield Problem(key, option, "options in the form --NAME or --NAME=VALUE", f"'{key}=[\"--exclude=n7\"]'")
            elif match[1] in _OURS:
                yield Problem(key, option, "options that have no key of their own", _OURS[match[1]])


_OURS = {
    "array": "launcher.max_parallel=NUMBER",
    "nodes": "parallel=OPTION cluster=OPTION",
    "ntasks-per-node": "parallel=OPTION cluster=OPTION",
    "time": "launcher.time_limit_h=HOURS",
    "signal": "launcher.save_before_end_s=SECONDS",
    "requeue": "launcher.max_restarts=NUMBER",
    "output": "leave it out: the folder of the sweep is told when it is submitted",
    "dependency": "launcher.after=[collect]",
    "clusters": "leave it out: SLURM_CONF=FILE chooses a cluster",
}
"""Options of sbatch that are made from other keys."""

AnyLauncherConfig = Annotated[LauncherConfig | SlurmConfig, Field(discriminator="name")]
