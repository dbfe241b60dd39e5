"""What is shown of runs that are jobs; SLURM's answers are made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launchers import status
from launchers.plan import plan
from launchers.slurm import commands, follow, record, view
from launchers.slurm.commands import Job, SlurmError
from launchers.slurm.record import Record
from optimus_cc.claims import queue
from optimus_cc.config import RunConfig
from optimus_cc.config.launcher import LauncherConfig
from optimus_cc.config.schema import changed
from optimus_cc.runs import RunBusy, RunFolder, Status
from tests.config.command_line import one


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Job], list[set[str]]]:
    jobs: dict[str, Job] = {}
    asked: list[set[str]] = []

    def ask(ids: object) -> dict[str, Job]:
        asked.append(set(ids))  # type: ignore[call-overload]
        if "fail" in jobs:
            raise SlurmError("slurmctld is away")
        return jobs

    view._answers.clear()
    monkeypatch.setattr(commands, "jobs", ask)
    return jobs, asked


def run(runs_dir: Path, name: str, index: int, **fields: object) -> RunFolder:
    folder = RunFolder(runs_dir / name)
    folder.path.mkdir(parents=True)
    folder.write_status(Status(**fields))  # type: ignore[arg-type]
    runs = runs_dir / ".slurm" / "x" / "array_1.runs"
    runs.parent.mkdir(parents=True, exist_ok=True)
    record.id_path(runs).write_text("7\n")
    record.write(folder, Record(str(runs), index))
    return folder


SILENT = "it printed nothing; see scontrol show job 7_0"


@pytest.mark.parametrize(
    ("state", "job", "shown", "live", "cause"),
    [
        ("queued", Job("PENDING", "Resources"), "queued", True, "job 7_0 waits: Resources"),
        ("queued", Job("RUNNING", nodes="n1"), "queued", True, "job 7_0 is running on n1"),
        ("queued", Job("CANCELLED"), "abandoned", False, f"its job 7_0 is over: CANCELLED; {SILENT}"),
        ("queued", None, "abandoned", False, f"its job 7_0 is over: gone from SLURM; {SILENT}"),
        ("running", Job("RUNNING"), "running", True, None),
        ("running", Job("PENDING", "BeginTime"), "queued", True, "job 7_0 waits: BeginTime"),
        ("running", Job("NODE_FAIL"), "abandoned", False, "its job 7_0 is over: NODE_FAIL"),
        ("preempted", Job("PENDING"), "queued", True, "job 7_0 waits"),
        ("preempted", None, "preempted", False, "preempted by SIGTERM"),
        ("finished", Job("COMPLETING"), "finished", False, None),
    ],
)
def test_what_is_shown(
    answers: tuple[dict[str, Job], list[set[str]]],
    tmp_path: Path,
    state: str,
    job: Job | None,
    shown: str,
    live: bool,
    cause: str | None,
) -> None:
    jobs, _ = answers
    run(tmp_path, "a", 0, state=state, cause="preempted by SIGTERM" if state == "preempted" else None, host="n1", pid=1)
    if job is not None:
        jobs["7_0"] = job
    (told,) = status.select(tmp_path)
    assert (told.state, told.live, told.cause) == (shown, live, cause)


def test_what_says_why_a_job_never_began_is_named(
    answers: tuple[dict[str, Job], list[set[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the list of runs and by who follows them."""
    config = one(f"launcher=slurm runs_dir={tmp_path}")
    run(tmp_path, config.run_id, 0, state="queued")
    output = tmp_path / ".slurm" / "x" / "array_1_0.out"
    output.write_text("no such module")
    answers[0]["7_0"] = Job("FAILED")
    (told,) = status.select(tmp_path)
    assert told.cause == f"its job 7_0 is over: FAILED; see {output}"
    monkeypatch.setattr(follow, "GONE_AFTER_S", 0)
    (outcome,) = follow.follow(plan([config])).values()
    assert str(outcome.error) == f"its job ended (FAILED) before it began; see {output}"


def left_by_a_job(runs_dir: Path, state: str) -> tuple[RunConfig, RunFolder]:
    """A run that another host has queued as job 7_0, or that another host runs as that job."""
    config = one(f"launcher=slurm launcher.cpus_per_rank=3 runs_dir={runs_dir}")
    claimed = queue(config)
    folder = claimed.folder
    started = "2026-01-01T10:00:00+00:00" if state == "running" else None
    there: Any = replace(claimed.status, host="n1", pid=5, started=started)
    folder.write_status(replace(there, state=state))
    (folder.path / ".owner_1").write_text("held by process 5 on n1" if state == "running" else "left by process 1 on a")
    runs = runs_dir / ".slurm" / "x" / "array_1.runs"
    runs.parent.mkdir(parents=True)
    record.id_path(runs).write_text("7\n")
    record.write(folder, Record(str(runs), 0, pid=5, host="n1"))
    return config, folder


@pytest.mark.parametrize("job", [Job("FAILED"), Job("NODE_FAIL"), None])
@pytest.mark.parametrize("state", ["running", "queued"])
def test_a_run_whose_job_is_over_is_nobodys_for_all_commands(
    answers: tuple[dict[str, Job], list[set[str]]], tmp_path: Path, state: str, job: Job | None
) -> None:
    """Also while its owner on another host was heard of a moment ago; with other resources, or without SLURM."""
    config, folder = left_by_a_job(tmp_path, state)
    if job is not None:
        answers[0]["7_0"] = job
    assert status.look(folder).state == status.ABANDONED
    (planned,) = plan([config])
    assert planned.action == "start"
    assert planned.remark.startswith("its job 7_0 is over: ")
    view.let_go([folder])
    other = changed(config, launcher=LauncherConfig())
    assert queue(other).status.restarts == (state == "running")
    assert folder.run_config() == other
    assert record.read(folder) is None


@pytest.mark.parametrize("job", [Job("RUNNING"), Job("PENDING"), Job("fail")])
def test_a_run_whose_job_is_not_over_stays_its(
    answers: tuple[dict[str, Job], list[set[str]]], tmp_path: Path, job: Job
) -> None:
    config, folder = left_by_a_job(tmp_path, "running")
    answers[0]["fail" if job.state == "fail" else "7_0"] = job
    (planned,) = plan([config])
    assert planned.action == "elsewhere"
    view.let_go([folder])
    assert record.read(folder) is not None
    with pytest.raises(RunBusy):
        queue(config)


def test_one_query_for_all(answers: tuple[dict[str, Job], list[set[str]]], tmp_path: Path) -> None:
    for index in range(50):
        run(tmp_path, f"run_{index}", index, state="queued")
    status.select(tmp_path)
    status.select(tmp_path)  # asked again at once, SLURM is left in peace
    assert answers[1] == [{f"7_{index}" for index in range(50)}]


def test_without_slurm_folders_tell(answers: tuple[dict[str, Job], list[set[str]]], tmp_path: Path) -> None:
    answers[0]["fail"] = Job("")
    folder = run(tmp_path, "a", 0, state="queued", cause=None)
    assert status.select(tmp_path) == [status.read(folder)]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"runs": 3, "index": 0}', '{"runs": "x"}', '{"index": "0", "runs": ""}']
)
def test_a_damaged_record_is_none(tmp_path: Path, text: str) -> None:
    record.path(RunFolder(tmp_path)).write_text(text)
    assert record.read(RunFolder(tmp_path)) is None
