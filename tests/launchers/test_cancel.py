"""``python -m launchers cancel``, on processes that stand for supervisors; ``resubmit``, on a stand-in for sweeps."""

from __future__ import annotations

import dataclasses
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launchers import cancel
from launchers.__main__ import main
from optimus_cc.claims import claim, queue
from optimus_cc.config import ConfigError, Problem, RunConfig
from optimus_cc.runs import RunFolder, Status
from tests.configurations import tiny

ROOT = Path(__file__).parents[2]
HERE = socket.gethostname()

_SUPERVISOR = """
import os, socket, sys, time
from launchers.supervise import Stop
from optimus_cc import ownership
from optimus_cc.runs import RunFolder, Status
folder = RunFolder(sys.argv[1])
with Stop().on_signals() as stop:
    owned = ownership.take(folder.path)
    running = {"pid": os.getpid(), "host": socket.gethostname(), "step": 3}
    folder.write_status(Status("running", **running))
    print("started", flush=True)
    while not stop.requested:
        time.sleep(0.02)
    if stop.at_once or not time.sleep(1) and stop.at_once:
        folder.write_status(Status("cancelled", **running))
    else:
        folder.write_status(Status("preempted", **running))
    owned.release()
"""


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def supervisor(
    runs_dir: Path, name: str, processes: list[subprocess.Popen[str]], *, ignoring: tuple[signal.Signals, ...] = ()
) -> RunFolder:
    folder = RunFolder(runs_dir / name)
    folder.path.mkdir(parents=True)

    def ignore() -> None:
        for number in ignoring:
            signal.signal(number, signal.SIG_IGN)

    process = subprocess.Popen(
        [sys.executable, "-c", _SUPERVISOR, str(folder.path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=ignore if ignoring else None,
    )
    processes.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    return folder


def state(folder: RunFolder) -> str:
    status = folder.status()
    assert status is not None
    return status.state


def cancelled(runs_dir: Path, *arguments: str) -> int:
    return main(["cancel", "--runs-dir", str(runs_dir), *arguments])


@pytest.mark.parametrize(
    "ignoring",
    [
        pytest.param((), id="in a terminal"),
        pytest.param((signal.SIGINT,), id="in a script's background"),
        pytest.param((signal.SIGHUP,), id="nohup"),
        pytest.param((signal.SIGINT, signal.SIGHUP), id="both"),
    ],
)
def test_a_running_run_ends_at_once(
    ignoring: tuple[signal.Signals, ...], tmp_path: Path, processes: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = supervisor(tmp_path, "a-1", processes, ignoring=ignoring)
    other = supervisor(tmp_path, "b-1", processes)
    assert cancelled(tmp_path, "a-") == 0
    assert state(folder) == "cancelled"
    assert processes[0].wait(10) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"a-1  ends now: signal to process {processes[0].pid}",
        "a-1  is cancelled, at step 3",
    ]
    assert state(other) == "running"


def test_a_running_run_saves_and_stops(tmp_path: Path, processes: Any) -> None:
    folder = supervisor(tmp_path, "a-1", processes)
    assert cancelled(tmp_path, "a-", "--save") == 0
    assert processes[0].wait(10) == 0
    assert state(folder) == "preempted"


@pytest.fixture
def config(tmp_path: Path) -> Any:
    return dataclasses.replace(tiny("pp2"), runs_dir=str(tmp_path))


def test_a_queued_run(config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = queue(config).folder
    assert cancelled(tmp_path, "*") == 0
    assert state(folder) == "cancelled"
    assert "was queued, is cancelled" in capsys.readouterr().out
    with claim(config) as run:  # it never began: this is its first attempt
        assert run.status.restarts == 0


def test_a_queued_run_that_is_being_started(tmp_path: Path, processes: Any) -> None:
    """Who holds the folder decides what it becomes: it isn't taken out of the queue under a supervisor's hands."""
    folder = supervisor(tmp_path, "a", processes)
    status = folder.status()
    assert status is not None
    folder.write_status(dataclasses.replace(status, state="queued"))

    seen = []

    def sleep(seconds: float) -> None:
        seen.append(state(folder))
        if len(seen) == 1:
            folder.write_status(status)
        time.sleep(seconds)

    assert cancel.cancel(tmp_path, "a", save=False, sleep=sleep) == 0
    assert seen[0] == "queued"
    assert processes[0].wait(10) == 0
    assert state(folder) == "cancelled"


@pytest.mark.parametrize(("flags", "command"), [((), "kill -INT 7"), (("--save",), "kill -TERM 7")])
def test_a_run_on_another_host(
    flags: tuple[str, ...], command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / "a")
    folder.path.mkdir()
    folder.write_status(Status("running", pid=7, host="elsewhere"))
    assert cancelled(tmp_path, "a", *flags) == 1
    assert f"a  runs as process 7 on elsewhere; there: {command}" in capsys.readouterr().out
    assert state(folder) == "running"


@pytest.mark.parametrize("lock", ["none", "free", "of another process", "of another host"])
def test_a_process_that_only_has_the_number_is_not_signalled(
    lock: str, tmp_path: Path, processes: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "a")
    innocent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdout=subprocess.PIPE)
    processes.append(innocent)
    if lock.startswith("of"):
        supervisor(tmp_path, "a", processes)
        if lock == "of another host":  # that of a copied folder, or where the kernel's locks do reach
            (folder.path / ".lock").write_text(f"process {innocent.pid} on elsewhere\n")
    else:
        folder.path.mkdir()
        if lock == "free":
            (folder.path / ".lock").write_text(f"process {innocent.pid} on {HERE}\n")
    folder.write_status(Status("running", pid=innocent.pid, host=HERE))
    monkeypatch.setattr(cancel, "_ATTEMPTS", 2)
    assert cancelled(tmp_path, "a") == 1
    assert "is left alone" in capsys.readouterr().out
    assert all(process.poll() is None for process in processes)


def test_nothing_to_cancel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, changes in (("a", {"state": "finished"}), ("b", {"state": "running", "pid": 2**22 + 1, "host": HERE})):
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir()
        folder.write_status(Status(**changes))
    for pattern, said in (("*", "nothing to cancel"), ("x", "matches 'x'")):
        assert cancelled(tmp_path, pattern) == 1
        captured = capsys.readouterr()
        assert said in captured.err
        assert len(captured.err.splitlines()) == 1
    assert cancelled(tmp_path / "nowhere", "*") == 1


# -- resubmit ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def swept(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """What the sweep is given; it exits with their number."""
    given: list[RunConfig] = []

    def run_all(configs: list[RunConfig]) -> list[int]:
        given.extend(configs)
        if any(config.training.seed == 99 for config in configs):
            raise ConfigError(Problem("training.device", "cuda", "cpu", "training.device=cpu"))
        return [0] * len(configs)

    module: Any = types.ModuleType("launchers.sweep")
    module.run_all, module.exit_code = run_all, len
    monkeypatch.setitem(sys.modules, "launchers.sweep", module)
    monkeypatch.setattr(sys.modules["launchers"], "sweep", module, raising=False)
    return given


def ended(config: Any, seed: int, state: Any, **changes: Any) -> RunConfig:
    one: RunConfig = dataclasses.replace(config, training=dataclasses.replace(config.training, seed=seed))
    with claim(one) as run:
        run.update(state=state, step=2, **changes)
    return one


@pytest.fixture
def unfinished(config: Any) -> Any:
    states = ["failed", "preempted", "cancelled", "finished", "running"]
    return {state: ended(config, seed, state, pid=2**22 + 1) for seed, state in enumerate(states)}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--failed"], {"failed", "running"}),
        (["--preempted", "--cancelled"], {"preempted", "cancelled"}),
        (["--all"], {"failed", "preempted", "cancelled", "running"}),
        (["--failed", "s0"], {"failed"}),
    ],
)
def test_what_is_resubmitted(
    arguments: list[str], expected: set[str], unfinished: Any, swept: list[RunConfig], tmp_path: Path
) -> None:
    assert main(["resubmit", "--runs-dir", str(tmp_path), *arguments]) == len(expected)
    assert {config.run_id for config in swept} == {unfinished[state].run_id for state in expected}
    assert all(config in unfinished.values() for config in swept)


def test_a_copied_folder_is_run_where_it_lies(
    unfinished: Any, swept: list[RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = tmp_path.parent / "moved"
    tmp_path.rename(moved)
    monkeypatch.chdir(moved.parent)
    assert main(["resubmit", "--runs-dir", "moved", "--failed"]) == 2
    assert {config.runs_dir for config in swept} == {str(moved)}


def test_nothing_is_started_if_one_is_wrong(
    unfinished: Any, swept: list[RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = tmp_path / unfinished["failed"].run_id
    (failed / "config.yaml").write_text(
        (failed / "config.yaml").read_text().replace("hidden_size: 32", "hidden_size: 33")
    )
    failed.rename(tmp_path / "renamed")
    (tmp_path / unfinished["running"].run_id / "config.yaml").unlink()
    cancelled_run = tmp_path / unfinished["cancelled"].run_id
    cancelled_run.rename(tmp_path / "copy")
    assert main(["resubmit", "--runs-dir", str(tmp_path), "--all"]) == 2
    error = capsys.readouterr().err
    assert "renamed: ConfigError" in error
    assert "config.yaml can't be read" in error
    assert f"copy: its config.yaml is {unfinished['cancelled'].run_id}'s now" in error
    assert "nothing was started" in error
    assert not swept


def test_what_this_machine_cannot_run(
    config: Any, swept: list[RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended(config, 99, "failed")
    assert main(["resubmit", "--runs-dir", str(tmp_path), "--failed"]) == 2
    assert "training.device=cpu" in capsys.readouterr().err


def test_nothing_to_resubmit(unfinished: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--failed", "s3"], ["--failed", "nothing"]):
        assert main(["resubmit", "--runs-dir", str(tmp_path), *arguments]) == 1
        assert len(capsys.readouterr().err.splitlines()) == 1
    with pytest.raises(SystemExit, match="2"):
        main(["resubmit", "--runs-dir", str(tmp_path)])


def test_what_runs_is_not_resubmitted(config: Any, swept: list[RunConfig], tmp_path: Path) -> None:
    with claim(config):
        assert main(["resubmit", "--runs-dir", str(tmp_path), "--all"]) == 1
    assert not swept
