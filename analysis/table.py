"""One table over run folders: what each run reached, how fast, and what it sent."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from optimus_cc.runs import RunFolder, folders_in, traffic_per_step

FIRST_CLASSES = ("pipeline_backward", "pipeline_forward")
"""Traffic classes that are always shown, first."""
WARM_UP_STEPS = 5
"""First records left out of the step time of a run that has no summary."""

Row = dict[str, Any]


def collect(runs_dir: Path, filters: Sequence[str] = ()) -> tuple[list[Row], list[str]]:
    """Read the run folders in ``runs_dir`` in the order in which they were started.

    Args:
        filters: keep runs whose id contains one of these, or matches it as a pattern with ``*`` or ``?``.

    Returns:
        a row for each run (see :func:`read_run`), and a line for each folder or file that couldn't be read.
    """
    rows, remarks = [], []
    try:
        folders = folders_in(runs_dir, filters)
    except OSError as error:
        return [], [f"{runs_dir}: {error.strerror}"]
    for folder in folders:
        path = folder.path
        if not folder.exists():
            remarks.append(f"{path}: not a run folder")
            continue
        rows.append(read_run(folder))
        for file, content in ((folder.status_path, folder.status()), (folder.summary_path, folder.summary())):
            if content is None and file.exists():
                remarks.append(f"{path}: {file.name} can't be read")
    rows.sort(key=lambda row: (row["started"] or "", row["run"]))
    return rows, remarks


def read_run(folder: RunFolder) -> Row:
    """One run as a flat row; None where nothing is known.

    A run without a summary is described by its metrics so far. Bytes are those that all ranks send in one step,
    by traffic class and in total.
    """
    status = folder.status()
    summary = folder.summary()
    if summary is None:
        summary = _summary_so_far(folder)
    validation = _mapping(summary.get("validation"))
    provenance = folder.provenance() or {}
    row: Row = {
        "run": folder.run_id,
        "state": None if status is None else "abandoned" if status.abandoned else status.state,
        "cause": None if status is None else status.cause,
        "started": _text(provenance.get("created")) or (status.started if status else None),
        "steps": _number(summary.get("steps", status.step if status else None)),
        "validation_loss": _number(validation.get("loss")),
        "validation_token_perplexity": _number(validation.get("perplexity")),
        "step_time_median_s": _number(_mapping(summary.get("step_time_s")).get("median")),
        "tokens_per_s": _number(summary.get("tokens_per_s")),
        "folder": os.path.relpath(folder.path),
    }
    traffic = traffic_per_step(summary)
    for kind in ("wire_bytes", "logical_bytes"):
        for name, counts in traffic.items():
            row[f"{kind}.{name}"] = counts[kind]
        row[f"{kind}.total"] = sum(counts[kind] for counts in traffic.values()) if traffic else None
    return row


def to_frame(rows: Iterable[Row]) -> pd.DataFrame:
    """One line per run, one column per quantity."""
    return pd.DataFrame(list(rows))


def render(rows: Sequence[Row], width: int = 120) -> str:
    """A table with one column per run; as many blocks below each other as ``width`` needs."""
    if not rows:
        return "no runs"
    names = short_names([row["run"] for row in rows])
    quantities = _quantities(rows)
    labels = [label for label, _ in quantities]
    label_width = max(map(len, labels))
    longest = max(8, width - label_width - 2)
    columns = [
        [_shortened(name, longest), *(_shortened(text, longest) for text in cells)]
        for name, cells in zip(names, ([show(row) for _, show in quantities] for row in rows), strict=True)
    ]
    blocks, begin = [], 0
    while begin < len(columns):
        end, used = begin, label_width
        while end < len(columns) and (end == begin or used + 2 + max(map(len, columns[end])) <= width):
            used += 2 + max(map(len, columns[end]))
            end += 1
        blocks.append(_block(["", *labels], columns[begin:end]))
        begin = end
    name_width = max(map(len, names))
    folders = [f"{name:<{name_width}}  {row['folder']}" for name, row in zip(names, rows, strict=True)]
    causes = [f"{name}: {row['cause']}" for name, row in zip(names, rows, strict=True) if row["cause"]]
    return "\n\n".join(["\n\n".join(blocks), "\n".join(folders), *(["\n".join(causes)] if causes else [])])


def short_names(run_ids: Sequence[str]) -> list[str]:
    """What tells runs apart: of model-layout-technique-seed-hash the technique, and whatever else differs."""
    parts = [run_id.split("-") for run_id in run_ids]
    if len({len(part) for part in parts}) != 1 or len(parts[0]) != 5:
        return list(run_ids)
    kept = [index for index in range(4) if index == 2 or len({part[index] for part in parts}) > 1]
    names = ["-".join(part[index] for index in kept) for part in parts]
    return [f"{name}-{part[4]}" if names.count(name) > 1 else name for name, part in zip(names, parts, strict=True)]


def _quantities(rows: Sequence[Row]) -> list[tuple[str, Any]]:
    """Label of each line of the table, and what makes its text from a row."""
    lines: list[tuple[str, Any]] = [
        ("state", lambda row: row["state"] or "-"),
        ("steps", lambda row: _shown(row["steps"], ".0f")),
        ("validation token perplexity", lambda row: _shown(row["validation_token_perplexity"], ".2f")),
        ("step time, median (s)", lambda row: _shown(row["step_time_median_s"], ".3f")),
    ]
    prefix = "wire_bytes."
    found = {key.removeprefix(prefix) for row in rows for key, value in row.items() if key.startswith(prefix) and value}
    others = sorted(found - {*FIRST_CLASSES, "total"})
    for name in (*FIRST_CLASSES, *others, "total"):
        for kind, label in (("wire_bytes", "wire"), ("logical_bytes", "logical")):
            key = f"{kind}.{name}"
            lines.append((f"{name}, {label} (MB/step)", lambda row, key=key: _shown(row.get(key), ".3f", 1e6)))
    return lines


def _block(labels: Sequence[str], columns: Sequence[Sequence[str]]) -> str:
    label_width = max(map(len, labels))
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for index, label in enumerate(labels):
        cells = "".join(f"  {column[index]:>{width}}" for column, width in zip(columns, widths, strict=True))
        lines.append(f"{label:<{label_width}}{cells}")
    return "\n".join(line.rstrip() for line in lines)


def _summary_so_far(folder: RunFolder) -> dict[str, Any]:
    """What can be said of a run that has no summary, in a summary's shape."""
    times: list[float] = []
    totals: dict[str, dict[str, float]] = {}
    traffic_records = 0
    validation: dict[str, Any] = {}
    last: dict[str, Any] = {}
    trained = 0
    for record in folder.metrics():
        if record.get("kind") == "validation":
            validation = record
        elif record.get("kind") == "train":
            last = record
            trained += 1
            if trained > WARM_UP_STEPS and (time := _number(record.get("step_time_s"))) is not None:
                times.append(time)
            traffic = traffic_per_step(record)
            traffic_records += bool(traffic)
            for name, counts in traffic.items():
                total = totals.setdefault(name, {"wire_bytes_per_step": 0.0, "logical_bytes_per_step": 0.0})
                for kind, value in counts.items():
                    total[f"{kind}_per_step"] += value
    summary: dict[str, Any] = {
        "validation": validation,
        "step_time_s": {"median": statistics.median(times) if times else None},
        "tokens_per_s": last.get("tokens_per_s"),
        "traffic": {
            name: {kind: value / traffic_records for kind, value in counts.items()} for name, counts in totals.items()
        },
    }
    if last:
        summary["steps"] = last.get("step")
    return summary


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: Any) -> float | int | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _shown(value: float | None, form: str, unit: float = 1.0) -> str:
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    return f"{value / unit:{form}}" if abs(value) < 1e15 else f"{value / unit:.3g}"


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."
