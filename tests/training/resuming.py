"""Trainings in test ranks that save, die and go on."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from optimus_cc.config import RunConfig
from tests.configurations import VOCABULARY
from tests.training_runs import backend_in_world, random_tokens


def train(
    config: RunConfig, folder: Path, *, stop_at: int | None = None, kill: tuple[int, float] | None = None
) -> dict[str, Any]:
    """Train with checkpoints in ``folder``, going on from those that are there.

    Args:
        stop_at: ask for a stop, on rank 0 alone, during this step.
        kill: SIGKILL this rank when it has taken so many steps, and after that so many times the time of its last one.
    """
    from optimus_cc.training import loop
    from optimus_cc.training.checkpoint import Checkpoints

    backend = backend_in_world(config)
    trainer = loop.Trainer.build(config, backend, VOCABULARY)
    saver = Checkpoints(config, folder, backend)
    rest, notes = saver.resume(trainer)
    began_at = trainer.step
    stop = loop.StopRequest()
    records: list[dict[str, Any]] = []

    step_began = time.monotonic()

    def heartbeat() -> None:
        nonlocal step_began
        took, step_began = time.monotonic() - step_began, time.monotonic()
        if kill is not None and trainer.step == began_at + kill[0]:
            threading.Timer(kill[1] * took, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if trainer.step == stop_at and backend.rank == 0:
            stop.requested = True

    result = loop.run(
        trainer,
        random_tokens(config),
        random_tokens(config, offset=10**6),
        records.append,
        heartbeat=heartbeat,
        stop=stop,
        saver=saver,
        resumed=rest,
    )
    return {
        "began_at": began_at,
        "ended_at": trainer.step,
        "stopped": isinstance(result, loop.Stopped),
        "traffic": None if isinstance(result, loop.Stopped) else result["traffic"],
        "notes": notes,
        "records": [without_timings(record) for record in records],
        "weights": {
            f"{index}.{name}": value.detach().clone()
            for index, chunk in enumerate(trainer.model)
            for name, value in chunk.module.named_parameters()
        },
        "state": {key: value.clone() for key, value in trainer.attachment.state_dict().items()},
    }


def without_timings(record: dict[str, Any]) -> dict[str, Any]:
    """What of a metrics record must not depend on the clock."""
    timings = {"step_time_s", "tokens_per_s", "tflop_per_s_per_rank", "wall_s"}
    return {key: value for key, value in record.items() if key not in timings}
