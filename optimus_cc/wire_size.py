"""How many bytes a codec puts on the wire for a tensor. Pure arithmetic, without torch.

Codecs take their sizes from here, and so does whoever checks, reports or predicts traffic without running it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from optimus_cc.config.codec import CodecConfig, LowRankConfig, TopKConfig

BLOCK_ENTRIES = 2**16
"""Most entries of a top-k block: an index inside it takes 16 bits."""
INDEX_BYTES = 2
_WIRE_ITEMSIZES = {"fp32": 4, "bf16": 2, "fp16": 2}


def message_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, columns) of a tensor seen as a matrix: the last dimension is the columns.

    For a stage-to-stage message (sequence, micro-batch, hidden) rows are tokens and columns are hidden units.
    """
    if not shape:
        return 1, 1
    columns = shape[-1]
    return math.prod(shape[:-1]), columns


def weight_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, columns) of a weight seen as a matrix: the first dimension is the rows.

    Of a vector (1, its length), which no rank makes smaller.
    """
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


def low_rank_elements(shape: Sequence[int], rank: int) -> int:
    """Elements of the two factors of ``shape`` as a matrix; the rank is clamped to min(rows, columns)."""
    rows, columns = message_matrix(shape)
    return min(rank, rows, columns) * (rows + columns)


def top_k_entries(shape: Sequence[int], value_bytes: int, *, density: float | None, match_rank: int | None) -> int:
    """Entries that the top-k codec keeps of a tensor: at least one per block, at most all.

    Args:
        shape: the tensor's.
        value_bytes: size of a value as it travels.
        density: share of the entries to keep, rounded up; or else
        match_rank: as many as fit into the payload of a low-rank codec of this rank with values of the same size.
    """
    numel = math.prod(shape)
    if density is not None:
        wanted = math.ceil(density * numel)
    else:
        assert match_rank is not None
        wanted = low_rank_elements(shape, match_rank) * value_bytes // (value_bytes + INDEX_BYTES)
    return min(max(wanted, num_blocks(numel)), numel)


def num_blocks(numel: int) -> int:
    return -(-numel // BLOCK_ENTRIES)


@dataclass(frozen=True)
class Blocks:
    """Consecutive top-k blocks of one size, of which equally many entries are kept."""

    start: int
    """First entry, in the flattened tensor."""
    count: int
    size: int
    kept: int
    """Entries kept of each block."""

    @property
    def stop(self) -> int:
        return self.start + self.count * self.size


def top_k_blocks(numel: int, entries: int) -> Iterator[Blocks]:
    """How ``numel`` entries are cut into blocks, and how many of each are kept; ``entries`` in total.

    Sizes and kept counts are each as even as they can be, the larger ones first, so a block never keeps more than
    it has. At most three runs of like blocks come out.
    """
    blocks = num_blocks(numel)
    if not blocks:
        return
    (size, larger), (kept, richer) = divmod(numel, blocks), divmod(entries, blocks)
    cuts = sorted({0, larger, richer, blocks})
    start = 0
    for first, end in pairwise(cuts):
        run = Blocks(start, end - first, size + (first < larger), kept + (first < richer))
        yield run
        start = run.stop


def wire_nbytes(codec: CodecConfig, shape: Sequence[int], itemsize: int) -> int:
    """Bytes that travel for a tensor of ``shape`` with elements of ``itemsize`` bytes."""
    if isinstance(codec, LowRankConfig):
        return low_rank_elements(shape, codec.rank) * _WIRE_ITEMSIZES.get(codec.wire_dtype, itemsize)
    if isinstance(codec, TopKConfig):
        value_bytes = _WIRE_ITEMSIZES.get(codec.wire_dtype, itemsize)
        entries = top_k_entries(shape, value_bytes, density=codec.density, match_rank=codec.match_rank)
        return entries * (value_bytes + INDEX_BYTES)
    return math.prod(shape) * itemsize


def part_of_a_mean(elements: int, ranks: int) -> int:
    """Of how many elements one of ``ranks`` makes the mean, where means travel in half precision."""
    return -(-elements // ranks)


def mean_nbytes(elements: int, matrices: int, wire_dtype: str, ranks: int) -> float:
    """Bytes that a rank sends for the mean over ``ranks`` of fp32 matrices of ``elements`` in all.

    Args:
        wire_dtype: in which they travel. fp32, and so ``input``: a ring all-reduce. Half precision: an all-to-all and
            an all-gather of equal parts, and in fp16 an exponent with each matrix.
    """
    if wire_dtype not in ("bf16", "fp16"):
        return 2 * (ranks - 1) / ranks * elements * 4
    exponents = matrices if wire_dtype == "fp16" else 0
    return (ranks - 1) * (2 * part_of_a_mean(elements, ranks) + exponents) * _WIRE_ITEMSIZES[wire_dtype]
