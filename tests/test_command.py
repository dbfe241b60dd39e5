"""What every program on the command line has in common: closed streams, paths, and what reaches a terminal."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from optimus_cc import command
from tests.config.command_line import one

ROOT = Path(__file__).parents[1]
PROGRAMS = (
    ["run.py", "--help"],
    ["-m", "launchers", "status"],
    ["-m", "analysis", "table"],
    ["-m", "paper_figures", "--list"],
)
EVIL = "\x1b[31mred\x07\u202e"


def _start(folder: Path, program: list[str], shell: str = "", **environment: str) -> subprocess.CompletedProcess[bytes]:
    arguments = [str(ROOT / program[0]), *program[1:]] if program[0].endswith(".py") else program
    line = ["bash", "-c", f'exec "$@" {shell}', "bash", sys.executable, *arguments]
    path = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(line, cwd=folder, env=path, capture_output=True, timeout=120, check=False)


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program[1])
def test_closed_streams_are_no_mistake(tmp_path: Path, program: list[str], closed: str) -> None:
    (tmp_path / "runs").mkdir()
    found, usual = _start(tmp_path, program, closed), _start(tmp_path, program)
    assert (found.returncode, found.stdout) == (usual.returncode, b"")
    assert b"Traceback" not in found.stderr


def test_what_is_written_to_a_closed_stream_goes_nowhere(tmp_path: Path) -> None:
    """Into no file that is opened later, and into none of a child's."""
    script = (
        "import subprocess, sys\n"
        "from optimus_cc import command\n"
        "def main():\n"
        "    file = open('file', 'w')\n"
        "    print('lost', flush=True)\n"
        "    return subprocess.run([sys.executable, '-c', 'print(1)']).returncode\n"
        "sys.exit(command.run(main))\n"
    )
    assert _start(tmp_path, ["-c", script], ">&-").returncode == 0
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize(
    "program",
    [
        ["-m", "launchers", "status"],
        ["-m", "analysis", "table"],
        ["-m", "analysis", "collect"],
        ["-m", "paper_figures"],
    ],
    ids=lambda program: " ".join(program[1:]),
)
def test_a_folders_name_is_no_command_to_a_terminal(tmp_path: Path, program: list[str]) -> None:
    for name in (EVIL, f"{EVIL}2"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / EVIL / "config.yaml").touch()
    chosen = [*program, "table_1"] if program[1] == "paper_figures" else program
    found = _start(tmp_path, chosen)
    said = (found.stdout + found.stderr).decode()
    assert not {letter for letter in said if not letter.isprintable()} - set("\n\t")
    assert "Traceback" not in said


def test_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert command.to_path("~/a") == tmp_path / "a"
    assert command.to_path("a/~") == Path("a/~")
    for wrong in ("~nobody_is_called_so/a", "caf\udce9"):
        with pytest.raises(argparse.ArgumentTypeError):
            command.to_path(wrong)
    config = one("\"runs_dir='~/x'\" \"data.cache_dir='~/y'\"")
    assert (config.runs_dir, config.data.cache_dir) == (f"{tmp_path}/x", f"{tmp_path}/y")
    assert config.run_id == one().run_id
