"""How many runs a sweep asks for, told from its overrides before any of them is composed."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from hydra.core.override_parser.types import Override, RangeSweep

from optimus_cc.config.errors import Problem

MAX_RUNS = 10_000
"""Of one sweep. Each is composed and checked before the first one starts."""


def size_problems(overrides: Sequence[Override]) -> Iterator[Problem]:
    """Which of a sweep's ``overrides`` asks for no run at all; else that all of them ask for too many.

    The last override of a key is the one that counts, as for Hydra's sweeper.
    """
    swept = {override.get_key_element(): override for override in overrides}
    sizes = {key: _size(override) for key, override in swept.items() if override.is_discrete_sweep()}
    empty = [key for key, size in sizes.items() if size == 0]
    for key in empty:
        said = swept[key].input_line or key
        yield Problem(
            swept[key].key_or_group,
            said.partition("=")[2],
            "at least one value; there is none in this, so there would be no run",
            f"{key}=A,B, or leave it out",
        )
    total = math.prod(sizes.values())
    if not empty and total > MAX_RUNS:
        largest = max(sizes, key=lambda key: sizes[key])
        each = " x ".join(_shown(size) for size in sizes.values() if size > 1)
        yield Problem(
            swept[largest].key_or_group,
            str(swept[largest].input_line).partition("=")[2],
            f"at most {MAX_RUNS:,} runs in a sweep; these overrides ask for {each}"
            + (f" = {_shown(total)}" if "x" in each else ""),
            "fewer values, or several sweeps",
        )


class Composing:
    """Says on stderr, once it takes longer than a moment, how far the composing of a sweep has come."""

    FIRST_S, NEXT_S = 5.0, 15.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._next = self._began + self.FIRST_S

    def __call__(self, done: int, count: int) -> None:
        """``done`` of ``count`` runs are composed."""
        now = self._clock()
        if now < self._next or done == 0 or done == count:
            return
        self._next = now + self.NEXT_S
        left = (now - self._began) / done * (count - done)
        print(f"checking the configurations: {done} of {count} runs, {left:.0f} s left", file=sys.stderr, flush=True)


def _size(override: Override) -> float:
    """How many values a discrete sweep has; infinite if it has no end."""
    value = override.value()
    if not isinstance(value, RangeSweep):
        return sum(1 for _ in override.sweep_string_iterator())
    start, stop, step = value.start or 0, value.stop or 0, value.step
    if step == 0 or not all(map(math.isfinite, (start, stop, step))):
        return math.inf
    if all(isinstance(part, int) for part in (start, stop, step)):
        return max(0, -((start - stop) // step))  # Python's own len() ends at 64 bits
    return max(0, math.ceil((stop - start) / step))


def _shown(size: float) -> str:
    return f"{size:,}" if math.isfinite(size) else "no end of them"
