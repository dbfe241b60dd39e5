"""``training``: length, batches, precision, validation and what to do when something goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from optimus_cc.config.errors import Problem
from optimus_cc.config.schema import YEAR_S, PathText, PositiveFloat, PositiveInt, strict


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
class ProbesConfig:
    """Measurements that a training takes of itself. They change nothing of what it computes."""

    error_independence: bool = False
    """Compare what compressed backpropagation leaves out with how activations change between micro-batches."""
    memory: bool = False
    """Divide the peak of memory into training itself, codecs' workspaces, and error memories and queries."""
    phases: bool = False
    """Divide the time of a step into forward, backward, communication of each kind, codec, optimizer and the rest."""
    interval_steps: PositiveInt = 10
    """Every how many steps these are measured. Memory, on the step after: measuring it on a CPU takes time."""
    trace_step: PositiveInt | None = None
    """Step of which a trace is written, trace.json in the run folder; null: none."""

    def measures_errors(self, step: int) -> bool:
        return self.error_independence and step % self.interval_steps == 0

    def measures_phases(self, step: int) -> bool:
        return self.phases and step % self.interval_steps == 0

    def measures_time(self, step: int) -> bool:
        """For either purpose: phases or the trace."""
        return self.measures_phases(step) or step == self.trace_step

    def measures_memory(self, step: int) -> bool:
        return self.memory and step > 1 and (step - 1) % self.interval_steps == 0 and step != self.trace_step

    def problems(self, steps: int) -> Iterator[Problem]:
        """What is wrong with it in a training of so many steps."""
        if self.trace_step is not None and self.trace_step > steps:
            yield Problem(
                "training.probes.trace_step",
                self.trace_step,
                f"at most training.steps = {steps}",
                f"training.probes.trace_step={steps}",
            )
        least = 2 if self.memory and (self.error_independence or self.phases) else 1
        most = steps - 1 if self.memory else steps
        if most < least:
            yield Problem(
                "training.steps",
                steps,
                f"at least {steps + least - most} with these probes: memory is measured on a step of its own",
                f"training.steps={steps + least - most} training.probes.interval_steps={least}, "
                "or training.probes.memory=false",
            )
        elif (self.memory or self.error_independence or self.phases) and not least <= self.interval_steps <= most:
            yield Problem(
                "training.probes.interval_steps",
                self.interval_steps,
                f"{least} to {most}: steps are measured up to training.steps = {steps}, and memory on a step of its "
                "own, the one after",
                f"training.probes.interval_steps={max(least, min(self.interval_steps, most))}",
            )


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
    timeout_s: Annotated[float, Field(ge=1, le=YEAR_S, allow_inf_nan=False)] = 600.0
    """How long a rank waits for another before the run is ended as hung."""
    on_nonfinite_loss: Literal["stop", "continue"] = "stop"
    data_workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Processes that read batches ahead, per rank."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    resume_from: PathText | None = None
    """A checkpoint of another run (``runs/ID/checkpoints/step_N``), from which this one goes on, in any layout."""
    probes: ProbesConfig = ProbesConfig()
