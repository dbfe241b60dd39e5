"""Perplexity over iterations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from paper_figures.data import Data
from paper_figures.item import Item, Missing, Query, rows
from paper_figures.measure import over_steps
from paper_figures.style import COLUMN, LINES, MARKERS, color, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUERY = Query("laptop/figure_perplexity", ("baseline", "cb", "cb_fe", "cb_fe_sc"))


def values(data: Data) -> pd.DataFrame:
    selection = data.select(QUERY)
    metrics = data.table("metrics", selection.runs)
    found = over_steps(metrics[metrics["kind"] == "validation"], "perplexity")
    if not found:
        raise Missing("validation records of these runs", QUERY.command)
    return rows("measured", [{**row, "quantity": "validation perplexity", "unit": "per token"} for row in found])


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    axes = figure.add_subplot()
    for index, technique in enumerate(frame["technique"].unique()):
        line = frame[frame["technique"] == technique]
        label = f"{shown(technique)}, n = {line['n'].max()}"
        style = LINES[index % len(LINES)]  # curves that lie on each other stay visible
        axes.plot(line["step"], line["value"], style, marker=MARKERS[index], color=color(index), label=label)
        axes.fill_between(line["step"], line["low"], line["high"], color=color(index), alpha=0.15, lw=0)
    axes.set(xlabel="training step", ylabel="validation perplexity (per token)", yscale="log", title="measured")
    for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatter("{x:.0f}")
    axes.legend()


ITEM = Item(
    title="Perplexity over iterations",
    paper="The curves of CB and CB+FE lie on the baseline's; with SC the last value is slightly higher.",
    caption="Validation perplexity per token after so many steps: mean over seeds, the band is its 95 % confidence "
    "interval (none with one seed). Logarithmic axis.",
    needs=(QUERY,),
    values=values,
    draw=draw,
    size=(COLUMN, 2.5),
)
