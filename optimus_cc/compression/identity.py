"""No compression: "off" is a codec too."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from optimus_cc.compression.codec import CodecState, Part, Payload, WireFormat, what_is_left


class Identity:
    """The tensor travels as it is."""

    def new_state(self, seed_key: Sequence[int | str]) -> None:
        return None

    def wire_format(self, shape: Sequence[int], dtype: torch.dtype) -> WireFormat:
        shape = tuple(shape)
        return WireFormat(shape, dtype, (Part("values", shape, dtype),), summable=True)

    def encode(
        self, tensor: torch.Tensor, state: CodecState | None = None, dtype: torch.dtype | None = None
    ) -> Payload:
        tensor = tensor.to(dtype or tensor.dtype)
        return Payload(self.wire_format(tensor.shape, tensor.dtype), tensor.contiguous().view(-1))

    def decode(self, payload: Payload) -> torch.Tensor:
        return payload.data.view(payload.wire.shape)

    def residual(self, total: torch.Tensor, payload: Payload, out: torch.Tensor | None = None) -> torch.Tensor:
        return what_is_left(total, self.decode(payload))  # ``total`` may itself be the payload, not sent yet
