"""Small run configurations, made without Hydra."""

from __future__ import annotations

from typing import Any

from optimus_cc.config import RunConfig, load

LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "dp2": {"data_parallel_size": 2},
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
    "pp4": {"pipeline_parallel_size": 4},
    "pp4_dp2": {"pipeline_parallel_size": 4, "data_parallel_size": 2},
    "tp2_pp2_dp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2},
    "tp2_pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "tp2_pp2_v2_overlap": {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "num_chunks": 2,
        "overlap_p2p": True,
        "batch_p2p": False,
    },
    "pp4_v2": {"pipeline_parallel_size": 4, "num_chunks": 2},
    "pp4_v2_overlap": {"pipeline_parallel_size": 4, "num_chunks": 2, "overlap_p2p": True, "batch_p2p": False},
    "pp2_v2_overlap": {"pipeline_parallel_size": 2, "num_chunks": 2, "overlap_p2p": True, "batch_p2p": False},
    "pp2_dp2_v2_overlap": {
        "pipeline_parallel_size": 2,
        "data_parallel_size": 2,
        "num_chunks": 2,
        "overlap_p2p": True,
        "batch_p2p": False,
    },
}
SEQUENCE, HIDDEN, VOCABULARY = 16, 32, 1024


def low_rank(rank: int = 2, **technique: Any) -> dict[str, Any]:
    """A technique with compressed backpropagation through the low-rank codec."""
    codec = {key: technique.pop(key) for key in ("warm_start", "wire_dtype") if key in technique}
    return {"name": "cb", "cb": {"enabled": True, "codec": {"name": "low_rank", "rank": rank, **codec}, **technique}}


PRESETS: dict[str, dict[str, Any]] = {
    "baseline": {"name": "baseline"},
    "cb": low_rank(),
    "cb_carry": low_rank(residual="carry", epilogue_only=False),
    "cb_cold": low_rank(warm_start=False),
    "cb_topk": {"name": "cb_topk", "cb": {"enabled": True, "codec": {"name": "top_k", "match_rank": 2}}},
    "fe": {"name": "fe", "fe": {"enabled": True}},
    "cb_fe": {**low_rank(), "name": "cb_fe", "fe": {"enabled": True}},
    "sc": {
        "name": "sc",
        "sc": {"enabled": True, "fraction": 0.5, "warmup_steps": 2, "codec": {"name": "low_rank", "rank": 2}},
    },
    "naive_dp": {
        "name": "naive_dp",
        "sc": {"enabled": True, "fraction": 1.0, "warmup_steps": 0, "codec": {"name": "low_rank", "rank": 2}},
    },
}
PRESETS["cb_fe_sc"] = {**PRESETS["cb_fe"], "name": "cb_fe_sc", "sc": PRESETS["sc"]["sc"]}
NEED_REPLICAS = {"sc", "naive_dp", "cb_fe_sc"}


def tiny(
    layout: str | dict[str, Any] = "single",
    technique: dict[str, Any] | None = None,
    *,
    steps: int = 4,
    num_microbatches: int | None = None,
    micro_batch_size: int = 2,
    model: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    **training: Any,
) -> RunConfig:
    """A GPT that a rank trains in milliseconds: 4 layers, or as many as there are chunks.

    ``num_microbatches``: twice the stages, at least 4, unless given: every schedule has a steady state then.
    """
    sizes = {**(LAYOUTS[layout] if isinstance(layout, str) else layout), **(parallel or {})}
    stages = sizes.get("pipeline_parallel_size", 1)
    num_microbatches = num_microbatches or max(4, 2 * stages)
    return load(
        {
            "task": {"name": "train"},
            "model": {
                "name": "test",
                "num_layers": max(4, stages * sizes.get("num_chunks", 1)),
                "hidden_size": HIDDEN,
                "num_attention_heads": 4,
                "sequence_length": SEQUENCE,
                **(model or {}),
            },
            "parallel": sizes,
            "technique": technique or {"name": "baseline"},
            "data": {"name": "wikipedia_sample"},
            "tokenizer": {"name": "bpe"},
            "optimizer": {"learning_rate": 1e-2, "warmup_fraction": 0.25, **(optimizer or {})},
            "training": {
                "steps": steps,
                "global_batch_size": num_microbatches * micro_batch_size * sizes.get("data_parallel_size", 1),
                "micro_batch_size": micro_batch_size,
                "validation_interval": 2,
                "validation_batches": 1,
                **training,
            },
            "cluster": {"name": "test", "ranks_per_node": 16},
        }
    )
