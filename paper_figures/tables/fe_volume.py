"""What fused embedding synchronisation saves."""

from __future__ import annotations

from fractions import Fraction

import pandas as pd

from paper_figures.data import Data
from paper_figures.item import Item, Missing, Query, rows

QUERY = Query("laptop/table_pretraining", ("cb", "cb_fe"), baseline="cb")


def volumes(replicas: int) -> tuple[Fraction, Fraction]:
    """Per rank, in units of the embedding: by two all-reduces (of D ranks, then of 2), and by one of 2D ranks."""

    def ring(ranks: int) -> Fraction:
        return Fraction(2 * (ranks - 1), ranks)

    return ring(replicas) + ring(2), ring(2 * replicas)


def row(replicas: int, separate: float, fused: float) -> dict[str, float]:
    return {
        "data_parallel_size": replicas,
        "separate_volumes": separate,
        "fused_volumes": fused,
        "traffic_saved_percent": 100 * (1 - fused / separate),
        "speed_ratio": separate / fused,
    }


def values(data: Data) -> pd.DataFrame:
    stated = data.paper["fused_embedding"]
    at = {
        "data_parallel_size": stated["at_data_parallel"],
        "speed_ratio": stated["speed_ratio"],
        "traffic_saved_percent": stated["traffic_saved_percent"],
    }
    parts = [rows("paper", [at])]
    parts.append(rows("predicted", [row(d, *map(float, volumes(d))) for d in (2, 4, 8, 16, 32)]))
    try:
        parts.append(measured(data))
    except Missing as missing:
        data.note(f"Missing: {missing}. To make it: {missing.command}")
    return pd.concat(parts, ignore_index=True)


def measured(data: Data) -> pd.DataFrame:
    """From the bytes that runs have counted. Only the first and the last stage hold one."""
    selection = data.select(QUERY)
    if selection.missing:
        raise Missing(f"runs of {', '.join(selection.missing)}", QUERY.command)
    first = selection.runs.iloc[0]
    replicas = int(first["data_parallel_size"])
    holders = 2 * replicas * int(first["tensor_parallel_size"])  # first and last stage
    traffic = data.table("traffic", selection.runs)
    sent = traffic[traffic["traffic_class"] == "embedding"].groupby("technique")["wire_bytes_per_step"].mean()
    # Without FE the replicas' all-reduce of the embedding is a part of the gradients': the class holds the second one
    # alone, in which each of two ranks sends the embedding once.
    dp = traffic[traffic["traffic_class"] == "data_parallel"].groupby("technique")["wire_bytes_per_step"].mean()
    fused = sent["cb_fe"] / holders
    saved = ((sent + dp)["cb"] - (sent + dp)["cb_fe"]) / holders
    unit = sent["cb"] / holders
    return rows("measured", [row(replicas, (fused + saved) / unit, fused / unit)])


ITEM = Item(
    title="Volume of the embedding's synchronisation",
    paper="FE turns (3D-2)/D embeddings per rank into (2D-1)/D. The 42.9 % that the paper calls saved at D = 4 is a "
    "ratio of speeds, 1.429; the traffic saved is 30 %.",
    caption="Per rank, in units of the embedding's size. Predicted is exact arithmetic of rings; measured is what all "
    "ranks of a run counted, embedding and gradients together. Traffic saved and speed ratio say the same thing in "
    "two ways: limits are 33.3 % and 1.5.",
    needs=(QUERY,),
    values=values,
    columns=(
        ("kind", "value is"),
        ("data_parallel_size", "replicas D"),
        ("separate_volumes", "two all-reduces (V)"),
        ("fused_volumes", "fused (V)"),
        ("traffic_saved_percent", "traffic saved (%)"),
        ("speed_ratio", "speed ratio"),
    ),
)
