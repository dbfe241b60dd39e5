"""Which stage-to-stage message is on the critical path. Pure arithmetic; the one place that decides it.

A backward message is in the *epilogue* iff its receiver consumes it in its cool-down, when no forward pass is
left to hide it (Optimus-CC, section 5.2). With k the receiver's backward step that consumes the message, N the
receiver's number of backward steps in a mini-batch and W its number of warm-up steps, that is k >= N - W.
The sender, the receiver and whoever predicts or reports traffic ask this module.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property


@dataclass(frozen=True)
class Message:
    """A stage-to-stage message as both of its ends know it."""

    boundary: int
    """Virtual boundary between virtual stages ``boundary`` and ``boundary + 1``.
    Virtual stage c * P + p is chunk c of pipeline rank p."""
    microbatch: int
    epilogue: bool
    """No computation of the receiver hides it. Never true of a forward message."""
    last: bool
    """No later message of this mini-batch crosses the same boundary in the same direction."""

    def is_compressed(self, *, epilogue_only: bool, flush: bool) -> bool:
        """Whether compressed backpropagation sends this backward message through its codec.

        Args:
            epilogue_only: only epilogue messages are.
            flush: the last message of a boundary travels uncompressed, with all that was left out before.
        """
        return (self.epilogue or not epilogue_only) and not (flush and self.last)


@dataclass(frozen=True)
class Schedule:
    """Megatron-core's 1F1B (``num_chunks`` 1) or interleaved 1F1B schedule of one mini-batch."""

    pipeline_parallel_size: int
    num_chunks: int
    num_microbatches: int
    microbatch_group_size: int | None = None
    """Micro-batches that go through one chunk before the next chunk's turn (Megatron-core's
    microbatch_group_size_per_vp_stage); None: pipeline_parallel_size."""

    @property
    def group_size(self) -> int:
        return self.microbatch_group_size or self.pipeline_parallel_size

    def warmup_steps(self, rank: int) -> int:
        """Forward steps that pipeline rank ``rank`` runs before its first backward step."""
        behind = self.pipeline_parallel_size - rank - 1
        if self.num_chunks == 1:
            return min(behind, self.num_microbatches)
        steps = 2 * behind + (self.num_chunks - 1) * self.group_size
        return min(steps, self.num_steps)

    @property
    def num_steps(self) -> int:
        """Backward (and forward) steps of each rank: micro-batches x chunks."""
        return self.num_microbatches * self.num_chunks

    @cached_property
    def forward_order(self) -> tuple[tuple[int, int], ...]:
        """(chunk, micro-batch) of each forward step, in order; the same on every rank.

        Micro-batches advance through the chunks in groups of :attr:`group_size`; the last group may be smaller.
        """
        group = self.group_size if self.num_chunks > 1 else self.num_microbatches
        return tuple(
            (chunk, microbatch)
            for start in range(0, self.num_microbatches, group)
            for chunk in range(self.num_chunks)
            for microbatch in range(start, min(start + group, self.num_microbatches))
        )

    @cached_property
    def backward_order(self) -> tuple[tuple[int, int], ...]:
        """(chunk, micro-batch) of each backward step, in order: as forward, with the last chunk first."""
        return tuple((self.num_chunks - 1 - chunk, microbatch) for chunk, microbatch in self.forward_order)

    @cached_property
    def _backward_step(self) -> dict[tuple[int, int], int]:
        return {step: index for index, step in enumerate(self.backward_order)}

    def sent_backward(self, rank: int) -> tuple[Message, ...]:
        """The messages that pipeline rank ``rank`` sends backward, in the order in which it sends them."""
        size = self.pipeline_parallel_size
        if size == 1:
            return ()
        epilogue_start = self.num_steps - self.warmup_steps((rank - 1) % size)
        messages = []
        for chunk, microbatch in self.backward_order:
            boundary = chunk * size + rank - 1
            if boundary >= 0:  # the first virtual stage has nobody to send to
                consumed_at = self._backward_step[boundary // size, microbatch]
                messages.append(self._message(boundary, microbatch, epilogue=consumed_at >= epilogue_start))
        return tuple(messages)

    def sent_forward(self, rank: int) -> tuple[Message, ...]:
        """The messages that pipeline rank ``rank`` sends forward, in the order in which it sends them."""
        size = self.pipeline_parallel_size
        if size == 1:
            return ()
        boundaries = ((chunk * size + rank, microbatch) for chunk, microbatch in self.forward_order)
        last_stage = size * self.num_chunks - 1
        return tuple(self._message(*place, epilogue=False) for place in boundaries if place[0] != last_stage)

    def received_backward(self, rank: int) -> tuple[Message, ...]:
        """The messages that pipeline rank ``rank`` receives in its backward pass, in order of arrival.

        A link keeps its order: the n-th tensor sent is the n-th received.
        """
        return self.sent_backward((rank + 1) % self.pipeline_parallel_size)

    def received_forward(self, rank: int) -> tuple[Message, ...]:
        """The messages that pipeline rank ``rank`` receives in its forward pass, in order of arrival."""
        return self.sent_forward((rank - 1) % self.pipeline_parallel_size)

    def backward_steps_left(self, rank: int) -> int:
        """Backward steps that other ranks run, one after the other, once pipeline rank ``rank`` has run its last one.

        The last gradient of the mini-batch still passes through the ranks before it. An all-reduce of ``rank``'s
        gradients can hide behind those steps; that of rank 0 is on the critical path, for nothing is left there.
        """
        return rank

    def compressed_counts(self, *, epilogue_only: bool, flush: bool) -> dict[int, int]:
        """Backward messages of one mini-batch that are compressed, by virtual boundary."""
        counts: dict[int, int] = {}
        for rank in range(self.pipeline_parallel_size):
            for message in self.sent_backward(rank):
                compressed = message.is_compressed(epilogue_only=epilogue_only, flush=flush)
                counts[message.boundary] = counts.get(message.boundary, 0) + compressed
        return counts

    def _message(self, boundary: int, microbatch: int, epilogue: bool) -> Message:
        return Message(boundary, microbatch, epilogue, last=microbatch == self.num_microbatches - 1)


def stages_to_compress(pipeline_parallel_size: int, fraction: float) -> int:
    """How many pipeline stages, earliest first, compress their data-parallel gradients.

    In 1F1B an earlier stage ends its backward pass later, so its all-reduce is the one that nothing hides; the later
    stages' run while the earlier ones still compute. Virtual stages share the choice of their pipeline rank.

    Args:
        pipeline_parallel_size: stages, P.
        fraction: share of them in [0, 1]; fraction x P is rounded half up, so 0.75 of 4 is 3 and of 2 is 2.
    """
    # Exact decimals: 0.29 x 50 is 14.5, though not in floating point.
    return math.floor(Fraction(str(fraction)) * pipeline_parallel_size + Fraction(1, 2))
