"""What a person sees of a sweep: events as lines that stay, and how it stands; in a terminal redrawn, elsewhere said
now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from launchers.plan import Planned
from launchers.progress import REDRAW_S, Screen, duration, number

LOOK_S = 1.0
"""How often the folders of running runs are looked at."""
PLAIN_INTERVAL_S = 60.0
"""Without a terminal the state is said this often."""


@dataclass
class Watched:
    """A running run, as its folder shows it."""

    planned: Planned
    began: float
    step: int = 0
    loss: object = None
    _first: tuple[float, int] | None = field(default=None, repr=False)
    _looked: float = field(default=-1e9, repr=False)

    @property
    def total_steps(self) -> int:
        return self.planned.config.training.steps

    def look(self, now: float) -> None:
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        status = self.planned.folder.status()
        if status is None or status.state != "running" or not status.step:
            return  # what an earlier attempt left is no news
        self.step = status.step
        self.loss = (self.planned.folder.latest("train") or {}).get("loss")
        self._first = self._first or (now, self.step)

    def per_step_s(self, now: float) -> float | None:
        """Seconds a step takes, validation and checkpoints included; None if too little was seen."""
        if self._first is None or self.step <= self._first[1]:
            return None
        return (now - self._first[0]) / (self.step - self._first[1])

    def left_s(self, now: float) -> float | None:
        per_step = self.per_step_s(now)
        return None if per_step is None else per_step * (self.total_steps - self.step)

    def line(self, now: float) -> str:
        if not self.step:
            return f"{self.planned.folder.run_id}  starting, {duration(now - self.began)}"
        left = self.left_s(now)
        tail = "" if left is None else f"  {duration(left)} left"
        return f"{self.planned.folder.run_id}  step {self.step}/{self.total_steps}  loss {number(self.loss)}{tail}"


class Overview:
    def __init__(
        self, parallel: int, *, screen: Screen | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._parallel = parallel
        self._screen = screen or Screen()
        self._clock = clock
        self._drawn = self._said = clock()
        self._per_step_s: dict[object, float] = {}

    def say(self, text: str) -> None:
        """A line that stays."""
        self._screen.print(text)

    def show(self, running: Sequence[Watched], waiting: Sequence[Planned], ended: Mapping[str, int]) -> None:
        """Call it often; ``ended``: how many ended in which way."""
        now = self._clock()
        if now - self._drawn < REDRAW_S:
            return
        self._drawn = now
        for one in running:
            one.look(now)
            per_step = one.per_step_s(now)
            if per_step is not None:
                self._per_step_s[_kind(one.planned)] = per_step
        if self._screen.live:
            self._screen.draw(self._state(now, running, waiting, ended), *(f"  {one.line(now)}" for one in running))
        elif now - self._said >= PLAIN_INTERVAL_S and running:
            self._said = now
            self.say("; ".join((self._state(now, running, waiting, ended), *(one.line(now) for one in running))))

    def close(self) -> None:
        self._screen.clear()

    def _state(
        self, now: float, running: Sequence[Watched], waiting: Sequence[Planned], ended: Mapping[str, int]
    ) -> str:
        counts = {"running": len(running), **ended, "waiting": len(waiting)}
        text = ", ".join(f"{count} {name}" for name, count in counts.items() if count or name in ("running", "waiting"))
        left = self._left_s(now, running, waiting)
        return f"sweep   {text}{'' if left is None else f', about {duration(left)} left'}"

    def _left_s(self, now: float, running: Sequence[Watched], waiting: Sequence[Planned]) -> float | None:
        """By what like runs of this sweep have taken; None as long as that isn't known."""
        known = [one.left_s(now) for one in running]
        paces = [(one.remaining_steps, self._per_step_s.get(_kind(one))) for one in waiting]
        known += [None if pace is None else steps * pace for steps, pace in paces]
        times = [left for left in known if left is not None]
        if len(times) < len(known) or not times:
            return None
        return max(*times, sum(times) / self._parallel) if len(times) > 1 else times[0]


def _kind(planned: Planned) -> object:
    """Runs of one kind take about the same time per step."""
    config = planned.config
    return config.model, config.parallel, config.training.global_batch_size, config.training.micro_batch_size
