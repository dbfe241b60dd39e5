"""Short trainings on synthetic tokens: with our trainer, and with Megatron-core alone."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from optimus_cc.communication.gradient_sync import parameter_names
from optimus_cc.config import RunConfig
from optimus_cc.config.technique import TechniqueConfig
from optimus_cc.selfcheck import plan
from optimus_cc.training import loop
from optimus_cc.training.backend import Backend, seed_everything
from optimus_cc.training.checkpoint import Checkpoints
from optimus_cc.training.loop import Batch, BatchSource, Trainer
from optimus_cc.training.model import build_model
from optimus_cc.training.optimizer import build_optimizer

State = dict[str, torch.Tensor]
_VALIDATION = 10**6
"""First number of the samples that are only validated on."""
_CLOCKS = {"step_time_s", "tokens_per_s", "tflop_per_s_per_rank", "wall_s"}
"""Keys of a record that depend on the clock."""


@dataclass(frozen=True)
class Step:
    """What one optimizer step left on this rank."""

    loss: torch.Tensor
    """Mean of the micro-batches; zero where there is no last stage."""
    grad_norm: float
    weights: State
    data_parallel_bytes: float = 0.0
    state: State = field(default_factory=dict)
    """Error memories and queries."""
    state_after_validation: State = field(default_factory=dict)


@dataclass(frozen=True)
class Recorded:
    """A training by our loop, as its run folder would show it, and what it ended with."""

    records: list[dict[str, Any]]
    weights: State
    state: State


@dataclass
class Trainings:
    """Runs trainings of one tiny configuration on this rank. All methods are collective."""

    config: RunConfig
    backend: Backend
    heartbeat: Callable[[], None] = lambda: None

    @functools.cached_property
    def baseline(self) -> list[Step]:
        """With nothing compressed, by our trainer."""
        return self.ours(plan.BASELINE)

    @functools.cached_property
    def initial(self) -> State:
        """Weights before the first step."""
        trainer = self._built(plan.BASELINE)
        trainer.attachment.detach()
        return weights(trainer)

    @functools.cached_property
    def largest_change(self) -> float:
        """How far the baseline has moved a weight of this rank at most."""
        end = self.baseline[-1].weights
        return max((float((end[name] - value).abs().max()) for name, value in self.initial.items()), default=0.0)

    @functools.cached_property
    def everything(self) -> Recorded:
        """With all techniques that the layout can have."""
        return self.recorded(plan.everything(self.config), steps=plan.RESUME_STEPS)

    def ours(self, technique: TechniqueConfig) -> list[Step]:
        """Train, and validate after each step."""
        trainer = self._built(technique)
        batches = trainer.batches_for_chunks(self._source(), 0)
        steps = []
        trainer.attachment.traffic()
        for _ in range(plan.STEPS):
            loss, grad_norm = trainer.train_step(batches)
            traffic, state = trainer.attachment.traffic(), compressor_state(trainer)
            trainer.validate(trainer.batches_for_chunks(self._source(_VALIDATION), 0), 1)
            after = compressor_state(trainer)
            sent = traffic["data_parallel"].wire_bytes
            steps.append(Step(loss.clone(), grad_norm, weights(trainer), sent, state, after))
            self.heartbeat()
        trainer.attachment.detach()
        return steps

    def plain(self) -> list[Step]:
        """The same with Megatron-core's own function: nothing of the communication layer is installed."""
        seed_everything(self.config.training.seed)
        model = build_model(self.config, self.backend, plan.VOCABULARY)
        optimizer, scheduler = build_optimizer(self.config, model)
        transformer = model[0].config
        transformer.grad_scale_func = optimizer.scale_loss
        transformer.finalize_model_grads_func = finalize_model_grads
        several = len(model) > 1
        batches = [self._source()(0) for _ in model]
        device = self.backend.device
        steps = []
        for _ in range(plan.STEPS):
            for chunk in model:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            out = get_forward_backward_func()(
                forward_step_func=functools.partial(_plain_forward_step, device),
                data_iterator=batches if several else batches[0],
                model=model if several else model[0],
                num_microbatches=self.config.num_microbatches,
                seq_length=self.config.model.sequence_length,
                micro_batch_size=self.config.training.micro_batch_size,
                forward_only=False,
            )
            _, grad_norm, _ = optimizer.step()
            scheduler.step(increment=1)
            losses = [one["loss"] for one in out]
            loss = torch.stack(losses).mean() if losses else torch.zeros((), device=device)
            steps.append(Step(loss, 0.0 if grad_norm is None else float(grad_norm), weights_of(model)))
            self.heartbeat()
        return steps

    def recorded(self, technique: TechniqueConfig, *, steps: int = plan.STEPS, folder: Path | None = None) -> Recorded:
        """Train with the whole loop; with a folder, save there after half of the steps and go on in a new trainer."""
        training: Any = self.config.training
        config: Any = self.config.with_technique(technique)
        config = replace(config, training=replace(training, steps=steps))
        records: list[dict[str, Any]] = []
        source, validation = self._source(), self._source(_VALIDATION)
        train = functools.partial(
            loop.run, train_batches=source, validation_batches=validation, heartbeat=self.heartbeat
        )
        trainer = self._built(technique, config)
        saver, resumed = None, None
        if folder is not None:
            saver = Checkpoints(config, folder, self.backend, self.heartbeat)
            stop = loop.StopRequest()

            def note(record: dict[str, Any]) -> None:
                records.append(record)
                stop.requested = record["step"] >= steps // 2

            train(trainer, record=note, saver=saver, stop=stop)
            trainer.attachment.detach()
            trainer = self._built(technique, config, seed=config.training.seed + 1)
            resumed, _ = saver.resume(trainer)
        train(trainer, record=records.append, saver=saver, resumed=resumed)
        trainer.attachment.detach()
        told = [{key: value for key, value in record.items() if key not in _CLOCKS} for record in records]
        return Recorded(told, weights(trainer), compressor_state(trainer))

    def _built(self, technique: TechniqueConfig, config: RunConfig | None = None, seed: int | None = None) -> Trainer:
        config = config or self.config.with_technique(technique)
        seed_everything(config.training.seed if seed is None else seed)
        return Trainer.build(config, self.backend, plan.VOCABULARY)

    def _source(self, offset: int = 0) -> BatchSource:
        replica = parallel_state.get_data_parallel_rank()
        return lambda step: _tokens(self.config, replica, offset + step)


def weights(trainer: Trainer) -> State:
    return weights_of(trainer.model)


def weights_of(model: list[Any]) -> State:
    return {name: parameter.detach().clone() for parameter, name in parameter_names(model).items()}


def compressor_state(trainer: Trainer) -> State:
    return {name: value.clone() for name, value in trainer.attachment.state_dict().items()}


def _plain_forward_step(
    device: torch.device, batches: Iterator[Batch], model: Any
) -> tuple[torch.Tensor, Callable[..., Any]]:
    batch = {name: value.to(device) for name, value in next(batches).items()}
    mask = batch["loss_mask"]

    def loss_func(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = (output.float() * mask).sum() / mask.sum()
        return loss, {"loss": loss.detach().clone()}  # the schedule divides the loss in place

    return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]), loss_func


def _tokens(config: RunConfig, replica: int, step: int) -> Iterator[Batch]:
    """Endless micro-batches of a data-parallel rank from ``step`` on; words are not equally frequent."""
    training, length = config.training, config.model.sequence_length
    size = training.micro_batch_size
    for number in itertools.count(step):
        generator = torch.Generator().manual_seed(training.seed + 7919 * number)
        uniform = torch.rand((training.global_batch_size, length + 1), generator=generator)
        samples = (uniform**2 * plan.VOCABULARY).long()
        for microbatch in range(config.num_microbatches):
            first = (microbatch * config.parallel.data_parallel_size + replica) * size
            mine = samples[first : first + size]
            yield {
                "tokens": mine[:, :-1].contiguous(),
                "labels": mine[:, 1:].contiguous(),
                "loss_mask": torch.ones(size, length),
                "position_ids": torch.arange(length).repeat(size, 1),
            }
