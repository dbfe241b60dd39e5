"""A cluster's numbers as the simulator needs them: one rate for each thing, in bytes, operations and seconds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from optimus_cc.config.cluster import ClusterConfig, LinkConfig
from optimus_cc.config.errors import ConfigError, Problem

_BYTES_PER_GBIT = 1e9 / 8


@dataclass(frozen=True)
class Link:
    """One kind of link. Rates in bytes a second, infinite where nothing is known."""

    ring: float
    """Inside a node of one rank, between nodes of a whole node: shared by the ranks that use it."""
    p2p: float
    """The same for messages between two ranks."""
    latency_s: float


@dataclass(frozen=True)
class Hardware:
    """What a step is priced with."""

    matmul_flops: float
    """Operations a second of a large matrix product, per rank."""
    matmul_depth: float
    matmul_unaligned: float
    """Share of that rate that is left when a dimension of a product is not aligned."""
    memory: float
    """Bytes a second of element-wise operations, read and written."""
    softmax: float
    """The same of attention's scores: masks, softmax, dropout."""
    multiprocessors: int
    several_nodes: float
    """Share of their speed that passes keep when ranks of several nodes take part."""
    kernel_s: float
    collective_s: float
    wait_s: float
    message_s: float
    step_s: float
    codec: float | None
    """Logical bytes a second of the codec of stage-to-stage messages, both ways; None: by its operations."""
    ranks_per_node: int
    intra: Link
    inter: Link


@lru_cache(maxsize=256)
def hardware(cluster: ClusterConfig, precision: str, bandwidth: str) -> Hardware:
    """What a step in ``precision`` is priced with on ``cluster``.

    Args:
        bandwidth: ``effective``, what links were seen to give, as far as anybody knows; or ``line_rate``.

    Raises:
        ConfigError: the cluster says nothing of its devices.
    """
    device, efficiency = cluster.device, cluster.device.efficiency
    flops, share = (
        (device.fp32_tflops, efficiency.matmul_fp32)
        if precision == "fp32"
        else (device.bf16_tflops, efficiency.matmul_bf16)
    )
    if flops is None or device.memory_gbyte_s is None:
        raise ConfigError(
            Problem(
                "cluster.device",
                cluster.name,
                "a cluster whose devices' rates are known (cluster.device.*)",
                "cluster=a100_hdr200, or another one whose file says them",
            )
        )
    return Hardware(
        matmul_flops=flops * 1e12 * share,
        matmul_depth=efficiency.matmul_depth,
        matmul_unaligned=efficiency.matmul_unaligned,
        memory=device.memory_gbyte_s * 1e9 * efficiency.memory,
        softmax=device.memory_gbyte_s * 1e9 * efficiency.softmax,
        multiprocessors=device.multiprocessors,
        several_nodes=efficiency.several_nodes,
        kernel_s=efficiency.kernel_us * 1e-6,
        collective_s=efficiency.collective_us * 1e-6,
        wait_s=efficiency.wait_us * 1e-6,
        message_s=efficiency.message_us * 1e-6,
        step_s=efficiency.step_ms * 1e-3,
        codec=None if device.codec_gbit_s is None else device.codec_gbit_s * _BYTES_PER_GBIT,
        ranks_per_node=cluster.ranks_per_node,
        intra=_link(cluster.intra_node, bandwidth, 1),
        inter=_link(cluster.inter_node, bandwidth, cluster.ranks_per_node),
    )


def _link(link: LinkConfig, bandwidth: str, sharers: int) -> Link:
    """``sharers``: ranks that use a link while each gets its effective rate. The line rate is the whole link's, and the
    most that it can give."""
    line = float("inf") if link.line_rate_gbit_s is None else link.line_rate_gbit_s
    ring = p2p = line
    if bandwidth == "effective":
        ring = line if link.ring_gbit_s is None else min(line, link.ring_gbit_s * sharers)
        p2p = line if link.p2p_gbit_s is None else min(line, link.p2p_gbit_s * sharers)
    return Link(ring * _BYTES_PER_GBIT, p2p * _BYTES_PER_GBIT, (link.latency_us or 0.0) * 1e-6)
