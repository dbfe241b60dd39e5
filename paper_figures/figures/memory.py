"""Peak memory, divided."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from analysis.statistics import mean
from paper_figures.data import Data
from paper_figures.item import Item, Query
from paper_figures.measure import interval
from paper_figures.style import PAGE, color, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUERY = Query("laptop/figure_memory", ("baseline", "cb", "cb_fe", "cb_fe_sc", "naive_dp"), probe="memory")
PARTS = ("weights", "gradients", "optimizer_state", "activations", "workspaces", "residuals")


def values(data: Data) -> pd.DataFrame:
    selection = data.select(QUERY)
    probes = data.table("probes", selection.runs)
    probes = probes[probes["probe"] == "memory"]
    columns = [f"{part}_bytes" for part in (*PARTS, "baseline", "peak")]
    # Of each stage the most over steps and replicas; a figure of one rank would hide the others.
    per_run = probes.groupby(["technique", "seed", "stage"], as_index=False)[columns].max()
    found = []
    for (technique, stage), group in per_run.groupby(["technique", "stage"]):
        base = {"kind": "measured", "technique": technique, "stage": int(stage)}
        for part in (*PARTS, "baseline", "peak"):
            numbers = (group[f"{part}_bytes"] / 1e6).tolist()
            found.append({**base, "quantity": part, "unit": "MB", **interval(mean(numbers))})
        for part in ("workspaces", "residuals"):
            shares = (100 * group[f"{part}_bytes"] / group["baseline_bytes"]).tolist()
            found.append({**base, "quantity": f"{part} over baseline", "unit": "%", **interval(mean(shares))})
    stated = data.paper["memory"]
    low, high = stated["workspace_percent"]
    paper = {"kind": "paper", "quantity": "workspaces over baseline", "unit": "%", "low": low, "high": high}
    found.append({**paper, "value": (low + high) / 2})
    lazy = {"kind": "paper", "quantity": "residuals over baseline", "unit": "%"}
    found.append({**lazy, "value": stated["lazy_error_percent"]})
    return pd.DataFrame(found)


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    bars, share = figure.subplots(1, 2, width_ratios=(1.5, 1))
    measured = frame[frame["kind"] == "measured"]
    techniques = [name for name in QUERY.techniques if name in set(measured["technique"])]
    stages = sorted(measured["stage"].unique())
    width = 0.8 / len(stages)
    table = measured.pivot_table(index=["technique", "stage"], columns="quantity", values="value")
    for place, technique in enumerate(techniques):
        for number, stage in enumerate(stages):
            bottom, cells = 0.0, table.loc[(technique, stage)]
            x = place + (number - (len(stages) - 1) / 2) * width
            for index, part in enumerate(PARTS):
                label = part.replace("_", " ") if place == number == 0 else None
                bars.bar(x, cells[part], width * 0.9, bottom=bottom, color=color(index), label=label)
                bottom += cells[part]
            bars.plot(x, cells["peak"], marker="_", color="black", label="peak" if place == number == 0 else None)
    bars.set_xticks(range(len(techniques)), [shown(name) for name in techniques])
    bars.set(ylabel="memory of a rank (MB)", title=f"measured; bars are stages 0 to {int(stages[-1])}")
    bars.set_ylim(top=1.35 * bars.get_ylim()[1])
    bars.legend(ncols=4, loc="upper right")
    for index, quantity in enumerate(("workspaces over baseline", "residuals over baseline")):
        part = measured[(measured["quantity"] == quantity) & (measured["technique"] != "baseline")]
        most = part.groupby("technique")["value"].max()
        shown_names = [name for name in techniques if name in most]
        offsets = [place + (index - 0.5) * 0.35 for place in range(len(shown_names))]
        label = f"{quantity.split()[0]}, measured"
        share.bar(offsets, [most[name] for name in shown_names], 0.33, color=color(4 + index), label=label)
        share.set_xticks(range(len(shown_names)), [shown(name) for name in shown_names])
    stated = frame[(frame["kind"] == "paper") & frame["low"].notna()].iloc[0]
    share.axhspan(stated["low"], stated["high"], color="black", alpha=0.12, lw=0, label="workspaces, paper's")
    for value in frame.loc[(frame["kind"] == "paper") & frame["low"].isna(), "value"]:
        share.axhline(value, color="black", ls="--", lw=0.8, label="residuals, paper's")
    share.set(ylabel="of training's own memory (%)", title="stage where it is most")
    share.legend()


ITEM = Item(
    title="Peak memory",
    paper="Workspaces of the low-rank codec add 5 to 10 % to the peak, stored lazy errors about 1 %.",
    caption="Left: what the peak of a rank is made of, a bar for each pipeline stage; the dash is the peak, which is "
    "less than the sum where the parts do not come at the same moment. Right: what codecs need while they run and "
    "what they keep, over the memory of training without them, in the stage where that is most. 1 MB = 10^6 bytes. A "
    "small model has small activations and no large weights beside which a memory would vanish.",
    needs=(QUERY,),
    values=values,
    draw=draw,
    size=(PAGE, 2.6),
)
