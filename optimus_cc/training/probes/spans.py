"""Spans of one step on a clock: the phases that a step's time goes to, and what a trace shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from optimus_cc.exposure import Message, Schedule
from optimus_cc.phases import PHASES, Phase
from optimus_cc.training.backend import Backend


@dataclass
class Span:
    """What a rank did from ``begin_s`` to ``end_s``, in seconds since its step began."""

    phase: Phase
    name: str
    about: Message | None
    parent: int | None
    """Index of the span around it."""
    begin_s: float = 0.0
    end_s: float = 0.0

    @property
    def duration_s(self) -> float:
        return self.end_s - self.begin_s


class _Clock(Protocol):
    def mark(self) -> Any:
        """Now."""

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks, once both have passed."""


class _HostClock:
    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start


class _DeviceClock:
    """When the device gets to where the host was. Marking waits for nothing."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1e3


class SpanRecorder:
    """Keeps the spans of one step, from :meth:`begin` to :meth:`finish`; a :class:`~.SpanListener`.

    On CUDA spans begin and end when the device's current stream reaches them: what another stream does meanwhile costs
    nothing unless the current one waits for it. On the CPU they are times of the host.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._clock: _Clock = _DeviceClock() if backend.is_cuda else _HostClock()
        self._spans: list[Span] = []
        self._marks: list[list[Any]] = []
        self._open: list[int] = []
        self.began = 0.0
        """The host's time.perf_counter() when the step began."""

    def begin(self) -> None:
        self._spans, self._marks, self._open = [], [], []
        self._backend.synchronize()
        self.began = time.perf_counter()
        self.open("other", "step", None)

    def open(self, phase: Phase, name: str, about: Message | None) -> None:
        self._spans.append(Span(phase, name, about, self._open[-1] if self._open else None))
        self._open.append(len(self._spans) - 1)
        self._marks.append([self._clock.mark()])

    def close(self) -> None:
        self._marks[self._open.pop()].append(self._clock.mark())

    def finish(self) -> None:
        """The step is over."""
        self.close()
        assert not self._open, "a span was left open"

    def spans(self) -> list[Span]:
        """What was recorded, in the order in which it began; the first is the step itself. Waits for the device."""
        self._backend.synchronize()
        start = self._marks[0][0]
        for span, (begin, end) in zip(self._spans, self._marks, strict=True):
            span.begin_s, span.end_s = self._clock.seconds(start, begin), self._clock.seconds(start, end)
        return self._spans


def phase_times(spans: Sequence[Span]) -> dict[Phase, float]:
    """Seconds of a step by phase. A span's time is that in none of the spans within it, so they add up to the step."""
    own = [span.duration_s for span in spans]
    for span in spans:
        if span.parent is not None:
            own[span.parent] -= span.duration_s
    times: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
    for span, seconds in zip(spans, own, strict=True):
        times[span.phase] += max(0.0, seconds)  # differences of rounded times
    return times


_MEGATRON: dict[str, Phase] = {
    "forward-compute": "forward",
    "backward-compute": "backward",
    "all-grads-sync": "data_parallel",
    "embedding-grads-all-reduce": "embedding",
}
"""Timers that Megatron-core starts and stops, and the phase that they measure."""


class MegatronTimers:
    """Stands in Megatron-core's ``config.timers`` for one step and turns some of its timers into spans.

    The n-th forward and backward pass of a rank is known by the schedule, so the spans are named by micro-batch and
    chunk.
    """

    def __init__(self, recorder: SpanRecorder, schedule: Schedule) -> None:
        self._recorder = recorder
        self._steps = {"forward": iter(schedule.forward_order), "backward": iter(schedule.backward_order)}

    def __call__(self, name: str, log_level: int | None = None) -> _Timer:
        phase = _MEGATRON.get(name)
        return _OFF if phase is None else _Timer(lambda: self._open(phase), self._recorder.close)

    def _open(self, phase: Phase) -> None:
        name: str = phase
        if phase in self._steps:
            chunk, microbatch = next(self._steps[phase])
            name = f"{phase} micro-batch {microbatch} chunk {chunk}"
        self._recorder.open(phase, name, None)


class _Timer:
    def __init__(self, start: Callable[[], None], stop: Callable[[], None]) -> None:
        self._start, self._stop = start, stop

    def start(self, barrier: bool = False) -> None:
        self._start()

    def stop(self, barrier: bool = False) -> None:
        self._stop()


_OFF = _Timer(lambda: None, lambda: None)
