"""Forked ranks are as executed ones are; what can't be forked is executed; one that was killed takes nobody along."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from launchers import sweep
from launchers.processes import parent
from launchers.processes.preloaded import Line, Parents
from launchers.supervise import Stop, supervise
from optimus_cc import process
from optimus_cc.runs import RunCancelled, RunFailed
from tests.launchers.jobs import command_of, configuration
from tests.launchers.processes import (
    ROOT,
    assert_none_left,
    eventually,
    marked_environment,
    module_command,
    survivors,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")

WHO = "print(os.getppid())"


def _run(script: str, log_dir: Path, parents: Any = None, num_ranks: int = 1, **options: Any) -> list[str]:
    """What each rank printed."""
    options = {"env": {"PYTHONPATH": str(ROOT)}, "grace_s": 0.5, "poll_s": 0.02, **options}
    supervise(module_command(script), num_ranks, log_dir=log_dir, parents=parents, **options)
    return [(log_dir / f"rank_{rank}.log").read_text().strip() for rank in range(num_ranks)]


def test_ranks_of_every_start_have_one_parent(tmp_path: Path) -> None:
    with Parents(modules=()) as parents:
        first = _run(WHO, tmp_path, parents, num_ranks=2)
        second = _run(WHO, tmp_path, parents, num_ranks=3)
    assert len({*first, *second} - {str(os.getpid())}) == 1


# As if it had been executed.

SIGHT = """
import json, random, resource, stat, warnings
def kind(descriptor):
    status = os.fstat(descriptor)
    return stat.S_IFMT(status.st_mode), os.readlink(f"/proc/self/fd/{descriptor}")
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(json.dumps({
    "arguments": len(sys.argv), "program": sys.argv[0], "path": sys.path, "name": __name__,
    "main": sys.modules["__main__"].__spec__.name, "flags": str(sys.flags),
    "environment": {name: value for name, value in os.environ.items() if name not in (
        "OPTIMUS_CC_SUPERVISOR_PID", "OPTIMUS_CC_RENDEZVOUS")},
    "folder": os.getcwd(), "umask": os.umask(0o22),
    "descriptors": [kind(int(name)) for name in sorted(os.listdir("/proc/self/fd")) if int(name) < 3],
    "others": [name for name in os.listdir("/proc/self/fd") if int(name) > 3],
    "leads": [os.getpid() == os.getsid(0), os.getpid() == os.getpgid(0)],
    "signals": [status[name].strip() for name in ("SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd")],
    "handlers": [str(signal.getsignal(number)).split(" at ")[0] for number in sorted(signal.valid_signals())],
    "nice": os.nice(0), "limits": resource.getrlimit(resource.RLIMIT_NOFILE), "filters": len(warnings.filters) > 0,
    "threads": len(os.listdir("/proc/self/task")), "buffering": [sys.stdout.line_buffering, sys.stdout.write_through],
    "encoding": [sys.stdout.encoding, sys.stdout.errors, sys.stderr.errors],
    "parent": int(os.environ["OPTIMUS_CC_SUPERVISOR_PID"]) == os.getppid(),
}))
"""


def test_a_forked_rank_finds_what_an_executed_one_does(tmp_path: Path) -> None:
    with Parents(modules=()) as parents:
        _run(DISTURBING, tmp_path, parents)  # of which nothing is left
        (forked,) = _run(SIGHT, tmp_path, parents)
        (executed,) = _run(SIGHT, tmp_path)
        assert json.loads(forked) == json.loads(executed)
        assert json.loads(forked)["parent"]


DISTURBING = """
import random, builtins, optimus_cc
os.environ["RANK"] = os.environ["DISTURBED"] = "7"
os.chdir("/"); os.umask(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
sys.path.insert(0, "/nowhere"); sys.argv.append("more"); builtins.print = None
os.dup2(1, 50); os.nice(1)
"""


def test_random_state_is_its_own(tmp_path: Path) -> None:
    with Parents(modules=()) as parents:
        script = "import random, uuid; print(random.random(), uuid.uuid4())"
        printed = [*_run(script, tmp_path, parents, num_ranks=2), *_run(script, tmp_path, parents)]
    assert len(set(printed)) == 3


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("sys.exit()", None),
        ("sys.exit('why')", "code 1"),
        ("sys.exit(7)", "code 7"),
        ("os._exit(8)", "code 8"),
        ("raise ValueError('why')", "code 1"),
        ("raise KeyboardInterrupt", "code 1"),
    ],
)
def test_it_ends_as_python_does(end: str, told: str | None, tmp_path: Path) -> None:
    script = f"""
    import atexit, threading
    atexit.register(lambda: print("at exit"))
    threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
    {end}
    """
    with Parents(modules=()) as parents, pytest.raises(RunFailed, match=told) if told else nullcontext():
        _run(script, tmp_path, parents)
    log = (tmp_path / "rank_0.log").read_text()
    assert ("why" in log) == ("why" in end)
    assert ("thread\nat exit\n" in log) == ("_exit(8)" not in end)


def test_signals_to_everybody_reach_ranks_alone(tmp_path: Path) -> None:
    """A scheduler signals the processes of a step all together."""
    script = """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP):
        os.kill(os.getppid(), number)
    """
    with Parents(modules=()) as parents:
        _run(script, tmp_path, parents)
        before = _run(WHO, tmp_path, parents)
        assert before == _run(WHO, tmp_path, parents)
        assert before != [str(os.getpid())]


# Where it would not be the same, it is executed.

REFUSED: dict[str, Callable[[dict[str, str], Path, pytest.MonkeyPatch], tuple[dict[str, str], str]]] = {
    "a variable": lambda env, place, _: ({**env, "OMP_NUM_THREADS": "17"}, os.getcwd()),
    "a new variable": lambda env, place, _: ({**env, "MKL_CBWR": "COMPATIBLE"}, os.getcwd()),
    "a variable less": lambda env, place, _: ({key: env[key] for key in env if key != "PATH"}, os.getcwd()),
    "a folder": lambda env, place, _: (env, str(place)),
    "the code": lambda env, place, patch: (
        patch.setattr(parent, "_code", lambda: {"optimus_cc/x.py": (1, 1)}) or env,
        os.getcwd(),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_else_may_differ(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = parent._Start()
    mine = dict(os.environ)
    start.check({**mine, "RANK": "3", "OPTIMUS_CC_RENDEZVOUS": "file:///x", "OPTIMUS_CC_DEVICE": "cpu"}, os.getcwd())
    asked = REFUSED[name](mine, tmp_path, monkeypatch)
    with pytest.raises(parent.Mismatch):
        start.check(*asked)


def test_the_code_is_every_file_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "__file__", str(tmp_path / "process.py"))
    (tmp_path / "deep").mkdir()
    states = [parent._code()]
    for change in (
        lambda: (tmp_path / "deep" / "new.py").write_text("1"),
        lambda: (tmp_path / "deep" / "new.py").write_text("12"),
        lambda: os.utime(tmp_path / "deep" / "new.py", (1, 1)),
        lambda: (tmp_path / "deep" / "new.py").unlink(),
    ):
        change()
        states.append(parent._code())
    assert [states[index] != states[index + 1] for index in range(4)] == [True] * 4
    assert states[0] == states[4]


def test_a_refusal_means_execution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the environment of a job is not the one that it asked for a parent with."""
    with Parents(modules=()) as parents:
        given: list[Line] = []

        class Other:
            def line(self, environment: Mapping[str, str]) -> Line | None:
                line = parents.line({**environment, "OMP_NUM_THREADS": "17"})
                assert line is not None
                given.append(line)
                return line

        assert _run(WHO, tmp_path, Other()) == [str(os.getpid())]
        assert "OMP_NUM_THREADS" in given[0].refused


def test_without_a_parent_it_is_executed(tmp_path: Path) -> None:
    """One that fails while it imports; the rank fails at the same import, and tells."""
    with Parents(modules=("tests.launchers.no_such_module",)) as parents:
        assert _run(WHO, tmp_path, parents) == [str(os.getpid())]


def test_a_request_to_end_does_not_wait_for_the_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sleeping_module.py").write_text("import time; time.sleep(1000)")
    stop = Stop()
    mark = marked_environment()
    env = {**mark, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    with Parents(modules=("sleeping_module",)) as parents:
        monkeypatch.setattr("launchers.processes.preloaded._CLOSE_S", 0.1)
        ask = lambda: stop.request("the deadline", at_once=True)  # noqa: E731
        with pytest.raises(RunCancelled, match="the deadline"):
            _run("time.sleep(1000)", tmp_path, parents, stop=stop, env=env, on_poll=ask)
    assert_none_left(mark["TEST_MARK"])


# Its own death, and that of those who use it.


def test_ranks_of_a_killed_parent_fail_and_leave_nothing(tmp_path: Path) -> None:
    script = """
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
    if RANK == 1:
        wait_for("begun")
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)
    """
    mark = marked_environment()
    (tmp_path / "begun").touch()
    with Parents(modules=()) as parents:
        with pytest.raises(RunFailed, match="the process that had started rank 0 died") as caught:
            _run(script, tmp_path, parents, num_ranks=3, env=mark)
        assert "Then" not in caught.value.details
        assert_none_left(mark["TEST_MARK"])
        assert _run(WHO, tmp_path, parents, env=mark) != [str(os.getpid())]  # there is a new one
        assert len(survivors(mark["TEST_MARK"])) == 1
    assert_none_left(mark["TEST_MARK"])


def test_what_a_lost_supervisor_asked_for_ends(tmp_path: Path) -> None:
    """Others who use the same parent lose nothing."""
    mark = marked_environment()
    environment = {**os.environ, **mark}
    command = module_command("time.sleep(1000)")
    with Parents(modules=()) as parents:
        lines = [parents.line(environment) for _ in range(2)]
        forked = []
        for line in lines:
            assert line is not None
            while not line.ready:
                line.receive(1.0)
            with (tmp_path / "log").open("wb") as output:
                forked.append(line.fork(command, {**environment, "RANK": "0"}, output))
        assert lines[0] is not None
        assert len(survivors(mark["TEST_MARK"])) == 3
        lines[0]._end.close()
        eventually(lambda: len(survivors(mark["TEST_MARK"])) == 2, "its rank ended")
        assert forked[1] is not None
        assert forked[1].poll() is None
        forked[1].send_signal(signal.SIGTERM)
        assert forked[1].wait(60) == -signal.SIGTERM
    assert_none_left(mark["TEST_MARK"])


# In a sweep.


def test_jobs_of_a_sweep_share_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each environment has one; a killed one is replaced."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(sweep, "Parents", lambda: Parents(modules=()))
    told = tmp_path / "told.txt"
    script = f"""
    from optimus_cc.runs import RunFolder
    folder = RunFolder(Path(os.environ["OPTIMUS_CC_LOG_DIR"]).parent)
    seed = str(folder.config()["training"]["seed"])
    if RANK == 0:
        with open({str(told)!r}, "a") as file:
            print(seed, os.getppid(), Path(f"/proc/{{os.getppid()}}/stat").read_text().split()[3], file=file)
        folder.write_summary({{"steps": 4}})
        if seed == "2":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1000)
    """
    command = command_of(tmp_path, default=textwrap.dedent(script))
    file = tmp_path / "job.py"  # of which every run's ranks get one environment
    job = re.sub(r"\nos.environ.update.*", "", file.read_text())
    file.write_text(re.sub(r"\brank_command(?=\(script\)|$)", "module_command", job, flags=re.MULTILINE))
    configs = [configuration(tmp_path / "runs", seed) for seed in (1, 2, 3)]
    configs.append(configuration(tmp_path / "runs", 4, threads_per_rank=3))
    outcomes = sweep.run_all(configs, job_command=command)
    assert [outcome.state for outcome in outcomes] == ["finished", "failed", "finished", "finished"]
    by_seed = {seed: (who, whose) for seed, who, whose in (line.split() for line in told.read_text().splitlines())}
    assert by_seed["1"] == by_seed["2"]
    assert len({who for who, _ in by_seed.values()}) == 3
    assert {whose for _, whose in by_seed.values()} == {str(os.getpid())}
