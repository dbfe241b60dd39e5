"""``cluster``: the machines and the links between them, and how well they were seen to be used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, TypeAdapter

from optimus_cc.config.schema import Name, NonNegativeFloat, PositiveFloat, PositiveInt, changed, strict
from optimus_cc.yaml_files import to_yaml, unreferring

Share = Annotated[float, Field(gt=0, le=1)]


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
class EfficiencyConfig:
    """How well software uses a device: fitted by ``task=calibrate``. The defaults are about
    what came out for A100."""

    matmul_fp32: Share = 0.9
    """Share of the peak that a large matrix product reaches, in fp32."""
    matmul_bf16: Share = 0.9
    """The same in bf16 (or fp16)."""
    matmul_depth: NonNegativeFloat = 0.0
    """Elements of the summed dimension at which a product reaches half of that: what starting and ending it costs."""
    matmul_unaligned: Share = 0.4
    """Share of that rate that is left when one of a product's dimensions is no multiple of 16 bytes."""
    memory: Share = 0.95
    """Share of the memory's rate that element-wise operations reach."""
    softmax: Share = 0.6
    """The same of what is done to attention's scores: mask, softmax, dropout."""
    several_nodes: Share = 0.9
    """Share of their speed that passes keep when ranks of several nodes take part: they wait for the slowest."""
    kernel_us: NonNegativeFloat = 26.5
    """What the host takes to launch one kernel. A device that works faster waits for it."""
    collective_us: NonNegativeFloat = 107.0
    """What a collective takes beyond its messages, which are priced by the links."""
    wait_us: NonNegativeFloat = 13.0
    """What a host waits, at each tensor-parallel collective, for each other rank of the group."""
    message_us: NonNegativeFloat = 670.0
    """What a stage-to-stage message takes beyond the link: launching it, and waiting until it is complete."""
    step_ms: NonNegativeFloat = 0.0
    """Of each step, whatever it computes: batches, logging, waiting for the host."""


@strict
class DeviceConfig:
    """One accelerator; null where nobody knows. Rates are the data sheet's, dense."""

    name: str | None = None
    memory_gib: PositiveFloat | None = None
    memory_gbyte_s: PositiveFloat | None = None
    """Of the device's own memory. 1 GB/s is 10^9 bytes in a second."""
    fp32_tflops: PositiveFloat | None = None
    """Of fp32 matrix products as they are run: TF32 on A100 and later where it is on."""
    bf16_tflops: PositiveFloat | None = None
    multiprocessors: PositiveInt = 108
    codec_gbit_s: PositiveFloat | None = None
    """What the low-rank codec of stage-to-stage messages encodes and decodes, together; null: by its operations."""
    efficiency: EfficiencyConfig = EfficiencyConfig()

    @property
    def known(self) -> bool:
        """Whether computation can be priced."""
        return None not in (self.memory_gbyte_s, self.fp32_tflops, self.bf16_tflops)


@strict
class CalibrationRecord:
    """Where fitted numbers come from, and what they can be trusted with."""

    source: str
    """What was measured, by whom, with which software."""
    fitted: tuple[str, ...]
    """Keys of this file that were fitted; all others are facts or were taken over."""
    values: tuple[float, ...] = ()
    """What they were fitted to, in the same order: a key that says something else was set by somebody."""
    error_percent: NonNegativeFloat | None = None
    """Mean absolute error on what was fitted."""
    held_out_error_percent: NonNegativeFloat | None = None
    """The same on measurements that no fit had seen; null: there are none."""
    held_out: str | None = None
    """Which measurements these are."""
    held_out_inside_percent: NonNegativeFloat | None = None
    """The same of those inside one node alone."""
    held_out_across_percent: NonNegativeFloat | None = None
    """The same of those over several nodes alone."""
    at_bound: tuple[str, ...] = ()
    """Fitted keys that came out as large or as small as the fit allows: what they stand for is not what they say."""
    family_keys: tuple[str, ...] = ()
    """Keys whose values can be others, together, while the measured times come out as well."""
    family: tuple[tuple[float, ...], ...] = ()
    """Such values, in the order of ``family_keys``: all that follows from one set follows from the others no less."""
    hidden_size: tuple[int, int] | None = None
    """Smallest and largest that was measured; the same below."""
    ranks: tuple[int, int] | None = None
    micro_batch_size: tuple[int, int] | None = None
    tensor_parallel_size: tuple[int, int] | None = None
    pipeline_parallel_size: tuple[int, int] | None = None
    data_parallel_size: tuple[int, int] | None = None


@strict
class ClusterConfig:
    name: Name
    num_nodes: PositiveInt = 1
    ranks_per_node: Annotated[int, Field(ge=1, le=1024)]
    """GPUs of a node, or processes that a node without GPUs may run."""
    device: DeviceConfig = DeviceConfig()
    intra_node: LinkConfig = LinkConfig()
    """Between ranks of one node."""
    inter_node: LinkConfig = LinkConfig()
    """Between ranks of two nodes."""
    calibration: CalibrationRecord | None = None
    """null: nothing was fitted for this cluster."""

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node


def as_file(cluster: ClusterConfig, name: str, remarks: Sequence[str]) -> str:
    """A file for the ``cluster`` group that says all of ``cluster``, under another name.

    Args:
        remarks: where the numbers come from; become comments.
    """
    body = TypeAdapter(ClusterConfig).dump_python(changed(cluster, name=name), mode="json")
    comments = "".join(f"# {line}".rstrip() + "\n" for line in remarks)
    return comments + to_yaml(unreferring(body), width=118)
