"""Who has a run folder: one process at a time, also among hosts that share the folder.

On one host the kernel's lock on ``.lock`` decides, which is let go however its holder ends. It need not reach other
hosts. So those who had the folder are numbered, too: ``.owner_1``, ``.owner_2`` and so on, each made with O_EXCL, which
one process alone can do on network file systems as well. Owner N + 1 is only made by who has seen that owner N is over,
and none is removed: of many who see that at the same moment, one makes it, and the others find it made.

An owner is over when it says so; when it was on this host and the lock is free; or when it has not renewed its file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import time
from pathlib import Path

from optimus_cc.files import open_regular, read_bytes

HEARTBEAT_S = 10.0
"""An owner renews its file, and a running run its status, at least this often."""
STALE_S = 120.0
"""What was not renewed for so long has no owner any more."""
WATCH_S = 3 * HEARTBEAT_S
"""How long a silent owner's file is watched before it is believed to be over: hosts' clocks may differ."""
_LOOK_S = 0.5

LOCK = ".lock"
_OWNER = re.compile(r"\.owner_(\d+)")
_LINE = re.compile(r"(held|left) by process (\d+) on (.*)")


class Held(Exception):
    """Somebody else has the folder. ``str()`` says who."""


class Ownership:
    """The right to change a folder; see :func:`take`."""

    def __init__(self, folder: Path, number: int, lock: int, file: int) -> None:
        self._next = _path(folder, number + 1)
        self._lock = lock
        self._file = file

    def renew(self) -> None:
        """Show the others that this owner is alive.

        Raises:
            Held: it was silent for so long that another one took the folder over.
            OSError: the folder can't be reached.
        """
        if self._next.exists():
            raise Held(_holder(_read(self._next)))
        os.utime(self._file)

    def release(self) -> None:
        with contextlib.suppress(OSError):  # the file goes stale then
            os.pwrite(self._file, b"left", 0)
        os.close(self._file)
        os.close(self._lock)


def take(folder: Path) -> Ownership:
    """Take a folder, or fail at once; only a silent owner on another host makes this wait, for :data:`WATCH_S`.

    Raises:
        Held: another process has it.
        OSError: the folder can't be written.
    """
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except BlockingIOError:
            raise Held(os.pread(lock, 200, 0).decode(errors="replace").strip() or "another process") from None
        except OSError:
            locked = False  # there are no locks on this file system
        number = max(_numbers(folder), default=1)
        while (file := _make(_path(folder, number))) is None:
            if not _is_over(_path(folder, number), lock, locked):
                raise Held(_holder(_read(_path(folder, number))))
            number += 1
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{_this_process()}\n".encode(), 0)
    except BaseException:
        os.close(lock)
        raise
    return Ownership(folder, number, lock, file)


def declare_over(folder: Path, pid: int, host: str) -> None:
    """Say that an owner is over, for somebody who knows it from elsewhere: a scheduler has ended its job. Nothing
    happens if it isn't the newest owner."""
    number = max(_numbers(folder), default=1)
    if (line := _LINE.fullmatch(_read(_path(folder, number)))) and (line[2], line[3]) == (str(pid), host):
        with _path(folder, number).open("r+b") as file:
            file.write(b"left")


def holder_here(folder: Path) -> int | None:
    """Process on this host that holds the folder's lock right now; None if none does, or it can't be told which."""
    try:
        with open_regular(folder / LOCK) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                said = re.fullmatch(r"process (\d+) on (.*)", file.read(300).decode(errors="replace").strip())
                return int(said[1]) if said and said[2] == socket.gethostname() else None
    except OSError:
        pass
    return None


def has_had(folder: Path, pid: int | None, host: str | None) -> bool:
    """Whether a process is one of those that have had the folder."""
    lines = (_LINE.fullmatch(_read(_path(folder, number))) for number in _numbers(folder))
    return any(line is not None and (line[2], line[3]) == (str(pid), host) for line in lines)


def is_a_mark(name: str) -> bool:
    """Whether a file in a run folder is one of those that this module keeps there."""
    return name == LOCK or _OWNER.fullmatch(name) is not None


def process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _path(folder: Path, number: int) -> Path:
    return folder / f".owner_{number}"


def _numbers(folder: Path) -> list[int]:
    found = [_OWNER.fullmatch(name) for name in os.listdir(folder)]
    return [int(name[1]) for name in found if name]


def _make(path: Path) -> int | None:
    """Make an owner's file; None if somebody has made it."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        return None
    try:
        os.write(file, f"held by {_this_process()}".encode())
        os.fsync(file)
    except BaseException:  # a full disk
        os.close(file)
        path.unlink()
        raise
    return file


def _read(path: Path) -> str:
    try:
        return read_bytes(path)[:300].decode(errors="replace")
    except FileNotFoundError:
        return ""


def _holder(text: str) -> str:
    return text.partition(" by ")[2] or "another process"


def _is_over(path: Path, lock: int, locked: bool) -> bool:
    line = _LINE.fullmatch(_read(path))
    if line is not None and line[1] == "left":
        return True
    if line is not None and line[3] == socket.gethostname() and (locked or not process_exists(int(line[2]))):
        return True
    os.utime(lock)  # what the file system takes for now; it is what it gives the owners' files too
    renewed_ns = _renewed_ns(path)
    if abs(os.fstat(lock).st_mtime_ns - renewed_ns) <= STALE_S * 1e9:
        return False
    deadline = time.monotonic() + WATCH_S
    while time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        if _renewed_ns(path) != renewed_ns:
            return False
    return True


def _renewed_ns(path: Path) -> int:
    """When a file was renewed; opened for it, because network file systems answer from memory otherwise."""
    with open_regular(path) as file:
        return os.fstat(file.fileno()).st_mtime_ns
