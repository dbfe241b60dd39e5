"""Compressed backpropagation with its parts taken away."""

from __future__ import annotations

import pandas as pd

from paper_figures.data import Data
from paper_figures.item import Item, Query
from paper_figures.measure import against_baseline

QUERY = Query(
    "laptop/reproduce",
    ("baseline", "cb", "cb_no_lazy_error", "cb_no_epilogue", "cb_naive", "cb_topk"),
    extra=("cb_carry", "cb_flush"),
)
PARTS = {
    "baseline": ("-", "-", "-", "-"),
    "cb": ("low-rank", "yes", "yes", "reset"),
    "cb_no_lazy_error": ("low-rank", "no", "yes", "-"),
    "cb_no_epilogue": ("low-rank", "yes", "no", "reset"),
    "cb_naive": ("low-rank", "no", "no", "-"),
    "cb_topk": ("top-k", "yes", "yes", "reset"),
    "cb_carry": ("low-rank", "yes", "yes", "carry"),
    "cb_flush": ("low-rank", "yes", "yes", "flush"),
}
"""What each technique's name means: codec, lazy error propagation, epilogue only, residual."""


def values(data: Data) -> pd.DataFrame:
    selection = data.select(QUERY)
    traffic = data.table("traffic", selection.runs)
    sent = traffic[traffic["traffic_class"] == "pipeline_backward"].groupby("technique")["wire_bytes_per_step"].mean()
    found = []
    for row in against_baseline(selection, selection.techniques):
        codec, lazy, epilogue, residual = PARTS[row["technique"]]
        parts = {"codec": codec, "lazy_error": lazy, "epilogue_only": epilogue, "residual": residual}
        found.append({**row, **parts, "backward_mb_per_step": sent.get(row["technique"], float("nan")) / 1e6})
    return pd.DataFrame(found)


ITEM = Item(
    title="Ablation of compressed backpropagation",
    paper="Without lazy error propagation, without epilogue-only compression, or with top-k in place of low-rank "
    "factors perplexity is worse; compressing every backward message naively diverges.",
    caption="Perplexity per token against the baseline's over the same seeds; ± is the half width of a 95 % interval. "
    "Volume is what all ranks send backward between stages in one step. Residual: what happens at the end of a "
    "mini-batch to what the last message left out.",
    needs=(QUERY,),
    values=values,
    columns=(
        ("kind", "value is"),
        ("technique", "technique"),
        ("codec", "codec"),
        ("lazy_error", "lazy error propagation"),
        ("epilogue_only", "epilogue only"),
        ("residual", "residual"),
        ("backward_mb_per_step", "sent backward (MB/step)"),
        ("perplexity", "perplexity (per token)"),
        ("perplexity_half_width", "± (per token)"),
        ("seeds", "seeds"),
        ("perplexity_verdict", "against the baseline"),
    ),
)
