"""One step of all ranks as a file that Perfetto and chrome://tracing open: the Trace Event Format, JSON."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from optimus_cc.records import replace_file, to_json
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
    # Whole nanoseconds, so that rounding can't make a span stick out of the one around it.
    begin = round(began_s * 1e9)
    row = {"pid": place.rank, "tid": 0}
    replica = f"data-parallel {place.data_parallel_rank}, tensor-parallel {place.tensor_parallel_rank}"
    names = {
        "process_name": {"name": f"stage {place.stage}, {replica} (rank {place.rank})"},
        "process_sort_index": {"sort_index": place.sort_index},
        "thread_name": {"name": "step"},
    }
    events: list[dict[str, Any]] = [{"ph": "M", "name": name, "args": args, **row} for name, args in names.items()]
    for span in spans:
        about = span.about
        start, end = begin + round(span.begin_s * 1e9), begin + round(span.end_s * 1e9)
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.phase,
                "ts": start / 1e3,
                "dur": (end - start) / 1e3,
                "args": {} if about is None else {"boundary": about.boundary, "microbatch": about.microbatch},
                **row,
            }
        )
    return events


def write_trace(path: Path, step: int, rows: Sequence[tuple[list[dict[str, Any]], float]]) -> None:
    """Write the rows of all ranks, each with the spread of its clock's offset in seconds; the first event is at 0."""
    events = [event for row, _ in rows for event in row]
    first = min(event["ts"] for event in events if event["ph"] == "X")
    for event in events:
        if event["ph"] == "X":
            event["ts"] = round(event["ts"] - first, 3)
    content = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"step": step, "clock_offset_spread_us": round(max(spread for _, spread in rows) * 1e6, 3)},
    }
    replace_file(path, to_json(content) + "\n")
