"""One call that installs a plan on a model that Megatron-core trains."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from optimus_cc.communication.data_parallel import SelectiveStageCompression
from optimus_cc.communication.embedding import FusedEmbeddingSync
from optimus_cc.communication.gradient_sync import BucketGroupSync, Restore, bucket_groups, undo
from optimus_cc.communication.pipeline import CompressedP2PCommunicator
from optimus_cc.communication.probe import Probe
from optimus_cc.communication.state import OWNER, check, owner
from optimus_cc.communication.traffic import ByteCount, TrafficMeter
from optimus_cc.config.parallel import ParallelConfig
from optimus_cc.config.technique import TechniqueConfig

_SC_PREFIX = "sc."


class Attachment:
    """What :func:`attach` returns: the plan at work on one model, on this rank."""

    def __init__(
        self,
        communicator: CompressedP2PCommunicator | None,
        groups: ProcessGroupCollection,
        meter: TrafficMeter,
        factored: SelectiveStageCompression | None,
        finalizer: _Finalizer,
        restores: Sequence[Restore],
        probe: Probe,
    ) -> None:
        self._communicator = communicator
        self._groups = groups
        self._factored = factored
        self._finalizer = finalizer
        self._restores: Sequence[Restore] = restores
        self.meter = meter
        self.probe = probe
        """Tells a listener what is going on; nobody listens at first."""

    def forward_backward_func(self, **kwargs: Any) -> Any:
        """Megatron-core's forward-backward function with this plan's communicator bound; same arguments and result.

        Raises:
            ValueError: a communicator or process groups are given, in a layout with pipeline stages.
        """
        schedule = get_forward_backward_func()
        self._finalizer.install()
        if self._communicator is None:
            return schedule(**kwargs)
        for name in ("p2p_communicator", "pg_collection"):  # loops that can take them pass None on
            if kwargs.pop(name, None) is not None:
                raise ValueError(f"{name} must be None: a plan brings its own, made from megatron.core.parallel_state")
        self._communicator.begin(kwargs["num_microbatches"], kwargs.get("forward_only", False))
        result = schedule(**kwargs, p2p_communicator=self._communicator, pg_collection=self._groups)
        self._communicator.end()
        return result

    def traffic(self) -> dict[str, ByteCount]:
        """Bytes that this rank has sent since the last call, by class."""
        self.meter.check()
        return self.meter.take()

    def state_dict(self, *, copy: bool = True) -> dict[str, torch.Tensor]:
        """Error memories, warm-started queries and the step count of this rank, and whose they are.

        Args:
            copy: false gives the tensors that the next step changes, for somebody who writes them before it.
        """
        state = self._communicator.state_dict() if self._communicator else {}
        if self._factored is not None:
            state |= {f"{_SC_PREFIX}{key}": value for key, value in self._factored.state_dict().items()}
        if state:
            state[OWNER] = owner()
        return {key: value.detach().clone() for key, value in state.items()} if copy else state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Continue from ``state``; what it does not hold starts afresh.

        Raises:
            ValueError: it holds what this plan does not keep on this rank. Nothing is changed then.
        """
        kept = self._communicator.kept() if self._communicator else {}
        if self._factored is not None:
            kept |= {f"{_SC_PREFIX}{key}": shape for key, shape in self._factored.kept().items()}
        check(state, kept)
        own = {key: value for key, value in state.items() if key != OWNER}
        factored = {key.removeprefix(_SC_PREFIX): v for key, v in own.items() if key.startswith(_SC_PREFIX)}
        if self._communicator is not None:
            self._communicator.load_state_dict({k: v for k, v in own.items() if not k.startswith(_SC_PREFIX)})
        if self._factored is not None:
            self._factored.load_state_dict(factored)

    def detach(self) -> None:
        """Give the model back to Megatron-core as it was."""
        undo(self._restores)
        self._restores = ()


def attach(
    technique: TechniqueConfig,
    model: torch.nn.Module | Sequence[torch.nn.Module],
    *,
    seed: int = 0,
    meter: TrafficMeter | None = None,
    split_over_tensor_parallel: bool = False,
) -> Attachment:
    """Install ``technique`` on a model whose process groups are those of megatron.core.parallel_state.

    Every rank must call it, after ``finalize_model_grads_func`` was set in the model's configuration.

    Args:
        technique: what is compressed and how.
        model: the chunks of this rank, or the only one, as given to Megatron-core's forward-backward function.
        seed: keys the codecs' private random generators; the same on every rank.
        meter: an already observing meter; by default a new one starts to observe.
        split_over_tensor_parallel: each tensor-parallel rank sends its share of the rows of a stage-to-stage message,
            and shares are gathered on arrival. Lossless; without sequence parallelism all ranks hold the same message.

    Raises:
        ValueError: the plan can't work in this layout, or would compress nothing.
    """
    if isinstance(model, torch.nn.Module):
        model = list(model) if isinstance(model, torch.nn.ModuleList) else [model]
    config = get_model_config(model[0])
    layout = _layout(config, split_over_tensor_parallel)
    problems = [*layout.message_problems(), *technique.problems(layout)]
    if problems:
        raise ValueError("; ".join(problem.sentence for problem in problems))
    if _captures_iterations(config):
        raise ValueError(
            "a CUDA graph of a whole iteration repeats what one step decided, and a plan decides at every step: "
            "cuda_graph_impl and cuda_graph_scope must not be full_iteration"
        )
    own_meter = meter is None
    meter = TrafficMeter.for_megatron() if meter is None else meter
    groups = _schedule_groups()
    probe = Probe()
    restores: list[Restore] = [meter.stop]
    try:
        communicator = None
        if layout.pipeline_parallel_size > 1:
            split_over = groups.tp if split_over_tensor_parallel and groups.tp.size() > 1 else None
            communicator = CompressedP2PCommunicator(groups.pp, config, technique.cb, meter, seed, split_over, probe)
        embedding = FusedEmbeddingSync(model, meter, groups, probe) if technique.fe.enabled else None
        left_out: frozenset[torch.nn.Parameter] = frozenset()
        if embedding is not None:
            restores.append(embedding.restore)
            left_out = embedding.left_out
        factored = None
        if technique.sc.enabled:
            excluded = embedding.parameters if embedding is not None else frozenset()
            factored = SelectiveStageCompression(model, technique.sc, seed, excluded, probe)
        compressors = {} if factored is None else {id(group): reduction for group, reduction in factored.groups}
        for group in bucket_groups(model) if left_out or compressors else ():
            if left_out & group.params or id(group) in compressors:
                restores.append(BucketGroupSync(group, meter, left_out, compressors.get(id(group))).restore)
        finalizer = _Finalizer(config, meter, embedding, factored)
        finalizer.install()
        restores.append(finalizer.restore)
    except BaseException:
        undo(restores[1:])
        raise
    if own_meter:
        meter.observe()
    return Attachment(communicator, groups, meter, factored, finalizer, restores, probe)


def _captures_iterations(config: Any) -> bool:
    """Whether Megatron-core makes a CUDA graph of all of a step; it says so in another field in each version."""
    scope = getattr(config, "cuda_graph_scope", None) or ()
    scopes = scope if isinstance(scope, (list, tuple)) else (scope,)
    said = [getattr(config, "cuda_graph_impl", None), *(getattr(part, "name", part) for part in scopes)]
    return "full_iteration" in said


class _Finalizer:
    """This plan's part in ``config.finalize_model_grads_func``, around whatever the training loop sets there."""

    def __init__(
        self,
        config: Any,
        meter: TrafficMeter,
        embedding: FusedEmbeddingSync | None,
        factored: SelectiveStageCompression | None,
    ) -> None:
        self._config = config
        self._meter = meter
        self._embedding = embedding
        self._factored = factored
        self._original: Callable[..., Any] | None = None
        self._installed: Callable[..., Any] | None = None

    def install(self) -> None:
        """Wrap the function that is set now, unless that is this one already: a loop may set its own at any time."""
        current = self._config.finalize_model_grads_func
        if current is None or current is self._installed:
            return
        self._original, self._installed = current, self._wrap(current)
        self._config.finalize_model_grads_func = self._installed

    def restore(self) -> None:
        """Put the loop's function back, unless the loop has set another one since."""
        if self._installed is not None and self._config.finalize_model_grads_func is self._installed:
            self._config.finalize_model_grads_func = self._original

    def _wrap(self, finalize: Callable[..., Any]) -> Callable[..., Any]:
        inner = finalize if self._embedding is None else self._embedding.finalizer(finalize)

        @functools.wraps(finalize)
        def finalize_in_scope(*args: Any, **kwargs: Any) -> Any:
            with self._meter.scope("other"):  # sums of LayerNorm gradients
                result = inner(*args, **kwargs)
            if self._factored is not None:
                self._factored.end_step()
            return result

        return finalize_in_scope


def _layout(config: ModelParallelConfig, split_over_tensor_parallel: bool) -> ParallelConfig:
    """What Megatron-core was set up with, in this project's terms."""
    return ParallelConfig(
        tensor_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        # Gradients are reduced over the context-parallel ranks too.
        data_parallel_size=parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        num_chunks=config.virtual_pipeline_model_parallel_size or 1,
        overlap_p2p=config.overlap_p2p_comm,
        batch_p2p=config.batch_p2p_comm,
        sequence_parallel=config.sequence_parallel,
        split_over_tensor_parallel=split_over_tensor_parallel,
    )


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
