"""``model``: the GPT's shape, and the compression settings that suit its size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from optimus_cc.config.errors import Problem
from optimus_cc.config.schema import Fraction, Name, NonNegativeInt, PositiveFloat, PositiveInt, strict

VOCABULARY_MULTIPLE = 1024
"""The vocabulary is padded to a multiple of this whatever the tensor-parallel size, so layouts stay interchangeable."""


@strict
class ModelConfig:
    """A GPT decoder (Megatron-core's GPTModel)."""

    name: Name
    num_layers: PositiveInt
    hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    ffn_hidden_size: PositiveInt | None = None
    """Width of the MLP; null: 4 x hidden_size."""
    sequence_length: PositiveInt
    """Tokens in one training sample."""
    tied_embeddings: bool = True
    """The output layer shares the input embedding's weight (GPT-2, and the paper)."""
    position_embedding: Literal["learned", "rope"] = "learned"
    dropout: Fraction = 0.0
    """Of hidden states and of attention."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""
    layernorm_epsilon: Annotated[float, Field(ge=1e-12, le=1)] = 1e-5
    cb_rank: PositiveInt = 16
    """Rank that suits this size for compressed backpropagation (paper: 16)."""
    sc_rank: PositiveInt = 128
    """Rank that suits this size for selective stage compression (paper: 128)."""
    sc_warmup_steps: NonNegativeInt = 30000
    """Steps before selective stage compression starts (paper: 30 000 of 230 000)."""

    @property
    def ffn_width(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def head_width(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.num_attention_heads

    def problems(self) -> Iterator[Problem]:
        if self.hidden_size % self.num_attention_heads:
            yield Problem(
                "model.num_attention_heads",
                self.num_attention_heads,
                f"a divisor of model.hidden_size = {self.hidden_size}",
                "choose a head count that divides the hidden size",
            )
        elif self.position_embedding == "rope" and self.head_width % 2:
            yield Problem(
                "model.position_embedding",
                self.position_embedding,
                f"learned, or an even head width: rope turns pairs of channels, and model.hidden_size / "
                f"model.num_attention_heads = {self.head_width}",
                f"model.hidden_size={2 * self.hidden_size}, or model.position_embedding=learned",
            )

    def num_parameters(self, padded_vocabulary: NonNegativeInt) -> int:
        """Weights of the whole model (biases and LayerNorms included)."""
        h, f = self.hidden_size, self.ffn_width
        attention = h * 3 * h + 3 * h + h * h + h
        mlp = h * f + f + f * h + h
        norms = 2 * 2 * h
        embedding = padded_vocabulary * h * (1 if self.tied_embeddings else 2)
        positions = self.sequence_length * h if self.position_embedding == "learned" else 0
        return self.num_layers * (attention + mlp + norms) + embedding + positions + 2 * h

    def flops_per_token(self, padded_vocabulary: int) -> float:
        """Model FLOPs of one training token, forward and backward, recomputation left out.

        Matrix products only, counted as in Narayanan et al., 2021 (SC'21, appendix): a multiply-add is
        two operations, the backward pass costs twice the forward pass, attention is not halved for causality.
        """
        h, f, s = self.hidden_size, self.ffn_width, self.sequence_length
        layer = 2 * (h * 3 * h + h * h + 2 * h * f) + 4 * s * h
        return 3.0 * (self.num_layers * layer + 2 * h * padded_vocabulary)


def padded_vocabulary_size(vocabulary_size: int) -> int:
    """``vocabulary_size`` rounded up to :data:`VOCABULARY_MULTIPLE`."""
    return -(-vocabulary_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
