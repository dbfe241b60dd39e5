"""Takes over the data-parallel reduction of those gradients that are to be treated differently.

Megatron-core's DistributedDataParallel has no communication hook; its bucket groups start and finish the reduction.
A bucket group that holds something special (a shared embedding that is reduced elsewhere, matrices that travel as
factors) gets ``start_grad_sync`` and ``finish_grad_sync`` of its own. They let Megatron's methods run on slices of the
buckets, the special gradients left out, so scaling, checks, coalescing and asynchrony stay Megatron's. A bucket
group that holds nothing special, or not at this step, is reduced by Megatron's methods on its unchanged buckets: slices
would change the order of summation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from optimus_cc.communication.traffic import TrafficMeter

Restore = Callable[[], None]


class Compressor(Protocol):
    """Reduces some matrices of one bucket group in its own way."""

    @property
    def parameters(self) -> frozenset[torch.nn.Parameter]:
        """Whose gradients it reduces."""

    @property
    def active(self) -> bool:
        """Whether it does so at this step; the same on every rank of the group, and all through a step."""

    def start(self) -> None:
        """Begin to reduce; must not wait."""

    def finish(self) -> None:
        """Leave the reduced gradients in the bucket."""


class BucketGroupSync:
    """One bucket group, taken over.

    Args:
        group: Megatron-core's bucket group.
        meter: counts what is sent.
        left_out: parameters whose gradients are neither scaled nor reduced here.
        compressor: reduces some of the others while it is active.

    Raises:
        ValueError: the bucket group is run in a way that is not supported.
    """

    def __init__(
        self,
        group: Any,
        meter: TrafficMeter,
        left_out: Collection[torch.nn.Parameter] = (),
        compressor: Compressor | None = None,
    ) -> None:
        self._group = group
        self._meter = meter
        self._left_out = frozenset(left_out)
        self._compressor = compressor
        self._compressing = False
        self._megatron_start = group.start_grad_sync
        self._megatron_finish = group.finish_grad_sync
        restores = [replace(group, "start_grad_sync", self.start), replace(group, "finish_grad_sync", self.finish)]
        self.restore: Restore = lambda: undo(restores)

    def start(self, force_all_reduce: bool | None = False) -> None:
        """In place of the bucket group's ``start_grad_sync``."""
        group = self._group
        if group.is_first_batch and group.grad_reduce_handle is not None:
            return  # as Megatron does: already dispatched
        self._compressing = self._compressor is not None and self._compressor.active
        if not self._compressing and not self._left_out:
            self._megatron_start(force_all_reduce=force_all_reduce)
            return
        config = group.ddp_config
        if config.check_for_nan_in_grad or config.check_for_large_grads:
            group.check_grads(
                check_for_nan_or_inf=config.check_for_nan_in_grad, check_for_large=config.check_for_large_grads
            )
        with self._meter.in_place_of("data_parallel", self._logical_bytes(bool(force_all_reduce))):
            self._reduce_the_rest(bool(force_all_reduce))
            if self._compressing:
                assert self._compressor is not None
                self._compressor.start()

    def finish(self, force_all_reduce: bool | None = False) -> None:
        """In place of the bucket group's ``finish_grad_sync``."""
        self._megatron_finish(force_all_reduce=force_all_reduce)
        if self._compressing:
            assert self._compressor is not None
            self._compressing = False
            with self._meter.in_place_of("data_parallel", 0.0):
                self._compressor.finish()

    def _reduce_the_rest(self, force_all_reduce: bool) -> None:
        """Megatron's reduction of what is neither left out nor compressed."""
        special = set(self._left_out)
        if self._compressing:
            assert self._compressor is not None
            special |= set(self._compressor.parameters)
        whole = [bucket for bucket in self._group.buckets if not special & bucket.params]
        slices = [
            part for bucket in self._group.buckets if special & bucket.params for part in _without(bucket, special)
        ]
        handles = []
        # A slice can't be scattered: its length is not a multiple of the number of ranks.
        scattered = self._group.ddp_config.use_distributed_optimizer
        for buckets, all_reduce in ((whole, force_all_reduce), (slices, force_all_reduce or scattered)):
            if buckets:
                with _standing_in(self._group, buckets):
                    self._megatron_start(force_all_reduce=all_reduce)
                handles.append(self._group.grad_reduce_handle)
                self._group.grad_reduce_handle = None
        if self._group.ddp_config.overlap_grad_reduce:
            self._group.grad_reduce_handle = _Handles(handles)

    def _logical_bytes(self, force_all_reduce: bool) -> float:
        """What Megatron's reduction of all that is not left out makes a rank send."""
        size = collective_group(self._group).size()
        scatter = self._group.ddp_config.use_distributed_optimizer and not force_all_reduce
        total: int = sum(bucket.grad_data.nbytes for bucket in self._group.buckets)
        for bucket in self._group.buckets:
            for parameter in self._left_out & bucket.params:
                start, end = extent(parameter, bucket)
                total -= (end - start) * bucket.grad_data.element_size()
        return total * (size - 1) / size * (1 if scatter else 2)


class _Handles:
    """Several collectives behind one handle; none is a handle too."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()


def bucket_groups(model: Sequence[torch.nn.Module]) -> list[Any]:
    """The bucket groups of a rank's chunks, those of experts apart.

    Raises:
        ValueError: the chunks are not wrapped in Megatron-core's DistributedDataParallel, or it is used in a way that
            leaves no place to act.
    """
    groups: list[Any] = []
    for chunk in model:
        found = getattr(chunk, "bucket_groups", None)
        if found is None:
            raise ValueError(
                f"the gradients of a {type(chunk).__name__} can't be reduced here: wrap the model in "
                "megatron.core.distributed.DistributedDataParallel (FSDP is not supported)"
            )
        groups += found
    for group in groups:
        if group.ddp_config.num_distributed_optimizer_instances > 1:
            raise ValueError("num_distributed_optimizer_instances must be 1")
        if any(getattr(bucket, "params_with_extra_main_grads", ()) for bucket in group.buckets):
            raise ValueError("param_name_patterns_for_fp32_local_accumulation must be empty")
    return groups


def collective_group(group: Any) -> dist.ProcessGroup:
    """The data-parallel ranks over which a bucket group is reduced."""
    if group.ddp_config.use_distributed_optimizer:
        ranks: dist.ProcessGroup = group.intra_distributed_optimizer_instance_group
        return ranks
    ranks = group.data_parallel_group
    return ranks


def extent(parameter: Any, bucket: Any) -> tuple[int, int]:
    """First and one past the last element of a parameter's gradient in its bucket."""
    # Not param_to_index: megatron-core 0.16 forgets there how the distributed optimizer pads parameters.
    start = parameter.main_grad.storage_offset() - bucket.grad_data.storage_offset()
    return start, start + parameter.main_grad.numel()


def gradient_scale(bucket: Any, group: Any) -> float:
    """What a local gradient is multiplied by so that the sum over data-parallel ranks is what Megatron leaves."""
    scale: float = bucket.gradient_scaling_factor
    return scale / collective_group(group).size() if group.ddp_config.average_in_collective else scale


def parameter_names(model: Sequence[torch.nn.Module]) -> dict[torch.nn.Parameter, str]:
    """``chunk.name`` of each parameter, for example ``0.decoder.layers.1.mlp.linear_fc1.weight``."""
    return {
        parameter: f"{index}.{name}"
        for index, chunk in enumerate(model)
        for name, parameter in unwrapped(chunk).named_parameters()
    }


def unwrapped(chunk: torch.nn.Module) -> torch.nn.Module:
    """The model inside Megatron-core's wrappers."""
    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    return chunk


def replace(owner: Any, name: str, value: Any) -> Restore:
    """Set an attribute of an instance; what is returned puts it back as it was."""
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)

    def restore() -> None:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return restore


def undo(restores: Sequence[Restore]) -> None:
    """Run them, last one first."""
    for restore in reversed(restores):
        restore()


def _without(bucket: Any, special: Collection[torch.nn.Parameter]) -> Iterator[Any]:
    """Stand-ins for ``bucket`` that cover all but the gradients of ``special``, in as few slices as there can be."""
    taken = sorted(extent(parameter, bucket) for parameter in bucket.params & set(special))
    position = 0
    for start, end in [*taken, (bucket.grad_data.numel(), 0)]:
        if start > position:
            part = copy.copy(bucket)
            part.grad_data = bucket.grad_data[position:start]
            yield part
        position = end


@contextmanager
def _standing_in(group: Any, buckets: list[Any]) -> Iterator[None]:
    """Let ``group`` hold other buckets for a moment."""
    real = group.buckets, group.cached_grad_buffer_shard_list
    group.buckets, group.cached_grad_buffer_shard_list = buckets, [None] * len(buckets)
    try:
        yield
    finally:
        group.buckets, group.cached_grad_buffer_shard_list = real
