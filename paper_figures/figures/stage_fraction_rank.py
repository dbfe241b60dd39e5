"""Two dials of selective stage compression: how many stages, and which rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from paper_figures.data import Data
from paper_figures.item import Item, Missing, Query
from paper_figures.measure import interval
from paper_figures.style import COLUMN, MARKERS, color, error_bars

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from analysis.statistics import Mean

RECIPE = "laptop/figure_stage_fraction_rank"
FRACTION, RANK = "stages, usual rank", "rank, usual stages"


def values(data: Data) -> pd.DataFrame:
    points = dials(data)
    if len({(point["sc_rank"], point["sc_fraction"]) for point in points}) < 2:
        raise Missing("runs of CB+FE+SC with several stage fractions or ranks", f"python run.py experiment={RECIPE}")
    return pd.DataFrame(points)


def dials(data: Data) -> list[dict[str, object]]:
    """A point for each setting of a dial: what data-parallel ranks send, and the perplexity."""
    from analysis import statistics

    runs = data.runs
    runs = runs[runs["technique"].str.startswith("cb_fe_sc", na=False) & runs["sc_rank"].notna()]
    runs = runs.dropna(subset=["setting", "validation_token_perplexity"])
    if runs.empty:
        return []
    counts = runs.groupby("setting")["variant"].nunique().sort_index().sort_values(kind="stable")
    runs = runs[runs["setting"] == counts.index[-1]]
    data.note_runs(runs["run"])
    first = runs.iloc[0]
    data.note(f"Measured: {first['model']}, {first['layout']}, {first['total_steps']} steps.")
    traffic = data.tables["traffic"]
    sent = traffic[traffic["traffic_class"] == "data_parallel"].set_index("run")["wire_bytes_per_step"]
    usual = runs.loc[runs["usual_ranks"].fillna(False), "sc_rank"]
    found: list[dict[str, object]] = []
    for (rank, fraction), group in runs.groupby(["sc_rank", "sc_fraction"]):
        at_usual_rank = len(usual) > 0 and rank == usual.iloc[0]
        dial_names = [FRACTION] if at_usual_rank else []
        dial_names += [RANK] if fraction == data.paper["setup"]["sc_stage_fraction"] else []
        perplexity: Mean = statistics.mean(group["validation_token_perplexity"].tolist())
        for dial in dial_names:
            found.append(
                {
                    "kind": "measured",
                    "dial": dial,
                    "sc_rank": int(rank),
                    "sc_fraction": fraction,
                    "sent_mb_per_step": sent.reindex(group["run"]).mean() / 1e6,
                    "quantity": "validation perplexity",
                    "unit": "per token",
                    **interval(perplexity),
                }
            )
    return found


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    axes = figure.add_subplot()
    for index, (dial, line) in enumerate(frame.groupby("dial", sort=True)):
        line = line.sort_values("sent_mb_per_step")
        x, y = line["sent_mb_per_step"], line["value"]
        axes.errorbar(
            x, y, error_bars(line), marker=MARKERS[index], color=color(index), capsize=2, label=f"{dial}, measured"
        )
        for _, row in line.iterrows():
            text = f"{row['sc_fraction']:.0%}" if dial == FRACTION else f"r{row['sc_rank']}"
            offset = (3, 4 + 8 * index)
            axes.annotate(
                text, (row["sent_mb_per_step"], row["value"]), offset, textcoords="offset points", fontsize=5.5
            )
    axes.set(xlabel="sent by data-parallel ranks (MB/step, all ranks)", ylabel="validation perplexity (per token)")
    axes.legend()


ITEM = Item(
    title="Stage fraction against rank",
    paper="At the same speed, compressing fewer stages at a fixed rank gives a better perplexity than compressing all "
    "at a lower rank.",
    caption="Each point is a setting of one dial with the other at its usual value (per cent: of stages; r: rank). To "
    "the left is faster on a slow network, down is better. Error bars are 95 % intervals over seeds. 1 MB = 10^6 "
    "bytes.",
    needs=(Query(RECIPE, ("cb_fe_sc",)),),
    values=values,
    draw=draw,
    size=(COLUMN, 2.5),
)
