"""What may be typed where a path is asked for."""

from __future__ import annotations

import os


def in_utf8(text: str) -> bool:
    """Whether a text, a file's name for example, can be written down: names may be any bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def spelled(text: str) -> str:
    """A name with what is not UTF-8 in it as ``\\xNN``."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def at_home(path: str) -> str:
    """A path with the ``~`` or ``~NAME`` that it begins with filled in, which shells leave behind a ``=``.

    Raises:
        ValueError: there is no such home.
    """
    found = os.path.expanduser(path)
    if found.startswith("~"):
        raise ValueError(f"a path in the home of a user who is there, or ./{found} for a folder with that name")
    return found
