"""Runs configurations as the launcher of each says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launchers.sweep import Outcome
    from optimus_cc.config import RunConfig


def run_all(configs: Sequence[RunConfig]) -> list[Outcome]:
    """Run all of ``configs``: on this machine (:func:`launchers.sweep.run_all`) or as jobs of SLURM.

    Returns:
        an outcome for each of ``configs``, in their order.

    Raises:
        ConfigError: one of them can't run; nothing of its launcher's was started.
    """
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
