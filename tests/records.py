"""Lines of metrics.jsonl that are JSON and no records."""

from __future__ import annotations

import math
from typing import Any

_NO_STEPS: tuple[Any, ...] = (None, "3", 1.5, True, -1, 10**30, [], {}, math.nan)
_NO_KINDS: tuple[Any, ...] = (None, 3, [], {})
NO_RECORDS: list[dict[str, Any]] = [
    *({"kind": "train", "step": step} for step in _NO_STEPS),
    *({"kind": kind, "step": 1} for kind in _NO_KINDS),
    {"kind": "train", "step": 1, "loss": 10**400},
    {"kind": "train", "step": 1, "traffic": {"embedding": [10**400]}},
]
