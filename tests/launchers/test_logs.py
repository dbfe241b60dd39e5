"""``python -m launchers logs``."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launchers import logs
from launchers.__main__ import main
from optimus_cc.runs import RunFolder, Status


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "tiny-cb-s1-01234567")
    folder.logs.mkdir(parents=True)
    _set(folder, "running")
    for rank in range(11):
        (folder.logs / f"rank_{rank}.log").write_text("".join(f"rank {rank} line {n}\n\n" for n in range(100)))
    (folder.logs / "rank_0.failure.json").write_text("{}")
    (folder.logs / "launcher.log").write_text("started\n")
    return folder


def _set(folder: RunFolder, state: Any, **changes: Any) -> None:
    folder.write_status(Status(state, pid=os.getpid(), host=socket.gethostname(), **changes))


def _shown(capsys: pytest.CaptureFixture[str], folder: RunFolder, *arguments: str) -> list[str]:
    assert main(["logs", "--runs-dir", str(folder.path.parent), *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_last_lines_of_each(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    lines = _shown(capsys, run, "tiny", "--lines", "2")
    assert lines[:2] == [f"== launcher: {run.logs / 'launcher.log'}", "started"]
    expected = [
        line
        for rank in range(11)
        for line in (
            f"== rank {rank}: {run.logs / f'rank_{rank}.log'}",
            f"rank {rank} line 98",
            f"rank {rank} line 99",
        )
    ]
    assert lines[2:] == expected


def test_one_rank(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    lines = _shown(capsys, run, "01234567", "--rank", "10", "--lines", "1")
    assert lines == [f"== rank 10: {run.logs / 'rank_10.log'}", "rank 10 line 99"]
    assert _shown(capsys, run, "tiny", "--rank", "11") == [f"{run.run_id} has no log of rank 11 yet"]


def test_a_folder_names_its_run(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert _shown(capsys, run, f"{run.path}/", "--lines", "0", "--rank", "0")[0].startswith("== rank 0")


def test_a_run_without_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path / "a")
    folder.path.mkdir()
    _set(folder, "queued")
    assert _shown(capsys, folder, "a") == ["a has no logs yet"]


def test_names(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    runs_dir = run.path.parent
    for name in ("tiny", "tiny-cb-s2-89abcdef"):
        (runs_dir / name).mkdir()
        _set(RunFolder(runs_dir / name), "finished")
    assert logs.find(runs_dir, "tiny").run_id == "tiny"  # all of an id, though others contain it
    assert logs.find(runs_dir, "*s2*").run_id == "tiny-cb-s2-89abcdef"
    assert main(["logs", "--runs-dir", str(runs_dir), "cb"]) == 1
    assert capsys.readouterr().err == "error: 'cb' matches 2 runs: tiny-cb-s1-01234567, tiny-cb-s2-89abcdef\n"
    assert main(["logs", "--runs-dir", str(runs_dir), "sc"]) == 1
    assert "matches 'sc'" in capsys.readouterr().err
    assert main(["logs", "--runs-dir", str(runs_dir / "nowhere"), "sc"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_damaged_and_huge_logs(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    for path in run.logs.glob("rank_*.log"):
        path.unlink()
    (run.logs / "rank_0.log").write_bytes(b"\xff\xfe\0\x1b[31mred\x1b[0m\r\n10%\r20%\r30%\nno end")
    with (run.logs / "rank_1.log").open("wb") as file:
        file.seek(50 * 2**30)  # with a hole
        file.write(b"\nthe end\n")
    (run.logs / "rank_2.log").mkdir()
    (run.logs / "rank_3.log").touch()
    text = "\n".join(_shown(capsys, run, "tiny", "--lines", "1000000000"))
    assert "\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}red\n30%\nno end" in text
    assert "the end" in text
    assert "\x1b" not in text
    assert "\0" not in text
    assert "can't be read" in text


def _in_turn(*actions: Callable[[], Any]) -> Callable[[float], None]:
    """Pauses in each of which something happens."""
    waiting = list(actions)

    def sleep(_: float) -> None:
        waiting.pop(0)()

    return sleep


def test_following_to_the_end(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(1, 11):
        (run.logs / f"rank_{rank}.log").unlink()
    first, second = run.logs / "rank_0.log", run.logs / "rank_1.log"

    def add(path: Path, text: bytes) -> Callable[[], Any]:
        def action() -> None:
            with path.open("ab") as file:
                file.write(text)

        return action

    def replace() -> None:
        first.rename(run.path / "old.log")
        first.write_text("another attempt\n")

    def end() -> None:
        add(first, b"last words\n")()
        _set(run, "failed", cause="reasons", step=3, total_steps=9)

    pauses = _in_turn(
        add(first, b"one\ntw"),
        add(first, b"o\n"),
        add(second, b"begins\n"),
        add(second, b"x" * 3 * 2**20),
        replace,
        end,
    )
    code = logs.logs(run.path.parent, "tiny", rank=None, lines=1, follow=True, sleep=pauses)
    assert code == 0
    lines = capsys.readouterr().out.splitlines()
    after = lines[lines.index("rank 0 line 99") + 1 :]
    assert [line for line in after if "xxx" not in line] == [
        "rank 0 | one",
        "rank 0 | two",
        f"== rank 1: {second}",
        "begins",
        "rank 0 | another attempt",
        "rank 0 | last words",
        f"{run.run_id} is failed at step 3/9: reasons",
    ]
    assert all(len(line) < 400 for line in lines)


def test_ctrl_c_ends_following(run: RunFolder) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    assert logs.logs(run.path.parent, "tiny", rank=None, lines=1, follow=True, sleep=interrupted) == 0
