"""What a job decides about itself; SLURM's answers are made up from those of a real one."""

from __future__ import annotations

import time
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
