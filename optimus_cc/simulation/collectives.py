"""What a collective or a message takes, from where its ranks lie.

Ranks are numbered as Megatron-core does, tensor-parallel ranks first, then data-parallel ones, then stages, and nodes
take them in this order. A ring sends as many bytes over each of its edges; the slowest edge counts. A node's link is
shared by all groups of the same kind that leave the node at the same time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from optimus_cc.simulation.hardware import Hardware


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, ``stride`` apart, with groups like it side by side."""

    size: int
    stride: int
    blocks: int = 1
    """How many times ``size`` x ``stride`` ranks follow each other: one that begins in a node may end in the next."""
    together: int | None = None
    """The most of a group that follow each other, if others of it lie in a stage far away; None: all."""

    def per_node(self, ranks_per_node: int) -> int:
        """Ranks of one group in a node."""
        if self._straddles(ranks_per_node):
            return max(1, self.size // 2)
        return max(1, min(self.together or self.size, ranks_per_node // self.stride))

    def spans_nodes(self, ranks_per_node: int) -> bool:
        return self.size > self.per_node(ranks_per_node)

    def _straddles(self, ranks_per_node: int) -> bool:
        """Whether a node's end cuts a block that would fit into a node."""
        block = self.size * self.stride
        return block <= ranks_per_node < self.blocks * block and ranks_per_node % block != 0

    def sharers(self, ranks_per_node: int) -> int:
        """Groups that leave a node side by side."""
        return min(self.stride, ranks_per_node)


def ring_s(hardware: Hardware, group: Group, sent_bytes: float, messages: int, sharers: int | None = None) -> float:
    """Seconds of one ring operation.

    Args:
        sent_bytes: what each rank sends: 2 V (n - 1) / n for an all-reduce of V bytes over n ranks, half of that for an
            all-gather or a reduce-scatter.
        messages: that each rank sends, one after the other: 2 (n - 1) or n - 1.
        sharers: groups that leave a node at the same time; None: all that are side by side.
    """
    if group.size == 1 or messages == 0:
        return 0.0
    intra, inter, per_node = hardware.intra, hardware.inter, group.per_node(hardware.ranks_per_node)
    seconds = hardware.collective_s
    if not group.spans_nodes(hardware.ranks_per_node):
        return seconds + messages * intra.latency_s + sent_bytes / intra.ring
    crossing = 1 / per_node  # of a ring's edges
    seconds += messages * (crossing * inter.latency_s + (1 - crossing) * intra.latency_s)
    shared = sent_bytes * (group.sharers(hardware.ranks_per_node) if sharers is None else sharers) / inter.ring
    return seconds + (max(shared, sent_bytes / intra.ring) if per_node > 1 else shared)


def message_s(hardware: Hardware, stride: int, sender: int, receiver: int, nbytes: float) -> float:
    """Seconds of a message of ``nbytes`` from each rank of stage ``sender`` to the same rank of stage ``receiver``.

    Args:
        stride: ranks of one stage, tensor- times data-parallel ones.
    """
    leaving = _leaving(stride, hardware.ranks_per_node, sender, receiver)
    if not leaving:
        return hardware.message_s + hardware.intra.latency_s + nbytes / hardware.intra.p2p
    return hardware.message_s + hardware.inter.latency_s + nbytes * leaving / hardware.inter.p2p


def _leaving(stride: int, per_node: int, sender: int, receiver: int) -> int:
    """How many messages leave the node that most of them leave."""
    if stride >= per_node:
        return per_node
    nodes = [((sender * stride + rank) // per_node, (receiver * stride + rank) // per_node) for rank in range(stride)]
    return max(Counter(here for here, there in nodes if here != there).values(), default=0)
