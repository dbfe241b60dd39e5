"""Larger models on more GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from paper_figures.data import Data
from paper_figures.item import Item, Query
from paper_figures.predicted import SCALING, all_gains
from paper_figures.style import MARKERS, PAGE, color, error_bars

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUERY = Query("laptop/figure_scaling", ("baseline", "cb_fe_sc"))


def values(data: Data) -> pd.DataFrame:
    return all_gains(data, QUERY, "ranks", SCALING, "on several numbers of ranks")


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    panels = list(frame.groupby("kind", sort=True))
    for axes, (kind, part) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for index, (model, line) in enumerate(part.groupby("model", sort=False)):
            line = line.sort_values("ranks")
            axes.errorbar(
                line["ranks"],
                line["value"],
                error_bars(line),
                marker=MARKERS[index],
                color=color(index),
                capsize=2,
                label=model,
            )
        axes.axhline(0, color="black", lw=0.6)
        ranks = sorted(part["ranks"].unique())
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [f"{rank:.0f}" for rank in ranks])
        axes.minorticks_off()
        axes.set(xlabel="ranks (one GPU or process each)", ylabel="CB+FE+SC faster than the baseline (%)", title=kind)
        axes.legend()


ITEM = Item(
    title="Scaling to larger models and more GPUs",
    paper="The gain holds for larger models, 175B among them, and for more GPUs.",
    caption="By how much a step is faster with all three techniques, over the number of ranks. More ranks are more "
    "replicas with the mini-batch as it was. A hop between nodes is assumed to take 5 microseconds. "
    "Error bars of measurements are 95 % intervals over seeds.",
    needs=(SCALING, QUERY),
    values=values,
    draw=draw,
    size=(PAGE, 2.3),
)
