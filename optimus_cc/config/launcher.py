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
