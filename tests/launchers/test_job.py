"""One queued run in a process of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from optimus_cc.claims import claim, queue, withdraw
from tests.config.command_line import one
from tests.launchers.jobs import FAIL, WAIT, command_of, configuration, folder_of, state_of
from tests.launchers.processes import ROOT


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def test_what_was_frozen_is_run_whatever_becomes_of_the_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    option = tmp_path / "conf" / "training" / "mine.yaml"
    option.parent.mkdir(parents=True)
    default = yaml.safe_load((ROOT / "conf" / "training" / "default.yaml").read_text())
    option.write_text(yaml.safe_dump({**default, "steps": 7, "seed": 1}))
    submitted = tmp_path / "submitted_here"
    submitted.mkdir()
    monkeypatch.chdir(submitted)
    config = one(f"--config-dir {tmp_path / 'conf'} training=mine training.device=cpu runs_dir=runs")
    folder = queue(config).folder
    frozen = folder.config_path.read_bytes()
    option.write_text(yaml.safe_dump({**default, "steps": 99, "seed": 2}))
    checks = """
    folder = Path(os.environ["TEST_FOLDER"])
    assert b"steps: 7" in (folder / "config.yaml").read_bytes()
    assert Path.cwd() == folder.parents[1], Path.cwd()
    from optimus_cc.runs import RunFolder
    if RANK == 0: RunFolder(folder).write_summary({"steps": 7})
    """
    result = run(command_of(tmp_path, {1: checks})(folder), tmp_path)
    assert result.returncode == 0, (folder.logs / "launcher.log").read_text()
    assert folder.config_path.read_bytes() == frozen
    status = folder.status()
    assert status is not None
    assert (status.state, status.total_steps, status.device) == ("finished", 7, "cpu")


def test_exit_codes(tmp_path: Path) -> None:
    config = configuration(tmp_path / "runs")
    folder = folder_of(config)
    assert run(command_of(tmp_path)(folder), ROOT).returncode != 0  # there is nothing
    queue(config)
    with claim(config):
        result = run(command_of(tmp_path)(folder), ROOT)
        assert (result.returncode, "is being run by" in result.stderr) == (69, True)
    queue(config)
    withdraw(folder, "cancelled", "not wanted")
    result = run(command_of(tmp_path)(folder), ROOT)
    assert (result.returncode, "not wanted" in result.stderr) == (130, True)
    queue(config)
    result = run(command_of(tmp_path, default=FAIL)(folder), ROOT)
    assert (result.returncode, result.stderr) == (1, "")
    assert "why" in (folder.logs / "launcher.log").read_text()
    queue(configuration(tmp_path / "runs", time_limit_h=1e-6))
    assert run(command_of(tmp_path, default=WAIT)(folder), ROOT).returncode == 75
    queue(config)
    assert run(command_of(tmp_path)(folder), ROOT).returncode == 0
    assert run(command_of(tmp_path, default=FAIL)(folder), ROOT).returncode == 0  # it is finished


def test_a_configuration_that_has_become_wrong(tmp_path: Path) -> None:
    config = configuration(tmp_path / "runs")
    queue(config)
    folder = folder_of(config)
    folder.config_path.write_text(folder.config_path.read_text().replace("steps: 4", "steps: -4"))
    result = run(command_of(tmp_path)(folder), ROOT)
    assert (result.returncode, "Traceback" in result.stderr) == (2, False)
    state, cause, _ = state_of(config)
    assert (state, "training.steps" in str(cause)) == ("failed", True)
    queue(config)
    assert state_of(config) == ("queued", None, 0)
