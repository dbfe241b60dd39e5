"""Whole runs through ``python run.py``: real ranks, real text, and what goes wrong in them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optimus_cc import process
from optimus_cc.runs import RunFolder

ROOT = Path(__file__).parents[1]
WORDS = ["stage", "gradient", "sends", "receives", "rank", "small", "large", "tensor", "over", "link"]


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small corpus of the user's own."""
    folder = tmp_path_factory.mktemp("end_to_end")
    words = random.Random(5)
    with (folder / "corpus.jsonl").open("w") as file:
        for _ in range(60):
            text = " ".join(words.choice(WORDS) for _ in range(200))
            file.write(json.dumps({"text": text}) + "\n")
    return folder


def command(workplace: Path, *overrides: str) -> list[str]:
    return [
        *(sys.executable, str(ROOT / "run.py")),
        *("parallel=pp2", "model.num_layers=2", "model.hidden_size=32", "model.sequence_length=32"),
        *("data=jsonl", f"data.path={workplace / 'corpus.jsonl'}", f"data.cache_dir={workplace / 'cache'}"),
        *("data.split=[0.8,0.1,0.1]", "tokenizer.vocabulary_size=300", f"runs_dir={workplace / 'runs'}"),
        *("training.steps=6", "training.validation_interval=3", "launcher.stop_grace_s=2"),
        *("model.num_attention_heads=2", *overrides),
    ]


def environment() -> dict[str, str]:
    return {**os.environ, "WANDB_SILENT": "true", "HF_HUB_OFFLINE": "1"}


def run(workplace: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(workplace, *overrides), cwd=workplace, env=environment(), capture_output=True, text=True, timeout=240
    )


def only_run(workplace: Path, seed: int) -> RunFolder:
    (path,) = (workplace / "runs").glob(f"*-s{seed}-*")
    return RunFolder(path)


@pytest.fixture(scope="session")
def finished(workplace: Path) -> tuple[subprocess.CompletedProcess[str], RunFolder]:
    """One run to the end; the tests below read what it left."""
    result = run(workplace, "training.seed=1", "tracking=wandb", "launcher.threads_per_rank=2")
    assert result.returncode == 0, result.stdout + result.stderr
    return result, only_run(workplace, 1)


def test_run_ends_with_a_summary_and_a_complete_folder(
    finished: tuple[subprocess.CompletedProcess[str], RunFolder],
) -> None:
    result, folder = finished
    assert "validation token perplexity" in result.stdout
    status = folder.status()
    assert status is not None
    assert (status.state, status.step, status.cause) == ("finished", 6, None)
    trained, validated = list(folder.metrics("train")), list(folder.metrics("validation"))
    assert [record["step"] for record in trained] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in validated] == [3, 6]
    wanted = {"loss", "perplexity", "grad_norm", "learning_rate", "tokens_per_s", "tflop_per_s_per_rank", "step_time_s"}
    for record in trained:
        assert wanted <= record.keys()
        assert record["perplexity"] == pytest.approx(math.exp(record["loss"]))
    assert trained[-1]["loss"] < trained[0]["loss"]
    provenance = folder.provenance()
    assert provenance is not None
    assert {"git", "versions", "host", "command"} <= provenance.keys()
    assert all((folder.logs / f"rank_{rank}.log").is_file() for rank in range(2))


def test_summary_is_made_of_the_records(finished: tuple[subprocess.CompletedProcess[str], RunFolder]) -> None:
    _, folder = finished
    summary = folder.summary()
    assert summary is not None
    trained, validated = list(folder.metrics("train")), list(folder.metrics("validation"))
    assert summary["run_id"] == folder.run_id
    assert summary["train"]["loss"] == trained[-1]["loss"]
    assert summary["validation"]["loss"] == validated[-1]["loss"]
    for name, totals in summary["traffic"].items():
        for kind in ("logical_bytes", "wire_bytes"):
            assert totals[kind] == pytest.approx(sum(record["traffic"][name][kind] for record in trained))
    backward = summary["traffic"]["pipeline_backward"]
    assert 0 < backward["wire_bytes"] < backward["logical_bytes"]


def test_offline_tracking_is_a_copy(finished: tuple[subprocess.CompletedProcess[str], RunFolder]) -> None:
    pytest.importorskip("wandb")
    _, folder = finished
    assert len(list(folder.path.glob("wandb/offline-run-*"))) == 1
    assert "tracking: could not" not in (folder.logs / "rank_0.log").read_text()


def test_finished_run_is_not_run_again(
    workplace: Path, finished: tuple[subprocess.CompletedProcess[str], RunFolder]
) -> None:
    _, folder = finished
    before = folder.metrics_path.read_bytes()
    again = run(workplace, "training.seed=1", "tracking=wandb")
    assert again.returncode == 0
    assert "not run again" in again.stdout
    assert folder.metrics_path.read_bytes() == before


def test_rerun_gives_the_same_numbers(
    workplace: Path, finished: tuple[subprocess.CompletedProcess[str], RunFolder]
) -> None:
    """To the bit, with two threads to a rank; also when each rank is executed, and not forked from a common parent."""
    _, folder = finished
    executed = "import sys, run, launchers.supervise as s; s.can_fork = lambda command: False; sys.exit(run.main())"
    arguments = command(workplace, "training.seed=1", f"runs_dir={workplace / 'elsewhere'}")[2:]
    other = subprocess.run(
        [sys.executable, "-c", executed, *arguments, "launcher.threads_per_rank=2"],
        cwd=workplace,
        env={**environment(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert other.returncode == 0, other.stderr
    (path,) = (workplace / "elsewhere").glob("*-s1-*")

    def computed(of: RunFolder) -> tuple[list[tuple[int, float]], list[str]]:
        # PyTorch's files of tensors; the others hold times, too.
        files = sorted(of.checkpoints.glob("*/*.distcp"))
        assert len(files) >= 2
        return (
            [(record["step"], record["loss"]) for record in of.metrics()],
            [hashlib.sha256(file.read_bytes()).hexdigest() for file in files],
        )

    assert computed(RunFolder(path)) == computed(folder)


def test_loss_that_is_not_a_number_stops_the_run_and_says_so(workplace: Path) -> None:
    diverging = ("optimizer.learning_rate=1e16", "optimizer.clip_grad=0", "optimizer.name=sgd")
    result = run(workplace, "training.seed=2", *diverging)
    output = result.stdout + result.stderr
    assert result.returncode == 1
    assert "NonFiniteLoss" in output
    assert "training.on_nonfinite_loss=continue" in output
    status = only_run(workplace, 2).status()
    assert status is not None
    assert status.state == "failed"
    assert "NonFiniteLoss" in str(status.cause)
    tolerated = run(workplace, "training.seed=2", "training.on_nonfinite_loss=continue", *diverging)
    assert tolerated.returncode == 0, tolerated.stderr
    losses = [record["loss"] for record in only_run(workplace, 2).metrics("train")]
    assert len(losses) == 6
    assert not math.isfinite(losses[-1])


def rank_processes(folder: RunFolder) -> dict[int, int]:
    """Process id of each living rank of a run, by rank: executed or forked, it writes to its log."""
    logs = {str(process.log_path(folder.logs.resolve(), rank)): rank for rank in range(8)}
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to somebody else
            if entry.name.isdigit() and (rank := logs.get(os.readlink(entry / "fd" / "1"))) is not None:
                found[rank] = int(entry.name)
    return found


def disturb(
    workplace: Path, seed: int, what: Callable[[subprocess.Popen[str], dict[int, int]], Any], *more: str
) -> str:
    """Start a long run, do something to it once it trains, and return what it printed when it has ended."""
    process = subprocess.Popen(
        command(workplace, f"training.seed={seed}", *(more or ("training.steps=100000",))),
        cwd=workplace,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not (folders := list((workplace / "runs").glob(f"*-s{seed}-*"))) or not RunFolder(folders[0]).latest(
            "train"
        ):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, "the run did not start"
            time.sleep(0.2)
        what(process, rank_processes(RunFolder(folders[0])))
        output, _ = process.communicate(timeout=90)
    finally:
        process.kill()
    deadline = time.monotonic() + 20
    while (left := rank_processes(RunFolder(folders[0]))) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, "ranks are left"
    return output


def _state(workplace: Path, seed: int) -> tuple[str, str, int]:
    status = only_run(workplace, seed).status()
    assert status is not None
    return status.state, str(status.cause), status.step


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank_is_named_and_ends_the_run(workplace: Path, rank: int) -> None:
    output = disturb(workplace, 10 + rank, lambda _, ranks: os.kill(ranks[rank], signal.SIGKILL))
    state, cause, step = _state(workplace, 10 + rank)
    assert state == "failed"
    assert f"rank {rank}" in cause
    assert "SIGKILL" in cause
    assert step > 0
    assert cause in output


def test_interrupt_ends_at_once_as_cancelled(workplace: Path) -> None:
    disturb(workplace, 20, lambda process, _: process.send_signal(signal.SIGINT))
    assert _state(workplace, 20)[0] == "cancelled"


def test_first_sigterm_stops_at_a_step_boundary(workplace: Path) -> None:
    disturb(workplace, 21, lambda process, _: process.send_signal(signal.SIGTERM))
    state, _, step = _state(workplace, 21)
    assert state == "preempted"
    records = list(only_run(workplace, 21).metrics("train"))
    assert records[-1]["step"] == step


def test_supervisor_killed_leaves_no_rank(workplace: Path) -> None:
    disturb(workplace, 22, lambda process, _: process.kill())


def test_preempted_then_killed_ends_as_if_nothing_had_happened(workplace: Path) -> None:
    length = "training.steps=80", "training.checkpoint.interval_steps=10"
    whole = run(workplace, "training.seed=24", *length, f"runs_dir={workplace / 'whole'}")
    assert whole.returncode == 0, whole.stderr
    disturb(workplace, 24, lambda process, _: process.send_signal(signal.SIGTERM), *length)
    state, _, step = _state(workplace, 24)
    assert state == "preempted"

    def kill_later(process: subprocess.Popen[str], ranks: dict[int, int]) -> None:
        while (only_run(workplace, 24).latest("train") or {})["step"] < step + 12:
            time.sleep(0.05)
        process.kill()

    output = disturb(workplace, 24, kill_later, *length)
    assert f"going on from step {step}" in output
    last = run(workplace, "training.seed=24", *length)
    assert last.returncode == 0, last.stderr
    assert "going on from step" in last.stdout
    assert "was running until its supervisor" in last.stdout
    folder, (expected,) = only_run(workplace, 24), map(RunFolder, (workplace / "whole").glob("*-s24-*"))

    def computed(of: RunFolder) -> list[tuple[str, int, float]]:
        return [(record["kind"], record["step"], record["loss"]) for record in of.metrics() if "loss" in record]

    assert computed(folder) == computed(expected)
    summaries = [of.summary() or {} for of in (folder, expected)]
    for name in ("validation", "train", "traffic", "run_id"):
        assert summaries[0][name] == summaries[1][name], name
    status = folder.status()
    assert status is not None
    assert (status.state, status.restarts) == ("finished", 2)
    assert "not run again" in run(workplace, "training.seed=24", *length).stdout


def test_rank_that_hangs_is_named(workplace: Path) -> None:
    stopped = "training.timeout_s=6", "training.steps=100000"
    output = disturb(workplace, 23, lambda _, ranks: os.kill(ranks[1], signal.SIGSTOP), *stopped)
    state, cause, _ = _state(workplace, 23)
    assert state == "failed"
    assert "rank 1" in cause
    assert "hung" in cause or "did not answer" in cause or "no progress" in cause
    assert cause in output
