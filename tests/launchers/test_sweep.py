"""Several runs on this machine: what starts, what does not, how it ends, and that nothing is left."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from launchers import sweep
from launchers.plan import plan
from launchers.sweep import NEVER_BEGAN, Outcome, exit_code, run_all
from optimus_cc.claims import queue, withdraw
from optimus_cc.config import ConfigError
from optimus_cc.runs import RunBusy, RunCancelled, RunFailed, RunFolder, RunPreempted
from tests.launchers.jobs import FAIL, FINISH, WAIT, command_of, configuration, folder_of, started, state_of
from tests.launchers.processes import ROOT, assert_none_left, eventually, marked_environment


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def test_all_are_trained_and_only_once(runs_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configs = [configuration(runs_dir, seed) for seed in (3, 1, 3)]
    outcomes = run_all(configs, job_command=command_of(tmp_path))
    assert [outcome.value() for outcome in outcomes] == [3.0, 1.0, 3.0]
    assert exit_code(outcomes) == 0
    assert started(runs_dir) == [config.run_id for config in configs[:2]]
    shown = capsys.readouterr().out
    assert "2 start, 1 asked for twice" in shown
    for config in configs:
        assert state_of(config) == ("finished", None, 0)
        assert "step 4/4" in (folder_of(config).logs / "launcher.log").read_text()

    again = run_all(configs, job_command=command_of(tmp_path, default=FAIL))
    assert [(outcome.state, outcome.value()) for outcome in again] == [("skipped", float(seed)) for seed in (3, 1, 3)]
    assert "2 finished already" in capsys.readouterr().out
    assert len(started(runs_dir)) == 2


def test_a_failure_stops_nothing_else(runs_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configs = [configuration(runs_dir, seed) for seed in (1, 2)]
    outcomes = run_all(configs, job_command=command_of(tmp_path, {1: FAIL}))
    assert [outcome.state for outcome in outcomes] == ["failed", "finished"]
    assert exit_code(outcomes) == 1
    with pytest.raises(RunFailed, match="exited with code 3"):
        outcomes[0].value()
    ending = capsys.readouterr().out.partition("sweep   1 failed, 1 finished")[2]
    assert f"{configs[0].run_id}: rank" in ending
    log = folder_of(configs[0]).logs / "launcher.log"
    assert str(log) in ending
    assert "why" in log.read_text()

    outcomes = run_all(configs, job_command=command_of(tmp_path))
    assert [outcome.state for outcome in outcomes] == ["finished", "skipped"]
    assert state_of(configs[0]) == ("finished", None, 1)
    kept = folder_of(configs[0]).path / "attempts" / "1" / "logs" / "launcher.log"
    assert "why" in kept.read_text()


def test_force_runs_again_and_keeps_the_results(runs_dir: Path, tmp_path: Path) -> None:
    run_all([configuration(runs_dir)], job_command=command_of(tmp_path))
    forced = configuration(runs_dir, force=True)
    (outcome,) = run_all([forced], job_command=command_of(tmp_path))
    assert outcome.state == "finished"
    assert len(started(runs_dir)) == 2
    assert (folder_of(forced).path / "previous" / "1" / "summary.json").exists()


def test_what_was_cancelled_in_the_queue_does_not_start(runs_dir: Path, tmp_path: Path) -> None:
    first, second = (configuration(runs_dir, seed) for seed in (1, 2))
    command = command_of(tmp_path)

    def cancels_the_second(folder: RunFolder) -> list[str]:
        withdraw(folder_of(second), "cancelled", "not wanted")
        return command(folder)

    outcomes = run_all([first, second], job_command=cancels_the_second)
    assert [outcome.state for outcome in outcomes] == ["finished", "cancelled"]
    assert started(runs_dir) == [first.run_id]
    assert state_of(second) == ("cancelled", "not wanted", 0)
    (outcome,) = run_all([second], job_command=command)
    assert outcome.state == "finished"
    assert state_of(second) == ("finished", None, 0)
    assert not (folder_of(second).path / "attempts").exists()


def test_time_limit(runs_dir: Path, tmp_path: Path) -> None:
    limited = configuration(runs_dir, 1, time_limit_h=0.5 / 3600)
    outcomes = run_all([limited, configuration(runs_dir, 2)], job_command=command_of(tmp_path, {1: WAIT}))
    assert [outcome.state for outcome in outcomes] == ["preempted", "finished"]
    assert exit_code(outcomes) == 75
    assert "launcher.time_limit_h" in str(state_of(limited)[1])


def test_a_job_that_dies_before_it_begins(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configuration(runs_dir)
    command = [sys.executable, "-c", "import sys; print('no such module'); sys.exit(7)"]
    (outcome,) = run_all([config], job_command=lambda folder: command)
    assert outcome.state == "failed"
    assert "code 7" in str(state_of(config)[1])
    assert "no such module" in capsys.readouterr().out


def test_a_killed_job_is_a_failure_and_leaves_no_rank(
    runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = marked_environment()["TEST_MARK"]
    monkeypatch.setenv("TEST_MARK", mark)
    kills = "os.kill(int(os.environ['OPTIMUS_CC_SUPERVISOR_PID']), signal.SIGKILL); time.sleep(1000)"
    (outcome,) = run_all([configuration(runs_dir)], job_command=command_of(tmp_path, {1: kills}))
    assert (outcome.state, "SIGKILL" in str(outcome.error)) == ("failed", True)
    monkeypatch.delenv("TEST_MARK")
    assert_none_left(mark)


# What runs at the same time.


def test_runs_beside_each_other_share_the_cores(
    runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "num_cores", lambda: 12)
    meet = """
    (Path(os.environ["TEST_FOLDER"]).parent / f"{os.environ['TEST_SEED']}_{RANK}").touch()
    while len(list(Path(os.environ["TEST_FOLDER"]).parent.glob("[12]_*"))) < 4:
        time.sleep(0.01)
    """
    configs = [configuration(runs_dir, seed, max_parallel=2) for seed in (1, 2)]
    outcomes = run_all(configs, job_command=command_of(tmp_path, default=textwrap.dedent(meet) + FINISH))
    assert exit_code(outcomes) == 0
    for config in configs:
        frozen = folder_of(config).config()
        assert frozen is not None
        assert frozen["launcher"]["threads_per_rank"] == 3


def test_each_job_has_gpus_of_its_own(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "choose_device", lambda config: ("cuda", []))
    monkeypatch.setattr(sweep, "visible_gpus", lambda: ["4", "5", "6", "7", "GPU-x"])
    script = """
    import os, sys, time
    from pathlib import Path
    from optimus_cc.runs import RunFolder, Status
    folder = RunFolder(sys.argv[1])
    running = folder.path.parent / f"running_{os.getpid()}"
    mine = set(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
    running.write_text(",".join(mine))
    time.sleep(0.3)
    others = [path.read_text().split(",") for path in running.parent.glob("running_*") if path != running]
    alone = not any(mine & set(gpus) for gpus in others)
    folder.write_summary({"validation": {"loss": len(mine) if alone and len(others) <= 1 else -1.0}})
    running.unlink()
    folder.write_status(Status("finished"))
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    configs = [configuration(runs_dir, seed, max_parallel=4) for seed in range(4)]  # of two ranks: two fit
    outcomes = run_all(configs, job_command=lambda folder: [*command, str(folder.path)])
    assert [outcome.value() for outcome in outcomes] == [2.0] * 4


def test_what_does_not_fit_is_told_before_anything_starts(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    good, bad = configuration(runs_dir, 1), configuration(runs_dir, 2)
    training: Any = bad.training
    needs_gpus: Any = dataclasses.replace(bad, training=dataclasses.replace(training, device="cuda"))
    with pytest.raises(ConfigError, match=r"training\.device"):
        run_all([good, needs_gpus])
    with pytest.raises(ConfigError, match=r"launcher\.max_parallel"):
        run_all([good, configuration(runs_dir, 2, max_parallel=2)])
    assert not runs_dir.exists()


# Being stopped. The engine is a process of its own.

_ENGINE = """
import sys
from pathlib import Path
from launchers.sweep import exit_code, run_all
from tests.launchers.jobs import {names}, command_of, configuration
runs_dir, place = map(Path, sys.argv[1:3])
configs = [configuration(runs_dir, seed, max_parallel={parallel}) for seed in {seeds}]
sys.exit(exit_code(run_all(configs, job_command=command_of(place, default={script}))))
"""


def engine(
    runs_dir: Path, place: Path, environment: dict[str, str], *, script: str = "WAIT", parallel: int = 1, seeds: str
) -> subprocess.Popen[str]:
    place.mkdir(exist_ok=True)
    code = _ENGINE.format(names="DEAF, FINISH, WAIT", parallel=parallel, script=script, seeds=seeds)
    return subprocess.Popen(
        [sys.executable, "-c", code, str(runs_dir), str(place)],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(
    ("number", "state", "code"),
    [
        (signal.SIGINT, "cancelled", 130),
        (signal.SIGHUP, "cancelled", 130),
        (signal.SIGTERM, "preempted", 75),
        (signal.SIGKILL, "running", -9),
    ],
)
def test_stopping_a_sweep(number: signal.Signals, state: str, code: int, runs_dir: Path, tmp_path: Path) -> None:
    environment = marked_environment()
    parallel = 2 if number == signal.SIGINT else 1
    seeds = range(parallel + 1)
    process = engine(runs_dir, tmp_path / "a", environment, parallel=parallel, seeds=str(seeds))
    try:
        eventually(lambda: len(started(runs_dir)) == parallel, "the first ones run")
        process.send_signal(number)
        output = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert process.returncode == code, output
    assert_none_left(environment["TEST_MARK"])
    configs = [configuration(runs_dir, seed) for seed in seeds]
    assert [state_of(config)[0] for config in configs[:parallel]] == [state] * parallel
    if number != signal.SIGKILL:
        assert all(state_of(config) == ("cancelled", NEVER_BEGAN, 0) for config in configs[parallel:])
        assert f"not begun  {configs[-1].run_id}" in output
        assert "The same command goes on where it was." in output

    outcomes = run_all(configs, job_command=command_of(tmp_path))
    assert exit_code(outcomes) == 0
    assert [state_of(config)[2] for config in configs] == [1] * parallel + [0]


def test_a_second_sigterm_ends_it_at_once_and_is_named(runs_dir: Path, tmp_path: Path) -> None:
    environment = marked_environment()
    process = engine(runs_dir, tmp_path / "a", environment, script="DEAF", seeds="(1,)")
    try:
        eventually(lambda: started(runs_dir), "it runs")
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        while "save and stop" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert state_of(configuration(runs_dir)) == ("cancelled", "cancelled by SIGTERM", 0)
    assert_none_left(environment["TEST_MARK"])


def test_two_submissions_at_once(runs_dir: Path, tmp_path: Path) -> None:
    environment = marked_environment()
    engines = [
        engine(runs_dir, tmp_path / name, environment, script="FINISH", seeds="(1, 2, 3)") for name in ("a", "b")
    ]
    outputs = [process.communicate(timeout=120)[0] for process in engines]
    ids = sorted(configuration(runs_dir, seed).run_id for seed in (1, 2, 3))
    assert sorted(started(runs_dir)) == ids, outputs
    for seed in (1, 2, 3):
        assert state_of(configuration(runs_dir, seed)) == ("finished", None, 0)
    for process, output in zip(engines, outputs, strict=True):
        assert process.returncode == (1 if "elsewhere" in output.rpartition("\nsweep   ")[2] else 0), output
    assert_none_left(environment["TEST_MARK"])


def test_exit_codes(runs_dir: Path) -> None:
    queue(configuration(runs_dir))

    def code(*errors: RunFailed | None, stopped: bool = False) -> int:
        (planned,) = plan([configuration(runs_dir)])
        return exit_code([Outcome(planned, error, interrupted=stopped) for error in errors])

    assert code() == code(None) == 0
    assert code(None, RunFailed("x")) == code(RunBusy("x")) == 1
    assert code(RunPreempted("x"), RunCancelled("x"), RunFailed("x")) == 1
    assert code(RunPreempted("x"), RunCancelled("x")) == 130
    assert code(RunFailed("x"), RunPreempted("x"), stopped=True) == 75
    assert code(RunPreempted("x"), RunCancelled("x"), RunFailed("x"), stopped=True) == 130
    (planned,) = plan([configuration(runs_dir)])
    assert math.isnan(Outcome(planned).value())
