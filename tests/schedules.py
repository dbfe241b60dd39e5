"""Megatron-core's schedules run with stub groups: what one pipeline rank sends, receives and consumes, and when.

No ranks and no model: a stub stage tells which (chunk, micro-batch) is computed, and a recording communicator hands
out numbered tensors. What is logged here is the oracle for :mod:`optimus_cc.exposure`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig


class StubGroup:
    """Stands for a process group of which only rank and size are asked."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


@dataclass
class Log:
    """What one rank did in one mini-batch."""

    sent_forward: list[tuple[int, int]] = field(default_factory=list)
    """(chunk, micro-batch) whose output each sent tensor is."""
    sent_backward: list[tuple[int, int]] = field(default_factory=list)
    """(chunk, micro-batch) whose input gradient each sent tensor is."""
    consumed_forward: dict[int, tuple[int, int]] = field(default_factory=dict)
    """n-th tensor received from the stage before -> (chunk, micro-batch) that took it as input."""
    consumed_backward: dict[int, tuple[int, int]] = field(default_factory=dict)
    """n-th tensor received from the stage after -> (chunk, micro-batch) that took it as gradient."""
    backward_steps: list[tuple[int, int]] = field(default_factory=list)
    received_in_cooldown: set[int] = field(default_factory=set)
    """Non-interleaved only: tensors that came through recv_backward, which only the cool-down calls."""


class _Stage(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, place: tuple[int, int], log: Log, code: int) -> torch.Tensor:
        ctx.place, ctx.log, ctx.code = place, log, code
        return torch.full_like(data, code)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.log.backward_steps.append(ctx.place)
        number = int(gradient.flatten()[0])
        if number >= 0:
            ctx.log.consumed_backward[number] = ctx.place
        return torch.full_like(gradient, ctx.code), None, None, None


class _Recorder(P2PCommunicator):
    def __init__(self, config: TransformerConfig, rank: int, size: int, log: Log, codes: list[tuple[int, int]]) -> None:
        self.pp_group = StubGroup(rank, size)
        self.config = config
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size
        self._log, self._codes = log, codes
        self._forward = self._backward = 0

    def _communicate(
        self,
        *,
        tensor_send_next: Any,
        tensor_send_prev: Any,
        recv_prev: Any,
        recv_next: Any,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> Any:
        handles: dict[str, Any] = {}
        for tensor, log, name in (
            (tensor_send_next, self._log.sent_forward, "send_next"),
            (tensor_send_prev, self._log.sent_backward, "send_prev"),
        ):
            if tensor is not None:
                log.append(self._codes[int(tensor.flatten()[0])])
                handles[name] = SimpleNamespace(wait=lambda: None)
        previous = following = None
        if recv_prev:
            previous = torch.full((1, 1, 1), float(self._forward), requires_grad=True)
            self._forward += 1
            handles["recv_prev"] = SimpleNamespace(wait=lambda: None)
        if recv_next:
            following = torch.full((1, 1, 1), float(self._backward))
            self._backward += 1
            handles["recv_next"] = SimpleNamespace(wait=lambda: None)
        return previous, following, None if wait_on_reqs else handles

    def recv_backward(self, *args: Any, **kwargs: Any) -> Any:
        before = self._backward
        result = super().recv_backward(*args, **kwargs)
        self._log.received_in_cooldown.update(range(before, self._backward))
        return result


class _StubChunk(torch.nn.Module):
    """What the schedules ask of a model chunk."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self, config: TransformerConfig, chunk: int) -> None:
        super().__init__()
        self.config = config
        self.chunk = chunk
        self.vp_stage = chunk
        self.microbatch = 0
        self.input: torch.Tensor | None = None

    def set_input_tensor(self, tensor: Any) -> None:
        self.input = tensor[0] if isinstance(tensor, list) else tensor


def run_schedule(
    size: int, chunks: int, microbatches: int, rank: int, *, overlap: bool, group_size: int | None = None
) -> Log:
    """One mini-batch of one pipeline rank on Megatron-core's own schedule function."""
    virtual = chunks if chunks > 1 else None
    config = TransformerConfig(
        num_layers=size * chunks,
        hidden_size=1,
        num_attention_heads=1,
        pipeline_model_parallel_size=size,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        overlap_p2p_comm=overlap,
        batch_p2p_comm=not overlap,
    )
    if group_size is not None:
        config.microbatch_group_size_per_vp_stage = group_size
    log = Log()
    codes: list[tuple[int, int]] = []
    last_rank = rank == size - 1

    def forward_step(data_iterator: Any, model: _StubChunk) -> Any:
        place = (model.chunk, model.microbatch)
        model.microbatch += 1
        data = model.input
        if data is None:
            data = torch.full((1, 1, 1), -1.0, requires_grad=True)
        else:
            log.consumed_forward[int(data.flatten()[0])] = place
        codes.append(place)
        output = _Stage.apply(data, place, log, len(codes) - 1)
        # The last virtual stage starts its backward pass from a loss, with a gradient that names no message.
        return output, lambda tensor: (-tensor.sum() * microbatches, {"loss": tensor.detach()})

    groups = ProcessGroupCollection()
    for name in ("tp", "cp", "embd", "pos_embd", "dp", "dp_cp", "tp_dp_cp"):
        setattr(groups, name, StubGroup(0, 1))
    communicator = _Recorder(config, rank, size, log, codes)
    groups.pp = communicator.pp_group
    models = [_StubChunk(config, chunk) for chunk in range(chunks)]
    function = (
        schedules.forward_backward_pipelining_with_interleaving
        if virtual
        else schedules.forward_backward_pipelining_without_interleaving
    )
    function(
        forward_step_func=forward_step,
        data_iterator=[None] * chunks if virtual else None,
        model=models if virtual else models[0],
        num_microbatches=microbatches,
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
        p2p_communicator=communicator,
        pg_collection=groups,
    )
    assert last_rank or log.consumed_backward
    return log


def megatron_warmup(size: int, chunks: int, microbatches: int, rank: int, group_size: int) -> int:
    """Warm-up steps of the interleaved schedule by Megatron-core's own count."""
    import inspect

    parameters = inspect.signature(schedules.get_pp_rank_microbatches).parameters
    stub = SimpleNamespace(pp_group=StubGroup(rank, size), virtual_pipeline_model_parallel_size=chunks)
    arguments: dict[str, Any] = {"p2p_communicator": stub} if "p2p_communicator" in parameters else {}
    return int(schedules.get_pp_rank_microbatches(microbatches, chunks, group_size, forward_only=False, **arguments)[2])
