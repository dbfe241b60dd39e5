"""What a file holds, without reading all of it when it is large."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from optimus_cc.files import open_regular

_WINDOW_BYTES = 2**20
_NUM_WINDOWS = 64


def fingerprint(path: str | Path) -> dict[str, Any]:
    """Size in bytes, and a SHA-256 of the content: of all of it up to 64 MiB, else of 64 windows of 1 MiB.

    The windows of a larger file are evenly spaced, the first and the last mebibyte among them, so that the cost is
    bounded. An edit of such a file goes unnoticed if it lies between two windows *and* leaves the length as it was.
    Name, place and times of the file play no part.

    Raises:
        OSError: if the file can't be read.
    """
    digest = hashlib.sha256()
    with open_regular(path) as file:
        size = file.seek(0, 2)
        last = max(0, size - _WINDOW_BYTES)
        whole = size <= _NUM_WINDOWS * _WINDOW_BYTES
        starts = (
            range(0, size, _WINDOW_BYTES) if whole else [last * i // (_NUM_WINDOWS - 1) for i in range(_NUM_WINDOWS)]
        )
        for start in starts:
            file.seek(start)
            digest.update(file.read(_WINDOW_BYTES))
    return {"bytes": size, "sha256": digest.hexdigest()}
