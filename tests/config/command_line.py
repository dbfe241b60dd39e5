"""What ``python run.py LINE`` composes, in this process."""

from __future__ import annotations

import shlex

from optimus_cc.config import RunConfig
from optimus_cc.config.compose import compose, parse


def composed(line: str) -> list[RunConfig]:
    arguments, _ = parse(shlex.split(line))
    return compose(arguments)


def one(line: str = "") -> RunConfig:
    (config,) = composed(line)
    return config
