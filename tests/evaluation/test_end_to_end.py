"""Real trainings evaluated by ``python run.py``, with no network: whatever is asked of one makes a test fail."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from optimus_cc.config.evaluation import TASKS
from optimus_cc.evaluation import results
from optimus_cc.runs import RunFolder
from tests.evaluation import files
from tests.test_end_to_end import command, only_run
from tests.test_end_to_end import workplace as workplace

NO_NETWORK = """
import os, socket

def refused(address):
    with open(os.environ["TEST_NETWORK"], "a") as file:
        file.write(f"{address}\\n")
    raise OSError(f"no network in this test: {address}")

def is_here(address):
    return not isinstance(address, tuple) or address[0] in ("127.0.0.1", "localhost", "::1")

connect, getaddrinfo = socket.socket.connect, socket.getaddrinfo
socket.socket.connect = lambda self, address: connect(self, address) if is_here(address) else refused(address)

def look_up(host, *arguments, **options):
    local = host in (None, "localhost", "127.0.0.1", "::1", socket.gethostname())
    return getaddrinfo(host, *arguments, **options) if local else refused(host)

socket.getaddrinfo = look_up
"""
"""A sitecustomize.py: every process notes what it asks of a network, and does not get it."""
SEED = 71


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("no_network")
    (folder / "sitecustomize.py").write_text(NO_NETWORK)
    files.write(folder / "items", 5)
    return folder


def run(workplace: Path, place: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(place), os.environ.get("PYTHONPATH", "")]))
    known = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment = {**known, "PYTHONPATH": path, "TEST_NETWORK": str(place / "asked.txt"), "HF_HOME": str(place / "hf")}
    return subprocess.run(
        [*command(workplace)[:2], *overrides],
        cwd=workplace,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


def found(folder: RunFolder) -> dict[tuple[str, str], dict[str, Any]]:
    return {(result["kind"], result["layout"]): result for result in results.read_all(folder)}


def test_a_training_and_its_evaluations_without_a_network(workplace: Path, place: Path) -> None:
    items = f"evaluation.data_dir={place / 'items'}"
    training = [*command(workplace, f"training.seed={SEED}", items, "evaluation.after_training=true")[2:]]

    trained = run(workplace, place, *training)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    folder = only_run(workplace, SEED)
    own = found(folder)
    assert set(own) == {("zero_shot", "pp2"), ("perplexity", "pp2")}
    assert "lambada_openai" in trained.stdout
    assert "token_perplexity" in trained.stdout

    elsewhere = [f"run={folder.run_id[-8:]}", f"runs_dir={workplace / 'runs'}", "task=evaluate", "parallel=single"]
    evaluated = run(workplace, place, *elsewhere, items, "evaluation.batch_size=3", "force=true")
    assert evaluated.returncode == 0, evaluated.stdout + evaluated.stderr
    other = found(folder)
    assert set(other) == {("zero_shot", "single"), ("perplexity", "single")}, "the same measurement, in the same files"

    zero_shot, again = own["zero_shot", "pp2"], other["zero_shot", "single"]
    assert list(zero_shot["tasks"]) == list(TASKS)
    for task in TASKS:
        assert zero_shot["tasks"][task]["items"] == {"evaluated": 5, "available": 5}
        for metric, values in zero_shot["tasks"][task]["metrics"].items():
            assert values["value"] == pytest.approx(again["tasks"][task]["metrics"][metric]["value"], rel=1e-4)
        assert zero_shot["data"][task]["bytes"] == (place / "items" / f"{task}.jsonl").stat().st_size
    for name, values in own["perplexity", "pp2"]["metrics"].items():
        assert values["value"] == pytest.approx(other["perplexity", "single"]["metrics"][name]["value"], rel=1e-5)
        assert values["standard_error"] is None
    for result in (*own.values(), *other.values()):
        assert result["checkpoint"]["step"] == 6
        assert result["run_id"] == folder.run_id
        assert result["versions"]["lm_eval"] == "0.4.13"
        assert result["tokenizer"]["vocabulary_size"] <= 300
        assert result["batch_size"] in (16, 3)

    began = {path.name for path in (folder.evaluation / "logs").iterdir()}
    finished = run(workplace, place, *training)
    assert finished.returncode == 0
    assert {path.name for path in (folder.evaluation / "logs").iterdir()} == began, "nothing is measured again"

    wrong = run(workplace, place, *elsewhere, items, "evaluation.tasks=[piqa,rac]")
    assert wrong.returncode == 2
    assert "rac.jsonl" in wrong.stderr
    assert not (place / "asked.txt").exists(), (place / "asked.txt").read_text()
