"""Real training on two nodes of two ranks, through everything that interrupts it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launchers.slurm import record
from optimus_cc.runs import RunFolder
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import ROOT, until
from tests.training.resuming import without_timings

STEPS, KEPT_EVERY = 60, 5
SLOW = Path(__file__).with_name("slow")
WORDS = ["stage", "gradient", "sends", "receives", "rank", "small", "large", "tensor", "over", "link"]


def command(place: Path, runs_dir: str, *overrides: str) -> list[str]:
    return [
        *(sys.executable, "-u", str(ROOT / "run.py")),
        *("parallel=pp2", "parallel.data_parallel_size=2", "model.num_layers=2", "model.hidden_size=32"),
        *("model.num_attention_heads=2", "model.sequence_length=32", "technique.cb.codec.rank=4"),
        *("data=jsonl", f"data.path={place / 'corpus.jsonl'}", f"data.cache_dir={place / 'cache'}"),
        *("data.split=[0.8,0.1,0.1]", "tokenizer.vocabulary_size=300", f"runs_dir={place / runs_dir}"),
        *(f"training.steps={STEPS}", "training.validation_interval=20", "training.device=cpu"),
        *(f"training.checkpoint.interval_steps={KEPT_EVERY}", "launcher.threads_per_rank=1"),
        *("launcher.stop_grace_s=2", *overrides),
    ]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    words = random.Random(5)
    with (tmp_path / "corpus.jsonl").open("w") as file:
        for _ in range(60):
            file.write(json.dumps({"text": " ".join(words.choice(WORDS) for _ in range(200))}) + "\n")
    return tmp_path


def only_run(folder: Path) -> RunFolder:
    paths = until(lambda: [path for path in folder.glob("gpt*") if (path / "slurm.json").exists()], "there is a run")
    return RunFolder(paths[0])


def records(folder: RunFolder) -> list[dict[str, Any]]:
    return [without_timings(one) for one in folder.metrics() if one["kind"] != "resume"]


def reached(folder: RunFolder, attempt: int, step: int) -> bool:
    status = folder.status()
    return status is not None and (status.state, status.restarts) == ("running", attempt) and status.step >= step


def test_a_run_outlives_a_node_and_a_time_limit(
    cluster: Cluster, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node dies in mid-run; the job is put back into the queue, goes on, meets its time limit, goes on once more, and
    has computed what an uninterrupted run does, to the bit."""
    env = {**os.environ, "WANDB_SILENT": "true", "HF_HUB_OFFLINE": "1"}
    slow = place / "slow"
    slow.write_text("1.2")
    setup = f'launcher.setup=["export SLOW=$(cat {slow})","export PYTHONPATH={SLOW}"]'
    spread = ("cluster.num_nodes=2", "cluster.ranks_per_node=2", "launcher.save_before_end_s=5")
    told, began = (place / "told").open("w"), time.monotonic()
    events = []

    def happened(what: str) -> None:
        events.append(f"{time.monotonic() - began:4.0f} s  {what}")

    popen = subprocess.Popen(
        command(place, "runs", "launcher=slurm", *spread, "launcher.time_limit_h=0.2", setup),
        cwd=place,
        env=env,
        stdout=told,
        stderr=told,
    )
    try:
        folder = only_run(place / "runs")
        until(lambda: reached(folder, 0, KEPT_EVERY + 2) or popen.poll() is not None, "it trains")
        found = record.read(folder)
        assert found is not None
        assert found.id is not None
        nodes = [json.loads((folder.logs / f"node_{node}.json").read_text())["host"] for node in (0, 1)]
        cluster.kill_node(nodes[1])
        happened(f"{nodes[1]} is killed at step {getattr(folder.status(), 'step', None)}")
        until(lambda: getattr(folder.status(), "restarts", 0) == 1, "the run is put back into the queue")
        happened("the run is put back into the queue")
        cluster.run("scontrol", "update", f"JobId={found.id}", "TimeLimit=1")
        until(lambda: getattr(folder.status(), "state", "") == "running", "it goes on")
        happened("it goes on")
        until(lambda: getattr(folder.status(), "restarts", 0) == 2, "its time is over")
        happened("its time is over, and it is put back into the queue once more")
        slow.write_text("0")
        cluster.run("scontrol", "update", f"JobId={found.id}", "TimeLimit=20")
        assert popen.wait() == 0, (place / "told").read_text()
        happened("finished")
    finally:
        popen.kill()
        popen.wait()
        with capsys.disabled():
            print("\n" + "\n".join(events))
    lost, timed_out = (RunFolder(folder.path / "attempts" / number).status() for number in ("1", "2"))
    assert lost is not None
    assert timed_out is not None
    assert lost.state == timed_out.state == "preempted"
    assert lost.cause == f"preempted by the loss of {nodes[1]}"
    assert timed_out.cause == "preempted by SIGUSR2"
    resumed = [one["step"] for one in folder.metrics("resume")]
    assert resumed[0] == KEPT_EVERY
    assert resumed[-1] >= timed_out.step
    local = subprocess.run(command(place, "uninterrupted"), cwd=place, env=env, capture_output=True, text=True)
    assert local.returncode == 0, local.stdout + local.stderr
    (uninterrupted,) = (place / "uninterrupted").glob("gpt*")
    assert uninterrupted.name == folder.run_id
    assert records(folder) == records(RunFolder(uninterrupted))
