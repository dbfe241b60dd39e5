"""What SLURM's commands are told, and what is made of their answers; programs of the same names answer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from launchers.slurm import commands, submit
from launchers.slurm.commands import Job, SlurmError
from optimus_cc.config import ConfigError
from tests.config.command_line import one

NAMES = ("sbatch", "squeue", "scontrol", "sacct", "scancel", "sinfo")
UNKNOWN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
DOWN = "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1"

Answers = Callable[..., Path]


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Programs that answer as lines of bash say; returns a folder where each leaves what it was told."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def say(**lines: str) -> Path:
        for name in NAMES:
            told = 'env > "$0.env"; echo "$@" >> "$0.told"'
            (folder / name).write_text(f"#!/bin/bash\n{told}\n{lines.get(name, 'exit 0')}\n")
            (folder / name).chmod(0o755)
        return folder

    return say


def test_every_command_has_a_clean_environment(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {
        *("SQUEUE_PARTITION", "SQUEUE_USERS", "SQUEUE_FORMAT2", "SCANCEL_USER", "SCANCEL_INTERACTIVE", "SACCT_LOCAL"),
        *("SCONTROL_ALL", "SINFO_FORMAT", "SBATCH_ACCOUNT", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT", "SLURM_JOB_ID"),
    }
    for name in theirs:
        monkeypatch.setenv(name, "x")
    kept = {"SLURM_CONF", "SLURM_JWT", "SSH_AUTH_SOCK", "SCRATCH"}
    for name in kept:
        monkeypatch.setenv(name, "y")
    folder = answers(sbatch="echo 7", sinfo="echo idle")
    commands.jobs(["7_0"])
    commands.cancel(["7_0"])
    commands.test("")
    commands._nodes_are_away()
    for name in NAMES:
        found = {line.partition("=")[0] for line in (folder / f"{name}.env").read_text().splitlines()}
        assert not theirs & found, name
        assert kept <= found, name


ARRAY = "echo 'JobId=7 ArrayJobId=7 ArrayTaskId=2-4,9%2 JobState=PENDING Reason=Priority NodeList=(null) Command=/x'"
ELEMENT = (
    "echo 'JobId=8 ArrayJobId=7 ArrayTaskId=1 JobState=RUNNING Reason=None NodeList=n[1-2] Comment=JobState=FAILED'"
)


@pytest.mark.parametrize(
    ("job", "scontrol", "sacct", "expected"),
    [
        ("7_9", ARRAY, "", Job("PENDING", "Priority")),
        ("7_1", f"{ARRAY}; {ELEMENT}", "", Job("RUNNING", "", "n[1-2]")),
        ("7_1", UNKNOWN, "echo '7_[0-3%2]|PENDING|None assigned'", Job("PENDING", "", "None assigned")),
        ("7_1", UNKNOWN, "echo '7_1|CANCELLED by 0|n1'", Job("CANCELLED", "", "n1")),
        ("7_5", ARRAY, "echo '7_[0-3%2]|PENDING|'", None),
        ("7_1", UNKNOWN, "exit 1", None),
    ],
)
@pytest.mark.parametrize("squeue", ["exit 0", UNKNOWN])
def test_absence_needs_a_second_witness(
    answers: Answers, squeue: str, job: str, scontrol: str, sacct: str, expected: Job | None
) -> None:
    answers(squeue=squeue, scontrol=scontrol, sacct=sacct)
    assert commands.jobs([job]).get(job) == expected


def test_an_empty_answer_and_no_witness_is_no_answer(answers: Answers) -> None:
    answers(scontrol=DOWN, sacct="exit 1")
    with pytest.raises(SlurmError, match="Unable to contact"):
        commands.jobs(["7_0"])


NOT_NOW = """
case "$*" in
*--test-only*) echo 'allocation failure: Requested node configuration is not available' >&2; exit 1 ;;
*) echo 7 ;;
esac
"""


@pytest.mark.parametrize("state", ["drained", "down*", "unknown", "idle*", "draining"])
def test_what_waits_for_nodes_that_are_away_is_submitted(
    answers: Answers, tmp_path: Path, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    folder = answers(sbatch=NOT_NOW, sinfo=f"echo idle; echo '{state}'", scontrol="echo Slurmctld is UP")
    config = one(f"launcher=slurm launcher.wait=false runs_dir={tmp_path / 'runs'}")
    (outcome,) = submit.run_all([config])
    assert outcome.error is None
    told = " ".join(capsys.readouterr().out.split())
    assert "drained or not registered (allocation failure: Requested node configuration" in told
    assert "submitted job 7" in told
    tested, probed, submitted = (folder / "sbatch.told").read_text().splitlines()
    assert "--test-only" in tested
    assert "--hold" in probed
    assert submitted.endswith(".sh")
    assert (folder / "scancel.told").read_text().split() == ["--quiet", "7"], "the probe does not stay"


@pytest.mark.parametrize(
    ("sbatch", "sinfo", "scontrol", "said", "not_said"),
    [
        (NOT_NOW, "echo idle", "echo Slurmctld is UP", "launcher.partition=NAME", "scontrol ping"),
        (
            "echo 'invalid partition specified: nowhere' >&2; exit 1",
            *("echo drained", "echo Slurmctld is UP", "launcher.partition=NAME", "scontrol ping"),
        ),
        (DOWN, DOWN, "echo 'Slurmctld(primary) at x is DOWN'; exit 1", "scontrol ping", "launcher.partition"),
    ],
)
def test_what_slurm_does_not_take_leaves_nothing(
    answers: Answers, tmp_path: Path, sbatch: str, sinfo: str, scontrol: str, said: str, not_said: str
) -> None:
    answers(sbatch=sbatch, sinfo=sinfo, scontrol=scontrol)
    with pytest.raises(ConfigError) as error:
        submit.run_all([one(f"launcher=slurm launcher.wait=false runs_dir={tmp_path / 'runs'}")])
    assert said in str(error.value)
    assert not_said not in str(error.value)
    assert not (tmp_path / "runs").exists()


def test_a_late_refusal_leaves_no_script(answers: Answers, tmp_path: Path) -> None:
    answers(sbatch='case "$*" in *--test-only*) ;; *) echo "too many jobs" >&2; exit 1 ;; esac')
    (outcome,) = submit.run_all([one(f"launcher=slurm launcher.wait=false runs_dir={tmp_path / 'runs'}")])
    assert outcome.state == "failed"
    assert "too many jobs" in str(outcome.error)
    assert not list((tmp_path / "runs").glob(".slurm/*/*"))


def test_what_the_shell_chooses_for_sbatch_is_said(
    answers: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers(sbatch="echo 7")
    monkeypatch.setenv("SBATCH_ACCOUNT", "physics")
    monkeypatch.setenv("SBATCH_QOS", "long")
    line = f"launcher=slurm launcher.wait=false launcher.qos=short runs_dir={tmp_path / 'runs'}"
    submit.run_all([one(line)])
    told = " ".join(capsys.readouterr().out.split())
    assert "launcher.account=physics" in told
    assert "SBATCH_QOS" not in told
