"""Run folders into tables, again and again: ``python -m analysis collect RUNS_DIR -o results.parquet``.

The tables lie beside each other: ``results.parquet`` is the table ``runs``, ``results.metrics.parquet`` and so on are
the others (:data:`analysis.columns.TABLES`). A run folder whose files are as they were is not read again.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.columns import TABLES, empty
from analysis.convert import to_frame
from analysis.read import Found, codec_rows, is_settled, read, stamp
from optimus_cc.files import check_regular, read_text
from optimus_cc.records import read_json_object
from optimus_cc.runs import BENCHMARKS, RunFolder, folders_in

SUFFIXES = (".parquet", ".csv")

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
    with _no_garbage_collection():
        return _collect(runs_dirs, before or {}, filters)


def _collect(runs_dirs: Sequence[Path], before: Tables, filters: Sequence[str]) -> Collected:
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
        if run != folder.path.name:  # not known; or a copy, which gives way if there is the folder that has the name
            folders.append((folder, mark))
        elif _is_first(run, folder.path, seen, result.remarks):
            kept.add(run)
    result.unchanged, result.read = len(kept), len(folders)
    found: list[Found] = [read(folder, mark) for folder, mark in folders]
    wanted: list[Found] = []
    # The folder that has its run's name comes first, so that a copy beside it is the one that is left out.
    for one, (folder, _) in sorted(
        zip(found, folders, strict=True), key=lambda pair: pair[0].name != pair[1][0].run_id
    ):
        if _is_first(one.name, folder.path, seen, result.remarks):
            wanted.append(one)
            result.remarks += [f"{os.path.relpath(folder.path)}: {remark}" for remark in one.remarks]
    for table in TABLES:
        old = before.get(table, empty(table))
        if table == "codecs":
            frames = [to_frame(table, [codec_rows(folder) for folder in _benchmarks(runs_dirs)])]
        else:
            parts = [one.tables[table] for one in wanted if table in one.tables]
            frames = [old[old["run"].isin(kept)], to_frame(table, parts)]
        result.tables[table] = _joined(table, frames)
    return result


def is_readable(output: Path) -> bool:
    """Whether :func:`load` finds tables at ``output``."""
    try:
        return all(_load_table(table_path(output, table), table) is not None for table in TABLES)
    except Exception:  # as in load
        return False


def load(output: Path) -> Tables:
    """The tables that lie at ``output``; all are empty if one of them can't be read, or has other columns.

    For ``runs`` says what was read: with another table lost, it would say so of rows that are not there.
    """
    try:
        return {table: _load_table(table_path(output, table), table) for table in TABLES}
    except Exception:  # whatever it is, these are no tables of ours: all is read anew
        return {table: empty(table) for table in TABLES}


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


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """It would look through millions of values again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


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


def _joined(table: str, frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    filled = [frame for frame in frames if len(frame)]
    if not filled:
        return empty(table)
    key = "run" if "run" in TABLES[table] else "benchmark"
    return pd.concat(filled, ignore_index=True).sort_values(key, kind="stable", ignore_index=True)


def _load_table(path: Path, table: str) -> pd.DataFrame:
    types = {name: column.dtype for name, column in TABLES[table].items()}
    if path.suffix == ".csv":
        text = io.StringIO(read_text(path))
        found = pd.read_csv(text, dtype=types, keep_default_na=False, na_values=[""])  # "NA" and "null" are names
    else:
        check_regular(path)
        found = pd.read_parquet(path)
    if list(found) != list(types):
        raise ValueError(f"{path} has other columns")
    return found.astype(types)


def finished(tables: Tables) -> pd.DataFrame:
    """The runs that can be compared."""
    runs = tables["runs"]
    return runs[runs["state"] == "finished"]


def provenance(folder: Path) -> dict[str, Any]:
    """Where a run came from; empty if that can't be read."""
    return read_json_object(folder / "provenance.json") or {}
