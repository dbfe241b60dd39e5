"""The one error a mistake in a configuration leads to."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

NOT_SET = "???"
"""As a problem's value: nobody gave the key one."""

_SHOWN_PROBLEMS = 6
"""One screen's worth."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration, in the terms of the person who wrote it."""

    key: str
    """Dotted key as written on the command line, for example ``technique.cb.codec.rank``."""
    value: Any
    """What the key was set to."""
    allowed: str
    """What would have been accepted."""
    fix: str
    """What to type instead."""

    def __str__(self) -> str:
        return f"{self._found}\n    allowed: {self.allowed}\n    fix:     {self.fix}"

    @property
    def sentence(self) -> str:
        """On one line, for somebody who has no command line to type the fix on."""
        return f"{self._found}, allowed is {self.allowed}"

    @property
    def _found(self) -> str:
        return f"{self.key} is not set" if self.value == NOT_SET else f"{self.key} = {_shown(self.value)}"


class ConfigError(ValueError):
    """A configuration that can't run. Raised before any process starts; holds every problem found."""

    def __init__(self, problems: Problem | Sequence[Problem], where: str = "") -> None:
        """``where``: which run of a sweep, if there is more than one."""
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        self.where = where
        super().__init__(str(self))

    def __str__(self) -> str:
        count = len(self.problems)
        heading = "ConfigError" if count == 1 else f"ConfigError: {count} problems"
        lines = [f"{heading} in {self.where}" if self.where else heading]
        lines += [f"  {problem}" for problem in self.problems[:_SHOWN_PROBLEMS]]
        if count > _SHOWN_PROBLEMS:
            lines.append(f"  ... and {count - _SHOWN_PROBLEMS} more")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...], str]]:
        return type(self), (self.problems, self.where)


def suggest(key: str, candidates: Iterable[str]) -> str:
    """A line that says which of ``candidates`` was probably meant by ``key``."""
    close = closest(key, candidates)
    if not close:
        return "see python run.py --help and python run.py --cfg job for what there is"
    return f"did you mean {' or '.join(close)}?"


def closest(key: str, candidates: Iterable[str]) -> list[str]:
    """The few of ``candidates`` (dotted keys, or plain words) that ``key`` is likely to be a slip of, best first."""
    parent, _, last = key.lower().rpartition(".")
    ends: dict[str, list[str]] = {}
    siblings: dict[str, str] = {}
    for name in sorted(set(candidates) - {key}):
        head, _, end = name.rpartition(".")
        ends.setdefault(end, []).append(name)
        if head == parent:
            siblings[end] = name
    close = ends.get(last) or [siblings[end] for end in difflib.get_close_matches(last, siblings)]
    close = close or [name for end in difflib.get_close_matches(last, ends) for name in ends[end]]
    return close[:3]


_READS_AS_OTHER = re.compile(
    r"true|false|null|none|yes|no|on|off|[+-]?(inf|infinity|nan|0x[0-9a-f]+|[0-9._]+(e[+-]?[0-9]+)?)|[\[{].*[\]}]",
    re.IGNORECASE | re.DOTALL,
)
"""Texts that would be something else than a text if they were typed without quotes."""


def _shown(value: Any) -> str:
    """A value, in such a way that its type can be seen."""
    plain = isinstance(value, str) and value and value.strip() == value and value.isprintable()
    if plain and not _READS_AS_OTHER.fullmatch(value):
        text = str(value)
    else:
        text = json.dumps(value, default=str, ensure_ascii=False)
        text = text if text.isprintable() else json.dumps(value, default=str)
    return text if len(text) <= 160 else f"{text[:157]}..."
