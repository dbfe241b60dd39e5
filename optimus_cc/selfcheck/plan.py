"""What the checks run: a tiny model in the user's layout, and the techniques that this layout can have. No torch."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any, Literal

from pydantic import TypeAdapter

from optimus_cc.config import RunConfig, load
from optimus_cc.config.technique import TechniqueConfig

STEPS = 3
"""Optimizer steps of a training whose end is compared."""
RESUME_STEPS = 4
VOCABULARY = 1024
FULL_RANK = 10**6
"""Above any matrix here: the codec is exact to rounding."""
ROUNDING = {"fp32": 1e-4, "bf16": 2.0**-6}
"""What two trainings may differ by that differ in rounding, relative to the value; see :mod:`.compare`."""
REDUCTION_ROUNDING = 1e-5
"""The same for gradients that were added up in another order; they are kept in fp32 in every precision."""
TIMEOUT_S = 120.0
"""Ranks that run a model this small don't wait longer for each other."""

Residual = Literal["carry", "reset", "flush"]
_TECHNIQUE: TypeAdapter[TechniqueConfig] = TypeAdapter(TechniqueConfig)


def tiny(config: RunConfig) -> RunConfig:
    """The user's layout, precision and kind of optimizer on a model, batches and tokens that take seconds."""
    parallel, optimizer = config.parallel, config.optimizer
    tp = parallel.tensor_parallel_size
    heads = math.lcm(4, tp)
    micro_batch_size = 2
    num_microbatches = 2 * parallel.pipeline_parallel_size
    mapping = config.to_mapping()
    model = {
        "name": "selfcheck",
        "num_layers": 2 * parallel.num_virtual_stages,
        "hidden_size": 16 * heads,
        "num_attention_heads": heads,
        "ffn_hidden_size": None,
        "sequence_length": math.lcm(16, tp),
    }
    training = {
        "steps": STEPS,
        "global_batch_size": num_microbatches * micro_batch_size * parallel.data_parallel_size,
        "micro_batch_size": micro_batch_size,
        "validation_interval": 1,
        "validation_batches": 1,
        "log_interval": 1,
        "timeout_s": min(config.training.timeout_s, TIMEOUT_S),
        "checkpoint": {"interval_steps": None, "interval_minutes": None, "keep_last": 2},
        "resume_from": None,
    }
    # With so large an epsilon Adam's update is in proportion to the gradient. At the usual one it would hide a gradient
    # that is a multiple of what it should be, and blow rounding up where gradients are zero but for rounding.
    steady = {"learning_rate": 0.1, "min_learning_rate": 0.05, "warmup_fraction": 0.0, "decay_steps": None}
    return load(
        {
            **mapping,
            "model": {**mapping["model"], **model},
            "technique": {"name": "baseline"},
            "ablation": None,
            "data": {"name": "wikipedia_sample"},
            "tokenizer": {"name": "bpe", "vocabulary_size": VOCABULARY},
            "optimizer": {**mapping["optimizer"], **steady, **({"epsilon": 0.1} if optimizer.name == "adam" else {})},
            "training": {**mapping["training"], **training},
        }
    )


def obstacle(config: RunConfig, technique: TechniqueConfig) -> str | None:
    """Why the layout of ``config`` can't have ``technique``; None if it can."""
    problems = config.with_technique(technique).problems()
    found = next((problem for problem in problems if problem.key.startswith("technique.")), None)
    return None if found is None else f"it needs {found.allowed}"


def technique(**nodes: Any) -> TechniqueConfig:
    """One with these nodes (``cb``, ``fe``, ``sc``), which are switched on; the others are off."""
    return _TECHNIQUE.validate_json(json.dumps({name: {"enabled": True, **keys} for name, keys in nodes.items()}))


BASELINE = technique()
FUSED_EMBEDDING = technique(fe={})


def low_rank(rank: int, *, epilogue_only: bool = False, residual: Residual = "carry") -> TechniqueConfig:
    """Compressed backpropagation with the low-rank codec, factors in fp32."""
    return technique(cb=_low_rank_node(rank) | {"epilogue_only": epilogue_only, "residual": residual})


def lossless_top_k() -> TechniqueConfig:
    """Every message of both directions through the top-k codec, which keeps all entries."""
    codec = {"name": "top_k", "density": 1.0}
    return technique(cb={"codec": codec, "epilogue_only": False, "residual": "carry", "compress_forward": True})


def selective(rank: int, *, warmup_steps: int = 0) -> TechniqueConfig:
    """All data-parallel gradients of matrices through the low-rank codec, on every stage."""
    gate = {"fraction": 1.0, "min_compression_ratio": 1e-3, "warmup_steps": warmup_steps}
    return technique(sc=_low_rank_node(rank) | gate)


def everything(config: RunConfig) -> TechniqueConfig:
    """All techniques that the layout can have, coarse and with error feedback."""
    parts = {"cb": low_rank(1), "fe": FUSED_EMBEDDING, "sc": selective(2, warmup_steps=1)}
    none: Any = BASELINE
    nodes = {name: getattr(part, name) for name, part in parts.items() if obstacle(config, part) is None}
    return replace(none, **nodes)  # type: ignore[no-any-return]


def _low_rank_node(rank: int) -> dict[str, Any]:
    return {"codec": {"name": "low_rank", "rank": rank, "wire_dtype": "fp32"}}
