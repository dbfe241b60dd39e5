"""A copy of the metrics in a wandb project. The run folder's metrics.jsonl stays the record."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from optimus_cc.config import RunConfig
from optimus_cc.records import flat
from optimus_cc.runs import RunFolder


class Tracker:
    """Sends records where ``tracking`` says. Trouble with the tracker is reported and never ends a run."""

    def __init__(self, run: Any) -> None:
        self._run = run

    @classmethod
    def start(cls, config: RunConfig, folder: RunFolder) -> Tracker:
        if config.tracking.name == "none":
            return cls(None)
        try:
            import wandb

            return cls(
                wandb.init(
                    project=config.tracking.project,
                    name=config.run_id,
                    id=config.run_id,
                    resume="allow",
                    mode=config.tracking.mode,
                    dir=str(folder.path),
                    config=config.to_mapping(),
                    settings=wandb.Settings(silent=True, console="off"),
                )
            )
        except Exception as error:
            _complain("start", error)
            return cls(None)

    def log(self, record: Mapping[str, Any]) -> None:
        """One metrics record; nested values become ``outer/inner``. A tracker has no place for a step's many probes."""
        if self._run is None or record.get("kind") == "probe":
            return
        try:
            kind, step = str(record["kind"]), int(record["step"])
            values = {f"{kind}/{key}": value for key, value in flat(record).items() if key not in ("kind", "step")}
            self._run.log(values, step=step)
        except Exception as error:
            _complain("log", error)

    def finish(self, summary: Mapping[str, Any]) -> None:
        if self._run is None:
            return
        try:
            self._run.summary.update(flat(summary))
            self._run.finish()
        except Exception as error:
            _complain("finish", error)


def _complain(action: str, error: Exception) -> None:
    print(f"tracking: could not {action}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
