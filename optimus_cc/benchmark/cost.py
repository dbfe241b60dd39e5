"""What the communication layer costs: single steps in pairs, plain Megatron-core against a technique.

A step is the forward-backward function with all that reduces gradients, without the optimizer, which the layer does
not touch; weights and samples never change. The two members of a pair run on two copies of the model, one after the
other, in random order. The copies are the same; that this makes no difference is measured too (``plain_again``).
Attaching, and patching torch to count bytes, happen outside of what is timed.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from optimus_cc.benchmark.arithmetic import median_with_interval, ratio_of_pairs
from optimus_cc.communication.attach import Attachment, attach
from optimus_cc.config import RunConfig
from optimus_cc.config.benchmark import CostConfig, measured_techniques
from optimus_cc.config.model import padded_vocabulary_size
from optimus_cc.config.technique import TechniqueConfig
from optimus_cc.stage_traffic import vocabulary_size
from optimus_cc.training.backend import Backend, seed_everything
from optimus_cc.training.model import build_model

Batch = dict[str, torch.Tensor]
AGAIN, OFF = "plain_again", "off"
"""Plain Megatron-core on the second copy; attached with nothing switched on."""


class Side:
    """One copy of the model, plain or with a technique attached, and how it takes a step."""

    def __init__(self, config: RunConfig, backend: Backend, technique: TechniqueConfig | None) -> None:
        seed_everything(config.training.seed)
        self._config, self._backend = config, backend
        vocabulary = padded_vocabulary_size(vocabulary_size(config))
        self.model = build_model(config, backend, vocabulary)
        self.model[0].config.finalize_model_grads_func = finalize_model_grads
        self._batches = _batches(config, backend, vocabulary)
        self.attachment: Attachment | None = None
        if technique is not None:
            split = config.parallel.split_over_tensor_parallel
            self.attachment = attach(technique, self.model, seed=config.training.seed, split_over_tensor_parallel=split)
            self.attachment.meter.stop()  # it counts in this side's steps only

    def step(self) -> tuple[float, float]:
        """Seconds that one step took on this rank, and seconds of processor time. Collective."""
        for chunk in self.model:
            chunk.zero_grad_buffer()
        attachment = self.attachment
        function: Callable[..., Any] = get_forward_backward_func() if attachment is None else _function(attachment)
        several = len(self.model) > 1
        iterators = [iter(self._batches) for _ in self.model]
        if attachment is not None:
            attachment.meter.observe()
        self._backend.synchronize()
        dist.barrier(group=self._backend.control_group)
        began, processor_began = time.perf_counter(), time.process_time()
        function(
            forward_step_func=_forward_step,
            data_iterator=iterators if several else iterators[0],
            model=self.model if several else self.model[0],
            num_microbatches=self._config.num_microbatches,
            seq_length=self._config.model.sequence_length,
            micro_batch_size=self._config.training.micro_batch_size,
            forward_only=False,
        )
        self._backend.synchronize()
        took = time.perf_counter() - began, time.process_time() - processor_began
        if attachment is not None:
            attachment.meter.stop()
        return took

    def close(self) -> None:
        if self.attachment is not None:
            self.attachment.traffic()  # raises if not all was counted
            self.attachment.detach()


def measure(config: RunConfig, backend: Backend, record: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Time every technique that the layout allows. Collective.

    Args:
        record: takes the times of each pair; called on every rank.

    Returns:
        for each technique the ratio of its step time to plain Megatron-core's, that of the processor time of all ranks,
        and the medians, each with a 95 % interval.
    """
    benchmark = config.benchmark
    assert isinstance(benchmark, CostConfig)
    sides: dict[str, TechniqueConfig | None] = {AGAIN: None, OFF: TechniqueConfig(), **measured_techniques(config)[0]}
    total = len(sides) * benchmark.pairs
    plain = Side(config, backend, None)
    rows = []
    for position, (name, technique) in enumerate(sides.items()):
        other = Side(config, backend, technique)
        for _ in range(benchmark.warmup_steps):
            plain.step()
            other.step()
        first = _first_is_plain(benchmark.pairs, config.training.seed)
        pairs = []
        for index, plain_first in enumerate(first):
            took = {side: side.step() for side in ((plain, other) if plain_first else (other, plain))}
            pair = _over_ranks(backend, took[plain], took[other])
            pairs.append(pair)
            done = position * benchmark.pairs + index + 1
            record(
                {"kind": "pair", "technique": name, "plain_first": plain_first, **pair, "done": done, "total": total}
            )
        other.close()
        del other
        gc.collect()
        times = {key: [pair[key] for pair in pairs] for key in pairs[0]}
        rows.append(
            {
                "technique": name,
                "ratio": asdict(ratio_of_pairs(times["plain_s"], times["technique_s"])),
                "processor_ratio": asdict(ratio_of_pairs(times["plain_processor_s"], times["technique_processor_s"])),
                **{key: asdict(median_with_interval(values)) for key, values in times.items()},
            }
        )
    return {"benchmark": benchmark.name, "techniques": rows}


def _over_ranks(backend: Backend, plain: tuple[float, float], other: tuple[float, float]) -> dict[str, float]:
    """Of the times of both sides the largest of all ranks, of their processor times the sum."""
    times, processor = torch.tensor(list(zip(plain, other, strict=True)), dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=backend.control_group)
    dist.all_reduce(processor, group=backend.control_group)
    names = ("plain_s", "technique_s", "plain_processor_s", "technique_processor_s")
    return dict(zip(names, (*times.tolist(), *processor.tolist()), strict=True))


def _first_is_plain(pairs: int, seed: int) -> list[bool]:
    """Plain first in half of the pairs, in an order that all ranks draw alike."""
    order = [index % 2 == 0 for index in range(pairs)]
    random.Random(seed).shuffle(order)
    return order


def _function(attachment: Attachment) -> Callable[..., Any]:
    return attachment.forward_backward_func


def _batches(config: RunConfig, backend: Backend, vocabulary: int) -> list[Batch]:
    """The micro-batches of this data-parallel rank, each [micro_batch, sequence], on the device."""
    generator = torch.Generator().manual_seed(config.training.seed + parallel_state.get_data_parallel_rank())
    shape = (config.training.micro_batch_size, config.model.sequence_length)
    batches = []
    for _ in range(config.num_microbatches):
        tokens = torch.randint(vocabulary, (shape[0], shape[1] + 1), generator=generator)
        batch = {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "position_ids": torch.arange(shape[1]).repeat(shape[0], 1),
        }
        batches.append({name: value.to(backend.device) for name, value in batch.items()})
    return batches


def _forward_step(batches: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    batch = next(batches)
    return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]), _loss


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    # The schedule divides the loss in place by the number of micro-batches.
    return loss, {"loss": loss.detach().clone()}
