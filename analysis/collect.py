"""Run folders into tables, again and again: ``python -m analysis collect RUNS_DIR -o results.parquet``.

The tables lie beside each other: ``results.parquet`` is the table ``runs``, ``results.metrics.parquet`` and so on are
the others (:data:`analysis.columns.TABLES`). A run folder whose files are as they were is not read again.
"""

from __future__ import annotations

import concurrent.futures
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.columns import TABLES, empty
from analysis.read import codec_rows, is_settled, read, stamp, to_frame
from optimus_cc.records import read_json_object
from optimus_cc.runs import BENCHMARKS, RunFolder, folders_in

SUFFIXES = (".parquet", ".csv")
_BATCH = 50
"""Folders that a process reads at a time."""

Tables = dict[str, pd.DataFrame]
_WRITING_ORDER = sorted(TABLES, key=lambda name: name == "runs")


@dataclass
class Collected:
    """Tables, and what is to be said about them."""

    tables: Tables
    remarks: list[str] = field(default_factory=list)
    """A line for each folder that is not, or not wholly, in the tables."""
    read: int = 0
    unchanged: int = 0


def table_path(output: Path, table: str) -> Path:
    """Where a table lies: ``results.parquet`` for ``runs``, else ``results.TABLE.parquet``."""
    return output if table == "runs" else output.with_suffix(f".{table}{output.suffix}")


def collect(runs_dirs: Sequence[Path], before: Tables | None = None, filters: Sequence[str] = ()) -> Collected:
    """Tables of all run folders in some folders.

    Args:
        before: an earlier result of this function, whose rows are kept for folders that did not change.
        filters: see :func:`optimus_cc.runs.folders_in`.
    """
    before = before or {}
    known = _known(before.get("runs"))
    result = Collected({})
    folders: list[tuple[RunFolder, str | None]] = []
    kept: set[str] = set()
    seen: dict[str, Path] = {}
    for folder in _folders(runs_dirs, filters, result.remarks):
        if not folder.exists():
            result.remarks.append(f"{os.path.relpath(folder.path)}: not a run folder")
            continue
        mark = stamp(folder)
        run = known.get((os.path.relpath(folder.path), mark or ""))
        if run is None:
            folders.append((folder, mark))
        elif _is_first(run, folder.path, seen, result.remarks):
            kept.add(run)
    result.unchanged, result.read = len(kept), len(folders)
    batches = _read_all(folders)
    runs = [(name, remarks) for batch in batches for name, remarks in batch.runs]
    wanted = set()
    # The folder that has its run's name comes first, so that a copy beside it is the one that is left out.
    for index in sorted(range(len(runs)), key=lambda index: runs[index][0] != folders[index][0].run_id):
        (name, remarks), path = runs[index], folders[index][0].path
        if _is_first(name, path, seen, result.remarks):
            wanted.add(index)
            result.remarks += [f"{os.path.relpath(path)}: {remark}" for remark in remarks]
    for table in TABLES:
        if table == "codecs":
            parts = [to_frame(table, [codec_rows(folder) for folder in _benchmarks(runs_dirs)])]
        else:
            old = before.get(table, empty(table))
            new = (batch.tables[table] for batch in batches)
            parts = [old[old["run"].isin(kept)], *(frame[frame["part"].isin(wanted)] for frame in new)]
        result.tables[table] = _joined(table, parts)
    return result


def load(output: Path) -> Tables:
    """The tables that lie at ``output``; those that can't be read, or have other columns, are empty."""
    return {table: _load_table(table_path(output, table), table) for table in TABLES}


def save(tables: Tables, output: Path) -> list[Path]:
    """Write tables; each file is replaced as a whole. The table that says what was read is written last."""
    output.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    for table in _WRITING_ORDER:
        path = table_path(output, table)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        if output.suffix == ".csv":
            tables[table].to_csv(temporary, index=False)
        else:
            tables[table].to_parquet(temporary, index=False)
        os.replace(temporary, path)
        paths.append(path)
    return paths


def in_writing_order(tables: Tables) -> list[pd.DataFrame]:
    """Tables in the order of :func:`save`'s paths."""
    return [tables[table] for table in _WRITING_ORDER]


def _folders(runs_dirs: Iterable[Path], filters: Sequence[str], remarks: list[str]) -> Iterator[RunFolder]:
    for runs_dir in runs_dirs:
        try:
            yield from folders_in(runs_dir, filters)
        except OSError as error:
            remarks.append(f"{runs_dir}: {error.strerror}")


def _benchmarks(runs_dirs: Iterable[Path]) -> Iterator[RunFolder]:
    for runs_dir in runs_dirs:
        try:
            yield from (folder for folder in folders_in(runs_dir / BENCHMARKS) if folder.exists())
        except OSError:
            continue


def _known(runs: pd.DataFrame | None) -> dict[tuple[str, str], str]:
    """Run by folder and stamp, of runs that stay as they are."""
    if runs is None or runs.empty:
        return {}
    cells = zip(runs["folder"], runs["stamp"], runs["state"], runs["run"], strict=True)
    return {(folder, mark): run for folder, mark, state, run in cells if is_settled(state)}


def _is_first(run: str, path: Path, seen: dict[str, Path], remarks: list[str]) -> bool:
    if (other := seen.setdefault(run, path)) == path:
        return True
    remarks.append(f"{os.path.relpath(path)}: holds the same run as {os.path.relpath(other)}; left out")
    return False


@dataclass
class _Batch:
    """Some folders, read; their rows say in ``part`` which folder of all they are from."""

    runs: list[tuple[str, list[str]]]
    tables: Tables


def _read_all(folders: Sequence[tuple[RunFolder, str | None]]) -> list[_Batch]:
    batches = [(start, folders[start : start + _BATCH]) for start in range(0, len(folders), _BATCH)]
    workers = min(os.cpu_count() or 1, len(batches))
    if workers < 2:
        return [_read_batch(*batch) for batch in batches]
    with concurrent.futures.ProcessPoolExecutor(workers) as pool:
        return list(pool.map(_read_batch, *zip(*batches, strict=True)))


def _read_batch(start: int, folders: Sequence[tuple[RunFolder, str | None]]) -> _Batch:
    found = [read(*one) for one in folders]
    tables = {}
    for table in TABLES:
        nothing: dict[str, list[Any]] = {name: [] for name in TABLES[table]}
        frame = to_frame(table, [one.tables.get(table, nothing) for one in found])
        tables[table] = frame.assign(part=frame["part"] + start)
    return _Batch([(one.name, one.remarks) for one in found], tables)


def _joined(table: str, parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    frames = [part[list(TABLES[table])] for part in parts if len(part)]
    if not frames:
        return empty(table)
    key = "run" if "run" in TABLES[table] else "benchmark"
    return pd.concat(frames, ignore_index=True).sort_values(key, kind="stable", ignore_index=True)


def _load_table(path: Path, table: str) -> pd.DataFrame:
    types = {name: column.dtype for name, column in TABLES[table].items()}
    try:
        if path.suffix == ".csv":
            found = pd.read_csv(io.StringIO(path.read_text(encoding="utf-8")), dtype=types)
        else:
            found = pd.read_parquet(path)
        return found.astype(types) if list(found) == list(types) else empty(table)
    except Exception:  # whatever it is, it is no table of ours: all is read anew
        return empty(table)


def finished(tables: Tables) -> pd.DataFrame:
    """The runs that can be compared."""
    runs = tables["runs"]
    return runs[runs["state"] == "finished"]


def provenance(folder: Path) -> dict[str, Any]:
    """Where a run came from; empty if that can't be read."""
    return read_json_object(folder / "provenance.json") or {}
