"""Texts that Hydra takes for numbers unless they are quoted, and how to say them on a command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from optimus_cc.config.errors import Problem


def with_quotes(problems: Iterable[Problem], overrides: Iterable[str]) -> list[Problem]:
    """The same problems; where a text was asked for and what was typed is none unless quoted, the fix quotes it.

    Args:
        overrides: as they were typed.
    """
    typed = {key.lstrip("+"): value for key, _, value in (one.partition("=") for one in overrides)}
    found = []
    for problem in problems:
        raw = typed.get(problem.key, "")
        quoted = _quoted(raw)
        if not isinstance(problem.value, (str, Mapping)) and "text" in problem.allowed.split(" or ") and quoted != raw:
            allowed = f"{problem.allowed}; {raw} is none unless it is quoted"
            problem = replace(problem, allowed=allowed, fix=shlex.quote(f"{problem.key}={quoted}"))
        found.append(problem)
    return found


def _quoted(value: str) -> str:
    """A value with quotes around each of its parts that is no text without them."""
    parts = re.split(r"([\[\],])", value)
    return "".join(f'"{part}"' if part and not _is_text(part) else part for part in parts)


def _is_text(part: str) -> bool:
    try:
        (override,) = OverridesParser.create().parse_overrides([f"key={part}"])
    except HydraException:
        return True
    return isinstance(override.value(), str)
