"""How Hydra's sweeps reach :mod:`launchers.sweep`. Hydra imports this at every start, so it imports late what is heavy.

This folder is a namespace that all plugins of Hydra share: it has no ``__init__.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus, env_override, run_job, setup_globals
from hydra.errors import CompactHydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from launchers.sweep import Outcome


class OptimusLauncher(Launcher):
    """Trains the jobs of a sweep in processes of their own; any other task's, one after the other in this process."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from optimus_cc.config.compose import is_ours

        if not is_ours(config):
            raise CompactHydraException(
                "hydra/launcher=optimus_cc serves run.py of Optimus-CC alone, whose configurations it trains. For this "
                "program choose another: hydra/launcher=basic"
            )
        self.hydra_context = hydra_context
        self.task_function = task_function
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Raises:
        ConfigError: a job of this batch is wrong; nothing of it was started.
        SystemExit: somebody stopped the sweep, or it was a dry run.
        """
        from launchers.start import run_all
        from launchers.sweep import exit_code
        from optimus_cc.config.compose import compose_jobs, uses_basic_sweeper
        from optimus_cc.config.sweeps import Composing

        setup_globals()
        loader = self.hydra_context.config_loader
        jobs = compose_jobs(loader, self.config, job_overrides, initial_job_idx, Composing())
        configs = [config for _, config in jobs]
        if all(config.task.name == "simulate" for config in configs):
            from optimus_cc.simulation.report import simulate_all  # one table, and no ranks

            found = [one.chosen.step_time_s for one in simulate_all(configs)]
            return [self._returned(job, partial(_given, value)) for (job, _), value in zip(jobs, found, strict=True)]
        if any(config.task.name != "train" for config in configs):
            return [self._returned(job, self.task_function) for job, _ in jobs]
        with env_override(self.config.hydra.job.env_set):
            outcomes = run_all(configs)
        code = exit_code(outcomes)
        if any(outcome.interrupted for outcome in outcomes):
            sys.exit(code)
        for outcome in outcomes:
            if outcome.error is not None:  # the first of them that the sweeper meets ends the program
                outcome.error.exit_code = code
        if any(config.launcher.dry_run for config in configs) and not uses_basic_sweeper(self.config):
            print("This is the first batch; what comes next depends on its results.")
            sys.exit(0)
        return [self._returned(job, partial(_told, outcome)) for (job, _), outcome in zip(jobs, outcomes, strict=True)]

    def _returned(self, job: DictConfig, task: TaskFunction) -> JobReturn:
        """What Hydra makes of a job: folders, callbacks, and the result for the sweeper."""
        returned = run_job(
            hydra_context=self.hydra_context,
            task_function=task,
            config=job,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        return _Returned(**vars(returned))


class _Returned(JobReturn):
    """Raises what a failed job raised, as Hydra's does, without another line about it: it was told when it happened."""

    @property
    def return_value(self) -> Any:
        if self.status == JobStatus.FAILED:
            raise self._return_value
        return self._return_value

    @return_value.setter
    def return_value(self, value: Any) -> None:
        self._return_value = value


def _given(value: float, _: DictConfig) -> float:
    """Stands in for a task whose result is there."""
    return value


def _told(outcome: Outcome, _: DictConfig) -> float:
    """Stands in for the task, which has run."""
    return outcome.value()


ConfigStore.instance().store(
    group="hydra/launcher",
    name="optimus_cc",
    node={"_target_": f"{OptimusLauncher.__module__}.{OptimusLauncher.__qualname__}"},
    provider="optimus_cc",
)
