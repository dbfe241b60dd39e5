"""How fast the codec is, by the size of the model's messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from paper_figures.data import Data
from paper_figures.item import Benchmark, Item, Missing
from paper_figures.style import COLUMN, MARKERS, color

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BENCHMARK = Benchmark("laptop/figure_codec_throughput")
GBIT = 8.0
"""Gigabits in a gigabyte."""


def values(data: Data) -> pd.DataFrame:
    codecs = data.tables["codecs"]
    if codecs.empty:
        raise Missing("measurements of codecs", BENCHMARK.command)
    both = 1 / (1 / codecs["encode_gbyte_s"] + 1 / codecs["decode_gbyte_s"])
    codecs = codecs.assign(
        device=codecs["device"].fillna("unknown device"), gbit_s=both * GBIT, message_mb=codecs["logical_bytes"] / 1e6
    )
    # Of a case that was measured several times the newest: folders end with the time.
    keys = ["device", "host", "codec", "rank", "rows", "columns"]
    newest = codecs.sort_values("benchmark", kind="stable").drop_duplicates(keys, keep="last")
    hosts = newest.drop_duplicates(["device", "host"])
    data.note(f"Measured on {', '.join(sorted(hosts['device']))}; {len(newest)} cases.")
    data.note_runs(sorted(newest["benchmark"].unique()))
    found = [
        {
            "kind": "measured",
            "device": row["device"],
            "codec": row["codec"],
            "rank": int(row["rank"]),
            "model": row["model"],
            "message_mb": row["message_mb"],
            "quantity": "encode and decode",
            "unit": "Gb/s",
            "value": row["gbit_s"],
        }
        for _, row in newest.iterrows()
    ]
    stated = data.paper["codec_throughput"]
    paper = {"kind": "paper", "device": stated["device"], "quantity": "encode and decode", "unit": "Gb/s"}
    return pd.DataFrame([*found, {**paper, "value": stated["gbit_s"]}])


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    axes = figure.add_subplot()
    measured = frame[frame["kind"] == "measured"].sort_values("message_mb")
    devices = measured["device"].nunique()
    for index, ((device, codec, rank), line) in enumerate(measured.groupby(["device", "codec", "rank"], sort=True)):
        label = f"{codec.replace('_', '-')}, rank {rank:.0f}{f', {device}' * (devices > 1)}"
        style = "-" if codec == "low_rank" else ":"
        axes.plot(line["message_mb"], line["value"], style, marker=MARKERS[index % 9], color=color(index), label=label)
    for _, row in frame[frame["kind"] == "paper"].iterrows():
        axes.axhline(row["value"], color="black", ls="--", lw=0.8, label=f"{row['device']}, paper's")
    axes.set(xlabel="message (MB)", ylabel="encode + decode (Gb/s)", xscale="log", yscale="log")
    axes.set_title(f"measured on {', '.join(measured['device'].unique())}")
    for formatter in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    figure.legend(loc="outside lower center", ncols=2)


ITEM = Item(
    title="Codec throughput",
    paper="787 Gb/s for compressing and decompressing on an A100, about four times the 200 Gb/s of the wire, over "
    "messages of GPT-2.5B, 8.3B and 175B.",
    caption="Size of the uncompressed message over the time that encoding and decoding it take together. Both axes "
    "are logarithmic. 1 MB = 10^6 bytes.",
    needs=(BENCHMARK,),
    values=values,
    draw=draw,
    size=(COLUMN, 3.0),
)
