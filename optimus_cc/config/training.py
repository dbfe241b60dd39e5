"""``training``: length, batches, precision, validation and what to do when something goes wrong."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from optimus_cc.config.schema import NonNegativeInt, PositiveFloat, PositiveInt, strict


@strict
class CheckpointConfig:
    """When a run saves what it needs to go on; it always does at its end and when it is asked to stop."""

    interval_steps: PositiveInt | None = None
    """Steps between checkpoints; null: by time only."""
    interval_minutes: PositiveFloat | None = 15.0
    """Minutes since the last checkpoint after which the next one is due; null: by steps only."""
    keep_last: PositiveInt = 2
    """Checkpoints that are kept, the newest ones."""


@strict
class TrainingConfig:
    steps: PositiveInt
    """Optimizer steps."""
    global_batch_size: PositiveInt
    """Sequences in one step, over all data-parallel ranks."""
    micro_batch_size: PositiveInt
    """Sequences in one forward pass of one rank."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1234
    precision: Literal["fp32", "bf16"] = "fp32"
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation: none, attention only, or whole layers."""
    validation_interval: PositiveInt = 50
    """Steps between validation passes; the last step is always validated."""
    validation_batches: PositiveInt = 4
    """Global batches in one validation pass; always the same ones."""
    log_interval: PositiveInt = 1
    """Steps between metric records (values are means over the interval); reading them synchronises with the device."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout_s: PositiveFloat = 600.0
    """How long a rank waits for another before the run is ended as hung."""
    on_nonfinite_loss: Literal["stop", "continue"] = "stop"
    data_workers: NonNegativeInt = 0
    """Processes that read batches ahead, per rank."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    resume_from: str | None = None
    """A checkpoint of another run (``runs/ID/checkpoints/step_N``), from which this one goes on, in any layout."""
