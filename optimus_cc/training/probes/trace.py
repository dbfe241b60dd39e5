"""One step of all ranks as a file that Perfetto and chrome://tracing open."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from optimus_cc import trace_events
from optimus_cc.training.backend import Backend
from optimus_cc.training.probes.place import Place
from optimus_cc.training.probes.spans import Span

_ROUNDS = 7


@dataclass(frozen=True)
class ClockOffset:
    """What to add to this rank's clock to get rank 0's."""

    seconds: float
    spread_s: float
    """How far apart the rounds that measured it were."""

    @classmethod
    def measure(cls, backend: Backend) -> ClockOffset:
        """All ranks leave a barrier at about the same moment; the median over some barriers. Every rank must call."""
        left = []
        for _ in range(_ROUNDS):
            dist.barrier(group=backend.control_group)
            left.append(time.perf_counter())
        differences = [first - mine for first, mine in zip(backend.everyone(left)[0], left, strict=True)]
        return cls(statistics.median(differences), max(differences) - min(differences))


def rank_events(place: Place, spans: Sequence[Span], began_s: float) -> list[dict[str, Any]]:
    """A row of a trace: one process for each rank, sorted by stage, and one complete event for each span.

    Args:
        began_s: when the spans' step began, on the clock that all rows share.
    """
    replica = f"data-parallel {place.data_parallel_rank}, tensor-parallel {place.tensor_parallel_rank}"
    process = f"stage {place.stage}, {replica} (rank {place.rank})"
    events = trace_events.row(place.rank, 0, process=process, sort_index=place.sort_index, thread="step")
    for span in spans:
        about = {} if span.about is None else {"boundary": span.about.boundary, "microbatch": span.about.microbatch}
        times = began_s + span.begin_s, began_s + span.end_s
        events.append(trace_events.span(place.rank, 0, span.name, span.phase, *times, about))
    return events


def write_trace(path: Path, step: int, rows: Sequence[tuple[list[dict[str, Any]], float]]) -> None:
    """Write the rows of all ranks, each with the spread of its clock's offset in seconds; the first event is at 0."""
    events = [event for row, _ in rows for event in row]
    spread_us = round(max(spread for _, spread in rows) * 1e6, 3)
    trace_events.write(path, events, {"step": step, "clock_offset_spread_us": spread_us})
