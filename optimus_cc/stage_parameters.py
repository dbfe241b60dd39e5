"""How many parameters each rank of a layout holds. Pure arithmetic over Megatron-core's GPTModel, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from optimus_cc.config.model import ModelConfig
from optimus_cc.config.parallel import ParallelConfig


@dataclass(frozen=True)
class StageParameters:
    """Parameters of one virtual stage that a single tensor-parallel rank holds."""

    sharded: int
    """Weights and biases of layers that the tensor-parallel ranks divide among them, word embeddings left out."""
    replicated: int
    """What each tensor-parallel rank holds a copy of: LayerNorms, biases of row-parallel layers, positions."""
    word_embedding: int
    """Rows of the vocabulary: of the input embedding, the output layer, or both where they are one or two."""

    @property
    def total(self) -> int:
        return self.sharded + self.replicated + self.word_embedding


def stage_parameters(
    model: ModelConfig, parallel: ParallelConfig, padded_vocabulary: int, virtual_stage: int
) -> StageParameters:
    """Parameters per rank of ``virtual_stage`` (chunk c of pipeline rank p is stage c * P + p).

    With tied embeddings and more than one stage the last stage holds its own copy of the word embedding.
    """
    tp, stages = parallel.tensor_parallel_size, parallel.num_virtual_stages
    h, f, layers = model.hidden_size, model.ffn_width, model.num_layers // stages
    first, last = virtual_stage == 0, virtual_stage == stages - 1
    sharded = layers * ((3 * h * h + 3 * h + h * h) // tp + (h * f + f + f * h) // tp)
    replicated = layers * (h + h + 2 * 2 * h)
    if first and model.position_embedding == "learned":
        replicated += model.sequence_length * h
    if last:
        replicated += 2 * h
    copies = first + (last and not (first and model.tied_embeddings))
    return StageParameters(sharded, replicated, copies * padded_vocabulary * h // tp)
