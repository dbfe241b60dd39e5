"""Evaluations on a real cluster: by the ranks of a training on their two nodes, and by a job for a sweep."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from launchers.slurm import record
from optimus_cc.evaluation import results
from optimus_cc.runs import RunFolder
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import until
from tests.slurm.test_training import command
from tests.slurm.test_training import place as place


def submit(place: Path, *overrides: str) -> str:
    spread = ("cluster.num_nodes=2", "cluster.ranks_per_node=1", "parallel.data_parallel_size=1")
    short = ("training.steps=3", "training.validation_interval=3", "evaluation=perplexity")
    line = command(place, "runs", "launcher=slurm", *spread, *short, *overrides)
    env = {**os.environ, "WANDB_SILENT": "true", "HF_HUB_OFFLINE": "1"}
    told = subprocess.run(line, cwd=place, env=env, capture_output=True, text=True, timeout=240)
    assert told.returncode == 0, told.stdout + told.stderr
    return told.stdout


def test_by_the_trainings_own_job_and_by_one_after_it(cluster: Cluster, place: Path) -> None:
    submit(place, "training.seed=1", "evaluation.after_training=true")
    (path,) = (place / "runs").glob("*-s1-*")
    (own,) = until(lambda: results.read_all(RunFolder(path)), "the job, which goes on, has evaluated it")
    assert (own["kind"], own["layout"], own["checkpoint"]["step"]) == ("perplexity", "pp2", 3)
    (logs,) = (path / "evaluation" / "logs").glob("step_00000003-*/logs")
    assert {file.name for file in logs.glob("node_*.json")} == {"node_0.json", "node_1.json"}

    submit(place, "training.seed=2,3", "launcher.after=[evaluate]")
    (script,) = (place / "runs" / record.FOLDER).glob("*/after.sh")
    job = record.id_path(script).read_text().strip()
    until(lambda: job not in cluster.run("squeue", "--noheader", "--format=%i").stdout.split(), "the job has ended")
    assert "token_perplexity" in script.with_name("after.out").read_text()
    for seed in (2, 3):
        (path,) = (place / "runs").glob(f"*-s{seed}-*")
        (one,) = results.read_all(RunFolder(path))
        assert (one["kind"], one["layout"]) == ("perplexity", "single"), "a node holds one rank"
