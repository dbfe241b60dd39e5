"""``export``: a checkpoint in another program's format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from optimus_cc.config.errors import Problem
from optimus_cc.config.schema import PathText, strict


@strict
class ExportConfig:
    format: Literal["huggingface"] = "huggingface"
    """What ``transformers`` loads."""
    path: PathText | None = None
    """A folder that isn't there yet; null: in the run's folder."""

    def problems(self) -> Iterator[Problem]:
        if self.path is not None and Path(self.path).exists():
            yield Problem("export.path", self.path, "a path where nothing is yet", "another path, or remove it")
