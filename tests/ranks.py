"""Real gloo ranks for tests.

Importing torch and Megatron-core takes longer than most tests. A fork server that lives as long as the test session
imports them once; the ranks of each call are forks of it, which takes milliseconds, and share nothing with those of
another call.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOAD = [__name__, "tests.preload"]


class RankFailed(AssertionError):
    """A function raised on some rank; holds the tracebacks."""


class RankPool:
    """Runs a function on n ranks at a time, in a fresh gloo world for each call."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)

    def run(
        self, num_ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = 240.0, **kwargs: Any
    ) -> list[Any]:
        """``function(*args, **kwargs)`` on every rank; what each returned, by rank.

        ``function`` must be importable by name; results must be picklable. Inside, torch.distributed is initialised
        with all ``num_ranks`` ranks, and RANK and WORLD_SIZE are set.

        Raises:
            RankFailed: it raised, or did not end in time, on some rank.
        """
        processes, connections = [], []
        with tempfile.TemporaryDirectory(prefix="ranks #?%20") as folder:
            store = str(Path(folder) / "store")
            for rank in range(num_ranks):
                ours, theirs = self._context.Pipe()
                call = (theirs, rank, num_ranks, store, function, args, kwargs)
                process = self._context.Process(target=_rank, args=call, daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                connections.append(ours)
            try:
                return _collect(connections, timeout_s)
            finally:
                for process in processes:
                    process.kill()
                    process.join()
                for connection in connections:
                    connection.close()


def _collect(connections: list[Connection], timeout_s: float) -> list[Any]:
    pending = dict(zip(connections, range(len(connections)), strict=True))
    results: dict[int, Any] = {}
    failures: list[str] = []
    while pending:
        # After a first failure the others get a moment to report theirs.
        ready = wait(list(pending), timeout=timeout_s if not failures else 2.0)
        if not ready:
            failures.append(f"ranks {sorted(pending.values())} did not answer")
            break
        for connection in [known for known in pending if known in ready]:
            rank = pending.pop(connection)
            try:
                succeeded, value = connection.recv()
            except (EOFError, OSError):  # also while it was handing over its tensors
                succeeded, value = False, "the rank died"
            if succeeded:
                results[rank] = value
            else:
                failures.append(f"rank {rank}:\n{value}")
    if failures:
        raise RankFailed("\n".join(failures))
    return [results[rank] for rank in range(len(connections))]


def _rank(
    connection: Connection,
    rank: int,
    num_ranks: int,
    store: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    import torch
    import torch.distributed as dist

    from optimus_cc.training.backend import meeting_place

    torch.set_num_threads(1)
    timeout = timedelta(seconds=120)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), OPTIMUS_CC_DEVICE="cpu")
    try:
        place = meeting_place(f"file://{store}", num_ranks, timeout)
        dist.init_process_group("gloo", rank=rank, world_size=num_ranks, timeout=timeout, **place)
        value = function(*args, **kwargs)
        dist.barrier()  # a rank that left would look like one that died
        connection.send((True, value))
    except BaseException:
        connection.send((False, traceback.format_exc()))
    connection.recv_bytes()  # until the test has heard from every rank
