"""Pre-training time and perplexity."""

from __future__ import annotations

import pandas as pd

from paper_figures.data import Data
from paper_figures.item import Item, Missing, Query, rows
from paper_figures.measure import against_baseline
from paper_figures.predicted import PRETRAINING, pretraining_days

QUERY = Query("laptop/table_pretraining", ("baseline", "cb", "cb_fe", "cb_fe_sc"))


def values(data: Data) -> pd.DataFrame:
    paper = data.paper["pretraining"]["rows"]
    parts = [rows("paper", [{**row, "source": data.paper["pretraining"]["from"]} for row in paper])]
    for make in (lambda: rows("predicted", pretraining_days(data)), lambda: measured(data)):
        try:
            parts.append(make())
        except Missing as missing:
            data.note(f"Missing: {missing}. To make it: {missing.command}")
    return pd.concat(parts, ignore_index=True)


def measured(data: Data) -> pd.DataFrame:
    selection = data.select(QUERY)
    return pd.DataFrame(against_baseline(selection, selection.techniques))


ITEM = Item(
    title="Pre-training time and perplexity",
    paper="CB+FE makes training 13.5 to 15.1 % faster at the same perplexity; with SC, GPT-8.3B takes 25.72 days in "
    "place of 37.27 and its perplexity goes from 8.10 to 8.20.",
    caption="Days and perplexity at the paper's size as it states them and as the simulator predicts them, and what "
    "was measured here at a small size. ± is the half width of a 95 % confidence interval over seeds. Perplexity is "
    "per token, which makes numbers of different corpora and tokenizers incomparable.",
    needs=(PRETRAINING, QUERY),
    values=values,
    columns=(
        ("kind", "value is"),
        ("model", "model"),
        ("technique", "technique"),
        ("bandwidth", "bandwidth"),
        ("days", "days"),
        ("faster_percent", "faster (%)"),
        ("step_time_s", "step (s)"),
        ("step_time_half_width_s", "± (s)"),
        ("perplexity", "perplexity (per token)"),
        ("perplexity_half_width", "± (per token)"),
        ("seeds", "seeds"),
        ("perplexity_verdict", "perplexity against the baseline's"),
    ),
)
