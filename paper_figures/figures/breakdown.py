"""Where the time of a step goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from analysis.statistics import mean
from optimus_cc.phases import PHASES
from paper_figures.data import Data
from paper_figures.item import Item, Missing, Query
from paper_figures.measure import interval
from paper_figures.predicted import BREAKDOWN, breakdown_parts
from paper_figures.style import HATCHES, PAGE, color, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUERY = Query("laptop/figure_breakdown", ("baseline", "cb", "cb_fe", "cb_fe_sc"), probe="phases")
ORDER = (*PHASES, "bubble", "parameter_gather", "overhead")


def values(data: Data) -> pd.DataFrame:
    found: list[dict[str, object]] = []
    for make in (measured, breakdown_parts):
        try:
            found += make(data)
        except Missing as missing:
            data.note(f"Missing: {missing}. To make it: {missing.command}")
    if not found:
        raise Missing("runs with the probe phases, and the simulator", QUERY.command)
    return pd.DataFrame(found)


def measured(data: Data) -> list[dict[str, object]]:
    """The mean over ranks: what one of them waits for, another one computes."""
    selection = data.select(QUERY)
    probes = data.table("probes", selection.runs)
    probes = probes[probes["probe"] == "phases"]
    model = selection.runs.iloc[0]["model"]
    found = []
    for technique in selection.techniques:
        own = probes[probes["technique"] == technique]
        for phase in PHASES:
            seconds = (own[f"{phase}_fraction"] * own["step_time_s"]).groupby(own["seed"]).mean()
            if seconds.isna().all():
                continue
            cells = interval(mean(seconds.dropna().tolist()))
            row = {"kind": "measured", "model": model, "technique": technique, "quantity": phase, "unit": "s"}
            found.append({**row, **cells})
    return found


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    panels = list(frame.groupby(["kind", "model"], sort=True))
    phases = [phase for phase in ORDER if frame.loc[frame["quantity"] == phase, "value"].sum() > 0]
    for axes, ((kind, model), part) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        techniques = list(dict.fromkeys(part["technique"]))
        for place, technique in enumerate(techniques):
            cells, bottom = part[part["technique"] == technique].set_index("quantity")["value"], 0.0
            for index, phase in enumerate(phases):
                height = float(cells.get(phase, 0.0))
                hatch = HATCHES[kind] + ("xx" if index >= 8 else "")
                axes.bar(place, height, 0.75, bottom=bottom, color=color(index), hatch=hatch, edgecolor="white", lw=0)
                bottom += height
        axes.set_xticks(range(len(techniques)), [shown(name) for name in techniques], rotation=20)
        axes.set_ylim(0, 1.05 * float(part.groupby("technique")["value"].sum().max()))
        axes.set(ylabel="time of a step (s)", title=f"{kind}, {model}")
    from matplotlib.patches import Patch

    handles = [
        Patch(
            facecolor=color(index), hatch="xx" if index >= 8 else "", edgecolor="white", label=phase.replace("_", " ")
        )
        for index, phase in enumerate(phases)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=7)


ITEM = Item(
    title="Execution time of a step, divided",
    paper="Forward and backward passes take most of a step; of the rest, stage-to-stage messages, gradient "
    "all-reduces and the embedding's synchronisation each shrink as CB, SC and FE are added.",
    caption="Measured: mean over ranks of the time in each phase, on probed steps; waiting for another stage counts "
    "as inter-stage. Predicted (hatched): seconds of the critical path of a step at the paper's size. Small runs on "
    "shared cores measure each other.",
    needs=(QUERY, BREAKDOWN),
    values=values,
    draw=draw,
    size=(PAGE, 2.9),
)
