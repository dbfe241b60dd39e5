"""One step of the pipeline on a time axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from paper_figures.data import Data
from paper_figures.item import Item
from paper_figures.predicted import TIMELINE, timeline_events
from paper_figures.style import PAGE, color, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def values(data: Data) -> pd.DataFrame:
    return pd.DataFrame(timeline_events(data))


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    from matplotlib.patches import Patch

    techniques = list(dict.fromkeys(frame["technique"]))
    events = list(dict.fromkeys(frame["event"]))
    end = frame["end_s"].max()
    for axes, technique in zip(
        figure.subplots(len(techniques), 1, sharex=True, squeeze=False)[:, 0], techniques, strict=True
    ):
        part = frame[frame["technique"] == technique]
        for index, event in enumerate(events):
            bars = part[part["event"] == event]
            widths = bars["end_s"] - bars["begin_s"]
            height = 0.8 if event in ("forward", "backward") else 0.45
            axes.barh(
                bars["stage"], widths, height, left=bars["begin_s"], color=color(index), edgecolor="white", lw=0.15
            )
        axes.invert_yaxis()
        axes.set_yticks(sorted(part["stage"].unique()))
        axes.set(ylabel="stage", xlim=(0, end), title=f"{shown(technique)}, predicted: {part['end_s'].max():.2f} s")
        axes.grid(False)
    axes.set_xlabel("time (s)")
    handles = [Patch(color=color(index), label=event.replace("_", " ")) for index, event in enumerate(events)]
    figure.legend(handles=handles, loc="outside lower center", ncols=8)


ITEM = Item(
    title="Pipeline timeline",
    paper="The messages of the cool-down are the ones that no computation hides; what CB, FE and SC shorten lies "
    "there.",
    caption="A predicted step of the paper's GPT-8.3B with few micro-batches, so that single passes can be seen: wide "
    "bars are passes, narrow ones messages (on the sender's row), codecs, reductions and the optimizer.",
    needs=(TIMELINE,),
    values=values,
    draw=draw,
    size=(PAGE, 3.4),
)
