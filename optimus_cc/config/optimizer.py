"""``optimizer``: Megatron-core's optimizer and learning-rate schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from optimus_cc.config.errors import Problem
from optimus_cc.config.schema import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, strict


@strict
class OptimizerConfig:
    name: Literal["adam", "sgd"] = "adam"
    learning_rate: PositiveFloat
    """Peak learning rate."""
    min_learning_rate: NonNegativeFloat = 0.0
    """Where the decay ends."""
    warmup_fraction: Fraction = 0.0
    """Share of the steps until the end of the decay that is linear warm-up."""
    decay_steps: PositiveInt | None = None
    """Step at which the decay ends; null: training.steps."""
    decay_style: Literal["cosine", "linear", "constant"] = "cosine"
    weight_decay: NonNegativeFloat = 0.01
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    epsilon: Annotated[float, Field(ge=1e-30, le=1)] = 1e-8
    momentum: Fraction = 0.9
    """Of sgd."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0: no clipping."""

    def schedule_steps(self, training_steps: int) -> tuple[int, int]:
        """(steps of warm-up, step at which the decay ends) in a training of ``training_steps``."""
        decay_steps = self.decay_steps or training_steps
        return int(self.warmup_fraction * decay_steps), decay_steps

    def problems(self) -> Iterator[Problem]:
        if self.min_learning_rate > self.learning_rate:
            yield Problem(
                "optimizer.min_learning_rate",
                self.min_learning_rate,
                f"at most optimizer.learning_rate = {self.learning_rate}",
                "lower the minimum",
            )
