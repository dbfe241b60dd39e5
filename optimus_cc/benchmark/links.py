"""Latency and bandwidth of each group of the layout, as this layout uses its links.

All groups of one kind are busy at the same time, as they are in training, and the slowest counts. Ring all-reduces
run over tensor, data and embedding groups; messages go back and forth between neighbours of a pipeline (stages 0 and
1, 2 and 3, ...), and half of a round trip counts. What is fitted is time over the bytes that a rank sends.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from optimus_cc.benchmark.arithmetic import fit_line
from optimus_cc.config import RunConfig
from optimus_cc.config.benchmark import LinksConfig
from optimus_cc.training.backend import Backend

OPERATIONS_PER_SAMPLE = 5
"""One after the other between two looks at the clock: ranks leave a barrier at slightly different times."""
WARMUP_SAMPLES = 2
Operation = Callable[[torch.Tensor], None]


def measure(config: RunConfig, backend: Backend, record: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Time every group of more than one rank. Collective.

    Args:
        record: takes the times of each size; called on every rank.

    Returns:
        for each group its times by size, and the line fitted to them.
    """
    benchmark = config.benchmark
    assert isinstance(benchmark, LinksConfig)
    hosts = backend.everyone(socket.gethostname())
    measured = _groups()
    sizes = benchmark.sizes_bytes
    rows = []
    for position, (name, group) in enumerate(measured.items()):
        ranks = [] if group is None else dist.get_process_group_ranks(group)
        num_ranks, spans = _maximum(backend, [len(ranks), len({hosts[rank] for rank in ranks}) > 1])
        if name == "pipeline":
            operation, sent_per_byte, per_sample = _round_trip(group), 1.0, 2 * OPERATIONS_PER_SAMPLE
        else:
            operation, sent_per_byte, per_sample = _all_reduce(group), 2 - 2 / num_ranks, OPERATIONS_PER_SAMPLE
        samples = []
        for index, nbytes in enumerate(sizes):
            tensor = torch.zeros(nbytes // 4, device=backend.device)
            times = _times(backend, operation, tensor, benchmark.repetitions)
            sample = {
                "message_bytes": nbytes,
                "sent_bytes": nbytes * sent_per_byte,
                "time_s": statistics.median(_maximum(backend, times)) / per_sample,
            }
            samples.append(sample)
            done = position * len(sizes) + index + 1
            record({"kind": "link", "group": name, **sample, "done": done, "total": len(measured) * len(sizes)})
        line = fit_line([sample["sent_bytes"] for sample in samples], [sample["time_s"] for sample in samples])
        rows.append(
            {
                "group": name,
                "operation": "p2p" if name == "pipeline" else "all_reduce",
                "ranks": int(num_ranks),
                "spans_nodes": bool(spans),
                "line": {**asdict(line), "gbit_s": line.gbit_s},
                "samples": samples,
            }
        )
    return {"benchmark": benchmark.name, "backend": dist.get_backend(), "groups": rows}


def _groups() -> dict[str, dist.ProcessGroup | None]:
    """The kinds of groups of more than one rank that this layout has, and this rank's own; None: it is in none."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    groups = {
        "tensor": parallel_state.get_tensor_model_parallel_group(),
        "pipeline": parallel_state.get_pipeline_model_parallel_group(),
        "data": parallel_state.get_data_parallel_group(),
    }
    found: dict[str, dist.ProcessGroup | None] = {name: group for name, group in groups.items() if group.size() > 1}
    if stages > 1:
        at_an_end = parallel_state.get_pipeline_model_parallel_rank() in (0, stages - 1)
        found["embedding"] = parallel_state.get_embedding_group() if at_an_end else None
    return found


def _all_reduce(group: dist.ProcessGroup | None) -> Operation:
    def operation(tensor: torch.Tensor) -> None:
        if group is not None:
            dist.all_reduce(tensor, group=group)

    return operation


def _round_trip(group: dist.ProcessGroup | None) -> Operation:
    """To the neighbour and back, between ranks 0 and 1 of a group, 2 and 3, ...; a last one without a partner waits."""
    assert group is not None
    ranks, mine = dist.get_process_group_ranks(group), group.rank()
    partner = mine ^ 1

    def operation(tensor: torch.Tensor) -> None:
        if partner >= len(ranks):
            return
        # The transport moves on in order on each side: nothing waits for the host in between.
        calls = (dist.send, dist.recv) if mine < partner else (dist.recv, dist.send)
        for call in calls:
            call(tensor, ranks[partner], group=group)

    return operation


def _times(backend: Backend, operation: Operation, tensor: torch.Tensor, repetitions: int) -> list[float]:
    """Seconds of each sample on this rank."""
    times = []
    for _ in range(WARMUP_SAMPLES + repetitions):
        backend.synchronize()
        dist.barrier(group=backend.control_group)
        began = time.perf_counter()
        for _ in range(OPERATIONS_PER_SAMPLE):
            operation(tensor)
        backend.synchronize()
        times.append(time.perf_counter() - began)
    return times[WARMUP_SAMPLES:]


def _maximum(backend: Backend, values: list[Any]) -> list[float]:
    """Element-wise, over all ranks."""
    tensor = torch.tensor([float(value) for value in values], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=backend.control_group)
    return [float(value) for value in tensor]
