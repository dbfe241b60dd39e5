"""What a run asks SLURM for. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from optimus_cc.config import ConfigError, Problem, RunConfig
from optimus_cc.config.launcher import SlurmConfig


@dataclass(frozen=True)
class Resources:
    """What a job asks for; runs that ask for the same can share an array."""

    nodes: int
    ranks_per_node: int
    gpus: bool
    launcher: SlurmConfig

    @classmethod
    def of(cls, config: RunConfig) -> Resources:
        """As few nodes as hold all ranks, with the same number of ranks on each.

        Raises:
            ConfigError: the ranks can't be shared out over the cluster's nodes.
        """
        launcher, ranks, cluster = config.launcher, config.parallel.world_size, config.cluster
        assert isinstance(launcher, SlurmConfig)
        fewest = math.ceil(ranks / cluster.ranks_per_node)
        nodes = next((nodes for nodes in range(fewest, ranks + 1) if ranks % nodes == 0), ranks)
        if nodes > cluster.num_nodes:
            raise ConfigError(
                Problem(
                    "parallel",
                    f"{config.parallel.label} ({ranks} ranks)",
                    f"ranks that up to {cluster.num_nodes} nodes of {cluster.ranks_per_node} share out evenly",
                    "another layout, or a higher cluster.num_nodes",
                )
            )
        return cls(nodes, ranks // nodes, config.training.device != "cpu", launcher)

    @property
    def cpus_per_node(self) -> int:
        return self.ranks_per_node * self.launcher.cpus_per_rank

    def __str__(self) -> str:
        gpus = f", {self.ranks_per_node} GPUs" if self.gpus else ""
        each = "" if self.nodes == 1 else " each"
        ranks = f"{self.ranks_per_node} rank{'s' * (self.ranks_per_node != 1)}"
        return f"{self.nodes} node{'s' * (self.nodes != 1)}, {ranks}{gpus}{each}"


@dataclass(frozen=True)
class Part:
    """An array of jobs."""

    size: int
    throttle: int | None
    """How many of its jobs run at a time; None: as many as the cluster lets."""
    after: int | None = None
    """Index of the part that has to end first."""


def parts(sizes: Sequence[int], largest: int, max_parallel: int | None) -> list[list[Part]]:
    """Arrays for groups of so many jobs, of at most ``largest`` jobs each, of which ``max_parallel`` run at a time over
    all arrays together.

    Returns:
        the arrays of each group; ``after`` counts through all of them.
    """
    chunks = [[min(largest, size - start) for start in range(0, size, largest)] for size in sizes]
    flat = [size for group in chunks for size in group]
    throttles, after = _throttles(flat, max_parallel)
    made = iter([Part(*one) for one in zip(flat, throttles, after, strict=True)])
    return [[next(made) for _ in group] for group in chunks]


def _throttles(sizes: Sequence[int], most: int | None) -> tuple[list[int | None], list[int | None]]:
    nothing: list[int | None] = [None] * len(sizes)
    if most is None or sum(sizes) <= most:
        return nothing, nothing
    if most <= len(sizes):  # that many arrays at a time, a job each
        return [1] * len(sizes), [index - most if index >= most else None for index in range(len(sizes))]
    shares = [1 + (most - len(sizes)) * size // sum(sizes) for size in sizes]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index])[: most - sum(shares)]:
        shares[index] += 1
    return list(shares), nothing
