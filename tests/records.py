"""Lines of metrics.jsonl that are JSON and no records."""

from __future__ import annotations

import math
from typing import Any

NO_RECORDS: list[dict[str, Any]] = [
    *({"kind": "train", "step": step} for step in (None, "3", 1.5, True, -1, 10**30, [], {}, math.nan)),
    *({"kind": kind, "step": 1} for kind in (None, 3, [], {})),
    {"kind": "train", "step": 1, "loss": 10**400},
    {"kind": "train", "step": 1, "traffic": {"embedding": [10**400]}},
]
