"""Starts runs again that did not finish: ``python -m launchers resubmit``."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launchers.status import ABANDONED, NothingFound, Run, select
from optimus_cc.config.errors import ConfigError
from optimus_cc.runs import RunFolder

if TYPE_CHECKING:
    from optimus_cc.config import RunConfig

FAILED = ("failed", ABANDONED)


def resubmit(runs_dir: Path, pattern: str | None, states: Sequence[str] | None) -> int:
    """Run again, as a sweep in the foreground, what is in one of ``states``: from the configuration in each folder, and
    from its newest checkpoint.

    Args:
        states: None: all that is neither finished nor live.

    Returns:
        the exit code: the sweep's, or 2 if a configuration can't be read or is wrong; nothing was started then.

    Raises:
        NothingFound: there is nothing to run.
    """
    wanted = states or ("queued", "preempted", "cancelled", *FAILED)
    chosen = [run for run in select(runs_dir, pattern) if run.state in wanted and not run.live]
    if not chosen:
        which = f" that matches {pattern!r}" if pattern else ""
        raise NothingFound(f"nothing to resubmit: no run in {runs_dir}{which} is {' or '.join(wanted)}")
    configs, wrong = [], []
    for run in chosen:
        config = _config(runs_dir, run)
        if isinstance(config, str):
            wrong.append(config)
        else:
            configs.append(config)
    if wrong:
        print("\n".join(f"error: {problem}" for problem in wrong), file=sys.stderr)
        print("nothing was started", file=sys.stderr)
        return 2
    from launchers import start, sweep

    print(f"resubmitting {len(configs)} run{'s' * (len(configs) != 1)}", flush=True)
    try:
        code: int = sweep.exit_code(start.run_all(configs))
    except ConfigError as error:  # it can't run on this machine
        print(error, file=sys.stderr)
        return 2
    return code


def _config(runs_dir: Path, run: Run) -> RunConfig | str:
    """What a folder's run is, to be run in that very folder; or what is wrong with it."""
    folder = RunFolder(runs_dir / run.run_id)
    try:
        frozen: Any = folder.run_config()
        config: RunConfig = dataclasses.replace(frozen, runs_dir=str(runs_dir.absolute()), force=False)
        run_ids = config.run_ids
    except (RuntimeError, OSError, ValueError) as error:
        return f"{run.run_id}: {error}"
    if run.run_id not in run_ids:
        return (
            f"{run.run_id}: its config.yaml is {run_ids[0]}'s now: "
            "a file that it reads has changed, or the folder's name"
        )
    return config
