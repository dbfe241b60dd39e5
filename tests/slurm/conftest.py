"""A cluster for all tests of a file, and runs on it: with real ranks, or with ranks that train nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from optimus_cc.config import RunConfig
from optimus_cc.config.launcher import SlurmConfig
from optimus_cc.runs import RunFolder
from tests.configurations import tiny
from tests.slurm import cluster as clusters
from tests.slurm.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
FAKES = Path(__file__).with_name("fakes")
DEADLINE_S = 180.0
"""For waiting loops only; nothing takes this long."""


def started(folder: Path, accounting: bool) -> Iterator[Cluster]:
    if (reason := clusters.missing(accounting)) is not None:
        pytest.skip(reason)
    cluster = Cluster(folder / "cluster")
    before = os.environ.get("SLURM_CONF")
    try:
        cluster.up(accounting)
        os.environ["SLURM_CONF"] = str(cluster.conf)
        yield cluster
    finally:
        cluster.down()
        os.environ.pop("SLURM_CONF", None)
        if before is not None:
            os.environ["SLURM_CONF"] = before


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    yield from started(tmp_path_factory.mktemp("slurm"), accounting=False)


class Sweeps:
    """Configurations of fake ranks, and sweeps of them."""

    def __init__(self, place: Path) -> None:
        self.runs_dir = place / "runs"
        self.place = place
        self.followers: list[subprocess.Popen[str]] = []

    def config(self, seed: int, fake: dict[str, Any] | None = None, ranks: int = 2, **launcher: Any) -> RunConfig:
        """One rank on each of ``ranks`` nodes, which trains nothing and does what ``fake`` says."""
        fake = {"steps": 3, "step_s": 0.05, **(fake or {})}
        told = json.dumps(fake)
        setup = (f"export FAKE='{told}'", f"export PYTHONPATH={FAKES}")
        slurm = SlurmConfig(**{"setup": setup, "stop_grace_s": 1.0, "time_limit_h": 0.1, **launcher})
        this: Any = tiny(
            {"data_parallel_size": ranks}, steps=fake["steps"], device="cpu", seed=seed, num_microbatches=1
        )
        cluster: Any = this.cluster
        spread = dataclasses.replace(cluster, num_nodes=clusters.NODES, ranks_per_node=1)
        made: RunConfig = dataclasses.replace(this, launcher=slurm, cluster=spread, runs_dir=str(self.runs_dir))
        return made

    def folder(self, config: RunConfig) -> RunFolder:
        return RunFolder(self.runs_dir / config.run_id)

    def start(self, *configs: RunConfig) -> subprocess.Popen[str]:
        """Submit and follow in another process, as run.py does."""
        text = self.text(self.pickled(configs))
        popen = subprocess.Popen(
            [sys.executable, "-u", "-c", text],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.followers.append(popen)
        return popen

    def pickled(self, configs: tuple[RunConfig, ...]) -> Path:
        path = self.place / f"configs_{len(self.followers)}.pickle"
        path.write_bytes(pickle.dumps(list(configs)))
        return path

    def text(self, pickled: Path) -> str:
        """A program that submits and follows configurations."""
        return f"""
import pickle, sys
from pathlib import Path
from launchers.start import run_all
from launchers.sweep import exit_code
sys.exit(exit_code(run_all(pickle.loads(Path({str(pickled)!r}).read_bytes()))))
"""

    def close(self) -> None:
        for popen in self.followers:
            if popen.poll() is None:
                os.killpg(popen.pid, signal.SIGKILL)
            popen.wait()


@pytest.fixture
def sweeps(cluster: Cluster, tmp_path: Path) -> Iterator[Sweeps]:
    made = Sweeps(tmp_path)
    try:
        yield made
    finally:
        made.close()
        cluster.run("scancel", "--user=root", "--quiet", check=False)


def until(condition: Callable[[], Any], what: str) -> Any:
    """The first value that is true."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.1)
    return value


def state(folder: RunFolder) -> str:
    status = folder.status()
    return "" if status is None else status.state


def ranks_of(folder: Path) -> list[dict[str, Any]]:
    """What the fake ranks whose logs are in a folder have said about themselves."""
    first_lines = [path.read_text().partition("\n")[0] for path in sorted(folder.glob("rank_*.log"))]
    return [json.loads(line) for line in first_lines if line]
