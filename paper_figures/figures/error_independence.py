"""Are what the codec leaves out and the change of activations independent?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from paper_figures.data import Data
from paper_figures.item import Item, Query
from paper_figures.measure import over_steps
from paper_figures.style import MARKERS, PAGE, color, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUERY = Query("laptop/figure_error_independence", ("cb", "cb_no_epilogue"), probe="error_independence", baseline="cb")
COSINE, RESIDUAL = "cosine similarity", "residual's mean over its rms"


def values(data: Data) -> pd.DataFrame:
    selection = data.select(QUERY)
    probes = data.table("probes", selection.runs)
    probes = probes[probes["probe"] == "error_independence"]
    parts = [{"kind": "paper", "quantity": COSINE, "value": data.paper["error_independence"]["cosine_similarity"]}]
    probes = probes.assign(relative=probes["residual_mean"] / probes["residual_rms"])
    for column, quantity in (("cosine_similarity", COSINE), ("relative", RESIDUAL)):
        # A run's value is the mean over boundaries, micro-batches and replicas, so that n counts seeds.
        per_run = probes.groupby(["technique", "seed", "step"], as_index=False)[column].mean()
        parts += [{"kind": "measured", "quantity": quantity, "unit": "", **row} for row in over_steps(per_run, column)]
    return pd.DataFrame(parts)


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    techniques = list(frame["technique"].dropna().unique())
    for axes, quantity in zip(figure.subplots(1, 2), (COSINE, RESIDUAL), strict=True):
        part = frame[frame["quantity"] == quantity]
        for index, technique in enumerate(techniques):
            line = part[part["technique"] == technique]
            low, high = line["low"], line["high"]
            axes.plot(
                line["step"],
                line["value"],
                marker=MARKERS[index],
                color=color(index),
                label=f"{shown(technique)}, measured",
            )
            axes.fill_between(line["step"], low, high, color=color(index), alpha=0.15, lw=0)
        for value in part.loc[part["kind"] == "paper", "value"]:
            axes.axhline(value, color="black", ls="--", lw=0.8, label="near zero, paper's")
        limit = max(0.1 if quantity == COSINE else 1e-9, 1.1 * part[["value", "low", "high"]].abs().max().max())
        axes.set(xlabel="training step", ylabel=f"{quantity} (no unit)", ylim=(-limit, limit))
        axes.legend()


ITEM = Item(
    title="Error independence over training",
    paper="The cosine similarity of the error and the difference of activations stays near zero throughout training, "
    "and both average near zero.",
    caption="Left: cosine similarity of what the codec left out of a micro-batch's backward message and the change of "
    "the activation to the next one. Right: mean of what was left out, over its root mean square. Means over "
    "boundaries, micro-batches and replicas, then over seeds; bands are 95 % intervals.",
    needs=(QUERY,),
    values=values,
    draw=draw,
    size=(PAGE, 2.2),
)
