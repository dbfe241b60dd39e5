"""What a run printed: ``python -m launchers logs``."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from launchers.status import NothingFound, look, step_of
from launchers.supervise import printable
from optimus_cc import process
from optimus_cc.files import open_regular
from optimus_cc.runs import RunFolder, folders_in

POLL_S = 0.5
_MOST_BYTES = 2**20
"""How much of a log is read at once."""


def logs(
    runs_dir: Path,
    name: str,
    *,
    rank: int | None,
    lines: int,
    follow: bool,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Print the last lines of a run's logs: its launcher's and each rank's, or one rank's.

    Args:
        name: any part of the id that one run alone has; or its folder.
        lines: of each log.
        follow: go on with what is added, until the run has ended or Ctrl-C comes.

    Raises:
        NothingFound: no run is called so, or several.
    """
    folder = find(runs_dir, name)
    tails: dict[str, _Tail] = {}
    try:
        _begin(folder, rank, lines, tails, follow)
        if not tails and not follow:
            print(f"{folder.run_id} has no {'logs' if rank is None else f'log of rank {rank}'} yet")
        while follow:
            over = not look(folder).live  # asked first, so that nothing of what came before the end is missed
            _begin(folder, rank, lines, tails, follow)
            for title, tail in tails.items():
                for line in tail.new_lines():
                    print(f"{title} | {line}", flush=True)
            if over:
                run = look(folder)
                print(f"{run.run_id} is {run.state} at step {step_of(run)}{f': {run.cause}' if run.cause else ''}")
                break
            sleep(POLL_S)
    except KeyboardInterrupt:
        pass
    return 0


def find(runs_dir: Path, name: str) -> RunFolder:
    """The one run that is meant.

    Raises:
        NothingFound: there is none, or there are several; names those.
    """
    if "/" in name:
        runs_dir, name = Path(name).parent, Path(name).name
    try:
        found = [folder for folder in folders_in(runs_dir, [name]) if folder.exists()]
    except OSError as error:
        raise NothingFound(f"{runs_dir}: {error.strerror}") from None
    exact = [folder for folder in found if folder.run_id == name]
    if len(exact or found) == 1:
        return (exact or found)[0]
    if not found:
        raise NothingFound(f"no run in {runs_dir} matches {name!r}")
    some = ", ".join(folder.run_id for folder in found[:10])
    more = f" and {len(found) - 10} more" if len(found) > 10 else ""
    raise NothingFound(f"{name!r} matches {len(found)} runs: {some}{more}")


def _begin(folder: RunFolder, rank: int | None, lines: int, tails: dict[str, _Tail], follow: bool) -> None:
    """Show the last lines of each log that is not shown yet."""
    for title, path in _files(folder, rank):
        if title in tails:
            continue
        tails[title] = tail = _Tail(path)
        print(f"== {title}: {path}")
        for line in tail.last_lines(lines, unfinished=not follow):
            print(line)


def _files(folder: RunFolder, rank: int | None) -> Iterator[tuple[str, Path]]:
    if rank is None:
        for title, path in (
            ("launcher", folder.logs / "launcher.log"),
            ("corpus", process.log_path(folder.logs / "corpus", 0)),
        ):
            if path.is_file():
                yield title, path
    try:
        names = os.listdir(folder.logs)
    except OSError:
        return
    numbers = sorted(int(match[1]) for name in names if (match := re.fullmatch(r"rank_(\d{1,9})\.log", name)))
    for number in numbers:
        if rank is None or number == rank:
            yield f"rank {number}", process.log_path(folder.logs, number)


class _Tail:
    """The end of a file that grows, or that another attempt replaces. Takes any bytes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._file: tuple[int, int] | None = None

    def last_lines(self, count: int, *, unfinished: bool) -> list[str]:
        """The last lines that are not empty, the one that has no end yet among them if wanted; few if lines are
        long."""
        try:
            with open_regular(self._path) as file:
                self._file = _identity(file.fileno())
                size = file.seek(0, os.SEEK_END)
                start = max(0, size - max(64 * 1024, min(400 * count, _MOST_BYTES)))
                file.seek(start)
                data = file.read(size - start)
        except OSError as error:
            return [f"(it can't be read: {error.strerror})"]
        end = data.rfind(b"\n") + 1
        self._offset = start + end
        found = _lines(data if unfinished else data[:end])
        return found[-count:] if count else []

    def new_lines(self) -> list[str]:
        """Those that were finished since."""
        try:
            with open_regular(self._path) as file:
                if (now := _identity(file.fileno())) != self._file or file.seek(0, os.SEEK_END) < self._offset:
                    self._file, self._offset = now, 0
                file.seek(self._offset)
                data = file.read(_MOST_BYTES)
        except OSError:
            return []
        end = data.rfind(b"\n") + 1 or (len(data) if len(data) == _MOST_BYTES else 0)
        self._offset += end
        return _lines(data[:end])


def _identity(file: int) -> tuple[int, int]:
    found = os.fstat(file)
    return found.st_dev, found.st_ino


def _lines(data: bytes) -> list[str]:
    lines = map(printable, data.decode("utf-8", errors="replace").split("\n"))
    return [line for line in lines if line.strip()]
