"""``cluster``: the machines."""

from __future__ import annotations

from optimus_cc.config.schema import Name, PositiveInt, strict


@strict
class ClusterConfig:
    name: Name
    num_nodes: PositiveInt = 1
    ranks_per_node: PositiveInt
    """GPUs of a node, or processes that a node without GPUs may run."""

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node
