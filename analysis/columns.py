"""Columns of the tables that ``python -m analysis collect`` writes: docs/analysis.md has them too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from optimus_cc.phases import PHASES

SCHEMA = 1
"""Counted up when the meaning of a column changes, so that tables of before are not gone on with."""


@dataclass(frozen=True)
class Column:
    """One column. ``dtype`` is pandas': ``string``, ``Int64``, ``float64`` or ``boolean``."""

    dtype: str
    unit: str
    """Empty: it has none."""
    meaning: str


def _text(meaning: str) -> Column:
    return Column("string", "", meaning)


def _count(meaning: str, unit: str = "") -> Column:
    return Column("Int64", unit, meaning)


def _real(unit: str, meaning: str) -> Column:
    return Column("float64", unit, meaning)


_RUN = {"run": _text("the run's id")}
_PLACE = {
    "rank": _count("global rank"),
    "stage": _count("its pipeline stage"),
    "data_parallel_rank": _count("its data-parallel rank"),
    "tensor_parallel_rank": _count("its tensor-parallel rank"),
}
MEMORY = (
    "peak",
    "baseline",
    "weights",
    "gradients",
    "optimizer_state",
    "activations",
    "workspaces",
    "residuals",
    "resident_peak",
)
INDEPENDENCE = (
    "residual_mean",
    "residual_rms",
    "activation_difference_mean",
    "activation_difference_rms",
)

TABLES: Mapping[str, Mapping[str, Column]] = {
    "runs": {
        **_RUN,
        "folder": _text("where it lies"),
        "state": _text("queued, running, abandoned, preempted, cancelled, failed, finished, or unknown"),
        "cause": _text("why it ended, if it did not finish"),
        "started": _text("when it was made, UTC, ISO 8601"),
        "model": _text("name of the model"),
        "layout": _text("parallel layout"),
        "technique": _text("what is compressed, and how that differs from the paper's choice; ranks are not told"),
        "seed": _count("of weights, data order and codecs"),
        "setting": _text("same for runs that differ in technique and seed alone"),
        "variant": _text("same for runs of the same technique with the same parameters"),
        "usual_ranks": Column("boolean", "", "whether codecs have the ranks that suit the model"),
        "cb_rank": _count("rank of compressed backpropagation's codec, if it has one"),
        "sc_rank": _count("rank of selective stage compression's codec, if it has one"),
        "sc_fraction": _real("", "fraction of the stages that compress their gradients; 0: none"),
        "total_steps": _count("training steps asked for"),
        "steps": _count("training steps made"),
        "num_parameters": _count("parameters of the model"),
        "num_layers": _count("layers of the model"),
        "hidden_size": _count("width of the model"),
        "sequence_length": _count("length of a sequence", "tokens"),
        "global_batch_size": _count("size of a mini-batch", "sequences"),
        "micro_batch_size": _count("size of a micro-batch", "sequences"),
        "tensor_parallel_size": _count("ranks that share a layer"),
        "pipeline_parallel_size": _count("pipeline stages"),
        "data_parallel_size": _count("replicas"),
        "validation_loss": _real("nats per token", "of the last validation"),
        "validation_token_perplexity": _real("per token", "of the last validation"),
        "train_loss": _real("nats per token", "of the last training record"),
        "step_time_mean_s": _real("s", "mean time of a step, the first five left out"),
        "step_time_median_s": _real("s", "its median"),
        "step_time_p95_s": _real("s", "its 95th percentile"),
        "tokens_per_s": _real("tokens/s", "at the median step time"),
        "wall_s": _real("s", "from the trainer's start to its end, all attempts"),
        "device": _text("cpu or cuda"),
        "host": _text("where it was made"),
        "commit": _text("of the code"),
        "stamp": _text("of the files that were read; collect reads a folder again when it changes"),
    },
    "metrics": {
        **_RUN,
        "kind": _text("train or validation"),
        "step": _count("steps made by then"),
        "loss": _real("nats per token", "mean since the last record; of all batches of a validation"),
        "perplexity": _real("per token", "of that loss"),
        "grad_norm": _real("", "norm of the whole gradient, before clipping"),
        "learning_rate": _real("", "at that step"),
        "tokens_per_s": _real("tokens/s", "since the last record"),
        "tflop_per_s_per_rank": _real("TFLOP/s", "of one rank, by the model's arithmetic"),
        "step_time_s": _real("s", "mean since the last record"),
    },
    "traffic": {
        **_RUN,
        "traffic_class": _text("see docs/architecture.md"),
        "logical_bytes_per_step": _real("bytes", "what all ranks would have sent in a step, uncompressed"),
        "wire_bytes_per_step": _real("bytes", "what they did send"),
    },
    "evaluation": {
        **_RUN,
        "kind": _text("zero_shot or perplexity"),
        "step": _count("of the checkpoint that was evaluated"),
        "task": _text("of a zero-shot evaluation"),
        "metric": _text("name of the measure, which says its unit"),
        "value": _real("", "what was measured"),
        "standard_error": _real("", "of that value over the items"),
        "items": _count("how many were evaluated; of a perplexity tokens"),
        "limit": _count("of items, if not all were to be evaluated"),
        "source": _text("the file it was read from"),
    },
    "probes": {
        **_RUN,
        "probe": _text("error_independence, memory or phases: docs/probes.md"),
        "step": _count("the step that was measured"),
        **_PLACE,
        "boundary": _count("between this stage and the next"),
        "microbatch": _count("index in the mini-batch"),
        "cosine_similarity": _real("", "of what a codec left out and the change of activations"),
        **{name: _real("", f"{name.replace('_', ' ')}, in units of the message") for name in INDEPENDENCE},
        **{f"{name}_bytes": _real("bytes", f"memory: {name.replace('_', ' ')}") for name in MEMORY},
        "step_time_s": _real("s", "time of the measured step"),
        **{f"{name}_fraction": _real("", f"of that time: {name.replace('_', ' ')}") for name in PHASES},
    },
    "codecs": {
        "benchmark": _text("name of the benchmark's folder"),
        "model": _text("whose message was encoded, if the shape is that of a model"),
        "codec": _text("low_rank or top_k"),
        "rank": _count("of the codec, or at whose volume it sends"),
        "rows": _count("of the message's matrix"),
        "columns": _count("of the message's matrix"),
        "logical_bytes": _real("bytes", "of the message"),
        "wire_bytes": _real("bytes", "of its encoding"),
        "copy_gbyte_s": _real("GB/s", "a plain copy, counted in bytes of the message"),
        "encode_gbyte_s": _real("GB/s", "encoding, counted likewise"),
        "decode_gbyte_s": _real("GB/s", "decoding, counted likewise"),
        "device": _text("cpu or cuda"),
        "host": _text("where it was measured"),
    },
}


def empty(table: str) -> pd.DataFrame:
    """The table without rows."""
    return pd.DataFrame({name: pd.Series(dtype=column.dtype) for name, column in TABLES[table].items()})
