"""Counts every byte that a rank sends, by class.

Collectives are counted where they reach torch's process groups, so nothing that Megatron-core or this package
sends through them goes uncounted, whoever calls. Stage-to-stage messages are counted at the same place as *observed*
bytes, and by the pipeline communicator from the codec's declaration as ``pipeline_forward`` and ``pipeline_backward``;
the two must agree (:meth:`TrafficMeter.check`). Not seen: functional collectives of compiled code, and what Transformer
Engine overlaps inside its own kernels.

Point-to-point counts the bytes sent; a collective counts what the ring algorithm makes a rank send.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

TRAFFIC_CLASSES = (
    "pipeline_forward",
    "pipeline_backward",
    "data_parallel",
    "embedding",
    "tensor_parallel",
    "parameter_gather",
    "other",
)
"""``other``: norms, barriers, LayerNorm sums, and what belongs to no group of the layout."""


@dataclass
class ByteCount:
    """Bytes sent by one rank."""

    logical_bytes: float = 0.0
    """What would have travelled uncompressed."""
    wire_bytes: float = 0.0
    """What travelled."""

    def add(self, logical: float, wire: float) -> None:
        self.logical_bytes += logical
        self.wire_bytes += wire


class TrafficMeter:
    """The bytes of one rank.

    Args:
        groups: traffic class of each process group, by group; collectives on any other group are ``other``.
    """

    def __init__(self, groups: Mapping[str, str]) -> None:
        unknown = set(groups.values()) - set(TRAFFIC_CLASSES)
        if unknown:
            raise ValueError(f"unknown traffic classes {sorted(unknown)}")
        self._groups = dict(groups)
        self._scope: str | None = None
        self._in_pipeline = False
        self._declared: str | None = None
        self.counts = {name: ByteCount() for name in TRAFFIC_CLASSES}
        self.observed_p2p_bytes = 0.0
        """Point-to-point bytes of pipeline transfers that reached a process group."""

    @classmethod
    def for_megatron(cls) -> TrafficMeter:
        """A meter that knows the process groups of megatron.core.parallel_state."""
        from megatron.core import parallel_state as ps

        named = {
            "tensor_parallel": [ps.get_tensor_model_parallel_group()],
            "data_parallel": [
                ps.get_data_parallel_group(),
                ps.get_data_parallel_group(with_context_parallel=True),
                ps.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True),
            ],
            "embedding": [
                ps.get_embedding_group(check_initialized=False),
                ps.get_position_embedding_group(check_initialized=False),
            ],
        }
        return cls({group.group_name: name for name, groups in named.items() for group in groups if group is not None})

    def add(self, name: str, logical: float, wire: float) -> None:
        self.counts[name].add(logical, wire)

    def classify(self, group: dist.ProcessGroup, name: str) -> None:
        """From now on collectives on ``group`` are of class ``name``."""
        self._groups[group.group_name] = name

    def take(self) -> dict[str, ByteCount]:
        """The counts since the last call; counting starts again at zero."""
        taken, self.counts = self.counts, {name: ByteCount() for name in TRAFFIC_CLASSES}
        self.observed_p2p_bytes = 0.0
        return taken

    def check(self) -> None:
        """Compare the pipeline's declared bytes with what was really handed to the transport.

        Raises:
            RuntimeError: they differ; a number that can't be trusted must not be reported.
        """
        declared = sum(self.counts[name].wire_bytes for name in ("pipeline_forward", "pipeline_backward"))
        if declared != self.observed_p2p_bytes:
            raise RuntimeError(
                f"the pipeline declared {declared:.0f} wire bytes but {self.observed_p2p_bytes:.0f} were sent"
            )

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Collectives inside that are of class ``tensor_parallel`` count as ``name`` (LayerNorm sums as ``other``)."""
        before, self._scope = self._scope, name
        try:
            yield
        finally:
            self._scope = before

    @contextmanager
    def pipeline_transfer(self, active: bool = True) -> Iterator[None]:
        """Point-to-point messages inside are stage-to-stage messages that a communicator declares; others aren't."""
        before, self._in_pipeline = self._in_pipeline, active
        try:
            yield
        finally:
            self._in_pipeline = before

    @contextmanager
    def in_place_of(self, name: str, logical: float) -> Iterator[None]:
        """Collectives of class ``name`` inside travel in place of ``logical`` bytes, and count as wire bytes only."""
        before, self._declared = self._declared, name
        self.add(name, logical, 0.0)
        try:
            yield
        finally:
            self._declared = before

    def observe(self) -> None:
        """Start counting what this process sends."""
        _Observer.add(self)

    def stop(self) -> None:
        """Stop counting; the last meter to stop leaves torch as it was."""
        _Observer.remove(self)

    def _collective(self, group: dist.ProcessGroup, kind: str, sent: float) -> None:
        if kind == "point_to_point" and self._in_pipeline:
            self.observed_p2p_bytes += sent
            return
        name = self._groups.get(group.group_name, "other")
        if name == "data_parallel" and kind == "gather" and self._declared != name:
            name = "parameter_gather"
        if name == "tensor_parallel" and self._scope is not None:
            name = self._scope
        self.add(name, 0.0 if name == self._declared else sent, sent)


_RING: dict[str, tuple[str, int, Callable[[int], float]]] = {
    # method of ProcessGroup: kind, argument that is measured, ring bytes sent per byte of it by a rank of n
    "allreduce": ("reduce", 0, lambda n: 2 * (n - 1) / n),
    "allreduce_coalesced": ("reduce", 0, lambda n: 2 * (n - 1) / n),
    "broadcast": ("broadcast", 0, lambda n: (n - 1) / n),
    "reduce": ("reduce", 0, lambda n: (n - 1) / n),
    "allgather": ("gather", 1, lambda n: n - 1),
    "allgather_coalesced": ("gather", 1, lambda n: n - 1),
    "allgather_into_tensor_coalesced": ("gather", 1, lambda n: n - 1),
    "_allgather_base": ("gather", 1, lambda n: n - 1),
    "all_gather_single": ("gather", 1, lambda n: n - 1),
    "all_gather_single_coalesced": ("gather", 1, lambda n: n - 1),
    "reduce_scatter": ("reduce", 0, lambda n: n - 1),
    "reduce_scatter_tensor_coalesced": ("reduce", 0, lambda n: n - 1),
    "_reduce_scatter_base": ("reduce", 0, lambda n: n - 1),
    "reduce_scatter_single": ("reduce", 0, lambda n: n - 1),
    "reduce_scatter_single_coalesced": ("reduce", 0, lambda n: n - 1),
    "gather": ("gather", 1, lambda n: (n - 1) / n),
    "scatter": ("scatter", 0, lambda n: (n - 1) / n),
    "alltoall": ("all_to_all", 1, lambda n: (n - 1) / n),
    "alltoall_base": ("all_to_all", 1, lambda n: (n - 1) / n),
    "all_to_all_single": ("all_to_all", 1, lambda n: (n - 1) / n),
    "send": ("point_to_point", 0, lambda n: 1.0),
}


class _Observer:
    """Wraps the methods of torch's ProcessGroup class that send something, once per process."""

    _meters: ClassVar[list[TrafficMeter]] = []
    _originals: ClassVar[dict[str, Callable[..., Any]]] = {}

    @classmethod
    def add(cls, meter: TrafficMeter) -> None:
        if meter not in cls._meters:
            cls._meters.append(meter)
        if cls._originals:
            return
        for method, (kind, argument, per_byte) in _RING.items():
            if hasattr(dist.ProcessGroup, method):  # which ones exist depends on torch's version
                # The class's own entry binds to an instance; what getattr returns does not, so it can't be put back.
                cls._originals[method] = vars(dist.ProcessGroup)[method]
                counting = cls._counting(getattr(dist.ProcessGroup, method), kind, argument, per_byte)
                setattr(dist.ProcessGroup, method, counting)

    @classmethod
    def remove(cls, meter: TrafficMeter) -> None:
        if meter in cls._meters:
            cls._meters.remove(meter)
        if cls._meters:
            return
        for method, original in cls._originals.items():
            setattr(dist.ProcessGroup, method, original)
        cls._originals.clear()

    @classmethod
    def _counting(
        cls, original: Callable[..., Any], kind: str, argument: int, per_byte: Callable[[int], float]
    ) -> Callable[..., Any]:
        @functools.wraps(original)
        def counting(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if len(args) > argument:
                sent = _nbytes(args[argument]) * per_byte(group.size())
                for meter in cls._meters:
                    meter._collective(group, kind, sent)
            return original(group, *args, **kwargs)

        return counting


def _nbytes(value: Any) -> int:
    """Bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_nbytes(item) for item in value) if isinstance(value, (list, tuple)) else 0
