"""What is shown of a sweep while it runs."""

from __future__ import annotations

import io
from pathlib import Path

from launchers.overview import Overview, Watched
from launchers.plan import plan
from launchers.progress import Screen
from optimus_cc.runs import Status
from tests.launchers.jobs import configuration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def feed(stream: io.StringIO, runs_dir: Path) -> Overview:
    """Two runs of four steps, the first of them at its third, 10 s a step; the second waits."""
    clock = Clock()
    overview = Overview(1, screen=Screen(stream), clock=clock)
    first, second = plan([configuration(runs_dir, seed) for seed in (1, 2)])
    first.folder.path.mkdir(parents=True)
    first.folder.append_metrics({"kind": "train", "step": 4, "loss": 9.0})  # an earlier attempt's
    watched = Watched(first, began=0.0)
    for step in (0, 1, 2, 3):
        if step:
            first.folder.append_metrics({"kind": "train", "step": step, "loss": 4.0 / step})
        first.folder.write_status(Status("running", step=step))
        clock.now += 10.0
        overview.show([watched], [second], {"finished": 3, "failed": 1})
    clock.now += 60.0
    overview.say("finished  some")
    overview.show([watched], [second], {"finished": 3})
    overview.close()
    return overview


def test_a_terminal_is_redrawn(tmp_path: Path) -> None:
    stream = Terminal()
    feed(stream, tmp_path)
    blocks = stream.getvalue().split("\r")
    assert "starting, 10 s" in blocks[1]
    assert "9.0" not in stream.getvalue()
    shown = next(block for block in blocks if "step 3/4" in block)
    assert "1 running, 3 finished, 1 failed, 1 waiting, about 50 s left" in shown
    assert "step 3/4  loss 1.333  10 s left" in shown
    assert stream.getvalue().count("\n") == 5 + 1  # a block of two lines, drawn five times, and the line that stays


def test_elsewhere_lines_are_few(tmp_path: Path) -> None:
    stream = io.StringIO()
    feed(stream, tmp_path)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "finished  some"
    assert len(lines) == 2
    assert "1 running" in lines[1]
    assert not any("\x1b" in line or "\r" in line for line in lines)
