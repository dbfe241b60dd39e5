"""Opening files whose names others chose: what is no regular file is an error, never something to wait for.

A pipe that nobody writes to keeps whoever opens it for ever, a terminal likewise, and ``/dev/zero`` has no end. All
that is read by a name that a user gave, or that lies in a folder of results, is opened here.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from typing import BinaryIO, TextIO

AnyPath = str | os.PathLike[str]


def open_regular(path: AnyPath) -> BinaryIO:
    """A regular file, for reading bytes.

    Raises:
        OSError: it can't be opened, or is a pipe, a device, a socket or a folder.
    """
    return open(path, "rb", opener=_regular)


def open_regular_text(path: AnyPath, *, encoding: str = "utf-8", newline: str | None = None) -> TextIO:
    """A regular file, for reading text.

    Raises:
        OSError: as :func:`open_regular`.
    """
    return io.TextIOWrapper(open_regular(path), encoding=encoding, newline=newline)


def read_bytes(path: AnyPath) -> bytes:
    """All of a regular file.

    Raises:
        OSError: as :func:`open_regular`.
    """
    with open_regular(path) as file:
        return file.read()


def read_text(path: AnyPath, *, encoding: str = "utf-8", errors: str = "strict") -> str:
    """All of a regular file as text, with line ends as ``\\n``.

    Raises:
        OSError: as :func:`open_regular`.
        UnicodeDecodeError: it isn't text of this encoding.
    """
    return read_bytes(path).decode(encoding, errors).replace("\r\n", "\n").replace("\r", "\n")


def check_regular(path: AnyPath) -> None:
    """For what another library opens.

    Raises:
        OSError: as :func:`open_regular`.
    """
    open_regular(path).close()


def _regular(path: str, flags: int) -> int:
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening some devices does something
        raise OSError(errno.EINVAL, "not a regular file", path)
    file = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(file).st_mode):  # it was replaced in between
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return file
