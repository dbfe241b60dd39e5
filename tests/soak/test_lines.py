"""A few of the command lines of ``make soak``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.command_line import composed_once
from tests.soak.command_lines import Accepted, Refused, classify, generate


def test_lines_are_refused_clearly_or_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with composed_once():
        outcomes = {type(classify(generate(seed))) for seed in range(1, 31)}
    assert outcomes == {Accepted, Refused}
