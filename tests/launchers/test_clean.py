"""``python -m launchers clean``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launchers.__main__ import main
from optimus_cc import checkpoints
from optimus_cc.runs import RunFolder, State, Status


def _run(runs_dir: Path, name: str, state: State, steps: tuple[int, ...] = (10, 20, 30)) -> Path:
    folder = RunFolder(runs_dir / name)
    folder.path.mkdir(parents=True)
    folder.write_status(Status(state, step=steps[-1]))
    for step in steps:
        place = checkpoints.path_of(folder.checkpoints, step)
        place.mkdir(parents=True)
        (place / "weights").write_bytes(b"x" * 1000)
        files = {"weights": checkpoints.file_record(place / "weights")}
        (place / checkpoints.MANIFEST).write_text(json.dumps({"step": step, "files": files, "scientific": {}}))
    return folder.checkpoints


def _steps(folder: Path) -> list[int]:
    return [found.step for found in checkpoints.all_in(folder)]


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, Path]:
    states: dict[str, Any] = {"a-done": "finished", "b-done": "finished", "c-failed": "failed", "d-running": "running"}
    return {name: _run(tmp_path, name, state) for name, state in states.items()}


def test_nothing_goes_without_yes(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clean", "--runs-dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("would remove") == 4
    assert "4 checkpoints" in printed
    assert all(_steps(folder) == [30, 20, 10] for folder in runs.values())


def test_the_newest_of_a_finished_run_stays(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["clean", "--yes", "--runs-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("removed ") == 4
    assert {name: _steps(folder) for name, folder in runs.items()} == {
        "a-done": [30],
        "b-done": [30],
        "c-failed": [30, 20, 10],
        "d-running": [30, 20, 10],
    }


def test_the_newest_complete_one_stays(runs: dict[str, Path], tmp_path: Path) -> None:
    (checkpoints.path_of(runs["a-done"], 30) / "weights").unlink()
    assert main(["clean", "a-*", "--yes", "--runs-dir", str(tmp_path)]) == 0
    assert _steps(runs["a-done"]) == [20]
    assert _steps(runs["b-done"]) == [30, 20, 10]


def test_all_of_them(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clean", "b-*", "--all", "--yes", "--runs-dir", str(tmp_path)]) == 0
    assert _steps(runs["b-done"]) == []
    assert _steps(runs["a-done"]) == [30, 20, 10]
    assert main(["clean", "b-*", "--all", "--runs-dir", str(tmp_path)]) == 0
    assert "nothing to remove" in capsys.readouterr().out


def test_a_filter_that_matches_nothing(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["clean", "nope", "--yes", "--runs-dir", str(tmp_path)]) == 1
    assert "matches 'nope'" in capsys.readouterr().err


def test_no_such_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clean", "--runs-dir", str(tmp_path / "nowhere")]) == 1
    assert "there is no folder" in capsys.readouterr().err
