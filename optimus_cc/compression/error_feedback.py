"""Error memories: what a codec left out of one tensor is added to the next one of the same origin."""

from __future__ import annotations

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
    """What has not been sent yet, in the tensors' shape; None stands for zero. The next :meth:`encode` writes to it."""
    _unremembered: tuple[torch.Tensor, Payload, bool] | None = field(default=None, init=False)
    """A tensor with what was in memory, its payload, and whether the first is this stream's own to write to."""

    def encode(self, tensor: torch.Tensor, *, remember: bool = True) -> Payload:
        """Encode ``tensor`` plus what is in memory; keep what was left out.

        Args:
            remember: false leaves that to a later :meth:`remember`, so that the payload can be sent first.
        """
        if not self.feedback:
            return self.codec.encode(tensor, self.state)
        total = self._take(tensor)
        payload = self.codec.encode(total, self.state, tensor.dtype)
        self._unremembered = total, payload, total.data_ptr() != tensor.data_ptr()
        if remember:
            self.remember()
        return payload

    def remember(self) -> None:
        """Put what the last :meth:`encode` left out into memory."""
        if self._unremembered is None:
            return
        (total, payload, own), self._unremembered = self._unremembered, None
        self.memory = self.codec.residual(total, payload, total if own else None)

    def flush(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` plus all that is in memory, to be sent as it is; the memory is empty afterwards."""
        return self._take(tensor).to(tensor.dtype)

    def reset(self) -> None:
        """Drop what is in memory."""
        self.memory = self._unremembered = None

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

    def _take(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` plus what is in memory, in fp32 and, where it fits, in the memory's place; that is empty then."""
        memory, self.memory = self.memory, None
        if memory is None or memory.shape != tensor.shape:
            return tensor.float().contiguous()  # a residual of tensors of another shape has no place here
        return memory.to(tensor.device).add_(tensor)
