"""Where measurements and real items lie that tests use when they are there; they are no part of the project."""

from __future__ import annotations

import os
from pathlib import Path

SHARED = Path(os.environ.get("OPTIMUS_CC_SHARED", Path(__file__).resolve().parents[2] / "shared"))
