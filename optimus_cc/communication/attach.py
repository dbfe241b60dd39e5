"""One call that installs a plan on a model that Megatron-core trains."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from optimus_cc.communication.embedding import FusedEmbeddingSync
from optimus_cc.communication.gradient_sync import BucketGroupSync, Restore, bucket_groups, replace, undo
from optimus_cc.communication.pipeline import CompressedP2PCommunicator
from optimus_cc.communication.traffic import ByteCount, TrafficMeter
from optimus_cc.config.technique import TechniqueConfig


class Attachment:
    """What :func:`attach` returns: the plan at work on one model, on this rank."""

    def __init__(
        self,
        communicator: CompressedP2PCommunicator | None,
        groups: ProcessGroupCollection,
        meter: TrafficMeter,
        restores: Sequence[Restore],
    ) -> None:
        self._communicator = communicator
        self._groups = groups
        self._restores = restores
        self.meter = meter

    def forward_backward_func(self, **kwargs: Any) -> Any:
        """Megatron-core's forward-backward function with this plan's communicator bound; same arguments and result."""
        schedule = get_forward_backward_func()
        if self._communicator is None:
            return schedule(**kwargs)
        self._communicator.begin(kwargs["num_microbatches"], kwargs.get("forward_only", False))
        result = schedule(**kwargs, p2p_communicator=self._communicator, pg_collection=self._groups)
        self._communicator.end()
        return result

    def traffic(self) -> dict[str, ByteCount]:
        """Bytes that this rank has sent since the last call, by class."""
        self.meter.check()
        return self.meter.take()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Error memories and warm-started queries of this rank."""
        return self._communicator.state_dict() if self._communicator else {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        if self._communicator:
            self._communicator.load_state_dict(state)
        elif state:
            raise ValueError(f"this plan keeps no state, but was given {sorted(state)}")

    def detach(self) -> None:
        """Give the model back to Megatron-core as it was."""
        undo(self._restores)


def attach(
    technique: TechniqueConfig,
    model: Sequence[torch.nn.Module],
    *,
    seed: int = 0,
    meter: TrafficMeter | None = None,
) -> Attachment:
    """Install ``technique`` on a model whose process groups are those of megatron.core.parallel_state.

    Args:
        technique: what is compressed and how.
        model: the chunks of this rank, as given to Megatron-core's forward-backward function.
        seed: keys the codecs' private random generators; the same on every rank.
        meter: an already observing meter; by default a new one starts to observe.

    Raises:
        ValueError: the plan can't work in this layout, or would compress nothing.
    """
    config = get_model_config(model[0])
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    if technique.cb.enabled and stages == 1:
        raise ValueError(
            "compressed backpropagation needs more than one pipeline stage: with one there are no messages"
        )
    if meter is None:
        meter = TrafficMeter.for_megatron()
        meter.observe()
    groups = _schedule_groups()
    restores: list[Restore] = [meter.stop]
    communicator = None
    if stages > 1:
        communicator = CompressedP2PCommunicator(groups.pp, config, technique.cb, meter, seed)
    finalize = config.finalize_model_grads_func
    left_out: frozenset[torch.nn.Parameter] = frozenset()
    if technique.fe.enabled:
        embedding = FusedEmbeddingSync(model, meter, groups)
        restores.append(embedding.restore)
        left_out = embedding.left_out
        finalize = embedding.finalizer(finalize)
    for group in bucket_groups(model) if left_out else ():
        if left_out & group.params:
            restores.append(BucketGroupSync(group, meter, left_out).restore)
    if finalize is not None:
        restores.append(replace(config, "finalize_model_grads_func", _in_scope(finalize, meter)))
    return Attachment(communicator, groups, meter, restores)


def _in_scope(finalize: Callable[..., Any], meter: TrafficMeter) -> Callable[..., Any]:
    """``finalize`` with its sums of LayerNorm gradients counted as ``other``."""

    @functools.wraps(finalize)
    def finalize_in_scope(*args: Any, **kwargs: Any) -> Any:
        with meter.scope("other"):
            return finalize(*args, **kwargs)

    return finalize_in_scope


def _schedule_groups() -> ProcessGroupCollection:
    """The groups that the pipelined schedules ask for when they are given a communicator."""
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp = parallel_state.get_data_parallel_group(with_context_parallel=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    groups.tp_dp_cp = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return groups
