"""``tracking``: a copy of the metrics elsewhere. The run folder's metrics.jsonl stays the record."""

from __future__ import annotations

from typing import Literal

from optimus_cc.config.schema import strict


@strict
class TrackingConfig:
    name: Literal["none", "wandb"] = "none"
    project: str = "optimus-cc"
    mode: Literal["offline", "online"] = "offline"
