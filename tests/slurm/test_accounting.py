"""The same with a database of jobs, and a queue that forgets what has ended within seconds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from launchers import start
from launchers.__main__ import main
from launchers.slurm import commands, record
from optimus_cc.runs import RunFolder
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import Sweeps, started, until


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    yield from started(tmp_path_factory.mktemp("slurm"), accounting=True)


def test_the_truth_is_in_the_accounts(sweeps: Sweeps, cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    configs = [sweeps.config(1), sweeps.config(2, {"failing_rank": 1}), sweeps.config(3, {"steps": 600, "step_s": 0.1})]
    follower = sweeps.start(*configs)
    folders = [sweeps.folder(config) for config in configs]
    jobs = [until(partial(job_of, folder), "it is submitted") for folder in folders]
    until(lambda: (status := folders[2].status()) is not None and status.step > 0, "it trains")
    cluster.run("scancel", jobs[2])
    assert follower.wait() == 1  # that one failed comes before that another was cancelled

    def forgotten() -> bool:
        return not cluster.run("squeue", "-h", "-t", "all", check=False).stdout.strip()

    until(forgotten, "the queue forgets")
    told = commands.jobs(jobs)
    assert [told[job].state for job in jobs] == ["COMPLETED", "FAILED", "CANCELLED"]
    assert main(["status", "--runs-dir", str(sweeps.runs_dir)]) == 0
    assert "3 runs: 1 cancelled, 1 failed, 1 finished" in " ".join(capsys.readouterr().out.split())


def test_a_job_that_never_began(sweeps: Sweeps, cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """It was cancelled behind our back: the job's own script puts that down, or SLURM tells."""
    config = sweeps.config(1, setup=("sleep 60",), wait=False)
    start.run_all([config])
    folder = sweeps.folder(config)
    job = job_of(folder)
    assert job
    until(lambda: commands.jobs([job])[job].state == "RUNNING", "it runs")
    cluster.run("scancel", job)
    until(lambda: commands.jobs([job])[job].state == "CANCELLED", "it is cancelled")
    capsys.readouterr()
    assert main(["status", "--runs-dir", str(sweeps.runs_dir)]) == 0
    told = capsys.readouterr().out
    assert f"its job {job} is over: CANCELLED" in told or "cancelled before it began" in told
    again = sweeps.config(1)  # whatever it says, it can be started once more
    assert [outcome.state for outcome in start.run_all([again])] == ["finished"]


def job_of(folder: RunFolder) -> str:
    found = record.read(folder)
    return found.id or "" if found is not None else ""
