"""Removes checkpoints of finished runs; nothing goes that was not listed first."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Iterator
from pathlib import Path

from optimus_cc import checkpoints
from optimus_cc.checkpoints import Checkpoint
from optimus_cc.runs import RunFolder


def clean(runs_dir: Path, pattern: str, *, everything: bool, remove: bool) -> int:
    """List, or remove, checkpoints of the finished runs whose ids match ``pattern``.

    Args:
        everything: the newest checkpoint of a run too.
        remove: remove them; otherwise they are only listed.

    Returns:
        the exit code: 1 if there is no such folder, or something could not be removed.
    """
    if not runs_dir.is_dir():
        print(f"error: there is no folder {runs_dir}", file=sys.stderr)
        return 1
    total = count = failed = 0
    for run_id, found in _doomed(runs_dir, pattern, everything):
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


def _doomed(runs_dir: Path, pattern: str, everything: bool) -> Iterator[tuple[str, Checkpoint]]:
    for path in sorted(runs_dir.iterdir()):
        folder = RunFolder(path)
        if not fnmatch.fnmatchcase(path.name, pattern) or not folder.exists():
            continue
        status = folder.status()
        if status is None or status.state != "finished":
            continue
        newest = checkpoints.newest(folder.checkpoints)
        for found in checkpoints.all_in(folder.checkpoints):
            if everything or found != newest:
                yield path.name, found
