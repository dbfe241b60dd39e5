"""The pre-training loop on Megatron-core: steps, validation, metrics."""

from __future__ import annotations

import functools
import itertools
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads

from optimus_cc.communication.attach import Attachment, attach
from optimus_cc.communication.traffic import TrafficMeter
from optimus_cc.config import RunConfig
from optimus_cc.runs import DIVERGED
from optimus_cc.training.backend import Backend, random_state, set_random_state
from optimus_cc.training.history import History, perplexity
from optimus_cc.training.model import build_model
from optimus_cc.training.optimizer import build_optimizer
from optimus_cc.training.probes import Probes

Batch = dict[str, torch.Tensor]
BatchSource = Callable[[int], Iterator[Batch]]
"""From a first step on, an endless run of micro-batches of this data-parallel rank, each [micro_batch, sequence]."""


class NonFiniteLoss(RuntimeError):
    """The training loss is NaN or infinite."""


@dataclass(frozen=True)
class Stopped:
    """Training ended early at a step boundary because it was asked to."""

    step: int


class StopRequest:
    """Asks for an orderly stop; the loop looks at a step boundary, where ranks can agree."""

    def __init__(self) -> None:
        self.requested = False

    @classmethod
    def by_signals(cls) -> StopRequest:
        """One that SIGTERM and SIGUSR2 make, from now on."""
        stop = cls()
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, stop._note)
        return stop

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True


class Saver(Protocol):
    """Keeps what a training needs to go on; see :mod:`optimus_cc.training.checkpoint`."""

    def due(self, step: int) -> bool:
        """Whether this rank finds that it is time."""

    def save(self, trainer: Trainer, rest: dict[str, Any]) -> None:
        """Save ``trainer`` and ``rest``; called on all ranks."""


@dataclass
class Trainer:
    """One rank's model, optimizer and plan, and how they take a step.

    Build with :meth:`build`, inside an initialised world.
    """

    config: RunConfig
    backend: Backend
    model: list[Any]
    optimizer: Any
    scheduler: Any
    attachment: Attachment
    padded_vocabulary: int
    began_with: dict[str, Any] = field(repr=False)
    """The random state that it was built in."""
    step: int = field(default=0, init=False)
    """Optimizer steps taken."""

    @classmethod
    def build(cls, config: RunConfig, backend: Backend, padded_vocabulary: int) -> Trainer:
        began_with = random_state(backend)
        meter = TrafficMeter.for_megatron()
        meter.observe()
        model = build_model(config, backend, padded_vocabulary)
        optimizer, scheduler = build_optimizer(config, model)
        transformer = model[0].config
        transformer.grad_scale_func = optimizer.scale_loss
        transformer.finalize_model_grads_func = finalize_model_grads
        attachment = attach(
            config.technique,
            model,
            seed=config.training.seed,
            meter=meter,
            split_over_tensor_parallel=config.parallel.split_over_tensor_parallel,
        )
        return cls(config, backend, model, optimizer, scheduler, attachment, padded_vocabulary, began_with)

    def start_over(self) -> None:
        """Be as :meth:`build` made it, after something has gone wrong half-way. Every rank must call it."""
        self.attachment.detach()
        self.model, self.optimizer, self.scheduler = [], None, None  # their memory is needed again
        set_random_state(self.began_with, self.backend)
        fresh = self.build(self.config, self.backend, self.padded_vocabulary)
        self.model, self.optimizer, self.scheduler = fresh.model, fresh.optimizer, fresh.scheduler
        self.attachment, self.step = fresh.attachment, 0

    @property
    def num_parameters(self) -> int:
        return self.config.model.num_parameters(self.padded_vocabulary)

    def train_step(self, batches: Sequence[Iterator[Batch]]) -> tuple[torch.Tensor, float]:
        """One optimizer step.

        Args:
            batches: micro-batches for each chunk of this rank.

        Returns:
            the mean loss of this rank's micro-batches (zero where there is no last stage), still on the device,
            and the global gradient norm before clipping.
        """
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self._forward_backward(batches, self.config.num_microbatches, forward_only=False)
        with self.attachment.probe.span("optimizer"):
            _, grad_norm, _ = self.optimizer.step()
        self.scheduler.step(increment=1)
        self.step += 1
        return self._mean(losses), 0.0 if grad_norm is None else float(grad_norm)

    def validate(
        self, batches: Sequence[Iterator[Batch]], num_batches: int, heartbeat: Callable[[], None] = lambda: None
    ) -> tuple[float, int]:
        """Mean loss per token over ``num_batches`` global batches of the validation set, and how many tokens."""
        for chunk in self.model:
            chunk.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.backend.device)
        with torch.no_grad():
            for _ in range(num_batches):
                losses = self._forward_backward(batches, self.config.num_microbatches, forward_only=True)
                heartbeat()
                if losses:
                    total += torch.stack([loss["loss"] for loss in losses]).double().sum()
        for chunk in self.model:
            chunk.train()
        microbatches = num_batches * self.config.num_microbatches * self.config.parallel.data_parallel_size
        tokens = microbatches * self.config.training.micro_batch_size * self.config.model.sequence_length
        loss = self.sum_over_ranks([self._on_one_rank(float(total))])[0] / microbatches
        return loss, tokens

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over all ranks, in double precision, on the CPU."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.backend.control_group)
        return [float(value) for value in tensor]

    def any_rank(self, *flags: bool) -> list[bool]:
        """Whether each of ``flags`` is true on any rank; every rank gets the same answer."""
        tensor = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.backend.control_group)
        return [bool(flag) for flag in tensor]

    def mean_loss(self, loss: torch.Tensor) -> float:
        """Mean over data-parallel ranks of the last stage's ``loss``; the same on every rank."""
        return self.sum_over_ranks([self._on_one_rank(float(loss))])[0] / self.config.parallel.data_parallel_size

    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _on_one_rank(self, value: float) -> float:
        """``value`` on the one rank of each tensor-parallel group of last stages that speaks for it, elsewhere 0."""
        speaks = parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
        return value if speaks else 0.0

    def _mean(self, losses: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        if not losses:
            return torch.zeros((), device=self.backend.device)
        return torch.stack([loss["loss"] for loss in losses]).mean()

    def _forward_backward(
        self, batches: Sequence[Iterator[Batch]], num_microbatches: int, forward_only: bool
    ) -> list[dict[str, torch.Tensor]]:
        result: list[dict[str, torch.Tensor]] = self.attachment.forward_backward_func(
            forward_step_func=self._forward_step,
            data_iterator=list(batches) if len(self.model) > 1 else batches[0],
            model=self.model if len(self.model) > 1 else self.model[0],
            num_microbatches=num_microbatches,
            seq_length=self.config.model.sequence_length,
            micro_batch_size=self.config.training.micro_batch_size,
            forward_only=forward_only,
        )
        return result

    def _forward_step(self, batches: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch = {name: value.to(self.backend.device, non_blocking=True) for name, value in next(batches).items()}
        output = model(batch.get("tokens"), batch.get("position_ids"), None, labels=batch.get("labels"))
        return output, functools.partial(_loss, batch.get("loss_mask"))

    def batches_for_chunks(self, source: BatchSource, start_step: int) -> list[Iterator[Batch]]:
        """For each chunk of this rank: micro-batches where it is the first or the last stage, else empty ones."""
        first_rank = parallel_state.is_pipeline_first_stage()
        last_rank = parallel_state.is_pipeline_last_stage()
        chunks = len(self.model)
        return [
            source(start_step)
            if (first_rank and chunk == 0) or (last_rank and chunk == chunks - 1)
            else itertools.repeat({})
            for chunk in range(chunks)
        ]


def _loss(loss_mask: torch.Tensor | None, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean over the micro-batch's tokens of the per-token loss [micro_batch, sequence]."""
    assert loss_mask is not None
    loss = (output.float() * loss_mask).sum() / loss_mask.sum()
    # The schedule divides the loss in place by the number of micro-batches.
    return loss, {"loss": loss.detach().clone()}


def run(
    trainer: Trainer,
    train_batches: BatchSource,
    validation_batches: BatchSource,
    record: Callable[[dict[str, Any]], None],
    heartbeat: Callable[[], None] = lambda: None,
    stop: StopRequest | None = None,
    saver: Saver | None = None,
    resumed: Mapping[str, Any] | None = None,
    trace_path: Path | None = None,
) -> dict[str, Any] | Stopped:
    """Train to the configured number of steps, or until asked to stop.

    Args:
        record: takes each metrics record; called on every rank with the same values.
        heartbeat: called after each step and each validation batch.
        saver: saves when it is due, before an early stop, and at the end.
        resumed: what it was given to save along with the trainer, when this one goes on from there.
        trace_path: where the trace of training.probes.trace_step goes.

    Returns:
        the summary, or where training stopped.

    Raises:
        NonFiniteLoss: on every rank, unless training.on_nonfinite_loss is ``continue``.
    """
    training = trainer.config.training
    history = History(trainer)
    probes = Probes(trainer, trace_path)
    validated: dict[str, Any] = {}
    validation_due = False
    if resumed is not None:
        history.load_state_dict(resumed["history"])
        validated, validation_due = dict(resumed["validated"]), resumed["validation_due"]

    def asked_to_stop() -> bool:
        return stop is not None and stop.requested

    def save() -> bool:
        """Whether a request to stop has come by the time that it is done."""
        if saver is None:
            return False
        history.pause()
        rest = {"history": history.state_dict(), "validated": validated, "validation_due": validation_due}
        saver.save(trainer, rest)
        (stopping,) = trainer.any_rank(asked_to_stop())
        history.resume()
        return stopping

    batches = trainer.batches_for_chunks(train_batches, trainer.step)
    history.resume()
    began_at = trainer.step
    while True:
        if validation_due:
            history.pause()
            validated = validation_record(trainer, validation_batches, heartbeat)
            record(validated)
            history.resume()
            validation_due = False
        if trainer.step >= training.steps:
            break
        with probes.step(history, record):
            history.add(*trainer.train_step(batches))
        heartbeat()
        last = trainer.step == training.steps
        if trainer.step % training.log_interval == 0 or last:
            values = history.train_record()
            record(values)
            if not math.isfinite(values["loss"]) and training.on_nonfinite_loss == "stop":
                raise NonFiniteLoss(
                    f"{DIVERGED} {values['loss']} by step {trainer.step} "
                    f"(gradient norm {values['grad_norm']:.4g}, "
                    f"learning rate {values['learning_rate']:.3g}); training.on_nonfinite_loss=continue goes on"
                )
        validation_due = last or trainer.step % training.validation_interval == 0
        stopping, due = trainer.any_rank(asked_to_stop(), saver is not None and saver.due(trainer.step))
        if not last and (stopping or due) and (save() or stopping):
            return Stopped(trainer.step)
    if trainer.step > began_at:
        save()
    return history.summary(validated)


def validation_record(
    trainer: Trainer, batches: BatchSource, heartbeat: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Validate now, on the same batches each time; what to record of it."""
    began = time.perf_counter()
    loss, tokens = trainer.validate(
        trainer.batches_for_chunks(batches, 0), trainer.config.training.validation_batches, heartbeat
    )
    return {
        "kind": "validation",
        "step": trainer.step,
        "loss": loss,
        "perplexity": perplexity(loss),
        "tokens": tokens,
        "wall_s": time.perf_counter() - began,
    }
