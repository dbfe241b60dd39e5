"""``python -m launchers status`` and ``watch``: what they make of folders, whatever those hold."""

from __future__ import annotations

import io
import json
import math
import os
import resource
import socket
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from launchers import status
from launchers.__main__ import main
from launchers.progress import Screen
from launchers.start import run_all
from launchers.status import STATES, read, table
from launchers.watch import watch
from optimus_cc.config import ConfigError
from optimus_cc.config.schema import changed
from optimus_cc.records import append_json_line, to_json
from optimus_cc.runs import RunFolder, Status
from tests.configurations import tiny
from tests.test_runs import GARBAGE

ROOT = Path(__file__).parents[2]
HERE = socket.gethostname()
GONE = 2**22 + 1
TRAIN: dict[str, Any] = {"kind": "train", "loss": 5.25, "step_time_s": 0.5}


def make(runs_dir: Path, name: str, state: Any, *, records: int = 0, **changes: Any) -> RunFolder:
    folder = RunFolder(runs_dir / name)
    folder.path.mkdir(parents=True)
    for step in range(1, records + 1):
        folder.append_metrics({**TRAIN, "step": step})
    known = {"total_steps": 30, "pid": os.getpid(), "host": HERE, "started": "2026-01-01T00:00:00+00:00"}
    folder.write_status(Status(state, **{**known, **changes}))
    return folder


def shown(capsys: pytest.CaptureFixture[str], runs_dir: Path, *arguments: str) -> str:
    assert main(["status", "--runs-dir", str(runs_dir), *arguments]) == 0
    return capsys.readouterr().out


def test_a_running_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, "a-run", "running", step=10, records=10, restarts=2)
    (run,) = json.loads(shown(capsys, tmp_path, "--json"))["runs"]
    assert run | {"updated": None, "folder": None} == {
        "run_id": "a-run",
        "folder": None,
        "state": "running",
        "cause": None,
        "step": 10,
        "total_steps": 30,
        "loss": 5.25,
        "step_time_s": 0.5,
        "time_left_s": 10.0,
        "restarts": 2,
        "started": "2026-01-01T00:00:00+00:00",
        "updated": None,
        "pid": os.getpid(),
        "host": HERE,
        "live": True,
    }
    text = shown(capsys, tmp_path)
    assert text.split("\n")[1].split() == ["a-run", "running", "10/30", "5.250", "10", "s", "2", "0", "s", "ago"]
    assert text.split("\n")[2] == "1 run: 1 running"


@pytest.mark.parametrize(
    ("changes", "state", "live"),
    [
        ({"pid": GONE}, "abandoned", False),
        ({"host": "elsewhere"}, "running", True),
        ({"state": "queued"}, "queued", False),  # by this very process, which starts nothing
        ({"state": "queued", "host": "elsewhere"}, "queued", True),
        ({"state": "queued", "pid": GONE}, "queued", False),
        ({"state": "failed"}, "failed", False),
    ],
)
def test_states(changes: dict[str, Any], state: str, live: bool, tmp_path: Path) -> None:
    run = read(make(tmp_path, "a", changes.pop("state", "running"), step=3, records=3, **changes))
    assert (run.state, run.live) == (state, live)
    assert (run.time_left_s is not None) == (state == "running")
    assert state != "abandoned" or f"process {GONE} on {HERE}, is gone" in (run.cause or "")


def test_silent_on_another_host(tmp_path: Path) -> None:
    folder = make(tmp_path, "a", "running", host="elsewhere")
    record = json.loads(folder.status_path.read_text())
    ago = (datetime.now(UTC) - timedelta(seconds=300)).isoformat()
    folder.status_path.write_text(json.dumps({**record, "updated": ago}))
    assert read(folder).state == "abandoned"


def test_records_of_an_earlier_attempt_tell_nothing_of_this_one(tmp_path: Path) -> None:
    folder = make(tmp_path, "a", "running", records=10)
    assert (read(folder).loss, read(folder).time_left_s) == (None, None)
    folder.append_metrics({"kind": "resume", "step": 10})
    folder.append_metrics({**TRAIN, "step": 11, "loss": 4.0, "step_time_s": 2.0})
    folder.write_status(Status("running", step=11, total_steps=13, pid=os.getpid(), host=HERE))
    run = read(folder)
    assert (run.loss, run.step_time_s, run.time_left_s) == (4.0, 2.0, 4.0)


def test_a_loss_that_is_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path, "a", "failed", step=1)
    folder.append_metrics({**TRAIN, "step": 1, "loss": math.nan, "step_time_s": math.inf})
    assert " nan " in shown(capsys, tmp_path)
    (run,) = json.loads(shown(capsys, tmp_path, "--json"))["runs"]
    assert (run["loss"], run["step_time_s"]) == ("NaN", None)


@pytest.mark.parametrize("content", [*GARBAGE, b'{"state": "running", "step": %d, "total_steps": -1}' % 10**400])
def test_anything_in_the_files(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, names in enumerate([("status.json",), ("metrics.jsonl",), ("config.yaml",), ("status.json",) * 2]):
        folder = make(tmp_path, f"run-{number}", "running", step=1, records=1)
        for name in names:
            (folder.path / name).write_bytes(content)
    for arguments in ([], ["--json"]):
        assert "run-0" in shown(capsys, tmp_path, *arguments)


@pytest.mark.parametrize(
    "value", ["\x1b[31mred\n\r\x00\ud800", 10**30, -5, True, [1], {"a": 1}, None, 1e308, "2026-99-01", ""]
)
def test_any_value_of_any_field(value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("cause", "step", "total_steps", "started", "updated", "pid", "host", "restarts"):
        folder = make(tmp_path, f"a-{name}", "failed", step=1, records=1)
        record = json.loads(folder.status_path.read_text())
        folder.status_path.write_text(json.dumps({**record, name: value}))
        append_json_line(folder.metrics_path, {**TRAIN, "loss": value, "step_time_s": value})
    text = shown(capsys, tmp_path)
    assert "\x1b" not in text
    assert text.encode()
    assert json.loads(shown(capsys, tmp_path, "--json"))["counts"] == {"failed": 8}


@pytest.mark.parametrize("name", ["status.json", "metrics.jsonl"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(tmp_path, "a", "running", step=1, records=1)
    folder.config_path.touch()
    (folder.path / name).unlink()
    os.mkfifo(folder.path / name)
    (run,) = json.loads(shown(capsys, tmp_path, "--json"))["runs"]
    assert run["loss"] is None
    assert folder.status() is None or (list(folder.metrics()) == [] and folder.latest("train") is None)


def test_a_folder_that_can_not_be_read_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir(mode=0)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read everything
    assert "its folder can't be read" in shown(capsys, tmp_path)


@pytest.mark.parametrize("command", ["status", "watch", "cancel", "resubmit", "clean"])
def test_an_empty_filter_is_refused(command: str, some: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It comes from a variable that isn't set, and would match every run."""
    with pytest.raises(SystemExit) as caught:
        main([command, "", "--runs-dir", str(some)])
    assert caught.value.code == 2
    assert "it is empty" in capsys.readouterr().err


def test_folders_of_all_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, "a", "failed")
    for name in ("empty", "benchmarks", ".hidden", "b", "c/status.json"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "b" / "config.yaml").touch()
    lines = shown(capsys, tmp_path).splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        ["b", "unknown"],
        ["it", "has"],
        ["a", "failed"],
        ["2", "runs:"],
    ]


def test_reading_while_a_run_writes(tmp_path: Path) -> None:
    folder = make(tmp_path, "a", "running", step=1, records=1)
    done = threading.Event()

    def write() -> None:
        step = 1
        while not done.is_set():
            step += 1
            folder.append_metrics({**TRAIN, "step": step})
            folder.write_status(Status("running", step=step, total_steps=10**6, pid=os.getpid(), host=HERE))
            if step % 20 == 0:
                folder.cut_metrics(step - 5)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        runs = [read(folder) for _ in range(300)]
    finally:
        done.set()
        writer.join()
    assert {run.state for run in runs} == {"running"}
    assert {run.loss for run in runs} <= {5.25, None}  # None: cut to nothing at that moment


@pytest.fixture
def some(tmp_path: Path) -> Path:
    for name, state in (("tiny-cb-1", "failed"), ("tiny-cb-2", "finished"), ("tiny-sc-1", "running")):
        make(tmp_path, name, state, cause="reasons" if state == "failed" else None)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {"tiny-cb-1", "tiny-cb-2", "tiny-sc-1"}),
        (["cb"], {"tiny-cb-1", "tiny-cb-2"}),
        (["tiny-*-1"], {"tiny-cb-1", "tiny-sc-1"}),
        (["tiny-?b-1"], {"tiny-cb-1"}),
        (["--state", "failed,running"], {"tiny-cb-1", "tiny-sc-1"}),
        (["cb", "--state", "finished"], {"tiny-cb-2"}),
    ],
)
def test_filters(arguments: list[str], expected: set[str], some: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {run["run_id"] for run in json.loads(shown(capsys, some, "--json", *arguments))["runs"]} == expected


@pytest.mark.parametrize("command", ["status", "watch"])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "matches 'nothing'"),
        (["cb", "--state", "queued,abandoned"], "matches 'cb' and is queued or abandoned"),
        (["--runs-dir", "/nowhere/at/all"], "there is no folder /nowhere/at/all"),
        (["--runs-dir", __file__], "Not a directory"),
    ],
)
def test_nothing_found(
    command: str, arguments: list[str], said: str, some: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--runs-dir", str(some), *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert len(captured.err.splitlines()) == 1


def test_an_unknown_state(some: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["status", "--state", "dancing"])
    assert all(state in capsys.readouterr().err for state in ("dancing",))


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_lines_fit_the_terminal(width: int, tmp_path: Path) -> None:
    name = "gpt_tiny-tp2_pp2_dp2-cb_fe_sc_with_a_very_long_label-s1234-0123abcd"
    run = read(make(tmp_path, name, "failed", step=10, records=10, cause="rank 3 failed: " + "x" * 200))
    header, (block,) = table([run], width)
    first, second = block.split("\n")
    assert max(map(len, (header, first, second))) <= width
    assert "0123abcd" in first
    assert second.endswith("...")
    header, (block,) = table([run])
    assert name in block
    assert "x" * 200 in block


# -- speed and imports -------------------------------------------------------------------------------------------------

_IMPORTS = """
import sys
from launchers.__main__ import main
code = main(["status", "--runs-dir", sys.argv[1]])
print(code, *sorted({name.partition(".")[0] for name in sys.modules}))
"""


def test_a_thousand_runs_in_two_seconds(tmp_path: Path) -> None:
    """Of the processor, so that what else the machine does is not measured; nothing here waits."""
    record = to_json({**TRAIN, "traffic": {f"class_{number}": {"logical_bytes": 1.0} for number in range(20)}})
    lines = f"{record}\n" * 200
    for number in range(1000):
        folder = RunFolder(tmp_path / f"gpt_tiny-pp4_dp2-cb_fe_sc-s{number}-0123abcd")
        folder.path.mkdir()
        folder.metrics_path.write_text(lines)
        status_of = Status(
            "running", step=150, total_steps=300, host="elsewhere", updated=datetime.now(UTC).isoformat()
        )
        folder.status_path.write_text(to_json(vars(status_of)))
    command = [sys.executable, "-m", "launchers", "status", "--runs-dir", str(tmp_path)]
    took = []
    for _ in range(2):  # the first one warms up
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert result.stdout.endswith("1000 runs: 1000 running\n")
    assert took[-1] < 2


def test_what_is_imported(some: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", _IMPORTS, str(some)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    code, *modules = result.stdout.splitlines()[-1].split()
    assert code == "0"
    assert not {"torch", "hydra", "omegaconf", "pydantic", "yaml", "numpy", "pandas", "megatron"} & set(modules)


# -- watch -------------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _ends_after(folder: RunFolder, looks: int) -> Any:
    """A pause in which the run goes on by ten steps, and which ends it after so many."""
    seen = 0

    def sleep(_: float) -> None:
        nonlocal seen
        seen += 1
        state: Any = "finished" if seen == looks else "running"
        folder.write_status(Status(state, step=10 * seen, total_steps=100, pid=os.getpid(), host=HERE))

    return sleep


def test_watch_prints_what_changes(tmp_path: Path) -> None:
    make(tmp_path, "other", "failed", cause="reasons")
    folder = make(tmp_path, "a", "running", total_steps=100)
    stream = io.StringIO()
    assert watch(tmp_path, None, [], screen=Screen(stream), sleep=_ends_after(folder, 3)) == 0
    lines = stream.getvalue().splitlines()
    steps = [line.split()[1:3] for line in lines if line.startswith("a ")]
    assert steps == [["running", "0/100"], ["running", "10/100"], ["running", "20/100"], ["finished", "30/100"]]
    assert sum(line.startswith("other") for line in lines) == 1
    assert lines[-1] == "2 runs: 1 failed, 1 finished"


def test_watch_in_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setenv("LINES", "12")
    for number in range(30):
        make(tmp_path, f"old-{number}", "failed", cause="reasons")
    folder = make(tmp_path, "a", "running", total_steps=100)
    stream = Terminal()
    assert watch(tmp_path, None, [], screen=Screen(stream), sleep=_ends_after(folder, 2)) == 0
    pictures = stream.getvalue().removeprefix("\r\x1b[2K").split("\x1b[J")
    assert len(pictures) == 3
    for picture in pictures:
        lines = picture.split("\x1b")[0].split("\n")
        assert len(lines) <= 13
        assert lines[1].startswith("a ")  # before those that are over, and after: it was heard of last
        assert max(map(len, lines)) < 70
        assert "and 27 more" in picture
    assert "31 runs: 30 failed, 1 finished" in pictures[-1]


def test_watching_a_state_ends_when_none_is_in_it(tmp_path: Path) -> None:
    folder = make(tmp_path, "a", "running", total_steps=100)
    assert watch(tmp_path, None, ["running"], screen=Screen(io.StringIO()), sleep=_ends_after(folder, 2)) == 0


def test_ctrl_c_ends_watching(tmp_path: Path) -> None:
    make(tmp_path, "a", "running")

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    assert watch(tmp_path, None, [], screen=Screen(io.StringIO()), sleep=interrupted) == 0


def test_every_state_is_counted_once() -> None:
    runs = [status.Run(state, state, state) for state in STATES]
    assert status.counts(runs) == dict.fromkeys(STATES, 1)


@pytest.mark.parametrize("kind", ["fifo", "aliases", "itself"])
def test_resubmit_ends_at_what_cannot_be_a_configuration(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, "a", "failed")
    place = tmp_path / "a" / "config.yaml"
    place.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "itself":
        place.write_text("a: &a [*a]\n")
    else:
        layers = [f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]" for n in range(1, 12)]
        place.write_text("\n".join(["x0: &x0 [1]", *layers]))
    assert main(["resubmit", "--runs-dir", str(tmp_path), "--failed"]) == 2
    said = capsys.readouterr().err
    assert "config.yaml can't be read" in said
    assert "nothing was started" in said


@pytest.mark.parametrize("place", ["file/runs", "/proc/nowhere/runs"])
def test_runs_that_could_leave_nothing_do_not_start(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = changed(tiny(), runs_dir=str(tmp_path / place))
    with pytest.raises(ConfigError, match="a folder that can be written"):
        run_all([config])
