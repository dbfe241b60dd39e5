"""``cluster``: the machines and the links between them."""

from __future__ import annotations

from optimus_cc.config.schema import Name, NonNegativeFloat, PositiveFloat, PositiveInt, strict


@strict
class LinkConfig:
    """One kind of link; null where nobody knows. ``task=benchmark benchmark=links`` measures all but the line rate.

    1 Gbit/s is 10^9 bits in a second, in one direction.
    """

    line_rate_gbit_s: PositiveFloat | None = None
    """What the hardware could do: inside a node, of one rank's link; between nodes, of a whole node's."""
    ring_gbit_s: PositiveFloat | None = None
    """What one rank sends in a large ring all-reduce, while the other groups of its layout do the same."""
    p2p_gbit_s: PositiveFloat | None = None
    """What one rank sends in large messages to one other, while the other pairs of its layout do the same."""
    latency_us: NonNegativeFloat | None = None
    """Of one message from one rank to another, beyond what its bytes take."""


@strict
class ClusterConfig:
    name: Name
    num_nodes: PositiveInt = 1
    ranks_per_node: PositiveInt
    """GPUs of a node, or processes that a node without GPUs may run."""
    intra_node: LinkConfig = LinkConfig()
    """Between ranks of one node."""
    inter_node: LinkConfig = LinkConfig()
    """Between ranks of two nodes."""

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node
