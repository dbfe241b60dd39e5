"""Where a plan says what it does, if anybody listens.

Code that moves or compresses something runs inside a span. Off, a span is a shared empty context: nothing is read,
kept or timed. What listens (see :mod:`optimus_cc.training.probes`) decides what a span is good for: a clock, a trace,
a look at the memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Protocol

import torch

from optimus_cc.exposure import Message
from optimus_cc.phases import Phase


class SpanListener(Protocol):
    """Told of spans as they open and close, properly nested."""

    def open(self, phase: Phase, name: str, about: Message | None) -> None: ...

    def close(self) -> None: ...


class MessageListener(Protocol):
    """Told of the stage-to-stage messages of a rank that compresses some."""

    def forward_arrived(self, message: Message, activation: torch.Tensor) -> None:
        """``activation`` is being received; it is complete at the latest when this micro-batch's backward pass ends."""

    def backward_sent(self, message: Message, residual: torch.Tensor | None) -> None:
        """A gradient was sent, and ``residual`` left out of it; None if nothing was, or if that was dropped unseen."""


class Probe:
    """What a plan's parts report to."""

    def __init__(self) -> None:
        self.spans: SpanListener | None = None
        self.messages: MessageListener | None = None

    def span(self, phase: Phase, name: str = "", about: Message | None = None) -> AbstractContextManager[None]:
        """What runs inside belongs to ``phase``, save for the spans within it.

        Args:
            name: what a trace shows; default: the phase.
            about: the message that it is done for.
        """
        return _OFF if self.spans is None else _Span(self.spans, phase, name or phase, about)


class _Span:
    def __init__(self, listener: SpanListener, phase: Phase, name: str, about: Message | None) -> None:
        self._listener, self._phase, self._name, self._about = listener, phase, name, about

    def __enter__(self) -> None:
        self._listener.open(self._phase, self._name, self._about)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()


_OFF: AbstractContextManager[None] = nullcontext()
