"""What a person sees of a run: one live line in a terminal, plain lines elsewhere, and the summary at the end."""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TextIO

from optimus_cc.command import drawable, shown
from optimus_cc.runs import traffic_per_step

PLAIN_INTERVAL_S = 10.0
"""Without a terminal a line is written this often, or every tenth of the steps if that comes first."""
REDRAW_S = 0.25


class Screen:
    """Lines that stay, and below them, in a terminal, a few that are redrawn. Never raises because nobody can see it.

    Attributes:
        live: whether there is a terminal that can redraw.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = drawable(stream or sys.stdout)
        self._drawn = 0
        try:
            self.live = self._stream.isatty()
        except ValueError:
            self.live = False

    def print(self, text: str) -> None:
        """A line that stays."""
        self.clear()
        self._write(f"{shown(text)}\n")

    def draw(self, *lines: str) -> None:
        """Lines in place of those drawn last, cut at the terminal's width and height."""
        width, height = shutil.get_terminal_size()
        texts = [shown(line)[: width - 1] for line in lines[: max(1, height - 1)]]
        self._write(self._back() + "\n".join(texts))
        self._drawn = len(texts)

    def clear(self) -> None:
        """Remove what was drawn last."""
        if self._drawn:
            self._write(self._back())
            self._drawn = 0

    def leave(self) -> None:
        """What was drawn last stays; nothing is drawn any more."""
        if self._drawn:
            self._write("\n")
        self._drawn, self.live = 0, False

    def _back(self) -> str:
        return f"\r\x1b[{self._drawn - 1}A\x1b[J" if self._drawn > 1 else "\r\x1b[2K"

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a closed terminal or pipe doesn't end a run
            self._stream.write(text)
            self._stream.flush()


class Progress:
    """Shows metrics records as they come. Never raises because nobody can see it any more."""

    def __init__(
        self, total_steps: int, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total = total_steps
        self._screen = Screen(stream)
        self._clock = clock
        self._phase = ""
        self._phase_began = self._drawn = self._printed = clock()
        self._last: Mapping[str, Any] | None = None
        self._shown_step = 0
        self._first: tuple[float, int] | None = None

    @property
    def step(self) -> int:
        """The newest step seen."""
        return _whole(self._last.get("step")) if self._last else 0

    def phase(self, text: str) -> None:
        """Say what goes on while there are no steps yet."""
        self._phase = text
        self._phase_began = self._clock()
        if self._screen.live:
            self._draw()
        else:
            self.print(text)

    def print(self, text: str) -> None:
        """A line that stays."""
        self._screen.print(text)

    def update(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take new records, and redraw what changes with time. Call it often."""
        now = self._clock()
        for record in _since_resume(list(records)):
            if record.get("kind") == "train":
                self._last = record
                if self._first is None:
                    self._first = now, self.step
                self._maybe_print(now)
            elif record.get("kind") == "validation":
                loss, perplexity = number(record.get("loss")), number(record.get("perplexity"))
                step = _whole(record.get("step"))
                self.print(f"validation at step {step}/{self._total}  loss {loss}  token perplexity {perplexity}")
            elif record.get("kind") == "resume" and isinstance(notes := record.get("notes"), list):
                for note in notes:
                    self.print(f"note    {note}")
        if self._screen.live and now - self._drawn >= REDRAW_S:
            self._draw()

    def close(self) -> None:
        """Leave the last state of the live line on the screen."""
        if self._screen.live and self._last is not None:
            self._draw()
        else:
            self._screen.clear()
        self._screen.leave()

    def _maybe_print(self, now: float) -> None:
        if self._screen.live:
            return
        tenth = max(1, self._total // 10)
        due = now - self._printed >= PLAIN_INTERVAL_S or self.step // tenth > self._shown_step // tenth
        if due or self.step >= self._total:
            self._printed, self._shown_step = now, self.step
            self.print(self._state(now))

    def _state(self, now: float) -> str:
        if self._last is None:
            return f"{self._phase} {now - self._phase_began:.0f} s"
        record = self._last
        left = self._time_left(now) if self.step < self._total else None
        parts = [  # in the order in which a narrow terminal should cut them off, last one first
            f"step {self.step:>{len(str(self._total))}}/{self._total}",
            *([] if left is None else [f"{duration(left)} left"]),
            f"loss {number(record.get('loss'))}",
            f"token perplexity {number(record.get('perplexity'))}",
            f"{number(record.get('tokens_per_s'), 3)} tokens/s",
            f"lr {number(record.get('learning_rate'), 3)}",
        ]
        return "  ".join(parts)

    def _time_left(self, now: float) -> float | None:
        if self._first is not None and self.step > self._first[1]:
            per_step = (now - self._first[0]) / (self.step - self._first[1])  # validation included
        else:
            step_time = (self._last or {}).get("step_time_s")
            per_step = step_time if isinstance(step_time, float) else math.nan
        left = per_step * (self._total - self.step)
        return left if math.isfinite(left) else None

    def _draw(self) -> None:
        self._drawn = self._clock()
        self._screen.draw(self._state(self._drawn))


def _since_resume(records: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Without what an earlier attempt has recorded: a run that goes on keeps those in its file."""
    starts = [index for index, record in enumerate(records) if record.get("kind") == "resume"]
    return records[starts[-1] :] if starts else records


def format_summary(summary: Mapping[str, Any]) -> str:
    """The result of one run as a short table."""
    validation, step_time = _mapping(summary.get("validation")), _mapping(summary.get("step_time_s"))
    rows = [
        ("steps", f"{summary.get('steps', '-')} in {duration(summary.get('wall_s'))}"),
        ("parameters", number(summary.get("parameters"), 3)),
        ("training loss", number(_mapping(summary.get("train")).get("loss"))),
        ("validation loss", number(validation.get("loss"))),
        ("validation token perplexity", number(validation.get("perplexity"))),
        (
            "step time",
            f"{number(step_time.get('median'), 3)} s median, {number(step_time.get('mean'), 3)} s mean, "
            f"{number(step_time.get('p95'), 3)} s at the 95th percentile",
        ),
        ("throughput", f"{number(summary.get('tokens_per_s'), 3)} tokens/s"),
    ]
    for name, counts in traffic_per_step(summary).items():
        if counts["logical_bytes"] > 0 or counts["wire_bytes"] > 0:
            rows.append((f"{name} per step", _traffic(counts)))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def number(value: Any, digits: int = 4) -> str:
    """A number for people: few digits, k/M/G above 10,000; "-" for what isn't a number.

    Floats of everyday size keep their last zeros, so that a line that is redrawn doesn't jump.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "-"
    if not math.isfinite(value):
        return str(value)
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if suffix == 'k' else limit):.{digits}g}{suffix}"
    if abs(value) >= 1000 or isinstance(value, int):
        return f"{value:.0f}"
    return f"{value:#.{digits}g}" if abs(value) >= 0.1 else f"{value:.{digits}g}"


def duration(seconds: Any) -> str:
    """``42 s``, ``3:07``, ``1:02:03``, ``2 d 03:04:05``."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not math.isfinite(seconds):
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02}:{second:02}"
    if hour:
        return f"{hour}:{minute:02}:{second:02}"
    return f"{minute}:{second:02}" if minute else f"{second} s"


def _traffic(counts: Mapping[str, float]) -> str:
    wire, logical = counts["wire_bytes"], counts["logical_bytes"]
    text = f"{_bytes(wire)} on the wire"
    if logical > 0 and not math.isclose(wire, logical):
        text += f", {_bytes(logical)} uncompressed ({1 - wire / logical:.1%} saved)"
    return text


def _bytes(value: float) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size:
            return f"{number(value / size)} {unit}"
    return f"{value:.0f} B"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0
