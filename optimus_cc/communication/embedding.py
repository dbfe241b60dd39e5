"""Fused embedding synchronisation (Optimus-CC): the tied embedding's two all-reduces become one.

The first and the last pipeline stage each hold a copy of the embedding. Megatron-core averages each copy's gradient
over the D data-parallel ranks and then adds the two: per rank 2V(D-1)/D + V bytes with V the gradient's size. Both are
sums, so one all-reduce over the 2D ranks gives the same for 2V(2D-1)/(2D). There is one such group per tensor-parallel
rank: ranks of different shards of the vocabulary have nothing to add up.

With the distributed optimizer a rank needs its own shard only. Megatron-core reduce-scatters, V(D-1)/D, and then adds
the whole copies, V; here the same reduce-scatter is followed by the exchange of the shard alone, V/D: in total V.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from optimus_cc.communication.gradient_sync import (
    Restore,
    bucket_groups,
    collective_group,
    extent,
    gradient_scale,
    replace,
    undo,
    unwrapped,
)
from optimus_cc.communication.probe import Probe
from optimus_cc.communication.traffic import TrafficMeter


@dataclass(frozen=True)
class _Place:
    """Where a rank's copy of the embedding is; what the ranks tell each other before anything is installed."""

    problem: str = ""
    tensor_parallel_rank: int = 0
    data_parallel_size: int = 1
    holds_copy: bool = False
    distributed_optimizer: bool = False
    shard: tuple[int, int] = (0, 0)
    """Elements of the embedding that this rank's optimizer owns."""
    partners: tuple[int, ...] = ()
    """Ranks of Megatron's own embedding group."""


class FusedEmbeddingSync:
    """The shared embedding's gradient, reduced once over all its copies. Every rank of the world must build it.

    There is more than one pipeline stage: see :meth:`TechniqueConfig.problems`.

    Args:
        model: the chunks of this rank.
        meter: the fused all-reduce counts as ``embedding``.
        schedule_groups: the process groups that a finaliser gets if its caller names none.
        probe: the synchronisation is reported to it as a span.

    Raises:
        ValueError: on every rank, if there is nothing to fuse or the copies are not alike.
    """

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        meter: TrafficMeter,
        schedule_groups: ProcessGroupCollection,
        probe: Probe | None = None,
    ) -> None:
        probe = probe or Probe()
        self._weight: torch.nn.Parameter | None = None
        self._bucket_group: Any = None
        self._place = self._agree(model)
        self._schedule_groups = schedule_groups
        self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        self._fused = None if self._place.distributed_optimizer else self._make_group()
        self._shard_group = schedule_groups.embd
        self._restores: list[Restore] = [self._destroy_groups]
        if self._weight is None:
            return
        if self._fused is not None:
            meter.classify(self._fused, "embedding")
        # Data-parallel reductions go first: they need not wait for the other stage, whose backward pass ends later.
        # Scaling by the number of tokens comes after, in Megatron's finaliser.
        last = model[-1]
        finish = last.finish_grad_sync

        @functools.wraps(finish)
        def finish_with_embedding(force_all_reduce: bool | None = False) -> None:
            finish(force_all_reduce=force_all_reduce)
            with probe.span("embedding", "fused embedding"):
                self.synchronize(bool(force_all_reduce))

        self._restores.append(replace(last, "finish_grad_sync", finish_with_embedding))

    @property
    def left_out(self) -> frozenset[torch.nn.Parameter]:
        """The parameters whose gradients the data-parallel reduction must not touch."""
        return frozenset() if self._place.distributed_optimizer else self.parameters

    @property
    def parameters(self) -> frozenset[torch.nn.Parameter]:
        """This rank's copy of the embedding, if it holds one."""
        return frozenset() if self._weight is None else frozenset({self._weight})

    @torch.no_grad()
    def synchronize(self, force_all_reduce: bool = False) -> None:
        """Reduce the embedding's gradient over all its copies.

        Args:
            force_all_reduce: what Megatron's reduction was told: with the distributed optimizer, leave the whole
                gradient on every rank.
        """
        weight: Any = self._weight
        if weight is None:
            return
        gradient = weight.main_grad.view(-1)
        if self._fused is not None:
            scale = gradient_scale(self._bucket_group.param_to_bucket[weight], self._bucket_group)
            if scale != 1.0:
                gradient *= scale
            dist.all_reduce(gradient, group=self._fused)
            return
        start, end = (0, gradient.numel()) if force_all_reduce else self._place.shard
        if end > start:
            dist.all_reduce(gradient[start:end], group=self._shard_group)

    def finalizer(self, finalize: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron-core's ``finalize_model_grads`` without its own embedding all-reduce."""

        @functools.wraps(finalize)
        def without_embedding(
            model: Sequence[torch.nn.Module],
            num_tokens: torch.Tensor | None = None,
            pg_collection: ProcessGroupCollection | None = None,
            **kwargs: Any,
        ) -> Any:
            groups = copy.copy(self._schedule_groups if pg_collection is None else pg_collection)
            groups.embd = self._alone  # None would make Megatron fall back to its own group
            return finalize(model, num_tokens, pg_collection=groups, **kwargs)

        return without_embedding

    def restore(self) -> None:
        """Give the reduction of the embedding back to Megatron-core."""
        undo(self._restores)
        self._restores.clear()

    def _agree(self, model: Sequence[torch.nn.Module]) -> _Place:
        """Find the copy, and make sure that all ranks can do what all ranks are about to do."""
        try:
            place = self._locate(model)
        except ValueError as error:
            place = _Place(problem=str(error))
        # One rank that refuses alone would leave the others waiting for it.
        places: list[_Place] = [place] * dist.get_world_size()
        dist.all_gather_object(places, place)
        for problem in (other.problem for other in places):
            if problem:
                raise ValueError(problem)
        self._members: dict[int, list[int]] = {}
        for rank, other in enumerate(places):
            if other.holds_copy:
                self._members.setdefault(other.tensor_parallel_rank, []).append(rank)
                for partner in other.partners:
                    if other.distributed_optimizer and places[partner].shard != other.shard:
                        raise ValueError(
                            "fused embedding synchronisation with the distributed optimizer: both copies must be cut "
                            f"alike, but rank {rank} owns elements {other.shard} of the embedding and rank {partner} "
                            f"elements {places[partner].shard}"
                        )
        for members in self._members.values():
            expected = 2 * places[members[0]].data_parallel_size
            if len(members) != expected:
                raise ValueError(
                    f"fused embedding synchronisation expects {expected} copies of each shard of the embedding "
                    f"(first and last stage), but ranks {members} hold one"
                )
        return place

    def _locate(self, model: Sequence[torch.nn.Module]) -> _Place:
        config = get_model_config(model[0])
        if getattr(config, "mtp_num_layers", None):
            raise ValueError("fused embedding synchronisation does not know the copies that mtp_num_layers adds")
        if config.finalize_model_grads_func is None:
            raise ValueError("fused embedding synchronisation: set config.finalize_model_grads_func first")
        chunks: list[Any] = [unwrapped(chunk) for chunk in model]
        if not all(getattr(chunk, "share_embeddings_and_output_weights", False) for chunk in chunks):
            raise ValueError(
                "fused embedding synchronisation needs tied embeddings (share_embeddings_and_output_weights): untied, "
                "the input and the output weight have no gradient to share"
            )
        groups = bucket_groups(model)
        scattered = groups[0].ddp_config.use_distributed_optimizer
        weights = [weight for chunk in chunks if (weight := chunk.shared_embedding_or_output_weight()) is not None]
        if not weights:
            return _Place(distributed_optimizer=scattered)
        (weight,) = weights  # there is more than one stage, so no rank holds both copies
        owners = [group for group in groups if weight in group.param_to_bucket]
        if not owners:
            raise ValueError("fused embedding synchronisation: the embedding is frozen, so it has no gradient")
        self._weight, self._bucket_group = weight, owners[0]
        return _Place(
            tensor_parallel_rank=parallel_state.get_tensor_model_parallel_rank(),
            data_parallel_size=collective_group(owners[0]).size(),
            holds_copy=True,
            distributed_optimizer=scattered,
            shard=_owned(weight, owners[0]) if scattered else (0, 0),
            partners=tuple(dist.get_process_group_ranks(parallel_state.get_embedding_group())),
        )

    def _make_group(self) -> dist.ProcessGroup | None:
        """This rank's group of 2D; every rank takes part in making all of them, in the same order."""
        mine = None
        for _, members in sorted(self._members.items()):
            group = dist.new_group(members)
            if dist.get_rank() in members:
                mine = group
        return mine

    def _destroy_groups(self) -> None:
        for group in (self._alone, self._fused):
            if group is not None:
                dist.destroy_process_group(group)


def _owned(weight: torch.nn.Parameter, group: Any) -> tuple[int, int]:
    """First and one past the last element of ``weight`` in this rank's shard of its bucket; (0, 0) if there is none."""
    bucket = group.param_to_bucket[weight]
    ranks = collective_group(group)
    length = bucket.grad_data.numel() // ranks.size()
    first, last = extent(weight, bucket)
    start, end = max(first, ranks.rank() * length), min(last, (ranks.rank() + 1) * length)
    return (start - first, end - first) if end > start else (0, 0)
