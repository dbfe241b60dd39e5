"""Low-rank codec: a matrix travels as two thin factors.

One step of power iteration per tensor (:mod:`.power_iteration`): with M of n x m and a query Q of r x m, P =
orthonormal basis of M Qᵀ, then R = Pᵀ M; what arrives is P R, the projection of M onto span(P). The next tensor of the
same origin starts from the R before (warm start).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

import torch

from optimus_cc.compression import powers_of_two
from optimus_cc.compression.codec import CodecState, Part, Payload, WireFormat, what_is_left, wire_dtype
from optimus_cc.compression.power_iteration import (
    blocks,
    clear_unless,
    first_factor,
    leave_out,
    masked,
    orthonormal_basis,
    second_factor,
    surely_finite,
    warm_query,
)
from optimus_cc.wire_size import message_matrix


def private_generator(key: Sequence[int | str], device: torch.device, index: int = 0) -> torch.Generator:
    """The ``index``-th generator of what ``key`` names: the same in every run and on every rank, and nobody else's."""
    digest = hashlib.sha256(repr(tuple(key)).encode()).digest()
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(digest[:7], "big") + index)
    return generator


def transposed(matrices: torch.Tensor) -> torch.Tensor:
    """A contiguous copy with the last two dimensions exchanged."""
    return matrices.mT.clone(memory_format=torch.contiguous_format)


class LowRankState:
    """The query of one origin, and the private generator that draws it."""

    def __init__(self, seed_key: Sequence[int | str]) -> None:
        self._key = tuple(seed_key)
        self._first: torch.Tensor | None = None
        self.draws = 0
        self.query: torch.Tensor | None = None
        """rank x columns, fp32: the second factor of the tensor before; None before the first one."""

    def draw(self, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
        """A new random orthonormal query, rank x columns; the n-th of an origin is the same in every run and rank."""
        self.draws += 1
        return self._orthonormal(self.draws, shape, device)

    def first(self, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
        """The query that this origin starts from."""
        if self._first is None or self._first.shape != shape:
            self._first = self._orthonormal(0, shape, device)
        return self._first

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The number of draws, and the query as columns x rank."""
        state = {"draws": torch.tensor(self.draws)}
        if self.query is not None:
            state["query"] = transposed(self.query)
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.draws = int(state.get("draws", 0))
        query = state.get("query")
        self.query = None if query is None else transposed(query)

    def _orthonormal(self, index: int, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
        generator = private_generator(self._key, device, index)
        # A square Gaussian matrix can be badly conditioned, and what M Qᵀ loses no second factor brings back.
        query: torch.Tensor = torch.linalg.qr(torch.randn(shape[::-1], generator=generator, device=device))[0]
        return transposed(query)


class LowRank:
    """See the module's docstring.

    Args:
        rank: columns of each factor, clamped to min(rows, columns), at which the result is exact up to rounding.
        warm_start: start from the previous factor; if false each tensor gets a new random query.
        wire_dtype: type in which the factors travel.
    """

    def __init__(
        self, rank: int, warm_start: bool = True, wire_dtype: Literal["input", "fp32", "bf16", "fp16"] = "input"
    ) -> None:
        if rank < 1:
            raise ValueError(f"rank must be at least 1, not {rank}")
        self.rank = rank
        self.warm_start = warm_start
        self.wire_dtype = wire_dtype

    def new_state(self, seed_key: Sequence[int | str]) -> LowRankState:
        return LowRankState(seed_key)

    def wire_format(self, shape: Sequence[int], dtype: torch.dtype) -> WireFormat:
        rows, columns = message_matrix(shape)
        rank = min(self.rank, rows, columns)
        sent = wire_dtype(self.wire_dtype, dtype)
        factors = (Part("left", (rows, rank), sent), Part("right", (rank, columns), sent))
        return WireFormat(tuple(shape), dtype, factors, summable=False)

    def encode(
        self, tensor: torch.Tensor, state: CodecState | None = None, dtype: torch.dtype | None = None
    ) -> Payload:
        """Encode ``tensor`` with the query in ``state``; without one, with the first query of an unnamed origin."""
        if state is None:
            state = self.new_state(())
        assert isinstance(state, LowRankState)
        wire = self.wire_format(tensor.shape, dtype or tensor.dtype)
        data = wire.allocate(tensor.device)
        if not data.numel():
            return Payload(wire, data)
        left, right = wire.unpack(data)
        matrix = _matrix(tensor).float()
        query = self._query(state, (right.shape[0], right.shape[1]), matrix.device)
        # What the receiver multiplies is the basis as it travels: project onto that, so that rounding it is seen here.
        left.copy_(orthonormal_basis(first_factor(matrix, query[None]))[0])
        factor = second_factor(matrix, left.float()[None])
        # A tensor that is not finite must not spoil the start of those after it, and neither must one whose projection
        # could leave fp32, which goes out as not finite. No branch: that would wait for the device.
        finite = surely_finite(factor)
        if self.warm_start:
            state.query = masked(factor, finite, 0.0)[0]
        factor = masked(factor, finite, torch.nan)[0]
        if left.dtype == torch.float16:
            exponent = _balance(factor)
            factor = factor * powers_of_two.power(-exponent)
            left.mul_(powers_of_two.power(exponent))
        right.copy_(factor)
        return Payload(wire, data)

    def decode(self, payload: Payload) -> torch.Tensor:
        if not payload.data.numel():
            return payload.data.new_empty(payload.wire.shape, dtype=payload.wire.dtype)
        left, right = payload.wire.unpack(payload.data)
        left, right = left.float(), right.float()
        if payload.wire.dtype == torch.float32:
            return (left @ right).view(payload.wire.shape)
        decoded = left.new_empty((left.shape[0], right.shape[1]), dtype=payload.wire.dtype)
        for rows in blocks(decoded.shape[0], decoded.shape[1], decoded.device):
            decoded[rows] = left[rows] @ right
        return decoded.view(payload.wire.shape)

    def residual(self, total: torch.Tensor, payload: Payload, out: torch.Tensor | None = None) -> torch.Tensor:
        if payload.wire.dtype != torch.float32 or not payload.data.numel():
            return what_is_left(total, self.decode(payload), out)  # with the rounding of what arrives
        left, right = (part.float()[None] for part in payload.wire.unpack(payload.data))
        into = None if out is None else _matrix(out)
        residual = leave_out(_matrix(total), left, right, into)
        clear_unless(surely_finite(right), residual)
        return residual.view(total.shape)

    def _query(self, state: LowRankState, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
        """rank x columns."""
        if not self.warm_start:
            return state.draw(shape, device)
        first = state.first(shape, device)
        if shape[0] == shape[1] or state.query is None or state.query.shape != shape:
            return first  # at full rank every orthonormal query sees all of the matrix: nothing to warm up
        return warm_query(state.query.to(device), first)


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as a batch of one matrix. Contiguous, because the rounding of a matrix product depends on strides."""
    return tensor.contiguous().view(1, *message_matrix(tensor.shape))


def _balance(factor: torch.Tensor) -> torch.Tensor:
    """Of a power of two that brings a factor's largest element, divided, and 1, multiplied, to the same size.

    fp16 reaches from 6e-8 to 65504 only, and activation gradients can be smaller or larger than that.
    """
    return (powers_of_two.exponent(factor.abs().amax()) >> 1).clamp(-12, 12)
