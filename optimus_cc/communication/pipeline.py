"""Compressed backpropagation: Megatron-core's stage-to-stage messages through a codec (Optimus-CC, section 5).

All public methods of Megatron-core's P2PCommunicator end in ``_communicate``: that is the one place overridden
here. It sees tensors, not micro-batches. A link keeps its order, so the n-th tensor sent backward is the n-th
received by the peer, and :mod:`optimus_cc.exposure` tells both ends which message that is. Where nothing is compressed
Megatron-core's own method runs, on unchanged tensors.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from optimus_cc.communication.probe import Probe
from optimus_cc.communication.traffic import TrafficMeter
from optimus_cc.compression import Codec, CompressedStream, Identity, Payload, build_codec
from optimus_cc.config.technique import CompressedBackpropagationConfig
from optimus_cc.exposure import Message, Schedule


class ScheduleMismatch(RuntimeError):
    """The schedule sent or received something that the exposure map does not know. Nothing sent can be trusted."""


class _AfterWait:
    """A request handle that does something once the transfer is complete, and keeps buffers alive until then.

    Args:
        probe, name: waiting and what is done then are a span of this name.
    """

    def __init__(
        self, work: Any, action: Callable[[], None] | None, keep: Any, probe: Probe | None = None, name: str = ""
    ) -> None:
        self._work, self._action, self._keep = work, action, keep
        self._probe, self._name = probe or Probe(), name

    def wait(self, *args: Any) -> Any:
        with self._probe.span("inter_stage", self._name):
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
        split_over: a tensor-parallel group whose ranks all hold the same messages. Each sends its share of the rows,
            and shares are gathered on arrival: bytes between stages fall by the group's size, whatever the codec.
        probe: what messages and spans of time are reported to.

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
        split_over: dist.ProcessGroup | None = None,
        probe: Probe | None = None,
    ) -> None:
        super().__init__(pp_group, config)
        if technique.enabled and (config.overlap_moe_expert_parallel_comm or config.mtp_standalone):
            raise ValueError(
                "compressed backpropagation does not know the schedule that overlap_moe_expert_parallel_comm or "
                "mtp_standalone make: both must be off"
            )
        if (technique.enabled or split_over is not None) and (
            config.variable_seq_lengths or config.use_ring_exchange_p2p
        ):
            raise ValueError(
                "compressed or split stage-to-stage messages must be of one known shape: "
                "variable_seq_lengths and use_ring_exchange_p2p must be off"
            )
        self.technique = technique
        self.meter = meter
        self.probe = probe or Probe()
        self._seed = seed
        self._tp_group = split_over
        self._shares = split_over.size() if split_over is not None else 1
        self._share = split_over.rank() if split_over is not None else 0
        self._codec: Codec = build_codec(technique.codec)
        self._streams: dict[str, CompressedStream] = {}
        self._to_remember: list[CompressedStream] = []
        self._to_report: list[tuple[Message, Callable[[], torch.Tensor | None]]] = []
        self._schedule: Schedule | None = None
        self._checked: Schedule | None = None
        self._to_send: dict[str, deque[Message]] = {}
        self._to_receive: dict[str, deque[Message]] = {}

    # -- one mini-batch ------------------------------------------------------------------------------------------

    def begin(self, num_microbatches: int, forward_only: bool) -> None:
        """Start a fresh ledger: the messages that one call of the schedule will exchange, in order.

        Raises:
            ValueError: so few micro-batches would compress nothing.
        """
        self._to_send, self._to_receive, self._schedule = {}, {}, None
        self._to_report.clear()
        if not forward_only and self.technique.residual == "reset":
            self._reset()  # also after a mini-batch that an exception ended
        if forward_only or not self.technique.enabled:
            return
        schedule = Schedule(
            pipeline_parallel_size=self.pp_group.size(),
            num_chunks=self.virtual_pipeline_model_parallel_size or 1,
            num_microbatches=num_microbatches,
            microbatch_group_size=self.config.microbatch_group_size_per_vp_stage,
        )
        if schedule != self._checked:
            for problem in self.technique.schedule_problems(schedule):
                raise ValueError(problem.sentence)
            self._checked = schedule
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
            self._reset()

    def _reset(self) -> None:
        for stream in self._streams.values():
            with self.probe.span("codec", "reset"):
                stream.reset()

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Error memories and warm-started queries, keyed by direction and virtual boundary."""
        return {
            f"{name}.{key}": value
            for name, stream in self._streams.items()
            for key, value in stream.state_dict().items()
        }

    def kept(self) -> dict[str, tuple[int | None, ...]]:
        """What :meth:`state_dict` may hold on this rank, with shapes as :func:`.state.check` takes them."""
        if not self.technique.enabled:
            return {}
        size, rank, chunks = self.pp_group.size(), self.pp_group.rank(), self.virtual_pipeline_model_parallel_size or 1
        stages = [chunk * size + rank for chunk in range(chunks)]
        sends = [("backward", stage - 1) for stage in stages if stage > 0]
        if self.technique.compress_forward:
            sends += [("forward", stage) for stage in stages if stage < size * chunks - 1]
        kept: dict[str, tuple[int | None, ...]] = {}
        hidden: int | None = getattr(self.config, "hidden_size", None)
        for direction, boundary in sends:
            stream = self._new_stream(f"{direction}.{boundary}")
            if stream.feedback:
                kept[f"{direction}.{boundary}.memory"] = (None, None, hidden)
            if stream.state is not None:
                kept[f"{direction}.{boundary}.codec.draws"] = ()
                kept[f"{direction}.{boundary}.codec.query"] = (hidden, None)
        return kept

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
            self._streams[name] = self._new_stream(name)
        return self._streams[name]

    def _new_stream(self, name: str) -> CompressedStream:
        direction, boundary = name.split(".")
        return CompressedStream(
            codec=self._codec,
            state=self._codec.new_state((self._seed, "cb", direction, int(boundary))),
            feedback=direction == "backward" and self.technique.lazy_error_propagation,
        )

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

    def _outgoing(self, tensor: torch.Tensor | None, direction: str) -> tuple[torch.Tensor | None, bool]:
        """What to hand to the transport for ``tensor``, and whether it is something else than a tensor of its shape."""
        if tensor is None:
            return None, False
        message = self._next(self._to_send, direction, "sent")
        logical = tensor.numel() * tensor.element_size()
        out, changed = tensor, False
        if self._is_split(tensor.shape):
            out, changed = self._own_rows(tensor.detach()), True
        if message is not None and self._is_compressed(direction, message):
            if tensor.dtype != self.config.pipeline_dtype:
                raise ScheduleMismatch(f"a {tensor.dtype} message where pipeline_dtype is {self.config.pipeline_dtype}")
            stream = self._stream(f"{direction}.{message.boundary}")
            with self.probe.span("codec", "encode", message):
                payload = stream.encode(out.detach(), remember=False)
            if direction == "backward" and self.probe.messages is not None:
                self._to_report.append((message, functools.partial(self._left_out, stream, out, payload)))
            out, changed = payload.data, True
            if message.last and self.technique.residual == "reset":
                stream.reset()  # that residual would be dropped unseen
            else:
                self._to_remember.append(stream)
        elif message is not None and direction == "backward":
            if self.technique.flushes and message.last:
                with self.probe.span("codec", "flush", message):
                    out = self._stream(f"{direction}.{message.boundary}").flush(out.detach())
            if self.probe.messages is not None:
                self._to_report.append((message, lambda: None))
        self.meter.add(f"pipeline_{direction}", logical, out.numel() * out.element_size())
        return out, changed

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
        forward = self._next(self._to_receive, "forward", "received") if recv_prev else None
        backward = self._next(self._to_receive, "backward", "received") if recv_next else None
        name = ""
        if self.probe.spans is not None:
            tensors = {"send_next": tensor_send_next is not None, "send_prev": tensor_send_prev is not None}
            used = {**tensors, "recv_prev": recv_prev, "recv_next": recv_next}
            name = ", ".join(_IN_A_TRACE[request] for request in used if used[request])
        with self.probe.span("inter_stage", name):
            result = self._exchange(
                tensor_send_next=tensor_send_next,
                tensor_send_prev=tensor_send_prev,
                recv_prev=recv_prev,
                recv_next=recv_next,
                tensor_shape=tensor_shape,
                wait_on_reqs=wait_on_reqs,
                decode_prev=self._is_compressed("forward", forward),
                decode_next=self._is_compressed("backward", backward),
            )
        if self.probe.messages is not None:
            if forward is not None and result[0] is not None:
                self.probe.messages.forward_arrived(forward, self._own_rows(result[0].detach()))
            for message, left_out in self._to_report:
                self.probe.messages.backward_sent(message, left_out())
            self._to_report.clear()
        return result

    def _exchange(
        self,
        *,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool,
        decode_prev: bool,
        decode_next: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, Any]:
        """:meth:`_communicate`, once it is known whether what arrives is to be decoded."""
        send_next, next_changed = self._outgoing(tensor_send_next, "forward")
        send_prev, prev_changed = self._outgoing(tensor_send_prev, "backward")
        splits = (recv_prev or recv_next) and self._is_split(tensor_shape)
        if not (splits or next_changed or prev_changed or decode_prev or decode_next):
            with self.meter.pipeline_transfer():
                result: tuple[torch.Tensor | None, torch.Tensor | None, Any] = super()._communicate(
                    tensor_send_next=send_next,
                    tensor_send_prev=send_prev,
                    recv_prev=recv_prev,
                    recv_next=recv_next,
                    tensor_shape=tensor_shape,
                    wait_on_reqs=wait_on_reqs,
                )
            if self.probe.spans is None or not isinstance(result[2], dict):
                return result
            handles = {
                name: _AfterWait(work, None, None, self.probe, _waiting(name)) for name, work in result[2].items()
            }
            return result[0], result[1], handles
        arriving: dict[str, _Arriving] = {}
        if recv_prev:
            arriving["recv_prev"] = self._arriving(tensor_shape, decode_prev)
        if recv_next:
            arriving["recv_next"] = self._arriving(tensor_shape, decode_next)
        buffers = {name: item.buffer for name, item in arriving.items()}
        batched = self.config.batch_p2p_comm
        post = p2p_communication._batched_p2p_ops if batched else p2p_communication._p2p_ops
        with self.meter.pipeline_transfer():
            requests = post(
                tensor_send_prev=send_prev,
                tensor_recv_prev=buffers.get("recv_prev"),
                tensor_send_next=send_next,
                tensor_recv_next=buffers.get("recv_next"),
                group=self.pp_group,
                prev_pipeline_rank=self.prev_rank,
                next_pipeline_rank=self.next_rank,
            )
        while self._to_remember:
            with self.probe.span("codec", "remember"):
                self._to_remember.pop().remember()
        if wait_on_reqs:
            for request in requests.values() if isinstance(requests, dict) else requests:
                request.wait()
            for item in arriving.values():
                item.complete()
            requests = None
        else:
            keep = (send_prev, send_next, buffers)
            requests = {
                name: _AfterWait(
                    work, arriving[name].complete if name in arriving else None, keep, self.probe, _waiting(name)
                )
                for name, work in requests.items()
            }
        if batched and self.config.batch_p2p_sync:
            torch.cuda.synchronize()
        previous, following = arriving.get("recv_prev"), arriving.get("recv_next")
        return previous.tensor if previous else None, following.tensor if following else None, requests

    def _communicate_shapes(self, *args: Any, **kwargs: Any) -> Any:
        with self.meter.pipeline_transfer(False):  # control messages, not activations or gradients
            return super()._communicate_shapes(*args, **kwargs)

    def _is_split(self, shape: Sequence[int]) -> bool:
        """Whether tensor-parallel ranks each send a share of such a message; both ends know its shape."""
        return self._shares > 1 and shape[0] % self._shares == 0

    def _own_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """What this rank sends of a message."""
        return tensor.chunk(self._shares)[self._share] if self._is_split(tensor.shape) else tensor

    def _left_out(self, stream: CompressedStream, tensor: torch.Tensor, payload: Payload) -> torch.Tensor | None:
        """What the message just sent lacks, in fp32; None if it was dropped unseen."""
        if stream.feedback:
            # A copy: whoever listens compares it with what comes later, and the next message is added to the memory.
            return None if stream.memory is None else stream.memory.clone()
        with self.probe.span("probes", "residual"):
            return tensor.float() - self._codec.decode(payload).float()

    def _arriving(self, shape: Sequence[int], compressed: bool) -> _Arriving:
        tensor = torch.empty(
            tuple(shape), dtype=self.config.pipeline_dtype, device=torch.cuda.current_device(), requires_grad=True
        )
        codec = self._codec if compressed else _IDENTITY
        shares = self._shares if self._is_split(tensor.shape) else 1
        wire = codec.wire_format((tensor.shape[0] // shares, *tensor.shape[1:]), tensor.dtype)
        if not compressed and shares == 1:
            return _Arriving(tensor, tensor, lambda: None)
        buffer = wire.allocate(tensor.device)

        def complete() -> None:
            with self.probe.span("codec" if compressed else "inter_stage", "decode"):
                arrived = codec.decode(Payload(wire, buffer))
                if shares == 1:
                    tensor.data.copy_(arrived)
            if shares > 1:
                dist.all_gather_into_tensor(tensor.data, arrived.contiguous(), group=self._tp_group)

        return _Arriving(tensor, buffer, complete)


_IDENTITY = Identity()
_IN_A_TRACE = {
    "send_next": "send forward",
    "send_prev": "send backward",
    "recv_prev": "receive forward",
    "recv_next": "receive backward",
}
"""What the requests of a transfer are for: activations come from the stage before, gradients from the one after."""


def _waiting(request: str) -> str:
    return f"wait: {_IN_A_TRACE.get(request, request)}"


@dataclass
class _Arriving:
    """One tensor to be received."""

    tensor: torch.Tensor
    """Where it will be."""
    buffer: torch.Tensor
    """Where the transport writes."""
    complete: Callable[[], None]
    """Makes :attr:`tensor` from :attr:`buffer` once the transfer is over."""
