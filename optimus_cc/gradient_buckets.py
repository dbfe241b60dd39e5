"""How Megatron-core's DistributedDataParallel lays the gradients of a chunk out in buckets. Without torch.

Only sizes matter here: with the distributed optimizer parameters and buckets are padded, the padding travels too, and
a bucket is reduce-scattered as a whole or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from optimus_cc.config.parallel import ParallelConfig
from optimus_cc.stage_parameters import Weight

_PARAMETER_ALIGNMENT = 64  # elements, with the distributed optimizer only
_BUCKET_ALIGNMENT = 128
_SMALLEST_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together."""

    weights: tuple[Weight, ...]
    numel: int
    """Elements, padding included."""


def gradient_buckets(
    weights: Sequence[Weight],
    parallel: ParallelConfig,
    virtual_stage: int,
    *,
    tied_embeddings: bool,
    bucket_size: int | None = None,
) -> list[Bucket]:
    """The buckets of one chunk, in the order in which a backward pass fills them.

    Args:
        weights: the chunk's parameters in model order.
        bucket_size: elements from which on a bucket is closed where there are several; None: Megatron-core's default.
    """
    replicas, scattered = parallel.data_parallel_size, parallel.distributed_optimizer
    size: float = bucket_size or max(_SMALLEST_BUCKET, _BUCKET_PER_RANK * replicas)
    if not parallel.overlap_grad_reduce or virtual_stage > 0:
        size = math.inf  # only the first chunk of the first rank: the others' reductions are hidden anyway
    # Both copies of a shared embedding must be cut alike, so each gets a bucket of its own.
    alone = scattered and tied_embeddings and parallel.pipeline_parallel_size > 1
    buckets: list[Bucket] = []
    held: list[Weight] = []
    start = end = 0

    def close() -> None:
        nonlocal start, end
        if scattered:
            end = _up(end, math.lcm(replicas, _BUCKET_ALIGNMENT))
        buckets.append(Bucket(tuple(held), end - start))
        held.clear()
        start = end

    for weight in reversed(weights):
        own = alone and weight.is_word_embedding
        if own and held:
            close()
        held.append(weight)
        end = (_up(end, _PARAMETER_ALIGNMENT) if scattered else end) + weight.numel
        if own or end - start >= size:
            close()
    if held:
        close()
    return buckets


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
