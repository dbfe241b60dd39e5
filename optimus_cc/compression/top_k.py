"""Top-k codec: the entries of largest magnitude travel, each with its place; the rest is taken for zero.

The sparsification that Deep Gradient Compression (arXiv 1712.01887) made known, and that Optimus-CC compares its
low-rank codec with, in a form whose payload has a size known beforehand: selection is exact, not by a threshold, and
works in blocks of at most 65,536 entries, each of which keeps a fixed number, so that an index takes 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from optimus_cc.compression.codec import CodecState, Part, Payload, WireFormat, what_is_left, wire_dtype
from optimus_cc.wire_size import Blocks, top_k_blocks, top_k_entries

_INDEX_OFFSET = 2**15
"""Indices 0 to 65,535 travel as int16, which every backend and operation knows, less this."""


class TopK:
    """See the module's docstring. Exactly one of ``density`` and ``match_rank`` must be given.

    Args:
        density: share of the entries to keep, in (0, 1]; rounded up, and at least one entry of each block.
        match_rank: keep what fits into the payload of a low-rank codec of this rank, and never more bytes than that.
        wire_dtype: type in which the values travel.
    """

    def __init__(
        self,
        density: float | None = None,
        match_rank: int | None = None,
        wire_dtype: Literal["input", "fp32", "bf16", "fp16"] = "input",
    ) -> None:
        if (density is None) == (match_rank is None):
            raise ValueError(f"either density or match_rank, not density={density} and match_rank={match_rank}")
        if density is not None and not 0 < density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, not {density}")
        if match_rank is not None and match_rank < 1:
            raise ValueError(f"match_rank must be at least 1, not {match_rank}")
        self.density = density
        self.match_rank = match_rank
        self.wire_dtype = wire_dtype

    def new_state(self, seed_key: Sequence[int | str]) -> None:
        return None

    def wire_format(self, shape: Sequence[int], dtype: torch.dtype) -> WireFormat:
        sent = wire_dtype(self.wire_dtype, dtype)
        entries = top_k_entries(shape, sent.itemsize, density=self.density, match_rank=self.match_rank)
        # Values first: they are the wider type, and both parts stay aligned.
        parts = (Part("values", (entries,), sent), Part("indices", (entries,), torch.int16))
        return WireFormat(tuple(shape), dtype, parts, summable=False)

    def encode(
        self, tensor: torch.Tensor, state: CodecState | None = None, dtype: torch.dtype | None = None
    ) -> Payload:
        wire = self.wire_format(tensor.shape, dtype or tensor.dtype)
        data = wire.allocate(tensor.device)
        if not data.numel():
            return Payload(wire, data)
        values, indices = wire.unpack(data)
        entries = tensor.contiguous().view(-1)
        for blocks, place in _runs(wire):
            block = entries[blocks.start : blocks.stop].view(blocks.count, blocks.size)
            chosen = _largest(block, blocks.kept)
            values[place].copy_(block.gather(1, chosen).view(-1))
            indices[place].copy_((chosen - _INDEX_OFFSET).view(-1))
        return Payload(wire, data)

    def decode(self, payload: Payload) -> torch.Tensor:
        wire = payload.wire
        tensor = torch.zeros(math.prod(wire.shape), dtype=wire.dtype, device=payload.data.device)
        if payload.data.numel():
            values, indices = wire.unpack(payload.data)
            for blocks, place in _runs(wire):
                chosen = indices[place].long() + _INDEX_OFFSET
                tensor[blocks.start : blocks.stop].view(blocks.count, blocks.size).scatter_(
                    1, chosen.view(blocks.count, -1), values[place].to(wire.dtype).view(blocks.count, -1)
                )
        return tensor.view(wire.shape)

    def residual(self, total: torch.Tensor, payload: Payload, out: torch.Tensor | None = None) -> torch.Tensor:
        return what_is_left(total, self.decode(payload), out)


def _runs(wire: WireFormat) -> Iterator[tuple[Blocks, slice]]:
    """The blocks of a tensor, and where in the payload's parts their entries stand."""
    start = 0
    for blocks in top_k_blocks(math.prod(wire.shape), wire.parts[0].shape[0]):
        end = start + blocks.count * blocks.kept
        yield blocks, slice(start, end)
        start = end


def _largest(block: torch.Tensor, kept: int) -> torch.Tensor:
    """Indices (rows x kept) of the entries of largest magnitude in each row; NaN is larger than anything.

    Of equal ones the first are taken: which ones topk itself takes depends on the device. The bits of a positive
    float order like the float, so magnitude and place make one integer key without ties.
    """
    magnitude = block.float().abs().view(torch.int32).long()
    place = torch.arange(block.shape[1] - 1, -1, -1, device=block.device)
    chosen: torch.Tensor = torch.topk(magnitude.mul_(2**16).add_(place), kept, dim=1).indices
    return chosen
