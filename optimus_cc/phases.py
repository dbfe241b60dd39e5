"""What a rank spends the time of a step on, by name; for who records it and who reads the records."""

from __future__ import annotations

from typing import Literal, get_args

Phase = Literal[
    "forward",
    "backward",
    "inter_stage",
    "data_parallel",
    "embedding",
    "gradient_norm",
    "optimizer",
    "codec",
    "probes",
    "other",
]
"""``other`` is what no span covers."""
PHASES: tuple[Phase, ...] = get_args(Phase)
