"""Files that survive a crash: replaced atomically or appended line by line, read without ever raising on content.

JSON has no NaN and no infinity. Here a non-finite float is written as the string ``"NaN"``, ``"Infinity"`` or
``"-Infinity"``, which any JSON reader accepts, and the readers below give the float back.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import stat
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_TEMPORARY_NUMBERS = itertools.count()


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Valid JSON for nested mappings, sequences, paths, and scalars of numpy or torch."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False, ensure_ascii=False)


def from_json(text: str | bytes) -> Any:
    """Inverse of :func:`to_json`.

    Raises:
        ValueError: if ``text`` isn't JSON.
    """
    try:
        return _restored(json.loads(text))
    except RecursionError:
        raise ValueError("nested too deep") from None


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values under names like ``outer/inner``, as trackers take them."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found.update(flat(value, f"{prefix}{key}/"))
        else:
            found[f"{prefix}{key}"] = value
    return found


def replace_file(path: Path, content: str) -> None:
    """Write a whole file so that a reader, and a crash, see the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.{next(_TEMPORARY_NUMBERS)}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", errors="replace") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def read_json_object(path: Path) -> dict[str, Any] | None:
    """The JSON object that a file holds; None if the file is missing, unreadable or something else."""
    try:
        with _open(path) as file:
            value = from_json(file.read())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def read_regular(path: Path, most_bytes: int = -1) -> bytes:
    """What a file holds; with a limit at most one byte more than that.

    Raises:
        OSError: it can't be read, or is no file.
    """
    with _open(path) as file:
        return file.read(most_bytes + 1 if most_bytes >= 0 else -1)


def append_json_line(path: Path, record: Mapping[str, Any]) -> None:
    """Add one record. A partial last line that a crash left is closed first, so that it can't swallow this one."""
    line = to_json(record).encode("utf-8", errors="replace") + b"\n"
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            line = b"\n" + line
        while line:
            line = line[os.write(file, line) :]
    finally:
        os.close(file)


class JsonLinesTail:
    """Reads the records that were appended to a file since the last look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def new_records(self) -> list[dict[str, Any]]:
        """Complete records since the last call; lines that aren't JSON objects are skipped."""
        try:
            with _open(self.path) as file:
                if file.seek(0, os.SEEK_END) < self._offset:
                    self._offset = 0  # the file was replaced or cut
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        return [record for line in data[:end].splitlines() if (record := _record(line)) is not None]


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Complete records of a file, first to last."""
    try:
        with _open(path) as file:
            for line in file:
                if line.endswith(b"\n") and (record := _record(line)) is not None:
                    yield record
    except OSError:
        return


def json_lines_from_end(path: Path, most_bytes: float = math.inf) -> Iterator[dict[str, Any]]:
    """Complete records of a file, last to first, without reading more of it than is asked for.

    Args:
        most_bytes: about how far from the end they may lie.
    """
    block, rest, ended = 64 * 1024, b"", False
    try:
        with _open(path) as file:
            size = start = file.seek(0, os.SEEK_END)
            while start > 0 and size - start < most_bytes:
                end, start = start, max(0, start - block)
                file.seek(start)
                lines = (file.read(end - start) + rest).split(b"\n")
                if not ended:  # what stands after the last line's end is not complete
                    lines[-1] = b""
                    ended = len(lines) > 1
                rest = lines[0] if start > 0 else b""
                for line in reversed(lines[1:] if start > 0 else lines):
                    if (record := _record(line)) is not None:
                        yield record
                block *= 2
    except OSError:
        return


def last_json_line(path: Path, **wanted: Any) -> dict[str, Any] | None:
    """The last complete record whose keys have the ``wanted`` values, found from the end of the file."""
    for record in json_lines_from_end(path):
        if all(record.get(key) == value for key, value in wanted.items()):
            return record
    return None


def _open(path: Path) -> BinaryIO:
    """A file for reading; what isn't one is an OSError: a pipe that nobody writes to would be waited for."""
    return open(path, "rb", opener=_regular)


def _regular(path: str, flags: int) -> int:
    file = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a file", path)
    return file


def _record(line: bytes) -> dict[str, Any] | None:
    if not line:
        return None
    try:
        value = from_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(item := getattr(value, "item", None)):
        return _plain(item())
    raise TypeError(f"a {type(value).__name__} can't be written as JSON")


def _restored(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _restored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_restored(item) for item in value]
    return value
