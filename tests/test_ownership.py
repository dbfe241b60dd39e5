"""One process at a time has a run folder, also where the kernel's locks don't reach every host."""

from __future__ import annotations

import dataclasses
import fcntl
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optimus_cc import ownership, provenance
from optimus_cc.claims import claim
from optimus_cc.config import RunConfig
from optimus_cc.ownership import STALE_S, Held, take
from optimus_cc.provenance import CodeVersion
from optimus_cc.runs import RunBusy, RunFolder, Status
from tests.configurations import tiny

HOSTS = 8
ROUNDS = 6
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def config(tmp_path: Path) -> Any:
    return dataclasses.replace(tiny("pp2"), runs_dir=str(tmp_path))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "code_version", lambda: CodeVersion("a" * 40))
    monkeypatch.setattr(ownership, "WATCH_S", 0.3)
    monkeypatch.setattr(ownership, "_LOOK_S", 0.05)


def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)


def mark(folder: Path, number: int, text: str, age_s: float) -> Path:
    path = folder / f".owner_{number}"
    path.write_text(text)
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def held_by(host: str, pid: int = 7) -> str:
    return f"held by process {pid} on {host}"


# -- many hosts at the same moment -------------------------------------------------------------------------------------


def _pretend(host: str, config: RunConfig, start: Any, results: Any, stay: Any) -> None:
    """A process on a host of its own: the kernel's locks tell it nothing of the others."""
    socket.gethostname = lambda: host
    fcntl.flock = lambda *_: None
    start.wait()
    try:
        with claim(config):
            results.put((host, "won"))
            stay.wait(60)
    except RunBusy as error:
        results.put((host, str(error)))
    except BaseException as error:
        results.put((host, repr(error)))


def _race(config: RunConfig) -> list[str]:
    """What each of the hosts says, sorted; the winner's folder is left as at a power cut."""
    start, results, stay = FORK.Barrier(HOSTS), FORK.SimpleQueue(), FORK.Event()
    processes = [
        FORK.Process(target=_pretend, args=(f"host{number}", config, start, results, stay)) for number in range(HOSTS)
    ]
    for process in processes:
        process.start()
    said = [results.get() for _ in processes]
    for process in processes:
        process.kill()
        process.join()
    return sorted(outcome for _, outcome in said)


def _finish(config: RunConfig) -> None:
    with claim(config) as run:
        run.folder.write_summary({"loss": 1.0})
        run.update(state="finished")


def _abandon(config: RunConfig, number: int) -> None:
    folder = RunFolder(Path(config.runs_dir) / config.run_id)
    folder.path.mkdir(exist_ok=True)
    mark(folder.path, number, held_by("gone"), STALE_S + 1)
    folder.write_status(Status("running", pid=7, host="gone"))


@pytest.mark.parametrize("before", ["fresh", "abandoned", "finished"])
def test_of_many_hosts_one_wins(before: str, config: Any, tmp_path: Path) -> None:
    for number in range(ROUNDS):
        config = dataclasses.replace(config, runs_dir=str(tmp_path / str(number)), force=before == "finished")
        Path(config.runs_dir).mkdir()
        if before == "finished":
            _finish(config)
        elif before == "abandoned":
            _abandon(config, 1)
        said = _race(config)
        assert said[-1] == "won"
        assert all("is being run by" in line for line in said[:-1]), said
        status = RunFolder(Path(config.runs_dir) / config.run_id).status()
        assert status is not None
        assert status.state == "running"


def test_a_finished_run_is_run_by_none_of_them(config: Any) -> None:
    _finish(config)
    assert _race(config) == ["won"] * HOSTS  # they were told that it is finished
    status = RunFolder(Path(config.runs_dir) / config.run_id).status()
    assert status is not None
    assert status.state == "finished"


def test_winners_follow_each_other(config: Any) -> None:
    """Each one's power cut leaves a folder that the next can have."""
    for number in range(1, 4):
        said = _race(config)
        assert said.count("won") == 1, said
        mark(Path(config.runs_dir) / config.run_id, number, held_by("gone"), STALE_S + 1)


# -- no folder stays taken ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("locks", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        pytest.param("left by process 7 on elsewhere", id="left"),
        pytest.param(held_by(socket.gethostname(), 2**22 + 1), id="killed here"),
        pytest.param(held_by(socket.gethostname(), os.getppid()), id="number given to another process"),
        pytest.param(held_by("elsewhere"), id="silent elsewhere"),
        pytest.param("", id="died at once"),
        pytest.param("\0\xff nonsense", id="damaged"),
    ],
)
@pytest.mark.parametrize("age_s", [STALE_S + 1, -365 * 86400], ids=["old", "from the future"])
def test_what_is_over_can_be_taken(
    locks: bool, text: str, age_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not locks:
        no_locks(monkeypatch)
    mark(tmp_path, 1, text, age_s)
    for _ in range(2):
        take(tmp_path).release()


@pytest.mark.parametrize("age_s", [STALE_S - 20, 0, 20 - STALE_S])
@pytest.mark.parametrize("text", [held_by("elsewhere"), ""])
def test_what_is_not_over_stays(age_s: float, text: str, tmp_path: Path) -> None:
    mark(tmp_path, 1, text, age_s)
    with pytest.raises(Held, match="process 7 on elsewhere" if text else "another process"):
        take(tmp_path)


@pytest.fixture
def renewed(tmp_path: Path) -> Iterator[float]:
    """An owner elsewhere whose clock is ten minutes behind, on a file system that takes its word for it."""
    path = mark(tmp_path, 1, held_by("elsewhere"), 600)
    done = threading.Event()

    def renew() -> None:
        while not done.wait(0.05):
            os.utime(path, (time.time() - 600,) * 2)

    thread = threading.Thread(target=renew)
    thread.start()
    yield 600
    done.set()
    thread.join()


@pytest.mark.usefixtures("renewed")
def test_an_owner_with_a_wrong_clock_is_alive(tmp_path: Path) -> None:
    with pytest.raises(Held):
        take(tmp_path)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            take(tmp_path)
    take(tmp_path).release()


def test_who_was_silent_for_too_long_writes_no_more(config: Any) -> None:
    with claim(config) as run:
        mark(run.folder.path, 2, held_by("elsewhere"), 0)
        before = run.folder.status()
        with pytest.raises(RunBusy, match="taken over by process 7 on elsewhere"):
            run.update(step=3)
        assert run.folder.status() == before


def test_an_owner_renews(tmp_path: Path) -> None:
    owned = take(tmp_path)
    path = tmp_path / ".owner_1"
    os.utime(path, (1, 1))
    owned.renew()
    assert abs(path.stat().st_mtime - time.time()) < 60
    owned.release()
    assert path.read_text() == f"left by process {os.getpid()} on {socket.gethostname()}"


def test_a_clock_that_is_ahead_does_not_keep_a_folder(config: Any) -> None:
    """The status of an owner that is over counts no more, whatever time it names."""
    folder = RunFolder(Path(config.runs_dir) / config.run_id)
    _abandon(config, 1)
    text = folder.status_path.read_text()
    updated = (folder.status() or Status("failed")).updated or ""
    folder.status_path.write_text(text.replace(updated, f"2999{updated[4:]}"))
    with claim(config) as run:
        assert run.status.restarts == 1


def test_the_process_that_holds_a_folder_is_known(tmp_path: Path) -> None:
    assert ownership.holder_here(tmp_path) is None
    owned = take(tmp_path)
    assert ownership.holder_here(tmp_path) == os.getpid()
    owned.release()
    assert ownership.holder_here(tmp_path) is None
