"""Runs as they go on: ``python -m launchers watch``."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from launchers.progress import Screen
from launchers.status import NothingFound, Run, counted, select, table

INTERVAL_S = 2.0


def watch(
    runs_dir: Path,
    pattern: str | None,
    states: Sequence[str],
    *,
    screen: Screen | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Show how runs stand until none of them is live any more, or until Ctrl-C: redrawn in a terminal, elsewhere a
    line whenever a run's state or the tenth of its steps that it is in changes.

    Raises:
        NothingFound: there are no such runs.
    """
    screen = screen or Screen()
    shown: dict[str, object] = {}
    runs = select(runs_dir, pattern, states)
    try:
        while True:
            if screen.live:
                screen.draw(*_picture(runs))
            else:
                _print_changes(runs, shown, screen)
            if not any(run.live for run in runs):
                break
            sleep(INTERVAL_S)
            runs = select(runs_dir, pattern, states)
    except (KeyboardInterrupt, NothingFound):  # none is in such a state any more
        pass
    finally:
        screen.leave()
    if shown:
        screen.print(counted(runs))
    return 0


def _picture(runs: Sequence[Run]) -> list[str]:
    """What fits on the screen: live runs first, then those that were heard of last."""
    width, height = shutil.get_terminal_size()
    ordered = sorted(runs, key=lambda run: run.updated or "", reverse=True)
    ordered.sort(key=lambda run: not run.live)
    header, blocks = table(ordered, width - 1)
    room = height - 4  # the heading, two lines at the end, and the cursor's
    lines: list[str] = []
    left = len(blocks)
    for block in blocks:
        if len(lines) + block.count("\n") + 1 > room:
            break
        lines += block.split("\n")
        left -= 1
    more = [f"... and {left} more"] if left else []
    return [header, *lines, *more, counted(runs)]


def _print_changes(runs: Sequence[Run], shown: dict[str, object], screen: Screen) -> None:
    header, blocks = table(runs)
    if not shown:
        screen.print(header)
    for run, block in zip(runs, blocks, strict=True):
        tenth = 10 * run.step // run.total_steps if run.step is not None and run.total_steps else None
        now = (run.state, run.cause, run.restarts, tenth)
        if shown.get(run.run_id) != now:
            shown[run.run_id] = now
            screen.print(block)
