"""Evaluations around their ranks, which are scripts here: what is measured again, what fails, and what is kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launchers import evaluate, local, sweep
from launchers.plan import Planned
from launchers.supervise import Stop
from launchers.sweep import Outcome
from optimus_cc import checkpoints
from optimus_cc.checkpoints import MANIFEST
from optimus_cc.config import ConfigError, RunConfig
from optimus_cc.evaluation import results
from optimus_cc.records import to_json
from optimus_cc.runs import RunCancelled, RunFailed, RunFolder
from optimus_cc.training import corpus
from tests.configurations import tiny
from tests.evaluation import files
from tests.launchers import jobs
from tests.launchers.processes import ROOT, rank_command

TRAIN = """
from optimus_cc.runs import RunFolder
if RANK == 0:
    RunFolder(os.environ["TEST_FOLDER"]).write_summary({"steps": 4, "validation": {"loss": 1.0}})
"""
MEASURE = """
from optimus_cc.evaluation import results
from optimus_cc.runs import RunFolder
from optimus_cc import checkpoints
folder = RunFolder(os.environ["TEST_FOLDER"])
if RANK == 0:
    config = folder.run_config()
    run = RunFolder(config.run)
    found = checkpoints.at(checkpoints.path_of(run.checkpoints, config.checkpoint))
    for kind in results.kinds(config) if config.force else results.missing(run, results.describe(found), config):
        scored = {"tasks": {}} if kind == "zero_shot" else {"metrics": {}, "items": {"documents": 1, "tokens": 2}}
        results.write(run, {
            "kind": kind, "checkpoint": results.describe(found), "settings": results.settings(config, kind),
            "versions": {"lm_eval": "0"}, "measured_in": config.parallel.label, **scored})
    folder.write_summary({})
"""
FAIL = "print('why it failed'); sys.exit(3)"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setattr(corpus, "is_prepared", lambda config: True)
    monkeypatch.setattr(corpus, "prepare", lambda config, report: tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    data_dir = files.write(tmp_path / "items", 2)
    this: Any = tiny("pp2", num_microbatches=4, device="cpu")
    evaluation = replace(this.evaluation, data_dir=str(data_dir), after_training=True)
    launcher = replace(this.launcher, stop_grace_s=0.5)
    changed: RunConfig = replace(this, runs_dir=str(tmp_path / "runs"), evaluation=evaluation, launcher=launcher)
    return changed


def change(config: RunConfig, **evaluation: Any) -> RunConfig:
    this: Any = config
    settings: Any = config.evaluation
    changed: RunConfig = replace(this, evaluation=replace(settings, **evaluation))
    return changed


def folder_of(config: RunConfig) -> RunFolder:
    return RunFolder(Path(config.runs_dir) / config.run_id)


def save(config: RunConfig, step: int) -> None:
    """A checkpoint as far as its files tell."""
    folder = folder_of(config)
    place = checkpoints.path_of(folder.checkpoints, step)
    place.mkdir(parents=True)
    manifest = {"step": step, "files": {}, "scientific": json.loads(to_json(config.scientific()))}
    (place / MANIFEST).write_text(json.dumps(manifest))


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What ranks run: under ``train`` and ``evaluate``; and how often each has been started, in ``started``."""
    chosen: dict[str, Any] = {"train": TRAIN, "evaluate": MEASURE, "started": []}

    def command(folder: RunFolder, config: RunConfig) -> list[str]:
        monkeypatch.setenv("TEST_FOLDER", str(folder.path))
        chosen["started"].append(config.task.name)
        if config.task.name == "train" and not checkpoints.all_in(folder.checkpoints):
            save(config, 4)
        return [word for word in rank_command(chosen[config.task.name]) if word != "-S"]  # they read configurations

    monkeypatch.setattr(local, "rank_command", command)
    monkeypatch.setattr(evaluate, "rank_command", command)
    return chosen


def found(config: RunConfig) -> list[str]:
    return [result["kind"] for result in results.read_all(folder_of(config))]


def state_of(config: RunConfig) -> str:
    status = folder_of(config).status()
    assert status is not None
    return status.state


def test_a_training_is_evaluated_once(config: RunConfig, scripts: dict[str, Any]) -> None:
    local.train(config)
    assert scripts["started"] == ["train", "evaluate"]
    assert found(config) == ["perplexity", "zero_shot"]
    local.train(config)
    assert scripts["started"] == ["train", "evaluate"]


def test_without_after_training_nothing_is_evaluated(config: RunConfig, scripts: dict[str, Any]) -> None:
    local.train(change(config, after_training=False))
    assert scripts["started"] == ["train"]
    local.train(config)  # and it can be asked for later
    assert scripts["started"] == ["train", "evaluate"]


def test_a_failed_evaluation_leaves_the_training_finished(
    config: RunConfig, scripts: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    scripts["evaluate"] = FAIL
    with pytest.raises(RunFailed) as error:
        local.train(config)
    assert state_of(config) == "finished"
    assert "the evaluation of" in str(error.value)
    assert "why it failed" in str(error.value)
    assert "trains nothing" in str(error.value)
    scripts["evaluate"] = MEASURE
    local.train(config)
    assert scripts["started"] == ["train", "evaluate", "evaluate"]
    assert found(config) == ["perplexity", "zero_shot"]


def test_a_broken_item_is_told_before_the_training_starts(config: RunConfig, scripts: dict[str, Any]) -> None:
    (Path(str(config.evaluation.data_dir)) / "piqa.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"piqa\.jsonl, line 1: no key 'goal'"):
        local.train(config)
    assert scripts["started"] == []
    assert not folder_of(config).path.exists()


def test_a_broken_document_is_told_before_the_training_starts(
    config: RunConfig, scripts: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_text("{}\n")
    with pytest.raises(ConfigError, match=r"documents\.jsonl, line 1: no key 'text'"):
        local.train(change(config, tasks=(), documents=str(path)))
    assert scripts["started"] == []
    assert not folder_of(config).path.exists()


def test_an_end_that_was_asked_for(config: RunConfig, scripts: dict[str, Any]) -> None:
    local.train(change(config, after_training=False))
    scripts["evaluate"] = "time.sleep(1000)"
    stop = Stop()
    stop.request("Ctrl-C", at_once=True)
    with pytest.raises(RunCancelled, match="cancelled by Ctrl-C"):
        evaluate.after_training(config, folder_of(config), stop)
    assert state_of(config) == "finished"


# -- task=evaluate -----------------------------------------------------------------------------------------------------


def evaluating(config: RunConfig, **changes: Any) -> RunConfig:
    this: Any = evaluate.of_training(config, folder_of(config))
    changed: RunConfig = replace(this, **changes)
    return changed


def test_other_settings_get_files_of_their_own(config: RunConfig, scripts: dict[str, Any]) -> None:
    save(config, 4)
    save(config, 9)
    assert set(evaluate.evaluate(evaluating(config))) == {"zero_shot", "perplexity"}
    evaluate.evaluate(evaluating(config, checkpoint=4))
    evaluate.evaluate(evaluating(change(config, limit=1, perplexity=False)))
    names = sorted(path.name.rpartition("-")[0] for path in folder_of(config).evaluation.glob("*.json"))
    assert names == [
        *("step_00000004-perplexity", "step_00000004-zero_shot", "step_00000009-perplexity"),
        *("step_00000009-zero_shot", "step_00000009-zero_shot"),
    ]
    assert scripts["started"] == ["evaluate"] * 3


def test_other_data_is_another_setting(config: RunConfig, scripts: dict[str, Any]) -> None:
    save(config, 4)
    evaluate.evaluate(evaluating(config))
    moved = Path(str(config.evaluation.data_dir)).with_name("moved")
    shutil.copytree(str(config.evaluation.data_dir), moved)
    evaluate.evaluate(evaluating(change(config, data_dir=str(moved))))
    assert scripts["started"] == ["evaluate"]  # the same items at another place
    with (moved / "race.jsonl").open("a") as file:
        file.write(json.dumps(files.rows("race", 5)) + "\n")
    evaluate.evaluate(evaluating(change(config, data_dir=str(moved))))
    assert scripts["started"] == ["evaluate"] * 2
    assert found(config) == ["perplexity", "zero_shot", "zero_shot"]


def test_another_lm_eval_is_another_setting(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    before = results.settings(config, "zero_shot")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "99.0")
    assert results.settings(config, "zero_shot") != before


def test_what_is_there_is_measured_again_by_force_only(config: RunConfig, scripts: dict[str, Any]) -> None:
    save(config, 4)
    evaluate.evaluate(evaluating(config))
    single = replace(config.parallel, pipeline_parallel_size=1)
    again = evaluating(config, parallel=single)
    assert evaluate.evaluate(again)["zero_shot"]["measured_in"] == "pp2"  # scores don't depend on the layout
    assert evaluate.evaluate(replace(again, force=True))["zero_shot"]["measured_in"] == "single"
    assert scripts["started"] == ["evaluate"] * 2


def test_a_checkpoint_that_was_made_anew_is_measured_anew(config: RunConfig, scripts: dict[str, Any]) -> None:
    save(config, 4)
    evaluate.evaluate(evaluating(config))
    manifest = folder_of(config).checkpoints / "step_00000004" / MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "time": "later"}))
    evaluate.evaluate(evaluating(config))
    assert scripts["started"] == ["evaluate"] * 2
    assert found(config) == ["perplexity", "zero_shot"]


def removing(config: RunConfig, then: Callable[[], None] = lambda: None) -> Callable[..., None]:
    """Ranks that fail because the training, which goes on, removes their checkpoint."""

    def start(command: list[str], ranks: int, asked: RunConfig, *_: Any) -> None:
        shutil.rmtree(checkpoints.path_of(folder_of(config).checkpoints, asked.checkpoint or 0))
        then()
        raise RunFailed("rank 0 failed with CheckpointError: a file is missing")

    return start


def test_a_checkpoint_that_is_removed_meanwhile_makes_way_for_the_newest(
    config: RunConfig, scripts: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(config, 4)
    real = local.run_ranks

    def next_one() -> None:
        save(config, 6)
        monkeypatch.setattr(evaluate, "run_ranks", real)

    attempts = iter([removing(config, next_one), real])
    monkeypatch.setattr(evaluate, "run_ranks", lambda *arguments: next(attempts)(*arguments))
    evaluate.evaluate(evaluating(config))
    assert "the checkpoint of step 4 was removed while it was being evaluated" in capsys.readouterr().out
    assert {result["checkpoint"]["step"] for result in results.read_all(folder_of(config))} == {6}


def test_a_checkpoint_may_go_once_it_is_loaded(config: RunConfig, scripts: dict[str, Any]) -> None:
    save(config, 4)
    scripts["evaluate"] = MEASURE + "    import shutil; shutil.rmtree(found.path)\n"
    assert set(evaluate.evaluate(evaluating(config))) == {"zero_shot", "perplexity"}
    assert scripts["started"] == ["evaluate"]


def test_a_checkpoint_that_was_named_and_is_removed_meanwhile(
    config: RunConfig, scripts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(config, 4)
    save(config, 6)
    monkeypatch.setattr(evaluate, "run_ranks", removing(config))
    with pytest.raises(RunFailed, match="step 4 was removed while it was being evaluated") as error:
        evaluate.evaluate(evaluating(config, checkpoint=4))
    assert "keep_last" in str(error.value)


def test_ranks_that_fail_are_told_with_their_last_lines(config: RunConfig, scripts: dict[str, Any]) -> None:
    save(config, 4)
    scripts["evaluate"] = FAIL
    with pytest.raises(RunFailed, match=r"why it failed(?s:.*)evaluation/logs/step_00000004"):
        evaluate.evaluate(evaluating(config))


# -- sweeps ------------------------------------------------------------------------------------------------------------


def test_a_sweep_evaluates_what_was_finished_before_it(config: RunConfig, scripts: dict[str, Any]) -> None:
    local.train(change(config, after_training=False))
    finished = Outcome(Planned(config, folder_of(config), "finished"), skipped=True)
    (outcome,) = evaluate.after_sweep([finished], Stop())
    assert outcome == finished
    assert found(config) == ["perplexity", "zero_shot"]
    assert evaluate.after_sweep([finished], Stop()) == [finished]
    assert scripts["started"] == ["train", "evaluate"]


def test_a_sweep_in_which_that_fails_goes_on_and_tells(
    config: RunConfig, scripts: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    local.train(change(config, after_training=False))
    scripts["evaluate"] = FAIL
    finished = Outcome(Planned(config, folder_of(config), "finished"), skipped=True)
    first, second = evaluate.after_sweep([finished, finished], Stop())
    assert scripts["started"] == ["train", "evaluate", "evaluate"]
    assert first.state == second.state == "failed"
    assert "why it failed" in capsys.readouterr().out


def test_a_job_that_fails_after_its_training_is_a_failure_of_the_sweep(tmp_path: Path) -> None:
    folder_of_jobs = tmp_path / "job"
    folder_of_jobs.mkdir()
    command = jobs.command_of(folder_of_jobs)
    file = folder_of_jobs / "job.py"
    file.write_text(
        file.read_text().replace("sys.exit(job.main(sys.argv[1:]))", "sys.exit(job.main(sys.argv[1:]) or 1)")
    )
    (outcome,) = sweep.run_all([jobs.configuration(tmp_path / "runs")], job_command=command)
    assert outcome.state == "failed"
    assert "it is trained, but its job exited with code 1" in str(outcome.error)
    assert jobs.state_of(outcome.config)[0] == "finished"


def test_missing_packages(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    save(config, 4)
    monkeypatch.setattr(evaluate, "_PACKAGES", ("no_such_package",))
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[evaluation\]'"):
        evaluate.check(config)
