from __future__ import annotations

import io
import math
from typing import Any

import pytest

from launchers.progress import Progress, duration, format_summary, number
from tests.launchers.screens import Clock, Terminal


def _record(step: int, **values: Any) -> dict[str, Any]:
    return {"kind": "train", "step": step, "loss": 5.0, "perplexity": 148.4, "learning_rate": 1e-3, **values}


def _feed(stream: io.StringIO, steps: int, seconds_per_step: float) -> list[str]:
    clock = Clock()
    progress = Progress(steps, stream=stream, clock=clock)
    progress.phase("starting 4 ranks ...")
    for step in range(1, steps + 1):
        clock.now += seconds_per_step
        progress.update([_record(step, tokens_per_s=12345.0)])
    progress.close()
    return stream.getvalue().splitlines()


def test_plain_lines_are_few() -> None:
    """Every tenth of the steps when that is quicker than every ten seconds."""
    lines = _feed(io.StringIO(), 300, 0.4)
    assert lines[0] == "starting 4 ranks ..."
    assert 10 <= len(lines) - 1 <= 24
    assert "12.3k tokens/s" in lines[1]
    assert "left" in lines[1]
    assert lines[-1].startswith("step 300/300")
    assert "left" not in lines[-1]


@pytest.mark.parametrize(("steps", "seconds", "most"), [(300, 0.001, 11), (1000, 1.0, 120), (3, 0.1, 3), (1, 1.0, 1)])
def test_number_of_plain_lines(steps: int, seconds: float, most: int) -> None:
    lines = _feed(io.StringIO(), steps, seconds)
    assert 1 <= len(lines) - 1 <= most
    assert not any("\x1b" in line or "\r" in line for line in lines)


def test_live_line() -> None:
    stream, clock = Terminal(), Clock()
    progress = Progress(10, stream=stream, clock=clock)
    progress.phase("starting 4 ranks ...")
    clock.now = 5.0
    progress.update([])
    assert stream.getvalue().endswith("starting 4 ranks ... 5 s")
    for step in range(1, 6):
        clock.now += 2.0
        progress.update([_record(step)])
    assert stream.getvalue().rsplit("\r", 1)[1].startswith("\x1b[2Kstep  5/10  10 s left  loss 5")
    assert "\n" not in stream.getvalue()
    progress.update([{"kind": "validation", "step": 5, "loss": 4.0, "perplexity": 54.6}])
    assert "\r\x1b[2Kvalidation at step 5/10  loss 4.000  token perplexity 54.60\n" in stream.getvalue()
    progress.close()
    assert stream.getvalue().endswith("\n")


def test_odd_records_and_closed_streams() -> None:
    stream = io.StringIO()
    progress = Progress(10, stream=stream)
    progress.update([{}, {"kind": 3}, {"kind": "train"}, {"kind": "validation", "step": None, "loss": "x"}])
    progress.update([_record(1, loss=math.nan, perplexity=math.inf, tokens_per_s=None, step_time_s=math.inf)])
    assert "loss nan" in stream.getvalue()
    assert "token perplexity inf" in stream.getvalue()
    stream.close()
    progress.update([_record(10)])
    progress.close()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.00012345, "0.0001234"),
        (5.0, "5.000"),
        (7, "7"),
        (54.5982, "54.60"),
        (4321.9, "4322"),
        (12345, "12.35k"),
        (1.5e6, "1.5M"),
        (175e9, "175G"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (None, "-"),
        ("5", "-"),
        (True, "-"),
    ],
)
def test_number(value: Any, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (42, "42 s"), (187, "3:07"), (3723, "1:02:03"), (183845, "2 d 03:04:05"), (None, "-")],
)
def test_duration(seconds: Any, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    "summary", [{}, {"validation": 3, "traffic": {"a": None, "b": {}}, "step_time_s": None, "steps": []}]
)
def test_summary_of_anything(summary: dict[str, Any]) -> None:
    assert "validation token perplexity  -" in format_summary(summary)
