"""What ``run.py`` can be asked to do. A task's module is imported when the task is wanted, not before."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from optimus_cc.config.errors import ConfigError, Problem, closest

if TYPE_CHECKING:
    from optimus_cc.config.run import RunConfig

TASKS = {
    "train": "launchers.local:train",
    "exposure": "optimus_cc.exposure_report:report",
    "simulate": "optimus_cc.simulation.report:simulate",
    "calibrate": "optimus_cc.simulation.calibrate_task:calibrate_cluster",
    "benchmark": "launchers.benchmark:benchmark",
    "evaluate": "launchers.evaluate:evaluate",
    "export": "optimus_cc.evaluation.export:export",
    "selfcheck": "launchers.selfcheck:selfcheck",
}
"""``task.name`` -> "module:function"; the function takes the :class:`RunConfig` and returns a summary."""


def check(name: str) -> None:
    """Raises:
    ConfigError: there is no such task.
    """
    if name not in TASKS:
        close = closest(name, TASKS)
        fix = f"task={close[0]}" if close else "task=OPTION with one of these"
        raise ConfigError(Problem("task.name", name, f"one of {', '.join(TASKS)}", fix))


def resolve(name: str) -> Callable[[RunConfig], dict[str, Any]]:
    """The function of task ``name``."""
    check(name)
    module, function = TASKS[name].split(":")
    task: Callable[[RunConfig], dict[str, Any]] = getattr(import_module(module), function)
    return task
