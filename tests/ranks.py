"""Real gloo ranks for tests, kept alive over a test session.

Importing torch and Megatron-core takes longer than most tests; a fork server imports them once and every rank is a
fork of it. A rank that fails takes the whole pool with it, because its peers may be stuck in a collective; the next
test gets a fresh one.
"""

from __future__ import annotations

import gc
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
        self._workers: list[tuple[Any, Connection]] = []

    def run(
        self, num_ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = 240.0, **kwargs: Any
    ) -> list[Any]:
        """``function(*args, **kwargs)`` on every rank; what each returned, by rank.

        ``function`` must be importable by name; results must be picklable. Inside, torch.distributed is initialised
        with all ``num_ranks`` ranks, and RANK and WORLD_SIZE are set.

        Raises:
            RankFailed: it raised, or did not end in time, on some rank.
        """
        while len(self._workers) < num_ranks:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_worker, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(num_ranks):
                self._workers[rank][1].send((rank, num_ranks, str(Path(folder) / "store"), function, args, kwargs))
            return self._collect(num_ranks, timeout_s)

    def close(self) -> None:
        for process, connection in self._workers:
            process.kill()
            connection.close()
        self._workers.clear()

    def _collect(self, num_ranks: int, timeout_s: float) -> list[Any]:
        pending: dict[Connection, int] = {self._workers[rank][1]: rank for rank in range(num_ranks)}
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
                except EOFError:
                    succeeded, value = False, "the rank died"
                if succeeded:
                    results[rank] = value
                else:
                    failures.append(f"rank {rank}:\n{value}")
        if failures:
            self.close()
            raise RankFailed("\n".join(failures))
        return [results[rank] for rank in range(num_ranks)]


def _worker(connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            rank, num_ranks, store, function, args, kwargs = connection.recv()
        except EOFError:
            return
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), OPTIMUS_CC_DEVICE="cpu")
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=120)
            )
            value = function(*args, **kwargs)
            dist.barrier()
            _leave()
            connection.send((True, value))
        except BaseException:
            connection.send((False, traceback.format_exc()))


def _leave() -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state

    from optimus_cc.communication.traffic import _Observer

    _Observer.uninstall()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    # Trainers are full of reference cycles that hold process groups; a group whose peers are gone keeps a core busy.
    gc.collect()
