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
        restore: Callable[[], None],
    ) -> None:
        self._communicator = communicator
        self._groups = groups
        self._restore = restore
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
        self.meter.stop()
        self._restore()


def attach(
    technique: TechniqueConfig,
    model: Sequence[torch.nn.Module],
    *,
    seed: int = 0,
    meter: TrafficMeter | None = None,
    split_over_tensor_parallel: bool = False,
) -> Attachment:
    """Install ``technique`` on a model whose process groups are those of megatron.core.parallel_state.

    Args:
        technique: what is compressed and how.
        model: the chunks of this rank, as given to Megatron-core's forward-backward function.
        seed: keys the codecs' private random generators; the same on every rank.
        meter: an already observing meter; by default a new one starts to observe.
        split_over_tensor_parallel: each tensor-parallel rank sends its share of the rows of a stage-to-stage message,
            and shares are gathered on arrival. Lossless; without sequence parallelism all ranks hold the same message.

    Raises:
        ValueError: the plan can't work in this layout, or would compress nothing.
    """
    config = get_model_config(model[0])
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    if technique.cb.enabled and stages == 1:
        raise ValueError(
            "compressed backpropagation needs more than one pipeline stage: with one there are no messages"
        )
    if split_over_tensor_parallel and config.sequence_parallel:
        raise ValueError("with sequence parallelism every rank sends only its share of a message already")
    if meter is None:
        meter = TrafficMeter.for_megatron()
        meter.observe()
    groups = _schedule_groups()
    communicator = None
    if stages > 1:
        split_over = groups.tp if split_over_tensor_parallel and groups.tp.size() > 1 else None
        communicator = CompressedP2PCommunicator(groups.pp, config, technique.cb, meter, seed, split_over)
    finalize = config.finalize_model_grads_func

    if finalize is not None:

        @functools.wraps(finalize)
        def finalize_in_scope(*args: Any, **kwargs: Any) -> Any:
            with meter.scope("other"):
                return finalize(*args, **kwargs)

        config.finalize_model_grads_func = finalize_in_scope

    def restore() -> None:
        config.finalize_model_grads_func = finalize

    return Attachment(communicator, groups, meter, restore)


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
