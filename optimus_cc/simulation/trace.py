"""A predicted step as a file that Perfetto and chrome://tracing open: a process for each stage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optimus_cc import trace_events
from optimus_cc.simulation.reduction import Event
from optimus_cc.simulation.step import StepTime

COMPUTES = ("forward", "backward", "encode", "decode", "codec", "optimizer", "overhead")
"""Kinds of events on a stage's first row; the others are communication, on its second."""


def write(path: Path, time: StepTime) -> None:
    """Write the step: computation and codecs on one row of each stage, communication on another.

    Category ``exposed`` marks what lies on the critical path.
    """
    config = time.plan.config
    events: list[dict[str, Any]] = []
    for rank in range(config.parallel.pipeline_parallel_size):
        for tid, thread in enumerate(("computation", "communication")):
            events += trace_events.row(rank, tid, process=f"stage {rank}, predicted", sort_index=rank, thread=thread)
    events += _spans(time)
    about = {"predicted": True, "configuration": config.run_id, "step_time_s": time.total_s}
    trace_events.write(path, events, about)


def _spans(time: StepTime) -> Iterator[dict[str, Any]]:
    for event in time.events():
        about = {name: value for name in ("place", "microbatch") if (value := getattr(event, name)) is not None}
        tid = 0 if event.kind in COMPUTES else 1
        category = f"{event.kind},exposed" if event.exposed else event.kind
        yield trace_events.span(event.rank, tid, _name(event), category, event.begin_s, event.end_s, about)


def _name(event: Event) -> str:
    return event.kind if event.microbatch is None else f"{event.kind} {event.microbatch}"
