"""How the gain depends on the network."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from paper_figures.data import Data
from paper_figures.item import Item
from paper_figures.predicted import NETWORK, network_gains
from paper_figures.style import COLUMN, MARKERS, color, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def values(data: Data) -> pd.DataFrame:
    return pd.DataFrame(network_gains(data))


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    axes = figure.add_subplot()
    predicted = frame[frame["kind"] == "predicted"]
    for index, (technique, line) in enumerate(predicted.groupby("technique", sort=False)):
        line = line.sort_values("gbit_s")
        label = f"{shown(technique)}, predicted"
        axes.plot(line["gbit_s"], line["value"], marker=MARKERS[index], color=color(index), label=label)
    for _, row in frame[frame["kind"] == "paper"].iterrows():
        axes.axvline(row["gbit_s"], color="black", ls="--", lw=0.8, label="same from here on, paper's")
    axes.axhline(0, color="black", lw=0.6)
    axes.set(xlabel="bandwidth between nodes (Gb/s)", ylabel="faster than the baseline (%)", xscale="log")
    ticks = sorted(predicted["gbit_s"].unique())
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.legend()


ITEM = Item(
    title="Sensitivity to the network's bandwidth",
    paper="From 100 Gb/s on, compressing the epilogue alone gives the same speed as compressing every backward "
    "message.",
    caption="By how much a predicted step of the paper's GPT-8.3B is faster than the baseline on the same network, "
    "over the bandwidth of one node. Logarithmic axis.",
    needs=(NETWORK,),
    values=values,
    draw=draw,
    size=(COLUMN, 2.4),
)
