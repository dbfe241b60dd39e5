"""Runs as a table, and two groups of runs against each other: ``show`` and ``compare`` on the command line."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from analysis import statistics
from analysis.collect import Tables
from analysis.columns import TABLES
from optimus_cc.config.errors import closest

COMPARED: Mapping[str, str] = {
    "validation_token_perplexity": "validation perplexity (per token)",
    "step_time_median_s": "step time, median (s)",
    "tokens_per_s": "tokens per second",
    "wire_bytes_per_step": "sent by all ranks (bytes/step)",
}
"""Quantities that are compared, with their units."""
SHOWN = ("run", "state", "technique", "seed", "steps", "validation_token_perplexity", "step_time_median_s")


class Nothing(Exception):
    """There is nothing to show or to compare; ``str()`` says why, in one line."""


def select(runs: pd.DataFrame, filters: Sequence[str]) -> pd.DataFrame:
    """Runs of a technique, or whose id contains a filter, or matches it with ``*`` and ``?``; all if there is none."""
    if not filters:
        return runs
    chosen = pd.Series(False, index=runs.index)
    for one in filters:
        exact = runs["technique"] == one
        if not exact.any():
            exact = pd.Series([one in run or fnmatch.fnmatchcase(run, one) for run in runs["run"]], index=runs.index)
        chosen |= exact.fillna(False).astype(bool)
    return runs[chosen]


def show(tables: Tables, filters: Sequence[str], table: str = "runs", columns: Sequence[str] = ()) -> pd.DataFrame:
    """Rows of a table that belong to the runs that filters choose.

    Raises:
        Nothing: there are none, or a column does not exist.
    """
    if unknown := [name for name in columns if name not in TABLES[table]]:
        near = closest(unknown[0], TABLES[table])
        hint = f"did you mean {near[0]}" if near else f"there are {', '.join(TABLES[table])}"
        raise Nothing(f"the table {table} has no column {unknown[0]}; {hint}")
    rows = tables[table]
    if "run" in rows:
        rows = rows[rows["run"].isin(select(tables["runs"], filters)["run"])]
    if rows.empty:
        wanted = f" of runs that match {' or '.join(filters)}" if filters else ""
        raise Nothing(f"no rows in the table {table}{wanted}")
    return rows[list(columns or (SHOWN if table == "runs" else TABLES[table]))]


@dataclass(frozen=True)
class Pair:
    """Two groups of runs in one setting."""

    setting: str
    """In words."""
    comparisons: dict[str, statistics.Comparison]
    """By a name of :data:`COMPARED`."""


def compare(
    tables: Tables,
    a: str,
    b: str,
    *,
    margin: float = statistics.MARGIN,
    confidence: float = statistics.CONFIDENCE,
) -> list[Pair]:
    """B against A, seed by seed, in each setting (model, layout, length, data) that has both.

    Raises:
        Nothing: no setting has both, or one of them names several variants.
    """
    runs = with_traffic(tables)
    groups = {name: select(runs, [name]).dropna(subset=["setting"]) for name in (a, b)}
    for name, group in groups.items():
        if group.empty:
            raise Nothing(f"no finished run is of the technique {name} or has it in its id")
        for _, setting in group.groupby("setting"):
            variants = setting.drop_duplicates("variant")
            if len(variants) > 1:
                raise Nothing(
                    f"{name} names {len(variants)} variants, among them {' and '.join(variants['run'].head(2))}; "
                    "say which with more of an id, or a pattern like '*-cb-*'"
                )
    pairs = list(_pairs(groups[a], groups[b], margin, confidence))
    if not pairs:
        raise Nothing(f"no run of {a} and of {b} have the same model, layout, length, data and seed")
    return pairs


def with_traffic(tables: Tables) -> pd.DataFrame:
    """Finished runs, with the bytes that all ranks sent per step."""
    runs = tables["runs"]
    sent = tables["traffic"].groupby("run")["wire_bytes_per_step"].sum()
    return runs[runs["state"] == "finished"].assign(wire_bytes_per_step=lambda frame: frame["run"].map(sent))


def _pairs(a: pd.DataFrame, b: pd.DataFrame, margin: float, confidence: float) -> Iterator[Pair]:
    for setting, one in a.groupby("setting"):
        other = b[b["setting"] == setting]
        found: dict[str, statistics.Comparison] = {}
        for column in COMPARED:
            values: list[dict[int, float]] = [
                {int(seed): float(value) for seed, value in zip(group["seed"], group[column], strict=True)}
                for group in (one.dropna(subset=["seed", column]), other.dropna(subset=["seed", column]))
            ]
            try:
                found[column] = statistics.compare(*values, margin=margin, confidence=confidence)
            except ValueError:
                continue
        if found:
            first = one.iloc[0]
            words = f"{first['model']}, {first['layout']}, {first['total_steps']} steps, {first['device']}"
            yield Pair(words, found)


def render(pairs: Sequence[Pair], a: str, b: str) -> str:
    """What :func:`compare` found, for a person to read."""
    blocks = []
    for pair in pairs:
        lines = [f"{pair.setting}: {b} against {a}"]
        width = max(len(COMPARED[name]) for name in pair.comparisons)
        for name, one in pair.comparisons.items():
            digits = 3 if abs(one.baseline) < 1000 else 0
            value = one.baseline + one.difference.value
            lines.append(f"  {COMPARED[name]:<{width}}  {one.baseline:.{digits}f} -> {value:.{digits}f}")
            lines.append(f"  {'':<{width}}  {one.text(digits)}")
        left_out = {seed for one in pair.comparisons.values() for seed in one.left_out}
        if left_out:
            named = ", ".join(map(str, sorted(left_out, key=str)))
            lines.append(f"  seeds left out, for they are not in both, or have no finite value: {named}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
