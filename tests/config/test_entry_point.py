"""``run.py``: what it prints, what it returns and what it leaves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import run
from optimus_cc import tasks
from optimus_cc.config import ConfigError, Problem, RunConfig
from optimus_cc.config.compose import CONF
from optimus_cc.config.help import GROUPS, help_text
from optimus_cc.runs import RunCancelled, RunFailed

RUN = Path(run.__file__)


def start(folder: Path, *arguments: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *flags, str(RUN), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    "arguments",
    [("model=gpt_tyni",), ("training.steps=many",), ("-m", "model=gpt_tiny,gpt_mini", "parallel=pp4,pp4_v2")],
)
def test_a_mistake_ends_at_once(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = start(tmp_path, *arguments)
    assert result.returncode == 2
    told = [line for line in result.stderr.splitlines() if not line.startswith("checking the configurations")]
    assert told[0].startswith("ConfigError")
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [("--help",), ("--cfg", "job"), ("--cfg", "job", "model=gpt_8_3b")])
def test_questions_are_answered_without_heavy_imports(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = start(tmp_path, *arguments, flags=("-X", "importtime"))
    assert result.returncode == 0
    imported = {
        line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if line.startswith("import time")
    }
    assert "hydra" in imported
    assert not [name for name in imported if re.match(r"(torch|megatron|pandas|numpy|pydantic|tokenizers)\b", name)]
    assert list(tmp_path.iterdir()) == []


def test_help_explains_every_group(tmp_path: Path) -> None:
    text = start(tmp_path, "--help").stdout
    groups = sorted(path.name for path in CONF.iterdir() if path.is_dir())
    assert groups == sorted(GROUPS)
    for group in groups:
        assert re.search(rf"^  {group} +\w", text, re.MULTILINE), f"{group} is not explained"
        for file in (CONF / group).glob("*.yaml"):
            assert re.search(rf"\b{file.stem}\b", text), f"{group}={file.stem} is not listed"
    assert max(map(len, text.splitlines())) <= 120


def test_help_lists_options_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "my_own.yaml").touch()
    assert "my_own" in help_text([CONF, tmp_path])


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["--cfg", "job", "model=x"], "model"),
        (["--cfg", "job", "trainng.steps=3"], "trainng.steps"),
        (["--resolve"], ""),
    ],
)
def test_mistakes_in_questions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], key: str
) -> None:
    assert main(monkeypatch, *arguments) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("ConfigError\n")
    assert key in shown


IN_THIS_PROCESS = ("-m", "hydra/launcher=basic")
"""A sweep through Hydra's own launcher; for ours see test_hydra_launcher.py."""
started: list[RunConfig] = []


def train(config: RunConfig) -> dict[str, Any]:
    """Stands in for the task; the seed says what happens."""
    started.append(config)
    match config.training.seed:
        case 1:
            raise RunFailed("rank 3 failed", "its last lines")
        case 2:
            raise RunCancelled("cancelled")
        case 3:
            raise KeyboardInterrupt
        case 4:
            raise ConfigError(Problem("training.device", "cuda", "cpu", "training.device=cpu"))
        case 5:
            raise ZeroDivisionError("a bug")
        case 6:
            raise ValueError("another bug")
    return {}


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    started.clear()
    monkeypatch.setitem(tasks.TASKS, "train", f"{__name__}:train")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    try:
        return run.main()
    except SystemExit as end:
        return int(str(end.code))


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_task_gets_the_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert main(monkeypatch, "+ablation=cb_no_epilogue", "training.seed=7") == 0
    (config,) = started
    assert (config.ablation, config.training.seed) == ("cb_no_epilogue", 7)
    assert list(tmp_path.iterdir()) == []


def test_a_run_may_refer_to_what_hydra_knows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert main(monkeypatch, "runs_dir=${hydra:runtime.cwd}/runs_of_mine") == 0
    (config,) = started
    assert config.runs_dir == f"{tmp_path}/runs_of_mine"


def test_a_sweep_runs_one_after_the_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert main(monkeypatch, *IN_THIS_PROCESS, "+ablation=baseline,cb", "training.seed=7,8") == 0
    assert [(config.ablation, config.training.seed) for config in started] == [
        ("baseline", 7),
        ("baseline", 8),
        ("cb", 7),
        ("cb", 8),
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_failed_run_is_told_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(monkeypatch, "training.seed=1") == 1
    shown = capsys.readouterr().err
    assert shown.count("rank 3 failed\nits last lines\n") == 1
    assert "Traceback" not in shown


def test_a_failed_run_does_not_stop_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(monkeypatch, *IN_THIS_PROCESS, "training.seed=1,7") == 1
    assert [config.training.seed for config in started] == [1, 7]


@pytest.mark.parametrize("seed", [2, 3])
def test_a_cancelled_run_stops_a_sweep(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    assert main(monkeypatch, *IN_THIS_PROCESS, f"training.seed={seed},7") == 130
    assert [config.training.seed for config in started] == [seed]


def test_a_mistake_that_only_the_task_can_see(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, "training.seed=4") == 2
    assert "training.device=cpu" in capsys.readouterr().err


@pytest.mark.parametrize(("seed", "error"), [(5, ZeroDivisionError), (6, ValueError)])
def test_a_bug_stays_a_bug(monkeypatch: pytest.MonkeyPatch, seed: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        main(monkeypatch, f"training.seed={seed}")


def test_tasks_are_importable_by_name() -> None:
    for name in tasks.TASKS:
        assert callable(tasks.resolve(name))


@pytest.mark.parametrize("arguments", [("--help",), ("launcher.dry_run=true",)])
def test_nobody_reads_what_it_says(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        command = [sys.executable, str(RUN), *arguments]
        result = subprocess.run(command, cwd=tmp_path, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120)
    finally:
        os.close(write)
    assert (result.returncode, result.stderr) == (0, "")
