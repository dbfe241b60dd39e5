"""Removes checkpoints of finished runs; nothing goes that was not listed first."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from launchers.status import Run, select
from optimus_cc import checkpoints
from optimus_cc.checkpoints import Checkpoint
from optimus_cc.runs import RunFolder


def clean(runs_dir: Path, pattern: str | None, *, everything: bool, remove: bool) -> int:
    """List, or remove, checkpoints of the finished runs whose ids match.

    Args:
        pattern: see :func:`launchers.status.select`.
        everything: the newest checkpoint of a run too.
        remove: remove them; otherwise they are only listed.

    Returns:
        the exit code: 1 if something could not be removed.

    Raises:
        NothingFound: there are no such runs.
    """
    finished = [run for run in select(runs_dir, pattern) if run.state == "finished"]
    total = count = failed = 0
    for run_id, found in _doomed(finished, everything):
        size = found.nbytes
        try:
            if remove:
                checkpoints.remove(found)
        except OSError as error:
            print(f"error: {found.path}: {error.strerror or error}", file=sys.stderr)
            failed += 1
            continue
        print(f"{'removed' if remove else 'would remove'}  {size / 1e6:>10,.1f} MB  {run_id}  step {found.step}")
        total, count = total + size, count + 1
    if not count:
        print("nothing to remove")
    else:
        print(f"{count} checkpoint{'s' * (count != 1)}, {total / 1e6:,.1f} MB")
        if not remove:
            print("nothing was removed; --yes does it")
    return 1 if failed else 0


def _doomed(finished: Sequence[Run], everything: bool) -> Iterator[tuple[str, Checkpoint]]:
    for run in finished:
        place = RunFolder(run.folder).checkpoints
        newest = checkpoints.newest(place)
        for found in checkpoints.all_in(place):
            if everything or found != newest:
                yield run.run_id, found
