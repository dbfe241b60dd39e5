"""How a program on the command line begins and ends, what it takes for a path, and what of a text a terminal gets."""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from optimus_cc.paths import at_home, in_utf8

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""What moves a cursor, changes colours or turns the direction of writing."""


def run(main: Callable[[], int], *, draws: bool = False) -> int:
    """What ``main`` returns; 0 if nobody reads its output any more, 130 after Ctrl-C.

    What it prints is no command to a terminal, whatever names and texts it has read. Standard streams that are closed
    swallow what is written.

    Args:
        draws: it has its own ways with stdout, and looks after what it writes there.
    """
    open_streams()
    sys.stderr = _Plain.of(sys.stderr)
    if not draws:
        sys.stdout = _Plain.of(sys.stdout)
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        nobody_reads()
        return 0
    except KeyboardInterrupt:
        return 130
    return code


def open_streams() -> None:
    """Put what reads nothing and swallows all in the place of standard streams that are closed."""
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:  # or else the next file that is opened would be one of them
        os.set_inheritable(file, True)
    os.close(file)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def nobody_reads() -> None:
    """What is printed from now on goes nowhere: a closed pipe is no mistake."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def shown(text: str) -> str:
    """A text with what a terminal would obey spelled out, as Python would: lines and tabs stay."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def drawable(stream: TextIO) -> TextIO:
    """The stream for whoever sends a terminal commands of its own, and :func:`shown` texts between them."""
    return stream.unfiltered if isinstance(stream, _Plain) else stream


class _Plain(io.TextIOWrapper):
    """A standard stream that shows texts; one that it can't encode is no error."""

    unfiltered: TextIO

    @classmethod
    def of(cls, stream: Any) -> Any:
        if not isinstance(stream, io.TextIOWrapper) or isinstance(stream, cls):
            return stream  # somebody else's, in a notebook for example
        stream.flush()
        stream.reconfigure(errors="backslashreplace")
        made = cls(
            stream.buffer,
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        made.unfiltered = stream
        return made

    def write(self, text: str) -> int:
        return super().write(shown(text))


def to_path(text: str) -> Path:
    """An argument that is a path, for argparse.

    Raises:
        ArgumentTypeError: its name can't be written down, or there is no such home.
    """
    if not in_utf8(text):
        raise argparse.ArgumentTypeError(f"{text!a} is not UTF-8: rename it")
    try:
        return Path(at_home(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not {error}") from None
