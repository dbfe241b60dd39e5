"""Means over ranks of many small matrices at once, and each rank's own share of what arrived.

An error memory needs more than the mean: what a rank takes off its own gradient must be its own factor, or its memory
collects how far it is from the others; and over the ranks all that is taken off must be what arrived, or the rounding
of the wire is lost. So every matrix has a *share* on each rank: the mean over the ranks of the shares is what arrived.

In fp32 the mean is an all-reduce, and a rank's share is its own matrix. In half precision an all-reduce would round
inside the library, where no rank sees it. There each rank sends every other one its part of the matrices (an
all-to-all), sums are made in fp32, and the rounded means are gathered: as many bytes as the ring of an all-reduce
sends, two roundings of each number, and each of them known to one rank, which takes it into its share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from optimus_cc.compression import powers_of_two
from optimus_cc.wire_size import part_of_a_mean

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Mean:
    """What arrived, in fp32."""

    arrived: list[torch.Tensor]
    """The same bits on every rank."""
    shares: Callable[[], list[torch.Tensor]]
    """Makes this rank's; their mean over the ranks is what arrived, up to the rounding of fp32."""


class FactorMean(Protocol):
    """One mean at a time, of batches of fp32 matrices."""

    def start(self, factors: Sequence[torch.Tensor]) -> None:
        """Begin; does not wait for other ranks."""

    def finish(self) -> Mean: ...


def factor_mean(
    ranks: dist.ProcessGroup, shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device
) -> FactorMean:
    """The mean over ``ranks`` of batches of matrices of ``shapes``, which travel in ``dtype``."""
    return AllReduceMean(ranks, shapes) if dtype == torch.float32 else HalfMean(ranks, shapes, dtype, device)


class AllReduceMean:
    """In fp32."""

    def __init__(self, ranks: dist.ProcessGroup, shapes: Sequence[Shape]) -> None:
        self._ranks = ranks
        self._shapes = list(shapes)
        self._under_way: tuple[list[torch.Tensor], torch.Tensor, Any] | None = None

    def start(self, factors: Sequence[torch.Tensor]) -> None:
        flat = torch.cat([factor.flatten() for factor in factors]).div_(self._ranks.size())
        self._under_way = list(factors), flat, dist.all_reduce(flat, group=self._ranks, async_op=True)

    def finish(self) -> Mean:
        assert self._under_way is not None
        (local, flat, handle), self._under_way = self._under_way, None
        handle.wait()
        return Mean(_split(flat, self._shapes), lambda: local)


class HalfMean:
    """In bf16 or fp16.

    fp16 has few exponents: each rank sends that of a power of two along with each matrix (a whole number, one more
    element), and the largest of all ranks', which all of them know, scales the mean.
    """

    def __init__(
        self, ranks: dist.ProcessGroup, shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._ranks = ranks
        self._shapes = list(shapes)
        self._dtype = dtype
        sizes = [rows * columns for count, rows, columns in shapes for _ in range(count)]
        self._numel = sum(sizes)
        self._part = part_of_a_mean(self._numel, ranks.size())
        """Elements of which one rank makes the mean."""
        self._exponents = len(sizes) if dtype == torch.float16 else 0
        sizes[-1] += self._part * ranks.size() - self._numel  # zeros: parts are of one size
        inside = _inside(sizes, ranks.rank() * self._part, self._part)
        self._sizes, self._own_sizes = (torch.tensor(each, device=device) for each in (sizes, inside))
        self._under_way: tuple[torch.Tensor, torch.Tensor, Any] | None = None

    def start(self, factors: Sequence[torch.Tensor]) -> None:
        ranks = self._ranks.size()
        flat = factors[0].new_zeros(ranks * self._part)
        torch.cat([factor.flatten() for factor in factors], out=flat[: self._numel])
        sent = flat.new_empty((ranks, self._part + self._exponents), dtype=self._dtype)
        if self._exponents:
            largest = torch.cat([factor.abs().amax(dim=(1, 2)) for factor in factors])
            # A matrix's largest element comes to lie between 2^14 and 2^15; fp16 ends below 2^16.
            sent[:, self._part :] = (powers_of_two.exponent(largest) - 14).clamp_(min=powers_of_two.LOWEST)
        sent[:, : self._part] = self._scaled(flat, self._exponents_of(sent[0]), self._sizes, -1).view(ranks, -1)
        received = torch.empty_like(sent)
        handle = dist.all_to_all_single(received, sent, group=self._ranks, async_op=True)
        self._under_way = sent, received, handle

    def finish(self) -> Mean:
        assert self._under_way is not None
        (sent, received, handle), self._under_way = self._under_way, None
        handle.wait()
        exponents = self._exponents_of(received)
        parts = self._scaled(received[:, : self._part].float(), exponents, self._own_sizes)
        mean = parts.mean(dim=0)
        largest = None if exponents is None else exponents.amax(dim=0)
        own = self._scaled(mean, largest, self._own_sizes, -1).to(self._dtype)
        flat = own.new_empty(self._ranks.size() * self._part)
        gathering = dist.all_gather_into_tensor(flat, own, group=self._ranks, async_op=True)
        rounding = self._scaled(own.float(), largest, self._own_sizes) - mean
        gathering.wait()
        arrived = self._scaled(flat.float(), largest, self._sizes)
        return Mean(_split(arrived[: self._numel], self._shapes), lambda: self._shares(sent, rounding))

    def _shares(self, sent: torch.Tensor, rounding: torch.Tensor) -> list[torch.Tensor]:
        """What this rank sent; and, since no other rank knows it, all of what its part gained in the mean's rounding.

        Args:
            sent: ranks x (part, exponents).
            rounding: of the mean of this rank's part.
        """
        shares = self._scaled(sent[:, : self._part].float().flatten(), self._exponents_of(sent[0]), self._sizes)
        shares.view(-1, self._part)[self._ranks.rank()].add_(rounding, alpha=self._ranks.size())
        return _split(shares[: self._numel], self._shapes)

    def _exponents_of(self, sent: torch.Tensor) -> torch.Tensor | None:
        """... x matrices; None if none travel."""
        return sent[..., self._part :].int() if self._exponents else None

    @staticmethod
    def _scaled(
        values: torch.Tensor, exponents: torch.Tensor | None, sizes: torch.Tensor, sign: int = 1
    ) -> torch.Tensor:
        """``values`` (... x elements) times 2 to ``sign`` x the exponent of the matrix that each belongs to."""
        if exponents is None:
            return values
        powers = powers_of_two.power(exponents * sign)
        return values * powers.repeat_interleave(sizes, dim=-1, output_size=values.shape[-1])


def _inside(sizes: Sequence[int], start: int, length: int) -> list[int]:
    """How much of each of consecutive pieces of ``sizes`` lies between ``start`` and ``start + length``."""
    found, end = [], 0
    for size in sizes:
        begin, end = end, end + size
        found.append(max(0, min(end, start + length) - max(begin, start)))
    return found


def _split(flat: torch.Tensor, shapes: Sequence[Shape]) -> list[torch.Tensor]:
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
