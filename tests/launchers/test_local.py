"""What a training run on this machine does around its ranks: folder, status, corpus, device, messages."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from launchers import local
from optimus_cc.config import ConfigError, RunConfig
from optimus_cc.runs import RunCancelled, RunFailed, RunFolder, RunPreempted
from optimus_cc.training import corpus
from tests.configurations import tiny
from tests.launchers.processes import ROOT, rank_command

TRAINER = """
from optimus_cc.runs import RunFolder
folder = RunFolder(os.environ["TEST_FOLDER"])
if RANK == 0:
    for step in range(1, 5):
        loss = float("nan") if step == 4 else 5.0 / step
        folder.append_metrics({"kind": "train", "step": step, "loss": loss, "perplexity": 9.0, "step_time_s": 0.1})
        folder.append_metrics({"kind": "validation", "step": step, "loss": 1.0, "perplexity": 2.71828, "tokens": 5})
"""
FINISH = """
    folder.write_summary({
        "run_id": folder.run_id, "steps": 4, "wall_s": 1.5, "parameters": 1234567,
        "train": {"loss": 1.25}, "validation": {"loss": 1.0, "perplexity": 2.71828, "tokens": 5},
        "step_time_s": {"mean": 0.11, "median": 0.1, "p95": 0.2}, "tokens_per_s": 2560.0,
        "traffic": {"pipeline_backward": {
            "logical_bytes": 4e6, "wire_bytes": 1e6, "logical_bytes_per_step": 1e6, "wire_bytes_per_step": 0.25e6}},
    })
"""


@pytest.fixture
def config(tmp_path: Path) -> Any:
    return _changed(tiny("pp2", num_microbatches=4, device="cpu"), runs_dir=str(tmp_path / "runs"))


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "is_prepared", lambda config: True)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def _changed(config: Any, **changes: Any) -> Any:
    return dataclasses.replace(config, **changes)


def _train(script: str, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    def command(folder: RunFolder, config: RunConfig) -> list[str]:
        monkeypatch.setenv("TEST_FOLDER", str(folder.path))
        return rank_command(script)

    monkeypatch.setattr(local, "rank_command", command)
    return local.train(config)


def _folder(config: RunConfig) -> RunFolder:
    return RunFolder(Path(config.runs_dir) / config.run_id)


def test_finishes(config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    summary = _train(TRAINER + FINISH, config, monkeypatch)
    assert summary["steps"] == 4
    status = _folder(config).status()
    assert status is not None
    assert (status.state, status.step, status.total_steps, status.cause) == ("finished", 4, 4, None)
    output = capsys.readouterr().out
    for text in (
        config.run_id,
        "pp2: 2 ranks on cpu",
        "starting 2 ranks",
        "step 1/4",
        "step 4/4  loss nan",
        "validation at step 4/4  loss 1.000  token perplexity 2.718",
        "1.23M",
        "250.0 kB on the wire, 1.000 MB uncompressed (75.0% saved)",
    ):
        assert text in output


def test_a_finished_run_is_not_run_again(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = _train(TRAINER + FINISH, config, monkeypatch)
    capsys.readouterr()
    assert _train("sys.exit('ran again')", config, monkeypatch) == first
    assert "finished already" in capsys.readouterr().out
    with pytest.raises(RunFailed, match="ran again"):
        _train("sys.exit('ran again')", _changed(config, force=True), monkeypatch)
    assert (_folder(config).path / "previous" / "1" / "summary.json").exists()


@pytest.mark.parametrize(
    ("script", "kind", "state", "cause", "exit_code"),
    [
        (
            "if RANK == 1: print('why'); sys.exit(3)\ntime.sleep(1000)",
            RunFailed,
            "failed",
            "rank 1 exited with code 3",
            1,
        ),
        ("os._exit(75)", RunPreempted, "preempted", "preempted", 75),
        (
            "if RANK == 0: os.kill(int(os.environ['OPTIMUS_CC_SUPERVISOR_PID']), signal.SIGINT)\ntime.sleep(1000)",
            RunCancelled,
            "cancelled",
            "cancelled by Ctrl-C",
            130,
        ),
        ("pass", RunFailed, "failed", "the ranks ended without a summary", 1),
    ],
)
def test_status_says_how_it_ended(
    script: str,
    kind: type[RunFailed],
    state: str,
    cause: str,
    exit_code: int,
    config: RunConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    launcher = _changed(config.launcher, stop_grace_s=0.5)
    config = _changed(config, launcher=launcher)
    with pytest.raises(RunFailed) as caught:
        _train(script, config, monkeypatch)
    assert type(caught.value) is kind
    assert caught.value.exit_code == exit_code
    status = _folder(config).status()
    assert status is not None
    assert (status.state, status.cause) == (state, cause)
    message = str(caught.value)
    first = f"{cause} before the first step" if kind is not RunFailed else f"failed before the first step: {cause}"
    assert message.startswith(f"{config.run_id} {first}")
    assert "starts it again" in message
    if "why" in script:
        assert "why" in message

    capsys.readouterr()
    _train(TRAINER + FINISH, config, monkeypatch)
    earlier = f"was {cause} at step 0" if kind is not RunFailed else f"failed at step 0 ({cause})"
    assert f"{earlier}: starting again" in capsys.readouterr().out
    again = _folder(config).status()
    assert again is not None
    assert (again.state, again.restarts) == ("finished", 1)
    assert (_folder(config).path / "attempts" / "1" / "logs" / "rank_0.log").exists()


def test_step_of_a_failure(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunFailed, match="failed at step 4: rank 0 failed with ValueError: boom"):
        _train(TRAINER + "    report.failed(ValueError('boom')); sys.exit(1)", config, monkeypatch)
    status = _folder(config).status()
    assert status is not None
    assert status.step == 4


def test_an_error_of_our_own_is_in_the_status(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(local, "supervise", broken)
    with pytest.raises(ZeroDivisionError):
        local.train(config)
    status = _folder(config).status()
    assert status is not None
    assert (status.state, status.cause) == ("failed", "ZeroDivisionError: oops")


def test_device_reaches_the_ranks(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "(Path(os.environ['TEST_FOLDER']) / f'device_{RANK}').write_text(os.environ['OPTIMUS_CC_DEVICE'])"
    with pytest.raises(RunFailed):
        _train(script, config, monkeypatch)
    assert [(_folder(config).path / f"device_{rank}").read_text() for rank in range(2)] == ["cpu", "cpu"]


# The corpus.


def _corpus_script(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(corpus, "is_prepared", lambda config: False)
    command = [sys.executable, "-c", textwrap.dedent(script)]
    monkeypatch.setattr(local, "corpus_command", lambda folder: [*command, str(folder.config_path)])


def test_corpus_is_prepared_first(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _corpus_script(monkeypatch, "import sys; print('building', 'steps' in open(sys.argv[1]).read())")
    _train(TRAINER + FINISH, config, monkeypatch)
    assert "building True\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        (
            "import sys; print('reading'); sys.stderr.write('DataError: a.jsonl, line 3: no text\\n'); sys.exit(3)",
            "the corpus can't be prepared: DataError: a.jsonl, line 3: no text",
        ),
        (
            "import os; os.kill(os.getpid(), 9)",
            "the corpus can't be prepared: the corpus preparation was killed by SIGKILL",
        ),
    ],
)
def test_corpus_fails(script: str, cause: str, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    _corpus_script(monkeypatch, script)
    with pytest.raises(RunFailed):
        _train(TRAINER + FINISH, config, monkeypatch)
    status = _folder(config).status()
    assert status is not None
    assert status.state == "failed"
    assert (status.cause or "").startswith(cause)


def test_corpus_source_is_missing(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(config: RunConfig) -> bool:
        raise corpus.DataError("a.jsonl is gone")

    monkeypatch.setattr(corpus, "is_prepared", raises)
    with pytest.raises(RunFailed, match="is gone"):
        _train(TRAINER + FINISH, config, monkeypatch)


# The device.


@pytest.mark.parametrize(
    ("visible", "installed", "count"),
    [
        (None, 0, 0),
        (None, 4, 4),
        ("", 4, 0),
        ("-1", 4, 0),
        ("0,1", 4, 2),
        ("3, 2,1", 4, 3),
        ("0,7,1", 4, 1),
        ("GPU-8932f937,GPU-b1234567", 4, 2),
        ("0,1", 0, 0),
    ],
)
def test_count_gpus(visible: str | None, installed: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    files = [f"/dev/nvidia{index}" for index in range(installed)] + ["/dev/nvidiactl", "/dev/nvidia-uvm"]
    monkeypatch.setattr("glob.glob", lambda pattern: files)
    monkeypatch.setenv("PATH", "")
    assert local.count_gpus() == count


def test_count_gpus_without_device_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: x)'\necho 'GPU 1: A (UUID: y)'\n")
    tool.chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("glob.glob", lambda pattern: [])
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert local.count_gpus() == 2


@pytest.mark.parametrize(
    ("device", "gpus", "cpu_build", "chosen", "notices"),
    [
        ("cpu", 8, False, "cpu", 0),
        ("cuda", 2, False, "cuda", 0),
        ("cuda", 1, False, None, 0),
        ("cuda", 2, True, None, 0),
        ("auto", 2, False, "cuda", 0),
        ("auto", 1, False, "cpu", 1),
        ("auto", 2, True, "cpu", 1),
        ("auto", 0, True, "cpu", 0),
    ],
)
def test_choose_device(
    device: str, gpus: int, cpu_build: bool, chosen: str | None, notices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "count_gpus", lambda: gpus)
    monkeypatch.setattr(local, "_torch_is_cpu_build", lambda: cpu_build)
    config = tiny("pp2", device=device)
    if chosen is None:
        with pytest.raises(ConfigError, match=r"training\.device = .*cuda"):
            local.choose_device(config)
    else:
        device, said = local.choose_device(config)
        assert (device, len(said)) == (chosen, notices)


def test_imports_no_torch() -> None:
    """Launching must stay quick; the ranks import what they need."""
    code = "import sys, launchers.local, optimus_cc.training.corpus; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
