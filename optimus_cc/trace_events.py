"""Files that Perfetto and chrome://tracing open: the Trace Event Format, JSON. Written by trainings and predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optimus_cc.records import replace_file, to_json


def row(pid: int, tid: int, *, process: str, sort_index: int, thread: str) -> list[dict[str, Any]]:
    """What names a row of a trace: a thread of a process, and the process's place."""
    names = {
        "process_name": {"name": process},
        "process_sort_index": {"sort_index": sort_index},
        "thread_name": {"name": thread},
    }
    return [{"ph": "M", "name": name, "args": args, "pid": pid, "tid": tid} for name, args in names.items()]


def span(
    pid: int, tid: int, name: str, category: str, begin_s: float, end_s: float, about: Mapping[str, Any]
) -> dict[str, Any]:
    """A complete event. Times are seconds on a clock that all rows share."""
    # Whole nanoseconds, so that rounding can't make an event stick out of the one around it.
    begin, end = round(begin_s * 1e9), round(end_s * 1e9)
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": begin / 1e3,
        "dur": (end - begin) / 1e3,
        "args": dict(about),
        "pid": pid,
        "tid": tid,
    }


def write(path: Path, events: Sequence[dict[str, Any]], about: Mapping[str, Any]) -> None:
    """Write ``events`` of all rows; the first one is at 0."""
    first = min(event["ts"] for event in events if event["ph"] == "X")
    for event in events:
        if event["ph"] == "X":
            event["ts"] = round(event["ts"] - first, 3)
    content = {"traceEvents": list(events), "displayTimeUnit": "ms", "otherData": dict(about)}
    replace_file(path, to_json(content) + "\n")
