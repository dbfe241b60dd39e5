"""The fixes that problems suggest, tried: what can be typed of them has to compose."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from optimus_cc.config import ConfigError, Problem
from optimus_cc.config.compose import compose, parse
from optimus_cc.config.errors import NOT_SET

_WORD = re.compile(r"'[^'\s=]*=[^']*'|[^\s]+")
_OVERRIDE = re.compile(r"(--[a-z-]+|[+~]*[A-Za-z_][\w./@]*)=.+", re.DOTALL)
_PLACEHOLDER = re.compile(r"[\[,]?[A-Z][A-Z_]*(,[A-Z_]+)*\]?")


@dataclass(frozen=True)
class Fix:
    """One thing to do: type overrides, or a key in place of one that does not exist, or leave overrides out."""

    add: tuple[str, ...] = ()
    rename: str | None = None
    leave_out: tuple[str, ...] = ()


def fixes(problem: Problem) -> list[Fix]:
    """What can be typed of a problem's fix as it stands; what stands for something else (VALUE, FILE) can't."""
    text = problem.fix
    if "$(" in text:  # something for a shell
        return []
    if left := re.findall(r"leave (\S+) out", text):
        out = [Fix(leave_out=() if one == "it" else (one,)) for one in left]
        return out + [Fix((new,), None, (old,)) for new, old in re.findall(r"say (\S+) in place of (\S+)", text)]
    if (meant := re.fullmatch(r"did you mean ([^=]+)\?", text)) is not None:
        return [Fix(rename=key) for key in meant[1].split(" or ")]
    found: list[list[str]] = [[]]
    for word in _WORD.findall(text):
        plain = re.sub(r"[,;:?]+$", "", word)
        quoted = re.fullmatch(r"'(.*)'", plain, re.DOTALL)
        typed = quoted[1] if quoted else plain
        if typed == "-m":
            found.append(["-m"])
        elif _OVERRIDE.fullmatch(typed):
            found[-1].append(typed)
        else:
            found.append([])
        if plain != word:
            found.append([])
    return [Fix(add=tuple(group)) for group in found if any("=" in word for word in group) and not _stands_for(group)]


def _stands_for(group: Sequence[str]) -> bool:
    return any(_PLACEHOLDER.fullmatch(word.partition("=")[2].strip('"')) for word in group)


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def applied(words: Sequence[str], problem: Problem, fix: Fix) -> Iterator[list[str]]:
    """Command lines with ``fix``: what was wrong is no longer there, or is there still, beside the fix."""
    said = str(problem.value).split() if problem.key == "command line" else []
    keys = (problem.key, problem.key.lstrip("+~"))
    wrong = [word for word in words if word in said or word == problem.value or _key(word) in keys]
    if problem.key.startswith("--"):
        wrong = [
            word for word in words if word.startswith(f"{problem.key}=") or word in ("-cn", problem.key, problem.value)
        ]
    if fix.rename is not None:
        renamed = [f"{fix.rename}={word.partition('=')[2]}" if word in wrong else word for word in words]
        yield from (renamed, ["-m", *renamed])
    elif fix.leave_out or not fix.add:
        out = fix.leave_out or wrong
        yield [*(word for word in words if word not in out and _key(word) not in out), *fix.add]
    else:
        new = {_key(word) for word in fix.add if word != "-m"}
        others = [word for word in words if _key(word) not in new]
        yield [*(word for word in others if word not in wrong), *fix.add]
        yield [*others, *fix.add]


def failing(line: str, problems: Sequence[Problem]) -> list[str]:
    """The fixes of ``problems``, which ``line`` has, with which it does not compose."""
    failed = []
    firsts = [fixes(problem)[:1] for problem in problems]
    stay = [problem for problem in problems if not fixes(problem)]
    for index, problem in enumerate(problems):
        for fix in fixes(problem):
            chosen = [[fix] if index == other else first for other, first in enumerate(firsts)]
            lines = [shlex.split(line)]
            for one, options in zip(problems, chosen, strict=True):
                lines = [
                    new for words, option in product(lines, options) for new in applied(words, one, option)
                ] or lines
            reasons = [_why_not(words, stay) for words in lines]
            if all(reasons):
                failed.append(f"{problem.key}: {problem.fix}: {lines[0]}: {reasons[0]}")
    return failed


def _why_not(words: Sequence[str], stay: Sequence[Problem]) -> str:
    try:
        compose(parse(words)[0])
    except ConfigError as error:
        if any(one.value != NOT_SET and one not in stay for one in error.problems):  # what is to be said next is none
            return str(error)
    return ""
