"""What error memories add to the matrix products that low-rank factors cost anyway, here and elsewhere.

Every path is one step with warm start and an error memory, on one rank, in fp32:

- ``message``: encoding and remembering one stage-to-stage message;
- ``gradients``: what selective stage compression computes for one matrix;
- ``torch_hook``: torch's own PowerSGD hook, called, with a group of one rank;
- ``alternating``: the one-sided steps of the PowerSGD authors' package (epfml/powersgd), restated: the factor of the
  step before is made orthonormal, one product, what is left out, and what comes out.

The bare products of a step are M Qᵀ, Pᵀ M and P R, each written where it already has a place.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_hooks

from optimus_cc.benchmark.arithmetic import median_with_interval, ratio_of_pairs
from optimus_cc.communication.power_sgd import Batch
from optimus_cc.compression import CompressedStream
from optimus_cc.compression.low_rank import LowRank
from optimus_cc.compression.power_iteration import cholesky_basis
from optimus_cc.config.codec import LowRankConfig

WARMUP = 4
Call = Callable[[], Any]


def paths(shape: tuple[int, int], rank: int, device: torch.device, repetitions: int, seed: int) -> list[dict[str, Any]]:
    """Each path's time beside that of the bare products of its rank and shape."""
    matrix = _normal(shape, seed, device)
    with _group_of_one():
        calls = {
            "message": _message(matrix, rank, seed),
            "gradients": _gradients(matrix.clone(), rank, seed),
            "torch_hook": _torch_hook(matrix.clone(), rank),
            "alternating": _alternating(matrix, rank, seed),
        }
        times = _timed({"products": _products(matrix, rank, seed), **calls}, device, repetitions)
    case = {"rank": rank, "rows": shape[0], "columns": shape[1]}
    products = median_with_interval(times["products"]).value
    return [
        {
            **case,
            "path": name,
            "products_s": products,
            "per_products": asdict(ratio_of_pairs(times["products"], times[name])),
        }
        for name in calls
    ]


def bases(rows: int, rank: int, device: torch.device, repetitions: int, seed: int) -> list[dict[str, Any]]:
    """Ways to make columns orthonormal: time beside QR, and what comes of columns that are there and that are not."""
    full = _normal((1, rows, rank), seed, device)
    lacking = full.clone()
    lacking[..., rank // 2 :] = full[..., : rank - rank // 2]  # twice the same
    lacking[..., -1] = 0.0
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "qr": lambda left: torch.linalg.qr(left)[0],
        "cholesky": cholesky_basis,
        "gram_schmidt": _gram_schmidt,
    }
    times = _timed({name: partial(way, full) for name, way in ways.items()}, device, repetitions)
    identity = torch.eye(rank, dtype=torch.float64, device=device)
    found = []
    for name, way in ways.items():
        basis, projection = way(full)[0].double(), way(lacking)[0].double()
        finite = bool(torch.isfinite(projection).all())
        found.append(
            {
                "basis": name,
                "rank": rank,
                "rows": rows,
                "seconds": median_with_interval(times[name]).value,
                "per_qr": asdict(ratio_of_pairs(times["qr"], times[name])),
                "orthogonality": float((basis.mT @ basis - identity).abs().max()),
                # Of a projection 1; NaN where a column that is not there spoils everything.
                "norm_without_full_rank": float(torch.linalg.matrix_norm(projection, ord=2)) if finite else None,
            }
        )
    return found


def _normal(shape: tuple[int, ...], seed: int, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def _gram_schmidt(left: torch.Tensor) -> torch.Tensor:
    basis = left.clone()
    torch_hooks._orthogonalize_gram_schmidt(basis)
    return basis


def _products(matrix: torch.Tensor, rank: int, seed: int) -> Call:
    query = _normal((rank, matrix.shape[1]), seed + 1, matrix.device)
    basis = torch.linalg.qr(matrix @ query.T)[0]
    left, factor, out = torch.empty_like(basis), torch.empty_like(query), torch.empty_like(matrix)

    def call() -> None:
        torch.mm(matrix, query.T, out=left)
        torch.mm(basis.T, matrix, out=factor)
        torch.mm(basis, factor, out=out)

    return call


def _message(matrix: torch.Tensor, rank: int, seed: int) -> Call:
    codec = LowRank(rank)
    stream = CompressedStream(codec, codec.new_state((seed, "benchmark")), feedback=True)
    return lambda: stream.encode(matrix)


def _gradients(matrix: torch.Tensor, rank: int, seed: int) -> Call:
    batch = Batch({"w": matrix}, 1.0, LowRankConfig(rank=rank), feedback=True, seed=seed)

    def call() -> None:
        factor = batch.second(batch.project(0))
        batch.apply(factor, factor)

    return call


def _torch_hook(matrix: torch.Tensor, rank: int) -> Call:
    state = torch_hooks.PowerSGDState(None, rank, start_powerSGD_iter=2, min_compression_rate=0)
    bucket = SimpleNamespace(
        buffer=lambda: matrix.view(-1), gradients=lambda: [matrix], index=lambda: 0, is_last=lambda: True
    )
    return lambda: torch_hooks.powerSGD_hook(state, bucket).wait()


def _alternating(matrix: torch.Tensor, rank: int, seed: int) -> Call:
    memory, out = torch.zeros_like(matrix), torch.empty_like(matrix)
    factors = [_normal((rows, rank), seed + 1, matrix.device) for rows in matrix.shape]
    side = 1

    def call() -> None:
        nonlocal side
        view, from_memory = (out, memory) if side else (out.T, memory.T)
        memory.add_(matrix)
        known = torch.linalg.qr(factors[side])[0]
        new = from_memory @ known
        from_memory.addmm_(new, known.T, alpha=-1.0)
        torch.mm(new, known.T, out=view) if side else view.copy_(new @ known.T)
        factors[1 - side] = new
        side = 1 - side

    return call


@contextmanager
def _group_of_one() -> Iterator[None]:
    """torch's hook reduces over a group."""
    if dist.is_initialized():
        yield
        return
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _timed(calls: dict[str, Call], device: torch.device, repetitions: int) -> dict[str, list[float]]:
    """Seconds of each call, in random order: of work of this process on a CPU, from begin to end on a GPU."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    shuffle = random.Random(0).shuffle
    for repetition in range(WARMUP + repetitions):
        shuffle(order)
        for name in order:
            _wait(device)
            began = clock()
            calls[name]()
            _wait(device)
            if repetition >= WARMUP:
                times[name].append(clock() - began)
    return times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
