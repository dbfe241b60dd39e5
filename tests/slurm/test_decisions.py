"""What a job decides about itself; SLURM's answers are made up from those of a real one."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from launchers.slurm import commands, job, node, record
from launchers.slurm.commands import SlurmError
from launchers.slurm.job import ThisJob
from launchers.slurm.node import Verdict
from launchers.slurm.record import Record
from launchers.supervise import PatientStop
from optimus_cc.claims import queue
from optimus_cc.config.launcher import LauncherConfig
from optimus_cc.config.schema import changed
from optimus_cc.records import replace_file, to_json
from optimus_cc.runs import RunFailed, RunFolder, RunPreempted, Status
from tests.config.command_line import one

ENDED = {"StartTime": "2026-01-01T10:00:00", "EndTime": "2026-01-01T10:00:30", "TimeLimit": "00:02:00"}


@pytest.mark.parametrize(
    ("told", "fate"),
    [
        ({"JobState": "RUNNING", "Restarts": "0"}, "ends"),
        ({"JobState": "COMPLETING", "Restarts": "1"}, "requeued"),
        ({"JobState": "COMPLETING", "Restarts": "0", "PreemptTime": "None", **ENDED}, "cancelled"),
        ({"JobState": "COMPLETING", "Restarts": "0", "PreemptTime": "2026-01-01T10:00:30", **ENDED}, "ends"),
        ({"JobState": "COMPLETING", "Restarts": "0", **ENDED, "EndTime": "2026-01-01T10:02:00"}, "ends"),
        ({"JobState": "COMPLETING", "Restarts": "0", **ENDED, "TimeLimit": "1-00:00:00"}, "cancelled"),
        ({"JobState": "COMPLETING", "Restarts": "0", **ENDED, "TimeLimit": "UNLIMITED"}, "cancelled"),
        (None, "ends"),
    ],
)
def test_what_slurm_means_to_do(monkeypatch: pytest.MonkeyPatch, told: dict[str, str] | None, fate: str) -> None:
    def show(name: str) -> dict[str, str]:
        if told is None:
            raise SlurmError("slurmctld is away")
        return told

    monkeypatch.setattr(commands, "show", show)
    assert ThisJob("7_0", Path("x"), 0, 0).fate() == fate


@pytest.mark.parametrize("other", [{"runs": "elsewhere.runs"}, {"job_id": "8_0"}])
def test_a_job_whose_run_was_given_to_another(tmp_path: Path, other: dict[str, Any]) -> None:
    folder = RunFolder(tmp_path)
    before = folder.write_status(Status("queued"))
    record.write(folder, Record(**{"runs": "here.runs", "index": 0, **other}))
    assert job.run(folder, ThisJob("7_0", Path("here.runs"), 0, 0), PatientStop()) == 0
    assert folder.status() == before


def test_a_run_that_was_cancelled_before_its_job_began(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_status(Status("queued"))
    record.write(folder, Record("here.runs", 0, stop=True))
    assert job.run(folder, ThisJob("7_0", Path("here.runs"), 0, 0), PatientStop()) == 130
    assert (status := folder.status()) is not None
    assert status.state == "cancelled"


@pytest.fixture
def queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunFolder, list[str], dict[str, str]]:
    """A run whose job 7_0 has started; which jobs are put back, and what SLURM says of its job."""
    config = one(f"launcher=slurm launcher.max_restarts=2 runs_dir={tmp_path}")
    folder = queue(config).folder
    record.write(folder, Record("here.runs", 0))
    requeued: list[str] = []
    told = {"JobState": "RUNNING", "Restarts": "0"}
    monkeypatch.setattr(commands, "requeue", requeued.append)
    monkeypatch.setattr(commands, "show", lambda name: told)
    return folder, requeued, told


THIS = ThisJob("7_0", Path("here.runs"), 0, 0)


def status_of(folder: RunFolder) -> Status:
    status = folder.status()
    assert status is not None
    return status


def test_a_job_that_could_not_begin_is_put_back_as_often_as_is_allowed(
    queued: tuple[RunFolder, list[str], dict[str, str]],
) -> None:
    folder, requeued, _ = queued
    for times in (1, 2):
        assert job.go_on_later(folder, THIS, 1) == 75
        status = status_of(folder)
        assert (status.state, status.restarts, len(requeued)) == ("queued", 0, times)
    assert job.go_on_later(folder, THIS, 1) == 1
    status = status_of(folder)
    assert (status.state, status.cause) == ("failed", "interrupted 3 times: launcher.max_restarts=2")
    assert requeued == ["7_0", "7_0"]


def test_a_job_that_could_not_begin_after_its_node_died(queued: tuple[RunFolder, list[str], dict[str, str]]) -> None:
    folder, requeued, _ = queued
    status = status_of(folder)
    folder.write_status(replace(status, state="running", started="2026-01-01T10:00:00", pid=5, host="n1"))
    (folder.path / ".owner_2").write_text("held by process 5 on n1")
    record.write(folder, Record("here.runs", 0, pid=5, host="n1"))
    assert job.go_on_later(folder, THIS, 1) == 75
    status = status_of(folder)
    assert (status.state, status.restarts, requeued) == ("queued", 1, ["7_0"])


def test_scancel_before_a_job_begins_is_final(queued: tuple[RunFolder, list[str], dict[str, str]]) -> None:
    folder, requeued, told = queued
    told |= {"JobState": "CANCELLED", **ENDED}
    assert job.go_on_later(folder, THIS, 1) == 130
    status = status_of(folder)
    assert (status.state, requeued) == ("cancelled", [])


@pytest.mark.parametrize(("state", "code"), [("preempted", 75), ("finished", 0), ("failed", 1), ("queued", 0)])
def test_a_job_that_died_of_a_signal_on_its_way_out_has_done_everything(
    queued: tuple[RunFolder, list[str], dict[str, str]], state: Any, code: int
) -> None:
    folder, requeued, _ = queued
    status = status_of(folder)
    before = folder.write_status(replace(status, state=state))
    record.write(folder, Record("here.runs", 0, pid=5, host=socket.gethostname()))
    assert job.go_on_later(folder, THIS, 5) == code
    assert (folder.status(), requeued) == (before, [])


def test_a_run_that_was_started_without_slurm_meanwhile(
    queued: tuple[RunFolder, list[str], dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _, _ = queued
    config = folder.run_config()
    queue(changed(config, launcher=LauncherConfig()))
    assert job.run(folder, THIS, PatientStop()) == 0
    assert "does nothing" in capsys.readouterr().out


FINE, ASKED = ("finished", "", False), ("preempted", "preempted by SIGTERM", False)
DIED, LOST, SILENT = (
    ("failed", "rank 1 was killed", False),
    ("failed", "rank 0 lost contact", True),
    ("running", "", False),
)


@pytest.mark.parametrize(
    ("verdicts", "asked", "expected"),
    [
        ((FINE, FINE), False, None),
        ((LOST, DIED), False, "rank 1 was killed on n1"),
        ((DIED, SILENT), True, "rank 1 was killed on n0"),
        ((LOST, LOST), False, "rank 0 lost contact on n0"),
        ((LOST, SILENT), False, "preempted by the loss of n1"),
        ((LOST, None), True, "preempted by the loss of node 1"),
        ((ASKED, ASKED), True, "preempted by SIGUSR2"),
        ((("preempted", "preempted", False), ASKED), False, "preempted by SIGTERM"),
        ((SILENT, SILENT), True, "preempted by SIGUSR2"),
        ((None, None), False, "srun started no ranks: it exited with code 9"),
    ],
)
def test_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdicts: Any, asked: bool, expected: str | None
) -> None:
    monkeypatch.setattr(job, "LATE_FILE_S", 0)
    folder, stop = RunFolder(tmp_path), PatientStop()
    folder.logs.mkdir()
    for number, told in enumerate(verdicts):
        if told is not None:
            state, cause, others = told
            text = to_json(vars(Verdict(state, f"n{number}", time.time() + number, cause, "", others)))
            replace_file(node.verdict_path(folder, number), text)
    if asked:
        stop.request("SIGUSR2")

    class Srun:
        returncode = 9

    def judge() -> None:
        job._judge(Srun(), 2, folder, stop, folder.logs / "srun.log")  # type: ignore[arg-type]

    if expected is None:
        judge()
        return
    with pytest.raises(RunFailed) as error:
        judge()
    assert error.value.cause == expected
    assert isinstance(error.value, RunPreempted) == expected.startswith("preempted")


def test_a_node_that_does_not_see_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``data.cache_dir`` on a disk of the first node's own: one cause, in place of one failure per rank."""
    config = one(f"launcher=slurm parallel=pp2 cluster.num_nodes=2 cluster.ranks_per_node=1 data.cache_dir={tmp_path}")
    folder = RunFolder(tmp_path / config.run_id)
    folder.logs.mkdir(parents=True)
    folder.config_path.write_text(yaml.safe_dump(config.to_mapping()))
    monkeypatch.setattr(node, "LATE_FILE_S", 0)
    monkeypatch.setattr(node, "supervise", lambda *_, **__: pytest.fail("ranks were started"))
    assert node.run(folder, 1, "cpu", "file:///nowhere", PatientStop()) == 1
    verdict = node.read_verdict(folder, 1)
    assert verdict is not None
    assert verdict.state == "failed"
    assert "data.cache_dir" in verdict.cause
