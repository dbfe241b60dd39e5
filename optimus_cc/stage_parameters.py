"""Which parameters each rank of a layout holds. Pure arithmetic over Megatron-core's GPTModel, without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from optimus_cc.config.model import ModelConfig
from optimus_cc.config.parallel import ParallelConfig

_WORD_EMBEDDINGS = ("embedding.word_embeddings.weight", "output_layer.weight")
_POSITIONS = "embedding.position_embeddings.weight"


@dataclass(frozen=True)
class Weight:
    """One parameter as a single tensor-parallel rank holds it."""

    name: str
    shape: tuple[int, ...]
    sharded: bool = False
    """Tensor-parallel ranks divide it among them; else each holds a copy."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_word_embedding(self) -> bool:
        """Rows of the vocabulary: of the input embedding or of the output layer."""
        return self.name in _WORD_EMBEDDINGS

    @property
    def is_position_embedding(self) -> bool:
        return self.name == _POSITIONS


@dataclass(frozen=True)
class StageParameters:
    """Parameters of one virtual stage that a single tensor-parallel rank holds."""

    weights: tuple[Weight, ...]
    """In the order of Megatron-core's ``named_parameters``, with its own (not Transformer Engine's) layers."""

    @property
    def sharded(self) -> int:
        """Weights and biases that the tensor-parallel ranks divide among them, word embeddings left out."""
        return sum(weight.numel for weight in self.weights if weight.sharded and not weight.is_word_embedding)

    @property
    def replicated(self) -> int:
        """What each tensor-parallel rank holds a copy of: LayerNorms, biases of row-parallel layers, positions."""
        return sum(weight.numel for weight in self.weights if not weight.sharded)

    @property
    def word_embedding(self) -> int:
        """Rows of the vocabulary: of the input embedding, the output layer, or both where they are one or two."""
        return sum(weight.numel for weight in self.weights if weight.is_word_embedding)

    @cached_property
    def total(self) -> int:
        return sum(weight.numel for weight in self.weights)


def stage_parameters(
    model: ModelConfig, parallel: ParallelConfig, padded_vocabulary: int, virtual_stage: int
) -> StageParameters:
    """Parameters per rank of ``virtual_stage`` (chunk c of pipeline rank p is stage c * P + p).

    With tied embeddings and more than one stage the last stage holds its own copy of the word embedding.
    """
    stages = parallel.num_virtual_stages
    ends = virtual_stage == 0, virtual_stage == stages - 1
    return _stage_parameters(model, parallel.tensor_parallel_size, stages, padded_vocabulary, *ends)


@lru_cache(maxsize=64)
def _stage_parameters(
    model: ModelConfig, tp: int, stages: int, padded_vocabulary: int, first: bool, last: bool
) -> StageParameters:
    hidden = model.hidden_size
    vocabulary = (padded_vocabulary // tp, hidden)
    embedding, output = (Weight(name, vocabulary, sharded=True) for name in _WORD_EMBEDDINGS)
    weights: list[Weight] = []
    if first:
        weights.append(embedding)
        if model.position_embedding == "learned":
            weights.append(Weight(_POSITIONS, (model.sequence_length, hidden)))
    for layer in range(model.num_layers // stages):
        weights += _layer(f"decoder.layers.{layer}.", hidden, model.ffn_width, tp)
    if last:
        weights += _norm("decoder.final_layernorm.", hidden)
        if not (first and model.tied_embeddings):
            weights.append(output)
    return StageParameters(tuple(weights))


def layer_matrices(model: ModelConfig, parallel: ParallelConfig) -> list[tuple[int, ...]]:
    """(rows, columns) of the weights of one layer on one tensor-parallel rank."""
    weights = _layer("", model.hidden_size, model.ffn_width, parallel.tensor_parallel_size)
    return [weight.shape for weight in weights if len(weight.shape) == 2]


def _layer(prefix: str, hidden: int, width: int, tp: int) -> Iterator[Weight]:
    yield from _norm(f"{prefix}input_layernorm.", hidden)
    yield from _row_parallel(f"{prefix}self_attention.linear_proj.", hidden, hidden // tp)
    yield from _column_parallel(f"{prefix}self_attention.linear_qkv.", 3 * hidden // tp, hidden)
    yield from _norm(f"{prefix}pre_mlp_layernorm.", hidden)
    yield from _column_parallel(f"{prefix}mlp.linear_fc1.", width // tp, hidden)
    yield from _row_parallel(f"{prefix}mlp.linear_fc2.", hidden, width // tp)


def _norm(prefix: str, hidden: int) -> Iterator[Weight]:
    yield Weight(f"{prefix}weight", (hidden,))
    yield Weight(f"{prefix}bias", (hidden,))


def _column_parallel(prefix: str, rows: int, columns: int) -> Iterator[Weight]:
    yield Weight(f"{prefix}weight", (rows, columns), sharded=True)
    yield Weight(f"{prefix}bias", (rows,), sharded=True)


def _row_parallel(prefix: str, rows: int, columns: int) -> Iterator[Weight]:
    yield Weight(f"{prefix}weight", (rows, columns), sharded=True)
    yield Weight(f"{prefix}bias", (rows,))
