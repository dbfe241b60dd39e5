"""``python -m launchers.slurm.node RUN_FOLDER DEVICE RENDEZVOUS``: one node's ranks of a run.

srun starts it once on each node of a job. How its ranks end it writes to ``logs/node_N.json``, from which the job makes
a verdict. Exit code: 0 they ended well, or because they were asked to; 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from launchers.local import import_path, rank_command
from launchers.slurm.resources import Resources
from launchers.supervise import OthersMayBeTheCause, PatientStop, Stop, World, supervise
from optimus_cc import command, process
from optimus_cc.config import RunConfig
from optimus_cc.config.launcher import SlurmConfig
from optimus_cc.records import read_json_object, replace_file, to_json
from optimus_cc.runs import RunFailed, RunFolder, RunPreempted
from optimus_cc.training.corpus import is_prepared

LATE_FILE_S = 30.0
"""How late a network file system may show what another node has written."""


@dataclass(frozen=True)
class Verdict:
    """How one node's ranks ended."""

    state: str
    """``running`` until then; ``finished``, ``preempted`` or ``failed``."""
    host: str
    time: float
    """Seconds since the epoch."""
    cause: str = ""
    details: str = ""
    others: bool = False
    """Failed, but what happened on another node may be the cause."""


def verdict_path(folder: RunFolder, node: int) -> Path:
    return folder.logs / f"node_{node}.json"


def read_verdict(folder: RunFolder, node: int) -> Verdict | None:
    record = read_json_object(verdict_path(folder, node))
    try:
        return None if record is None else Verdict(**record)
    except TypeError:
        return None


def run(folder: RunFolder, node: int, device: str, rendezvous: str, stop: Stop) -> int:
    """Run this node's ranks to their end; the exit code."""

    def say(state: str, error: RunFailed | None = None) -> None:
        told = (error.cause, error.details, isinstance(error, OthersMayBeTheCause)) if error is not None else ("", "")
        verdict = Verdict(state, socket.gethostname(), time.time(), *told)
        replace_file(verdict_path(folder, node), to_json(asdict(verdict)))

    say("running")
    config = folder.run_config()
    resources, launcher = Resources.of(config), config.launcher
    assert isinstance(launcher, SlurmConfig)
    local = resources.ranks_per_node
    try:
        if resources.nodes > 1:
            _check_that_the_corpus_is_here(config)
        supervise(
            rank_command(folder, config),
            local,
            log_dir=folder.logs,
            stop=stop,
            env={process.DEVICE: device, **import_path()},
            threads_per_rank=launcher.threads_per_rank or launcher.cpus_per_rank,
            grace_s=launcher.stop_grace_s,
            timeout_s=config.training.timeout_s,
            world=World(config.parallel.world_size, node * local, rendezvous) if resources.nodes > 1 else None,
        )
    except RunPreempted as preempted:
        say("preempted", preempted)
        return 0  # so that srun lets the other nodes end, too
    except RunFailed as failure:
        say("failed", failure)
        print(f"{socket.gethostname()}: {failure.cause}", flush=True)
        return 1
    say("finished")
    return 0


def _check_that_the_corpus_is_here(config: RunConfig) -> None:
    """The first node has prepared it; ranks of a node that can't see it would each fail in their own way.

    Raises:
        RunFailed: it is not there, also after a while.
    """
    deadline = time.monotonic() + LATE_FILE_S
    while not is_prepared(config):
        if time.monotonic() > deadline:
            raise RunFailed(
                f"data.cache_dir={config.data.cache_dir} on {socket.gethostname()} does not hold the corpus that the "
                "job's first node has prepared: with several nodes it must be a folder that all of them share"
            )
        time.sleep(0.5)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m launchers.slurm.node", description="Run one node's ranks.")
    parser.add_argument("folder", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("device", choices=["cpu", "cuda"])
    parser.add_argument("rendezvous")
    options = parser.parse_args(arguments)
    with PatientStop().on_signals() as stop:
        node = int(os.environ["SLURM_NODEID"])
        return run(RunFolder(options.folder), node, options.device, options.rendezvous, stop)


if __name__ == "__main__":
    raise SystemExit(command.run(main))
