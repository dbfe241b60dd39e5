"""Error memories: what a codec left out of one tensor is added to the next one of the same origin."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from optimus_cc.compression.codec import Codec, CodecState, Payload


@dataclass
class CompressedStream:
    """Tensors of one origin going through a codec in order, with or without an error memory.

    With feedback, ``decode(encode(x)) + memory == x + memory before`` up to rounding. The memory is fp32.
    """

    codec: Codec
    state: CodecState | None
    feedback: bool
    memory: torch.Tensor | None = field(default=None, init=False)
    """What has not been sent yet, in the tensors' shape; None stands for zero."""

    def encode(self, tensor: torch.Tensor) -> Payload:
        """Encode ``tensor`` plus what is in memory; keep what was left out."""
        if not self.feedback:
            return self.codec.encode(tensor, self.state)
        total = self._with_memory(tensor)
        payload = self.codec.encode(total.to(tensor.dtype), self.state)
        residual = total - self.codec.decode(payload)
        if residual.numel():
            # A non-finite tensor goes out non-finite, but nothing of it may reach later ones. The norm is one number
            # on the device: nothing waits for it, and no mask of the tensor's size is made.
            finite = torch.isfinite(torch.linalg.vector_norm(residual, ord=math.inf))
            residual.masked_fill_(~finite, 0.0)
        self.memory = residual
        return payload

    def flush(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` plus all that is in memory, to be sent as it is; the memory is empty afterwards."""
        total = self._with_memory(tensor).to(tensor.dtype)
        self.memory = None
        return total

    def reset(self) -> None:
        """Drop what is in memory."""
        self.memory = None

    def state_dict(self) -> dict[str, torch.Tensor]:
        state = {f"codec.{key}": value for key, value in (self.state.state_dict() if self.state else {}).items()}
        if self.memory is not None:
            state["memory"] = self.memory
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        if self.state is not None:
            prefix = "codec."
            self.state.load_state_dict(
                {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            )
        memory = state.get("memory")
        self.memory = None if memory is None else memory.clone()

    def _with_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.float()
        if self.memory is None or self.memory.shape != tensor.shape:
            return total  # a residual of tensors of another shape has no place here
        return total + self.memory
