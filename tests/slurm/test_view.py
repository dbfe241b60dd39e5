"""What is shown of runs that are jobs; SLURM's answers are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from launchers import status
from launchers.slurm import commands, record, view
from launchers.slurm.commands import Job, SlurmError
from launchers.slurm.record import Record
from optimus_cc.runs import RunFolder, Status


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


@pytest.mark.parametrize(
    ("state", "job", "shown", "live", "cause"),
    [
        ("queued", Job("PENDING", "Resources"), "queued", True, "job 7_0 waits: Resources"),
        ("queued", Job("RUNNING", nodes="n1"), "queued", True, "job 7_0 is running on n1"),
        ("queued", Job("CANCELLED"), "abandoned", False, "its job 7_0 is over: CANCELLED"),
        ("queued", None, "abandoned", False, "its job 7_0 is over: gone from SLURM"),
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
