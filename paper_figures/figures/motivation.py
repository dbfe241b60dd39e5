"""Why not all data-parallel traffic is compressed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from paper_figures.data import Data
from paper_figures.item import Item, Missing, Query
from paper_figures.measure import interval
from paper_figures.predicted import MOTIVATION, motivation_days
from paper_figures.style import COLUMN, grouped_bars, legend, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUERY = Query("laptop/figure_motivation", ("baseline", "naive_dp"))
DAYS, PERPLEXITY = "pre-training time", "validation perplexity"


def values(data: Data) -> pd.DataFrame:
    stated = data.paper["motivation"]
    base = {"kind": "paper", "quantity": DAYS, "unit": "days", "model": stated["model"]}
    found = [{**base, "technique": row["technique"], "value": row["days"]} for row in stated["rows"]]
    for make in (motivation_days, measured):
        try:
            found += make(data)
        except Missing as missing:
            data.note(f"Missing: {missing}. To make it: {missing.command}")
    return pd.DataFrame(found)


def measured(data: Data) -> list[dict[str, object]]:
    selection = data.select(QUERY)
    found = []
    for technique in selection.techniques:
        value = selection.mean(technique, "validation_token_perplexity")
        if value:
            row = {"kind": "measured", "quantity": PERPLEXITY, "unit": "per token", "technique": technique}
            found.append({**row, "model": selection.runs.iloc[0]["model"], **interval(value)})
    comparison = selection.compare("naive_dp", "validation_token_perplexity")
    if comparison:
        data.note(f"Perplexity of {shown('naive_dp')} against the baseline's: {comparison.text()}.")
    return found


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    quantities = [name for name in (DAYS, PERPLEXITY) if name in set(frame["quantity"])]
    techniques = list(QUERY.techniques)
    for axes, quantity in zip(figure.subplots(1, len(quantities), squeeze=False)[0], quantities, strict=True):
        part = frame[frame["quantity"] == quantity]
        kinds = [kind for kind in ("paper", "predicted", "measured") if kind in set(part["kind"])]
        cells = {(row["kind"], shown(row["technique"])): row.to_dict() for _, row in part.iterrows()}
        grouped_bars(axes, kinds, [shown(name) for name in techniques], cells)
        unit, model = part.iloc[0]["unit"], part.iloc[0]["model"]
        axes.set(ylabel=f"{quantity} ({unit})", title=model)
        axes.set_ylim(top=1.3 * axes.get_ylim()[1])
        legend(axes, [shown(name) for name in techniques], loc="upper right")


ITEM = Item(
    title="Motivation: compressing all data-parallel traffic",
    paper="GPT-2.5B takes 6.97 days in place of 8.00 for 125,000 steps, with an unacceptably worse perplexity.",
    caption="Days at the paper's size as it states and as the simulator predicts them, and perplexity per token "
    "measured at a small size: mean over seeds with a 95 % confidence interval.",
    needs=(MOTIVATION, QUERY),
    values=values,
    draw=draw,
    size=(COLUMN, 2.3),
)
