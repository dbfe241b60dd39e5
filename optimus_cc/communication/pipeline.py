"""Compressed backpropagation: Megatron-core's stage-to-stage messages through a codec (Optimus-CC, section 5).

All public methods of Megatron-core's P2PCommunicator end in ``_communicate``: that is the one place overridden
here. It sees tensors, not micro-batches. A link keeps its order, so the n-th tensor sent backward is the n-th
received by the peer, and :mod:`optimus_cc.exposure` tells both ends which message that is. Where nothing is compressed
Megatron-core's own method runs, on unchanged tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from optimus_cc.communication.traffic import TrafficMeter
from optimus_cc.compression import Codec, CompressedStream, Payload, build_codec
from optimus_cc.config.technique import CompressedBackpropagationConfig
from optimus_cc.exposure import Message, Schedule


class ScheduleMismatch(RuntimeError):
    """The schedule sent or received something that the exposure map does not know. Nothing sent can be trusted."""


class _AfterWait:
    """A request handle that does something once the transfer is complete, and keeps buffers alive until then."""

    def __init__(self, work: Any, action: Callable[[], None] | None, keep: Any) -> None:
        self._work, self._action, self._keep = work, action, keep

    def wait(self, *args: Any) -> Any:
        result = self._work.wait(*args)
        action, self._action, self._keep = self._action, None, None
        if action is not None:
            action()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class CompressedP2PCommunicator(P2PCommunicator):
    """Megatron-core's communicator with compressed backpropagation.

    Args:
        pp_group: the pipeline-parallel group.
        config: the model's TransformerConfig.
        technique: what is compressed and how.
        meter: counts what is sent.
        seed: keys the codecs' private random generators.

    Raises:
        ValueError: the configuration asks Megatron-core for messages whose shape is not known beforehand.
    """

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        config: ModelParallelConfig,
        technique: CompressedBackpropagationConfig,
        meter: TrafficMeter,
        seed: int = 0,
    ) -> None:
        super().__init__(pp_group, config)
        if technique.enabled and (config.variable_seq_lengths or config.use_ring_exchange_p2p):
            raise ValueError(
                "compressed backpropagation needs messages of one known shape: "
                "variable_seq_lengths and use_ring_exchange_p2p must be off"
            )
        self.technique = technique
        self.meter = meter
        self._seed = seed
        self._codec: Codec = build_codec(technique.codec)
        self._streams: dict[str, CompressedStream] = {}
        self._schedule: Schedule | None = None
        self._to_send: dict[str, deque[Message]] = {}
        self._to_receive: dict[str, deque[Message]] = {}

    # -- one mini-batch ------------------------------------------------------------------------------------------

    def begin(self, num_microbatches: int, forward_only: bool) -> None:
        """Start a fresh ledger: the messages that one call of the schedule will exchange, in order."""
        self._to_send, self._to_receive, self._schedule = {}, {}, None
        if forward_only or not self.technique.enabled:
            return
        schedule = Schedule(
            pipeline_parallel_size=self.pp_group.size(),
            num_chunks=self.virtual_pipeline_model_parallel_size or 1,
            num_microbatches=num_microbatches,
        )
        rank = self.pp_group.rank()
        self._schedule = schedule
        self._to_send = {
            "backward": deque(schedule.sent_backward(rank)),
            "forward": deque(schedule.sent_forward(rank)),
        }
        self._to_receive = {
            "backward": deque(schedule.received_backward(rank)),
            "forward": deque(schedule.received_forward(rank)),
        }

    def end(self) -> None:
        """Close the mini-batch: check that every message was exchanged, and apply the residual policy.

        Raises:
            ScheduleMismatch: the schedule exchanged fewer messages than expected.
        """
        for direction, verb in ((self._to_send, "sent"), (self._to_receive, "received")):
            left = {name: len(messages) for name, messages in direction.items() if messages}
            if left:
                raise ScheduleMismatch(f"messages that were never {verb} in this mini-batch: {left}")
        if self.technique.residual == "reset":
            for stream in self._streams.values():
                stream.reset()

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Error memories and warm-started queries, keyed by direction and virtual boundary."""
        return {
            f"{name}.{key}": value
            for name, stream in self._streams.items()
            for key, value in stream.state_dict().items()
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._streams.clear()
        by_stream: dict[str, dict[str, torch.Tensor]] = {}
        for key, value in state.items():
            direction, boundary, rest = key.split(".", 2)
            by_stream.setdefault(f"{direction}.{boundary}", {})[rest] = value
        for name, values in by_stream.items():
            self._stream(name).load_state_dict(values)

    def _stream(self, name: str) -> CompressedStream:
        """The messages of one direction ("backward", "forward") across one virtual boundary."""
        if name not in self._streams:
            direction, boundary = name.split(".")
            self._streams[name] = CompressedStream(
                codec=self._codec,
                state=self._codec.new_state((self._seed, "cb", direction, int(boundary))),
                feedback=direction == "backward" and self.technique.lazy_error_propagation,
            )
        return self._streams[name]

    # -- what travels --------------------------------------------------------------------------------------------

    def _next(self, ledger: dict[str, deque[Message]], direction: str, verb: str) -> Message | None:
        if self._schedule is None:
            return None
        if not ledger[direction]:
            raise ScheduleMismatch(f"the schedule {verb} more {direction} messages than {self._schedule} has")
        return ledger[direction].popleft()

    def _is_compressed(self, direction: str, message: Message | None) -> bool:
        if message is None:
            return False
        if direction == "forward":
            return self.technique.compress_forward
        return message.is_compressed(epilogue_only=self.technique.epilogue_only, flush=self.technique.flushes)

    def _arrives_compressed(self, direction: str) -> bool:
        return self._is_compressed(direction, self._next(self._to_receive, direction, "received"))

    def _outgoing(self, tensor: torch.Tensor | None, direction: str) -> tuple[torch.Tensor | None, Payload | None]:
        """What to hand to the transport for ``tensor``: the tensor itself, or a payload."""
        if tensor is None:
            return None, None
        message = self._next(self._to_send, direction, "sent")
        logical = tensor.numel() * tensor.element_size()
        payload = None
        if message is not None and self._is_compressed(direction, message):
            if tensor.dtype != self.config.pipeline_dtype:
                raise ScheduleMismatch(f"a {tensor.dtype} message where pipeline_dtype is {self.config.pipeline_dtype}")
            payload = self._stream(f"{direction}.{message.boundary}").encode(tensor.detach())
        elif message is not None and direction == "backward" and self.technique.flushes and message.last:
            tensor = self._stream(f"{direction}.{message.boundary}").flush(tensor.detach())
        self.meter.add(f"pipeline_{direction}", logical, logical if payload is None else payload.wire.nbytes)
        return tensor, payload

    @torch.no_grad()
    def _communicate(
        self,
        *,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, Any]:
        send_next, payload_next = self._outgoing(tensor_send_next, "forward")
        send_prev, payload_prev = self._outgoing(tensor_send_prev, "backward")
        decode_prev = recv_prev and self._arrives_compressed("forward")
        decode_next = recv_next and self._arrives_compressed("backward")
        if payload_next is None and payload_prev is None and not decode_prev and not decode_next:
            result: tuple[torch.Tensor | None, torch.Tensor | None, Any] = super()._communicate(
                tensor_send_next=send_next,
                tensor_send_prev=send_prev,
                recv_prev=recv_prev,
                recv_next=recv_next,
                tensor_shape=tensor_shape,
                wait_on_reqs=wait_on_reqs,
            )
            return result
        arriving_prev = self._arriving(tensor_shape, decode_prev) if recv_prev else None
        arriving_next = self._arriving(tensor_shape, decode_next) if recv_next else None
        batched = self.config.batch_p2p_comm
        post = p2p_communication._batched_p2p_ops if batched else p2p_communication._p2p_ops
        requests = post(
            tensor_send_prev=send_prev if payload_prev is None else payload_prev.data,
            tensor_recv_prev=arriving_prev.buffer if arriving_prev else None,
            tensor_send_next=send_next if payload_next is None else payload_next.data,
            tensor_recv_next=arriving_next.buffer if arriving_next else None,
            group=self.pp_group,
            prev_pipeline_rank=self.prev_rank,
            next_pipeline_rank=self.next_rank,
        )
        arriving = [item for item in (arriving_prev, arriving_next) if item is not None]
        if wait_on_reqs:
            _wait_all(requests.values() if isinstance(requests, dict) else requests)
            for item in arriving:
                item.decode()
            requests = None
        else:
            actions: dict[str, Callable[[], None]] = {}
            if arriving_prev is not None:
                actions["recv_prev"] = arriving_prev.decode
            if arriving_next is not None:
                actions["recv_next"] = arriving_next.decode
            keep = (payload_prev, payload_next, arriving)
            requests = {name: _AfterWait(work, actions.get(name), keep) for name, work in requests.items()}
        if batched and self.config.batch_p2p_sync:
            torch.cuda.synchronize()
        return (
            arriving_prev.tensor if arriving_prev else None,
            arriving_next.tensor if arriving_next else None,
            requests,
        )

    def _arriving(self, shape: Sequence[int], compressed: bool) -> _Arriving:
        tensor = torch.empty(
            tuple(shape), dtype=self.config.pipeline_dtype, device=torch.cuda.current_device(), requires_grad=True
        )
        if not compressed:
            return _Arriving(tensor, tensor, None, self._codec)
        wire = self._codec.wire_format(tensor.shape, tensor.dtype)
        data = wire.allocate(tensor.device)
        return _Arriving(tensor, data, Payload(wire, data), self._codec)


@dataclass
class _Arriving:
    """One tensor to be received: where it will be, and where the transport writes."""

    tensor: torch.Tensor
    buffer: torch.Tensor
    payload: Payload | None
    codec: Codec

    def decode(self) -> None:
        """Fill :attr:`tensor` from what has arrived."""
        if self.payload is not None:
            self.tensor.data.copy_(self.codec.decode(self.payload))
            self.payload = None


def _wait_all(requests: Iterable[Any]) -> None:
    for request in requests:
        request.wait()
