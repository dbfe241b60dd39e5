"""``launcher``: how ranks are started."""

from __future__ import annotations

from typing import Literal

from optimus_cc.config.schema import PositiveFloat, PositiveInt, strict


@strict
class LauncherConfig:
    name: Literal["local"] = "local"
    threads_per_rank: PositiveInt | None = None
    """Threads of each rank on CPU; null: the machine's cores shared out, at least one each."""
    stop_grace_s: PositiveFloat = 5.0
    """How long ranks get to end by themselves before they are killed."""
    max_parallel: PositiveInt = 1
    """Runs of a sweep that train at the same time. Runs that share cores spoil each other's step times."""
    time_limit_h: PositiveFloat | None = None
    """Hours after which a run is asked to save and stop; null: none."""
    dry_run: bool = False
    """Say what would be started and what it would take; start and write nothing."""
