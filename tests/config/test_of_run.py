"""``run=RUN``: what counts is the run's own configuration, and what may be said anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimus_cc.config import ConfigError, RunConfig
from tests.config.command_line import one, run_with_checkpoint


@pytest.fixture
def run_id(tmp_path: Path) -> str:
    return run_with_checkpoint(tmp_path, "model.num_layers=8 parallel=pp2 technique=baseline training.seed=77")


def export(tmp_path: Path, rest: str) -> RunConfig:
    return one(f"task=export runs_dir={tmp_path} {rest}")


@pytest.mark.parametrize("how", ["id", "part", "folder"])
def test_the_runs_own_configuration_counts(tmp_path: Path, run_id: str, how: str) -> None:
    said = {"id": run_id, "part": run_id[:-3], "folder": str(tmp_path / run_id)}[how]
    config = export(tmp_path, f"run={said} training.device=cpu data.cache_dir=/elsewhere")
    assert config.run == str(tmp_path / run_id)
    assert (config.model.num_layers, config.parallel.label, config.training.seed) == (8, "pp2", 77)
    assert (config.training.device, config.data.cache_dir) == ("cpu", "/elsewhere")
    assert config.run_id == run_id, "where and how is no part of what a run is"


def test_another_layout(tmp_path: Path, run_id: str) -> None:
    assert export(tmp_path, f"run={run_id} parallel=tp2").parallel.label == "tp2"
    config = export(tmp_path, f"run={run_id} parallel.tensor_parallel_size=2")
    assert config.parallel.label == "tp2_pp2", "one key of the run's own layout"


@pytest.mark.parametrize(
    ("said", "key", "told"),
    [
        ("run=nobody", "run", "launchers status"),
        ("run={id} model=gpt_mini", "model", "what the run was trained with"),
        ("run={id} technique=baseline", "technique", "what the run was trained with"),
        ("run={id} training.seed=3", "training.seed", "only device"),
        ("run={id} checkpoint=13", "checkpoint", "12"),
        ("run={id} parallel=tp2 parallel.tensor_parallel_size=3", "model.num_attention_heads", "multiple"),
        ("run={id} export.path=pyproject.toml", "export.path", "nothing is yet"),
        ("run={id} export.format=onnx", "export.format", "huggingface"),
        ("", "run", "task=export works on"),
    ],
)
def test_wrong(tmp_path: Path, run_id: str, said: str, key: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        export(tmp_path, said.format(id=run_id))
    assert error.value.problems[0].key == key
    assert told in str(error.value)


def test_several_runs_match(tmp_path: Path, run_id: str) -> None:
    other = tmp_path / f"{run_id}-2"
    other.mkdir()
    (other / "config.yaml").write_text("{}")
    with pytest.raises(ConfigError, match="2 have this in their id"):
        export(tmp_path, f"run={run_id[:-2]}")
    assert export(tmp_path, f"run={run_id}").run == str(tmp_path / run_id), "the whole id is one run"


def test_a_run_without_a_checkpoint(tmp_path: Path, run_id: str) -> None:
    (tmp_path / run_id / "checkpoints" / "step_00000012" / "manifest.json").unlink()
    with pytest.raises(ConfigError, match="complete checkpoint"):
        export(tmp_path, f"run={run_id}")


def test_other_tasks_take_no_run(tmp_path: Path, run_id: str) -> None:
    for said in (f"run={run_id}", "checkpoint=12"):
        with pytest.raises(ConfigError):
            one(f"runs_dir={tmp_path} {said}")
