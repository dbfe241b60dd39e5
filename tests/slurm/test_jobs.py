"""Sweeps on a real cluster whose ranks train nothing: what SLURM does to them, and what becomes of the runs."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import datetime
from functools import partial
from pathlib import Path

import pytest

from launchers import start
from launchers.__main__ import main
from launchers.slurm import commands, record
from optimus_cc.config import ConfigError
from optimus_cc.config.schema import changed
from optimus_cc.ownership import process_exists
from optimus_cc.runs import RunFolder
from tests.slurm.cluster import MAX_ARRAY_SIZE, Cluster
from tests.slurm.conftest import FAKES, ROOT, Sweeps, ranks_of, state, until

LONG = {"steps": 600, "step_s": 0.1}


def job_of(folder: RunFolder) -> str:
    found = record.read(folder)
    assert found is not None
    assert found.id is not None
    return found.id


def verdict(cluster: Cluster, folder: RunFolder) -> dict[str, str]:
    """What SLURM says about the job of a run that has ended."""
    job = job_of(folder)
    until(lambda: not commands.jobs([job])[job].live, "the job is over")
    return dict(commands.show(job))


def warn(cluster: Cluster, folder: RunFolder) -> None:
    """What SLURM does before a time limit."""
    cluster.run("scancel", "--batch", "--signal=USR2", job_of(folder))


def first_step(folder: RunFolder) -> int:
    def look() -> int:
        status = folder.status()
        return status.step if status is not None and status.state == "running" else 0

    step: int = until(look, f"{folder.run_id} trains")
    return step


def restarted(folder: RunFolder) -> bool:
    status = folder.status()
    return status is not None and status.restarts == 1


def test_an_array_with_a_throttle(sweeps: Sweeps, cluster: Cluster) -> None:
    configs = [sweeps.config(seed, ranks=1, max_parallel=2) for seed in range(5)]
    assert [outcome.state for outcome in start.run_all(configs)] == ["finished"] * 5
    (script,) = (sweeps.runs_dir / ".slurm").glob("*/*.sh")
    assert "#SBATCH --array=0-4%2\n" in script.read_text()
    times = []
    for config in configs:
        status = sweeps.folder(config).status()
        assert status is not None
        assert status.started is not None
        assert status.updated is not None
        times += [(datetime.fromisoformat(status.started), 1), (datetime.fromisoformat(status.updated), -1)]
    at_once = [sum(change for _, change in sorted(times)[: index + 1]) for index in range(len(times))]
    assert max(at_once) <= 2
    again = start.run_all(configs)
    assert all(outcome.skipped for outcome in again)


def test_ranks_on_two_nodes(sweeps: Sweeps, cluster: Cluster) -> None:
    config = sweeps.config(1)
    (outcome,) = start.run_all([config])
    assert outcome.state == "finished"
    first, second = ranks_of(sweeps.folder(config).logs)
    assert (first["RANK"], first["LOCAL_RANK"], second["RANK"], second["LOCAL_RANK"]) == ("0", "0", "1", "0")
    assert first["WORLD_SIZE"] == second["WORLD_SIZE"] == "2"
    assert first["host"] != second["host"]
    assert first["OPTIMUS_CC_RENDEZVOUS"] == second["OPTIMUS_CC_RENDEZVOUS"]
    assert first["OPTIMUS_CC_RENDEZVOUS"].startswith(f"tcp://{first['host']}:")
    assert verdict(cluster, sweeps.folder(config))["JobState"] == "COMPLETED"


def test_a_task_that_raises(sweeps: Sweeps, cluster: Cluster) -> None:
    config = sweeps.config(1, {"failing_rank": 1})
    (outcome,) = start.run_all([config])
    folder = sweeps.folder(config)
    assert outcome.state == state(folder) == "failed"
    told = verdict(cluster, folder)
    assert (told["JobState"], told["ExitCode"]) == ("FAILED", "1:0")
    log = (folder.logs / "launcher.log").read_text()
    assert "rank 1 failed with RuntimeError: this was to be expected on n" in log
    assert "Traceback" in log


def test_a_rank_that_is_killed(sweeps: Sweeps, cluster: Cluster) -> None:
    config = sweeps.config(1, LONG)
    follower = sweeps.start(config)
    folder = sweeps.folder(config)
    first_step(folder)
    first, second = ranks_of(folder.logs)
    os.kill(second["pid"], signal.SIGKILL)
    assert follower.wait() == 1
    assert state(folder) == "failed"
    status = folder.status()
    assert status is not None
    assert (status.cause or "").startswith("rank 1 was killed by SIGKILL")
    assert verdict(cluster, folder)["JobState"] == "FAILED"
    until(lambda: not process_exists(first["pid"]), "the other rank ends")


def test_scancel(sweeps: Sweeps, cluster: Cluster) -> None:
    """It ends the run for good: it isn't taken for a preemption."""
    config = sweeps.config(1, LONG)
    follower = sweeps.start(config)
    folder = sweeps.folder(config)
    first_step(folder)
    cluster.run("scancel", job_of(folder))
    assert follower.wait() == 130
    assert state(folder) == "cancelled"
    assert verdict(cluster, folder)["JobState"] == "CANCELLED"


@pytest.mark.parametrize("requeues", [True, False])
def test_a_warning_before_the_end(sweeps: Sweeps, cluster: Cluster, requeues: bool) -> None:
    """The run saves, ends, and goes on in the same job or, where SLURM doesn't requeue it, in a new one, as often as is
    allowed."""
    more = () if requeues else ("--no-requeue",)
    config = sweeps.config(1, LONG, ranks=2, max_restarts=1, sbatch=more, after=("collect",))
    follower = sweeps.start(config)
    folder = sweeps.folder(config)
    first_step(folder)
    job = job_of(folder)
    warn(cluster, folder)
    until(partial(restarted, folder), "the run is put back")
    step = first_step(folder)
    assert (job_of(folder) == job) == requeues
    (place,) = (folder.path / "attempts").iterdir()
    before, after = ranks_of(place / "logs"), ranks_of(folder.logs)
    assert before[0]["OPTIMUS_CC_RENDEZVOUS"] != after[0]["OPTIMUS_CC_RENDEZVOUS"]
    saved = RunFolder(place).status()
    assert saved is not None
    assert (saved.state, saved.cause) == ("preempted", "preempted by SIGUSR2")
    assert step > saved.step  # it went on from there
    warn(cluster, folder)
    assert follower.wait() == 1
    status = folder.status()
    assert status is not None
    assert (status.state, status.cause) == ("failed", "interrupted 2 times: launcher.max_restarts=1")
    (script,) = (sweeps.runs_dir / ".slurm").glob("*/after.sh")
    until(lambda: script.with_suffix(".out").exists(), "the table is there")  # not before: it would say preempted
    until(lambda: "failed" in script.with_suffix(".out").read_text(), "it was written when all had ended")


def test_a_warning_before_python_has_begun(
    sweeps: Sweeps, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever the folder is called and the user's shell says to squeue."""
    sweeps.runs_dir = tmp_path / "50%j a"
    monkeypatch.setenv("SQUEUE_PARTITION", "urgent")
    monkeypatch.setenv("SQUEUE_USERS", "nobody")
    began = tmp_path / "began"
    config = sweeps.config(1, ranks=1)
    first_lines = (f"[ -e {began} ] || {{ touch {began}; sleep 100; }}", *config.launcher.setup)  # type: ignore[union-attr]
    config = changed(config, launcher=changed(config.launcher, setup=first_lines))
    follower = sweeps.start(config)
    folder = sweeps.folder(config)
    until(began.exists, "its modules are loaded")
    warn(cluster, folder)
    assert follower.wait() == 0
    found, status = record.read(folder), folder.status()
    assert found is not None
    assert status is not None
    assert (status.state, status.restarts, found.unbegun) == ("finished", 0, 1)
    assert "goes on later" in found.output.read_text()


def test_a_batch_step_that_is_killed(sweeps: Sweeps, cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """What ``status`` calls abandoned, the same command starts at once, with other resources, too."""
    config = sweeps.config(1, {"steps": 60, "step_s": 0.3}, ranks=1)
    sweeps.start(config)
    folder = sweeps.folder(config)
    first_step(folder)
    status = folder.status()
    assert status is not None
    assert status.pid is not None
    os.kill(status.pid, signal.SIGKILL)
    until(lambda: not commands.jobs([job_of(folder)])[job_of(folder)].live, "its job is over")
    until(lambda: look(sweeps, capsys) == ["abandoned"], "it says so")
    other = sweeps.config(1, {"steps": 60, "step_s": 0.01}, ranks=1, cpus_per_rank=2)
    (outcome,) = start.run_all([other])
    assert outcome.state == "finished"
    assert commands.show(job_of(folder))["CPUs/Task"] == "2"


def test_nodes_that_are_drained(sweeps: Sweeps, cluster: Cluster) -> None:
    """SLURM would queue it, so it is queued."""
    nodes = ",".join(cluster.nodes)
    cluster.run("scontrol", "update", f"NodeName={nodes}", "State=DRAIN", "Reason=test")
    try:
        config = sweeps.config(1, ranks=1)
        follower = sweeps.start(config)
        until(lambda: record.read(sweeps.folder(config)) is not None, "it is submitted")
        job = until(lambda: record.read(sweeps.folder(config)).id, "it has an id")  # type: ignore[union-attr]
        assert commands.jobs([job])[job].state == "PENDING"
    finally:
        cluster.run("scontrol", "update", f"NodeName={nodes}", "State=RESUME")
    assert follower.wait() == 0


def test_preemption(sweeps: Sweeps, cluster: Cluster) -> None:
    """Both where SLURM requeues what it preempts and where it cancels it."""
    configs = [sweeps.config(seed, LONG, partition=name) for seed, name in enumerate(("main", "cancelling"))]
    sweeps.start(*configs)
    folders = [sweeps.folder(config) for config in configs]
    for folder in folders:
        first_step(folder)
    cluster.run("srun", "-p", "urgent", "-N", "4", "--exclusive", "true")
    for folder in folders:
        until(partial(restarted, folder), "it was interrupted")
        first_step(folder)


def test_submission_from_inside_an_allocation(sweeps: Sweeps, cluster: Cluster) -> None:
    config = sweeps.config(1)
    pickled = sweeps.pickled((config,))
    inside = [sys.executable, "-c", sweeps.text(pickled)]
    allocation = ["srun", "--nodes=1", "--ntasks=1", "--cpus-per-task=3", "--mem=100", "--time=5", "--export=ALL"]
    done = cluster.run(*allocation, *inside, check=False, SBATCH_PARTITION="nowhere", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len({rank["host"] for rank in ranks_of(sweeps.folder(config).logs)}) == 2
    told = commands.show(job_of(sweeps.folder(config)))
    assert (told["Partition"], told["NumNodes"], told["CPUs/Task"]) == ("main", "2", "1")


def test_the_launcher_is_killed(
    sweeps: Sweeps, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The jobs go on, and everything that can be asked and done about them works without it."""
    configs = [sweeps.config(seed, {"steps": 60, "step_s": 0.1}, max_parallel=1) for seed in (1, 2, 3)]
    follower = sweeps.start(*configs)
    folders = [sweeps.folder(config) for config in configs]
    first_step(folders[0])
    os.killpg(follower.pid, signal.SIGKILL)
    follower.wait()
    assert look(sweeps, capsys) == ["running", "queued", "queued"]
    again = sweeps.start(*configs)  # the same command follows what is there, and submits nothing
    assert again.stdout is not None
    assert sum("in SLURM already, as job" in again.stdout.readline() for _ in range(4)) == 3
    assert main(["cancel", configs[1].run_id, "--runs-dir", str(sweeps.runs_dir)]) == 0
    assert state(folders[1]) == "cancelled"
    assert main(["cancel", configs[0].run_id, "--runs-dir", str(sweeps.runs_dir), "--save"]) == 0
    until(lambda: state(folders[0]) == "preempted", "the run has saved")
    assert main(["logs", configs[0].run_id, "--runs-dir", str(sweeps.runs_dir)]) == 0
    assert "preempted by cancel --save" in capsys.readouterr().out
    assert again.wait() in (75, 130)
    assert [state(folder) for folder in folders] == ["preempted", "cancelled", "finished"]
    assert len(list((sweeps.runs_dir / ".slurm").glob("*/*.sh"))) == 1
    assert main(["resubmit", "--preempted", "--runs-dir", str(sweeps.runs_dir)]) == 0
    assert look(sweeps, capsys) == ["finished", "cancelled", "finished"]


def look(sweeps: Sweeps, capsys: pytest.CaptureFixture[str]) -> list[str]:
    import json

    capsys.readouterr()
    main(["status", "--json", "--runs-dir", str(sweeps.runs_dir)])
    runs = json.loads(capsys.readouterr().out)["runs"]
    return [run["state"] for run in sorted(runs, key=lambda run: str(run["run_id"]))]


def test_two_hundred_jobs(sweeps: Sweeps, cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    setup = ("export FAKE=done", f"export PYTHONPATH={FAKES}")
    configs = [sweeps.config(seed, ranks=1, setup=setup, after=("collect",)) for seed in range(200)]
    began = time.monotonic()
    outcomes = start.run_all(configs)
    print(f"200 jobs in {time.monotonic() - began:.0f} s")
    assert {outcome.state for outcome in outcomes} == {"finished"}
    scripts = sorted((sweeps.runs_dir / ".slurm").glob("*/array_*.sh"))
    sizes = [f"--array=0-{MAX_ARRAY_SIZE - 1}\n", f"--array=0-{199 - MAX_ARRAY_SIZE}\n"]
    assert [size in script.read_text() for size, script in zip(sizes, scripts, strict=True)] == [True, True]
    collected = next((sweeps.runs_dir / ".slurm").glob("*/")) / "after.out"
    until(lambda: collected.exists() and "finished" in collected.read_text(), "the table is there")


def test_slurm_refuses(sweeps: Sweeps, cluster: Cluster) -> None:
    with pytest.raises(ConfigError) as error:
        start.run_all([sweeps.config(1, partition="nowhere")])
    assert "invalid partition" in str(error.value).lower()
    assert not sweeps.folder(sweeps.config(1)).path.exists()


def test_a_copy_of_the_code(sweeps: Sweeps, cluster: Cluster) -> None:
    config = sweeps.config(1, copy_code=True)
    (outcome,) = start.run_all([config])
    assert outcome.state == "finished"
    (copy,) = (sweeps.runs_dir / ".slurm").glob("code_*")
    (script,) = (sweeps.runs_dir / ".slurm").glob("*/*.sh")
    assert f"export PYTHONPATH={copy}$" in script.read_text()
    assert (sweeps.folder(config).provenance() or {}).get("queued_with") is None  # it is the code that was queued
