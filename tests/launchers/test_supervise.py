"""Every way in which ranks can end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launchers.processes.preloaded import Parents
from launchers.supervise import Stop, last_lines, supervise
from optimus_cc.runs import RunCancelled, RunFailed
from tests.launchers.processes import (
    ROOT,
    assert_none_left,
    eventually,
    marked_environment,
    module_command,
    rank_command,
    survivors,
)


@dataclass(frozen=True)
class Ending:
    script: str
    cause: str
    """What the first line says."""
    shown: tuple[str, ...] = ()
    """What else the message says."""
    hidden: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()


PATIENT = (("grace_s", 30.0),)
"""Where all ranks end by themselves; a busy machine must not change which one is named."""

FAILURES = {
    "exit code": Ending(
        """
        if RANK == 1:
            print("the last words", flush=True)
            sys.exit(3)
        time.sleep(1000)
        """,
        "rank 1 exited with code 3",
        ("the last words", "rank_1.log"),
    ),
    "unreported exception": Ending(
        """
        if RANK == 2:
            raise KeyError("missing")
        time.sleep(1000)
        """,
        "rank 2 exited with code 1",
        ("KeyError: 'missing'",),
    ),
    "reported exception, others lose contact": Ending(
        """
        if RANK == 2:
            try:
                raise ValueError("boom\\nmore")
            except ValueError as error:
                report.failed(error)
                raise
        wait_for("rank_2.failure.json")
        lose_contact()
        """,
        "rank 2 failed with ValueError: boom more",
        ("Traceback", "ValueError: boom"),
        ("rank 0", "rank 1"),
        PATIENT,
    ),
    "the culprit reports after its victims": Ending(
        """
        if RANK == 1:
            wait_for("rank_0.failure.json")
            time.sleep(0.3)
            report.failed(ValueError("the true cause"))
            sys.exit(1)
        lose_contact()
        """,
        "rank 1 failed with ValueError: the true cause",
        options=PATIENT,
    ),
    "two exceptions, the earlier is named": Ending(
        """
        if RANK == 2:
            report.failed(ValueError("first"))
            time.sleep(0.3)
            sys.exit(1)
        wait_for("rank_2.failure.json")
        if RANK == 0:
            report.failed(ValueError("second"))
        sys.exit(1)
        """,
        "rank 2 failed with ValueError: first",
        ("Then rank 0 failed with ValueError: second",),
        options=PATIENT,
    ),
    "segmentation fault": Ending(
        """
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(1000)
        """,
        "rank 1 was killed by SIGSEGV",
    ),
    "aborted by a watchdog because another died": Ending(
        """
        if RANK == 0:
            print("Watchdog caught collective operation timeout", flush=True)
            os.abort()
        if RANK == 1:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        "rank 1 was killed by SIGKILL",
        options=PATIENT,
    ),
    "failed, and hangs on its way out": Ending(
        """
        if RANK == 1:
            report.failed(ValueError("boom"))
        time.sleep(1000)
        """,
        "rank 1 failed with ValueError: boom",
    ),
    "hung: the others time out": Ending(
        """
        def stuck_here():
            time.sleep(1000)
        install_stack_dump()
        report.beat()
        if RANK == 2:
            stuck_here()
        wait_for("rank_2.heartbeat")
        lose_contact()
        """,
        "rank 2 did not answer for",
        ("in stuck_here",),
        options=(("grace_s", 3.0),),
    ),
    "stopped: the others time out": Ending(
        """
        install_stack_dump()
        if RANK == 2:
            report.beat()
            os.kill(os.getpid(), signal.SIGSTOP)
        wait_for("rank_2.heartbeat")
        lose_contact()
        """,
        "rank 2 did not answer for",
        ("did not even write its stack",),
        options=(("grace_s", 3.0),),
    ),
    "nobody makes progress": Ending(
        """
        install_stack_dump()
        report.beat()
        time.sleep(1000)
        """,
        "no rank made progress for",
        ("most recent call first",),
        options=(("timeout_s", 0.2),),
    ),
    "nobody ever starts": Ending(
        """
        install_stack_dump()
        time.sleep(1000)
        """,
        "no rank made progress for",
        options=(("timeout_s", 0.2), ("startup_s", 0.5)),
    ),
    "one stays when the others are through": Ending(
        """
        install_stack_dump()
        report.beat()
        if RANK == 1:
            time.sleep(1000)
        """,
        "no rank made progress for",
        ("What rank 1 was doing",),
        options=(("timeout_s", 0.2),),
    ),
    "the others ignore SIGTERM": Ending(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if RANK == 0:
            sys.exit(1)
        time.sleep(1000)
        """,
        "rank 0 exited with code 1",
    ),
    "grandchildren": Ending(
        """
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
        if RANK == 0:
            sys.exit(1)
        time.sleep(1000)
        """,
        "rank 0 exited with code 1",
    ),
    "killed while its fork lives": Ending(
        """
        if RANK == 1 and os.fork():
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)
        """,
        "rank 1 was killed by SIGKILL",
    ),
    "lost contact without a culprit": Ending(
        """
        lose_contact()
        """,
        "failed with RuntimeError: [gloo/transport",
        options=PATIENT,
    ),
    "SIGTERM from elsewhere": Ending(
        """
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1000)
        """,
        "rank 1 was killed by SIGTERM",
    ),
    "a report that is not one": Ending(
        """
        if RANK == 1:
            (Path(os.environ["OPTIMUS_CC_LOG_DIR"]) / "rank_1.failure.json").write_text('{"time": [')
            sys.exit(4)
        time.sleep(1000)
        """,
        "rank 1 exited with code 4",
    ),
}


STARTS = ["executed", pytest.param("forked", marks=pytest.mark.skipif(sys.platform != "linux", reason="Linux only"))]
Supervise = Callable[..., None]


@pytest.fixture(params=STARTS)
def supervised(request: pytest.FixtureRequest, tmp_path: Path) -> Supervise:
    """Runs a script as ranks, which are executed or forked, and sees that nothing is left of them."""

    def run(script: str, num_ranks: int = 3, **options: Any) -> None:
        env = marked_environment()
        options = {"log_dir": tmp_path, "env": env, "grace_s": 0.5, "poll_s": 0.02, **options}
        try:
            if request.param == "executed":
                supervise(rank_command(script), num_ranks, **options)
            else:
                with Parents(modules=()) as parents:
                    supervise(module_command(script), num_ranks, parents=parents, **options)
        finally:
            assert_none_left(env["TEST_MARK"])

    return run


@pytest.mark.parametrize("name", FAILURES)
def test_failure(name: str, supervised: Supervise) -> None:
    ending = FAILURES[name]
    with pytest.raises(RunFailed) as caught:
        supervised(ending.script, **dict(ending.options))
    assert caught.value.state == "failed"
    assert ending.cause in caught.value.cause
    for text in ending.shown:
        assert text in str(caught.value)
    for text in ending.hidden:
        assert text not in str(caught.value)


@pytest.mark.parametrize("rank", range(4))
def test_any_rank_killed(rank: int, supervised: Supervise) -> None:
    with pytest.raises(RunFailed, match=f"^rank {rank} was killed by SIGKILL"):
        supervised(
            f"""
            if RANK == {rank}:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)
            """,
            num_ranks=4,
        )


def test_ends_well(tmp_path: Path, supervised: Supervise) -> None:
    polls: list[int] = []
    supervised(
        """
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "OPTIMUS_CC_RENDEZVOUS")
        print(*(os.environ[name] for name in names))
        print("unfinished", end="")
        """,
        num_ranks=2,
        threads_per_rank=3,
        on_poll=lambda: polls.append(1),
    )
    first, second = ((tmp_path / f"rank_{rank}.log").read_text() for rank in range(2))
    assert first.startswith("0 0 2 2 3 file:///")
    assert first.endswith("unfinished")
    assert second.startswith("1 1 2 2 3 file:///")
    assert polls


@pytest.mark.parametrize("name", ["tmp", "tmp #?%20"])
def test_every_start_has_its_own_rendezvous(
    tmp_path: Path, supervised: Supervise, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
    script = 'print(os.environ["OPTIMUS_CC_RENDEZVOUS"])'
    places = set()
    for _ in range(2):
        supervised(script, num_ranks=1)
        places.add((tmp_path / "rank_0.log").read_text())
    assert len(places) == 2
    assert all(place.startswith(f"file://{tmp_path / name}/") for place in places)
    assert not any(Path(place.strip().removeprefix("file://")).parent.exists() for place in places)


def test_reports_of_an_earlier_start_do_not_count(tmp_path: Path, supervised: Supervise) -> None:
    (tmp_path / "rank_0.failure.json").write_text(
        '{"time": 1, "exception": "ValueError", "message": "old", "communication": false}'
    )
    supervised("pass", num_ranks=1)


def test_a_fork_does_not_outlive_a_rank_that_ended_well(supervised: Supervise) -> None:
    supervised("os.fork() or time.sleep(1000)")


def test_an_error_of_the_supervisor_leaves_nobody(supervised: Supervise) -> None:
    def on_poll() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        supervised("time.sleep(1000)", on_poll=on_poll)


def test_stop_asked_by_a_program(supervised: Supervise) -> None:
    stop = Stop()
    stop.request("the deadline", at_once=True)
    with pytest.raises(RunCancelled, match="the deadline"):
        supervised("time.sleep(1000)", stop=stop)


def test_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"old\n" * 50 + b"10%\r20%\r30%\n\n\x1b[31mred\x1b[0m\n" + b"x" * 1000 + b"\n\xff\x00end")
    assert last_lines(log, 4) == ["30%", "red", "x" * 297 + "...", "\N{REPLACEMENT CHARACTER}end"]
    assert last_lines(tmp_path / "none") == []


# Signals to the supervisor, which is a process of its own here.

_DRIVER = """
import signal, sys
from contextlib import nullcontext
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # the test may run in the background
from launchers.processes.preloaded import Parents
from launchers.supervise import Stop, supervise
from optimus_cc.runs import RunFailed
from launchers.processes.preloaded import Parents
from tests.launchers.processes import module_command, rank_command
forked = sys.argv[3] == "forked"
with Stop().on_signals() as stop, (Parents(modules=()) if forked else nullcontext()) as parents:
    try:
        command = (module_command if forked else rank_command)(Path(sys.argv[1]).read_text())
        supervise(command, 3, log_dir=Path(sys.argv[2]), stop=stop, grace_s=0.5, poll_s=0.02, parents=parents)
        print("finished")
    except RunFailed as error:
        print(error.state, error.cause)
"""


class Supervisor:
    """A supervisor in a process, with three ranks."""

    def __init__(self, script: str, folder: Path, start: str) -> None:
        self.logs = folder / "logs"
        env = {**os.environ, **marked_environment()}
        self.mark = env["TEST_MARK"]
        (folder / "script.py").write_text(textwrap.dedent(script))
        self.popen = subprocess.Popen(
            [sys.executable, "-c", _DRIVER, str(folder / "script.py"), str(self.logs), start],
            env=env,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_for_ranks(self, word: str) -> None:
        def said() -> bool:
            return all(word in "".join(last_lines(self.logs / f"rank_{rank}.log")) for rank in range(3))

        eventually(said, f"all ranks said {word}")

    def wait(self) -> str:
        output, _ = self.popen.communicate(timeout=60)
        assert_none_left(self.mark)
        return output.strip()


ORDERLY = """
def stop(*_):
    time.sleep(0.1)
    print("asked", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(1000)
"""
DEAF = """
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""
AT_THE_END = ORDERLY.replace("sys.exit(75)", "sys.exit(0)")
WITHOUT_HANDLER = """
print("ready", flush=True)
time.sleep(1000)
"""
SOME_WITHOUT_HANDLER = """
if RANK:
    signal.signal(signal.SIGTERM, lambda *_: lose_contact())
print("ready", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("script", "signals", "ending"),
    [
        (ORDERLY, [signal.SIGINT], "cancelled cancelled by Ctrl-C"),
        (DEAF, [signal.SIGINT], "cancelled cancelled by Ctrl-C"),
        (ORDERLY, [signal.SIGTERM], "preempted preempted by SIGTERM"),
        (ORDERLY, [signal.SIGUSR2], "preempted preempted by SIGUSR2"),
        (DEAF, [signal.SIGTERM, signal.SIGTERM], "cancelled cancelled by SIGTERM"),
        (DEAF, [signal.SIGUSR2, signal.SIGINT], "cancelled cancelled by Ctrl-C"),
        (ORDERLY, [signal.SIGHUP], "cancelled cancelled by SIGHUP"),
        (AT_THE_END, [signal.SIGTERM], "finished"),
        (WITHOUT_HANDLER, [signal.SIGTERM], "preempted preempted by SIGTERM"),
        (SOME_WITHOUT_HANDLER, [signal.SIGTERM], "preempted preempted by SIGTERM"),
    ],
)
@pytest.mark.parametrize("start", STARTS)
def test_signals(script: str, signals: list[signal.Signals], ending: str, start: str, tmp_path: Path) -> None:
    supervisor = Supervisor(script, tmp_path, start)
    supervisor.wait_for_ranks("ready")
    for index, number in enumerate(signals):
        supervisor.popen.send_signal(number)
        if index < len(signals) - 1:
            supervisor.wait_for_ranks("asked")
    assert supervisor.wait() == ending


@pytest.mark.parametrize("start", STARTS)
def test_nobody_survives_a_killed_supervisor(start: str, tmp_path: Path) -> None:
    """Neither ranks that take no precautions nor what they started."""
    supervisor = Supervisor(
        """
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
        print(os.environ["OPTIMUS_CC_RENDEZVOUS"])
        print("ready", flush=True)
        time.sleep(1000)
        """,
        tmp_path,
        start,
    )
    supervisor.wait_for_ranks("ready")
    # Supervisor, guard, three ranks and their children, and whose children the ranks are.
    assert len(survivors(supervisor.mark)) == 8 + (start == "forked")
    scratch = Path(last_lines(supervisor.logs / "rank_0.log")[0].removeprefix("file://")).parent
    assert scratch.is_dir()
    supervisor.popen.kill()
    supervisor.wait()
    assert not scratch.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel kills orphans on Linux only")
@pytest.mark.parametrize("start", STARTS)
def test_ranks_die_even_without_the_guard(start: str, tmp_path: Path) -> None:
    supervisor = Supervisor(
        """
        die_with_parent()
        print("ready", flush=True)
        while True:
            pass
        """,
        tmp_path,
        start,
    )
    supervisor.wait_for_ranks("ready")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and f"guard.py\0{supervisor.popen.pid}\0".encode() in _command_line(entry):
            os.kill(int(entry.name), signal.SIGKILL)
    supervisor.popen.kill()
    supervisor.wait()


def _command_line(entry: Path) -> bytes:
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:
        return b""
