"""What every codec is: a tensor in, a payload out, and back; and a declaration of what travels.

A codec's :class:`WireFormat` says, from shape and dtype alone, which tensors a payload holds. The receiver
allocates from it, the traffic meter counts it, the simulator prices it, and the encoder writes into it: there is
no second description that could disagree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from optimus_cc.compression.power_iteration import blocks, clear_unless
from optimus_cc.config.codec import CodecConfig, LowRankConfig, TopKConfig
from optimus_cc.wire_size import message_matrix


def wire_dtype(name: str, input_dtype: torch.dtype) -> torch.dtype:
    """The type that a codec's ``wire_dtype`` stands for; ``input``: that of what is encoded."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}.get(name, input_dtype)


@dataclass(frozen=True)
class Part:
    """One tensor inside a payload."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WireFormat:
    """What travels for a tensor of ``shape`` and ``dtype``."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]
    summable: bool
    """Payloads of several ranks may be added up by an all-reduce; if not they must be gathered."""

    @cached_property
    def nbytes(self) -> int:
        """Wire bytes: what travels, with the padding that keeps parts of several types aligned."""
        return self._offsets[-1]

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        """First byte of each part, aligned to its own elements, and of what would come after the last."""
        offsets, end = [], 0
        for part in self.parts:
            start = -(-end // part.dtype.itemsize) * part.dtype.itemsize
            offsets.append(start)
            end = start + part.nbytes
        return (*offsets, end)

    @property
    def logical_nbytes(self) -> int:
        """What would have travelled uncompressed."""
        return math.prod(self.shape) * self.dtype.itemsize

    @cached_property
    def payload_dtype(self) -> torch.dtype:
        """Element type of the flat payload: that of the parts if they share one, else bytes."""
        dtypes = {part.dtype for part in self.parts}
        return dtypes.pop() if len(dtypes) == 1 else torch.uint8

    def allocate(self, device: torch.device) -> torch.Tensor:
        """An empty flat payload: 1-D, contiguous, ``nbytes`` long."""
        return torch.empty(self.nbytes // self.payload_dtype.itemsize, dtype=self.payload_dtype, device=device)

    def unpack(self, payload: torch.Tensor) -> list[torch.Tensor]:
        """The parts as views of ``payload``; writing to them fills it.

        Raises:
            ValueError: the payload is not of this format.
        """
        if payload.dtype != self.payload_dtype or payload.numel() * payload.element_size() != self.nbytes:
            raise ValueError(
                f"a payload of {payload.numel()} x {payload.dtype} is not the declared {self.nbytes} bytes "
                f"of {self.payload_dtype}"
            )
        size = payload.element_size()
        return [
            payload[offset // size : (offset + part.nbytes) // size].view(part.dtype).view(part.shape)
            for part, offset in zip(self.parts, self._offsets, strict=False)
        ]


@dataclass(frozen=True)
class Payload:
    """An encoded tensor: its format, and one flat tensor that holds everything that travels."""

    wire: WireFormat
    data: torch.Tensor


class CodecState(Protocol):
    """What a codec remembers from one tensor to the next of the same origin (warm start). Saved in checkpoints."""

    def state_dict(self) -> dict[str, torch.Tensor]: ...

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None: ...


class Codec(Protocol):
    """Turns tensors into payloads. Stateless: what it remembers lives in the state that the caller keeps.

    Any shape, any strides, any float dtype, zero and one element included. A non-finite input comes out non-finite.
    """

    def new_state(self, seed_key: Sequence[int | str]) -> CodecState | None:
        """State for one origin; ``seed_key`` names it and keys its private random generator."""

    def wire_format(self, shape: Sequence[int], dtype: torch.dtype) -> WireFormat: ...

    def encode(
        self, tensor: torch.Tensor, state: CodecState | None = None, dtype: torch.dtype | None = None
    ) -> Payload:
        """``tensor`` as a payload from which one of ``dtype`` is decoded; by default of its own."""

    def decode(self, payload: Payload) -> torch.Tensor:
        """The tensor that ``payload`` stands for, in its shape and the dtype it was encoded for."""

    def residual(self, total: torch.Tensor, payload: Payload, out: torch.Tensor | None = None) -> torch.Tensor:
        """What ``payload`` leaves out of ``total`` (fp32); zero everywhere if what is decoded is not finite.

        Args:
            out: where it may be put, contiguous; may be ``total``.
        """


def what_is_left(total: torch.Tensor, decoded: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """``total`` (fp32) less ``decoded``; zero everywhere if that is not finite. ``out`` may be ``total``."""
    residual = torch.empty_like(total) if out is None else out
    rows = message_matrix(total.shape)
    parts = [tensor.view(rows) for tensor in (total, decoded, residual)]
    for block in blocks(*rows, total.device):
        torch.sub(parts[0][block], parts[1][block], out=parts[2][block])
    if residual.numel():
        least, most = torch.aminmax(residual)  # both NaN if anything is
        clear_unless((torch.isfinite(least) & torch.isfinite(most)).view(1), residual.unsqueeze(0))
    return residual


def build_codec(config: CodecConfig) -> Codec:
    """The codec that a configuration describes."""
    from optimus_cc.compression.identity import Identity
    from optimus_cc.compression.low_rank import LowRank
    from optimus_cc.compression.top_k import TopK

    if isinstance(config, LowRankConfig):
        return LowRank(rank=config.rank, warm_start=config.warm_start, wire_dtype=config.wire_dtype)
    if isinstance(config, TopKConfig):
        return TopK(density=config.density, match_rank=config.match_rank, wire_dtype=config.wire_dtype)
    return Identity()
