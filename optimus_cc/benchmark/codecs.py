"""How fast codecs encode and decode, beside a plain copy of the same tensor in memory."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from optimus_cc.benchmark import memory_path
from optimus_cc.benchmark.arithmetic import median_with_interval, ratio_of_pairs
from optimus_cc.compression import Codec
from optimus_cc.compression.low_rank import LowRank
from optimus_cc.compression.top_k import TopK
from optimus_cc.config import RunConfig
from optimus_cc.config.benchmark import CodecsConfig
from optimus_cc.wire_size import message_matrix

WARMUP = 3


def measure(
    config: RunConfig, benchmark: CodecsConfig, device: torch.device, record: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Time each codec at each rank and shape, in the run's precision, on one process.

    Returns:
        for each of them GB/s of the uncompressed tensor, and how many times a copy's time encoding and decoding take;
        and what :mod:`.memory_path` measures of the low-rank ones.
    """
    dtype = torch.bfloat16 if config.training.precision == "bf16" else torch.float32
    shapes = benchmark.shapes or (message_matrix(config.message_shape),)
    cases: list[tuple[tuple[int, int], str, Codec, int]] = [
        (shape, name, codec, rank)
        for shape in shapes
        for rank in benchmark.ranks
        for name, codec in (("low_rank", LowRank(rank)), ("top_k", TopK(match_rank=rank)))
    ]
    rows = []
    for index, (shape, name, codec, rank) in enumerate(cases):
        row = {"codec": name, "rank": rank, "rows": shape[0], "columns": shape[1]}
        row |= _case(codec, shape, dtype, device, benchmark.repetitions, config.training.seed)
        rows.append(row)
        record({"kind": "codec", **row, "done": index + 1, "total": len(cases)})
    paths, bases = [], []
    for shape in shapes:
        for rank in sorted({min(rank, *shape) for rank in benchmark.ranks}):
            paths += memory_path.paths(shape, rank, device, benchmark.repetitions, config.training.seed)
            bases += memory_path.bases(shape[0], rank, device, benchmark.repetitions, config.training.seed)
    return {
        "benchmark": benchmark.name,
        "device": device.type,
        "threads": torch.get_num_threads(),
        "codecs": rows,
        "memory_paths": paths,
        "bases": bases,
    }


def _case(
    codec: Codec, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, repetitions: int, seed: int
) -> dict[str, Any]:
    state = codec.new_state((seed, "benchmark"))
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(shape, generator=generator).to(device=device, dtype=dtype)
    payload = codec.encode(tensor, state)
    elsewhere = torch.empty_like(tensor)
    calls: dict[str, Callable[[], Any]] = {
        "copy": lambda: elsewhere.copy_(tensor),
        "encode": lambda: codec.encode(tensor, state),
        "decode": lambda: codec.decode(payload),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    shuffle = random.Random(seed).shuffle
    for repetition in range(WARMUP + repetitions):
        shuffle(order)
        for name in order:
            took = _seconds(calls[name], device)
            if repetition >= WARMUP:
                times[name].append(took)
    logical = payload.wire.logical_nbytes
    row: dict[str, Any] = {"logical_bytes": logical, "wire_bytes": payload.wire.nbytes}
    for name, values in times.items():
        row[f"{name}_gbyte_s"] = logical / median_with_interval(values).value / 1e9
    for name in ("encode", "decode"):
        row[f"{name}_per_copy"] = asdict(ratio_of_pairs(times["copy"], times[name]))
    return row


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    _synchronize(device)
    began = time.perf_counter()
    call()
    _synchronize(device)
    return time.perf_counter() - began


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
