"""How the gain depends on the parallel layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from paper_figures.data import Data
from paper_figures.item import Item, Query
from paper_figures.predicted import LAYOUTS, all_gains
from paper_figures.style import PAGE, grouped_bars, legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUERY = Query("laptop/figure_layouts", ("baseline", "cb_fe_sc"))


def values(data: Data) -> pd.DataFrame:
    return all_gains(data, QUERY, "layout", LAYOUTS, "in several layouts")


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    panels = list(frame.groupby(["kind", "model"], sort=True))
    for axes, ((kind, model), part) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        name = "CB+FE+SC"
        cells = {(row["layout"], name): row.to_dict() for _, row in part.iterrows()}
        grouped_bars(axes, list(dict.fromkeys(part["layout"])), [name], cells)
        axes.axhline(0, color="black", lw=0.6)
        axes.set(ylabel="faster than the baseline (%)", title=f"{kind}, {model}", xlabel="layout")
        axes.tick_params(axis="x", rotation=20)
        legend(axes, [name])


ITEM = Item(
    title="Sensitivity to the layout",
    paper="The gain depends on how tensor, pipeline and data parallelism share the GPUs, and is there in all layouts "
    "tried.",
    caption="By how much a step is faster with all three techniques. Measured on one machine, whose ranks share "
    "memory and cores: there is no slow network to save, so the codec's cost shows. Error bars are 95 % intervals "
    "over seeds.",
    needs=(LAYOUTS, QUERY),
    values=values,
    draw=draw,
    size=(PAGE, 2.3),
)
