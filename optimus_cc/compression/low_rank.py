"""Low-rank codec: a matrix travels as two thin factors.

One step of power iteration per tensor (Optimus-CC, section 4; PowerSGD, arXiv 1905.13727): with M of n x m and a
query Q of m x r, P = orthonormal basis of M Q, then Q = M^T P; what arrives is P Q^T, the projection of M onto
span(P). The next tensor of the same origin starts from the Q before (warm start).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Literal

import torch

from optimus_cc.compression.codec import CodecState, Part, Payload, WireFormat, wire_dtype
from optimus_cc.wire_size import message_matrix


def private_generator(key: Sequence[int | str], device: torch.device, index: int = 0) -> torch.Generator:
    """The ``index``-th generator of what ``key`` names: the same in every run and on every rank, and nobody else's."""
    digest = hashlib.sha256(repr(tuple(key)).encode()).digest()
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(digest[:7], "big") + index)
    return generator


def warm_query(previous: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """A query from the factor before: scaled to unit columns; columns that vanished start afresh, from ``first``.

    Both are [..., columns, rank].
    """
    norms = torch.linalg.vector_norm(previous, dim=-2, keepdim=True)
    usable = norms > torch.finfo(norms.dtype).tiny
    return torch.where(usable, previous / norms.where(usable, 1.0), first)


class LowRankState:
    """The query of one origin, and the private generator that draws it."""

    def __init__(self, seed_key: Sequence[int | str]) -> None:
        self._key = tuple(seed_key)
        self._first: torch.Tensor | None = None
        self.draws = 0
        self.query: torch.Tensor | None = None
        """columns x rank, fp32: the second factor of the tensor before; None before the first one."""

    def draw(self, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
        """A new random orthonormal query; the n-th draw of an origin is the same in every run and on every rank."""
        self.draws += 1
        return self._orthonormal(self.draws, shape, device)

    def first(self, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
        """The query that this origin starts from."""
        if self._first is None or self._first.shape != shape:
            self._first = self._orthonormal(0, shape, device)
        return self._first

    def state_dict(self) -> dict[str, torch.Tensor]:
        state = {"draws": torch.tensor(self.draws)}
        if self.query is not None:
            state["query"] = self.query
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.draws = int(state.get("draws", 0))
        query = state.get("query")
        self.query = None if query is None else query.clone()

    def _orthonormal(self, index: int, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
        generator = private_generator(self._key, device, index)
        # A square Gaussian matrix can be badly conditioned, and what M Q loses no second factor brings back.
        query: torch.Tensor = torch.linalg.qr(torch.randn(shape, generator=generator, device=device))[0]
        return query


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
        factors = (Part("left", (rows, rank), sent), Part("right", (columns, rank), sent))
        return WireFormat(tuple(shape), dtype, factors, summable=False)

    def encode(self, tensor: torch.Tensor, state: CodecState | None = None) -> Payload:
        """Encode ``tensor`` with the query in ``state``; without one, with the first query of an unnamed origin."""
        if state is None:
            state = self.new_state(())
        assert isinstance(state, LowRankState)
        wire = self.wire_format(tensor.shape, tensor.dtype)
        data = wire.allocate(tensor.device)
        if not data.numel():
            return Payload(wire, data)
        left, right = wire.unpack(data)
        # Contiguous, because the rounding of a matrix product depends on strides.
        matrix = tensor.contiguous().view(message_matrix(tensor.shape)).float()
        basis, _ = torch.linalg.qr(matrix @ self._query(state, matrix, left.shape[1]))
        # What the receiver multiplies is the basis as it travels: project onto that, so that rounding it is seen here.
        left.copy_(basis)
        factor = matrix.t() @ left.float()
        scale = _balance(factor) if left.dtype == torch.float16 else None
        right.copy_(factor if scale is None else factor / scale)
        if scale is not None:
            left.mul_(scale)
        if self.warm_start:
            # A non-finite tensor must not spoil the start of those after it. No branch: that would wait for the device.
            state.query = torch.where(torch.isfinite(factor).all(), factor, torch.zeros_like(factor))
        return Payload(wire, data)

    def decode(self, payload: Payload) -> torch.Tensor:
        if not payload.data.numel():
            return payload.data.new_empty(payload.wire.shape, dtype=payload.wire.dtype)
        left, right = payload.wire.unpack(payload.data)
        return (left.float() @ right.float().t()).to(payload.wire.dtype).view(payload.wire.shape)

    def _query(self, state: LowRankState, matrix: torch.Tensor, rank: int) -> torch.Tensor:
        """columns x rank."""
        shape = (matrix.shape[1], rank)
        if not self.warm_start:
            return state.draw(shape, matrix.device)
        first = state.first(shape, matrix.device)
        if rank == shape[0] or state.query is None or state.query.shape != shape:
            return first  # at full rank every orthonormal query sees all of the matrix: nothing to warm up
        return warm_query(state.query.to(matrix.device), first)


def _balance(factor: torch.Tensor) -> torch.Tensor:
    """A power of two that brings a factor's largest element, divided, and 1, multiplied, to the same size.

    fp16 reaches from 6e-8 to 65504 only, and activation gradients can be smaller or larger than that.
    """
    largest = torch.linalg.vector_norm(factor, ord=math.inf)
    exponent = torch.round(torch.log2(largest) / 2).clamp(-12, 12)
    return torch.exp2(torch.where(torch.isfinite(exponent), exponent, 0.0))
