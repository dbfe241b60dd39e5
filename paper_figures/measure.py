"""Rows that several items make in the same way from runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from analysis import statistics
from paper_figures.data import Data, Selection
from paper_figures.item import Query

LONG = ("kind", "technique", "quantity", "unit", "value", "low", "high", "n")
"""First columns of rows with one value each."""


def interval(mean: statistics.Mean) -> dict[str, Any]:
    """A mean's cells."""
    return {"value": mean.value, "low": mean.low, "high": mean.high, "n": mean.n}


def speedup(selection: Selection, technique: str, column: str = "step_time_median_s") -> statistics.Mean | None:
    """How much faster a technique's steps are, in per cent, seed by seed: 100 (t_baseline / t - 1)."""
    baseline, own = selection.by_seed(selection.query.baseline, column), selection.by_seed(technique, column)
    ratios = [100 * (baseline[seed] / own[seed] - 1) for seed in baseline.keys() & own.keys() if own[seed]]
    return statistics.mean(sorted(ratios)) if ratios else None


def against_baseline(selection: Selection, techniques: Iterable[str]) -> list[dict[str, Any]]:
    """For each technique perplexity and step time, with intervals, and how they compare with the baseline's."""
    found = []
    for technique in techniques:
        perplexity = selection.mean(technique, "validation_token_perplexity")
        time = selection.mean(technique, "step_time_median_s")
        row: dict[str, Any] = {
            "kind": "measured",
            "model": selection.runs.iloc[0]["model"],
            "technique": technique,
            "perplexity": perplexity.value if perplexity else math.nan,
            "perplexity_half_width": perplexity.half_width if perplexity else None,
            "step_time_s": time.value if time else math.nan,
            "step_time_half_width_s": time.half_width if time else None,
            "seeds": perplexity.n if perplexity else 0,
        }
        if technique != selection.query.baseline:
            faster = speedup(selection, technique)
            comparison = selection.compare(technique, "validation_token_perplexity")
            row["faster_percent"] = faster.value if faster else None
            row["perplexity_difference"] = comparison.difference.value if comparison else None
            verdict = comparison.text() if comparison else "no seed with a finite value in both"
            gone = selection.only_diverged(technique, selection.query.baseline)
            row["perplexity_verdict"] = f"{verdict}; {gone}" if gone else verdict
        found.append(row)
    return found


def over_steps(metrics: pd.DataFrame, column: str) -> list[dict[str, Any]]:
    """Mean over seeds at each step of each technique, with its interval."""
    found = []
    for (technique, step), group in metrics.groupby(["technique", "step"], sort=True):
        values = [float(value) for value in group[column].dropna() if math.isfinite(value)]
        if values:
            found.append({"technique": technique, "step": int(step), **interval(statistics.mean(values))})
    return found


def gains(data: Data, query: Query, same: Sequence[str], varied: str) -> list[dict[str, Any]]:
    """How much faster the query's second technique is than its baseline, for each value of ``varied``.

    Of the combinations of the columns ``same`` those are taken that have most values of ``varied``; one is not a
    comparison, and is left out.
    """
    technique = query.techniques[1]
    runs = data.runs[data.runs["technique"].isin(query.techniques) & data.runs["usual_ranks"].fillna(False)]
    runs = runs.dropna(subset=["setting", "num_parameters"])
    ranks = runs["tensor_parallel_size"] * runs["pipeline_parallel_size"] * runs["data_parallel_size"]
    runs = runs.assign(ranks=ranks)
    found: list[tuple[tuple[Any, ...], list[dict[str, Any]]]] = []
    for key, group in runs.groupby(list(same), sort=True):
        points = []
        for value, setting in group.groupby(varied, sort=True):
            settings = setting.groupby("setting")["technique"].nunique()
            chosen = setting[setting["setting"] == settings.sort_index().idxmax()]
            selection = Selection(chosen.drop_duplicates(["technique", "seed"]), (), query)
            faster = speedup(selection, technique)
            if faster is not None:
                shown = {"quantity": "faster", "unit": "%", "model": chosen.iloc[0]["model"]}
                points.append(
                    {"kind": "measured", varied: value, **shown, **interval(faster), "runs": list(chosen["run"])}
                )
        if len(points) > 1:
            found.append((key, points))
    most = max((len(points) for _, points in found), default=0)
    rows = [point for _, points in found if len(points) == most for point in points]
    for row in rows:
        data.note_runs(row.pop("runs"))
    if rows:
        chosen = runs[runs["run"].isin(data.used[data.item])]
        steps, seeds = sorted(chosen["total_steps"].unique()), chosen["seed"].nunique()
        data.note(
            f"Measured: {', '.join(sorted(chosen['model'].unique()))}; {' and '.join(map(str, steps))} steps, up to "
            f"{seeds} seed{'s' * (seeds != 1)}, {', '.join(sorted(chosen['device'].unique()))}."
        )
    return rows
