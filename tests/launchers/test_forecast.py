"""Dry runs: what would happen and what it would take, from what is there, and nothing is written."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from launchers import local
from launchers.forecast import dry_run, forecasts
from launchers.plan import plan
from launchers.sweep import exit_code, run_all
from optimus_cc import disk_budget
from optimus_cc.claims import claim, queue
from optimus_cc.config import ConfigError, RunConfig
from tests.config.command_line import composed, one
from tests.launchers.jobs import configuration, folder_of


def run(config: RunConfig, state: str, step_times: list[float], device: str = "cpu", **changes: Any) -> None:
    """As if it had run, and ended in a state."""
    with claim(config) as claimed:
        for step, step_time in enumerate(step_times, start=1):
            claimed.folder.append_metrics({"kind": "train", "step": step, "step_time_s": step_time})
        claimed.update(state=state, step=len(step_times), device=device, **changes)


def other(config: Any, **training: Any) -> Any:
    return dataclasses.replace(config, training=dataclasses.replace(config.training, **training))


def test_what_would_happen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new, finished, failed, running, queued = (configuration(tmp_path, seed) for seed in range(5))
    run(finished, "finished", [])
    run(failed, "failed", [1.0, 1.0], cause="a rank died")
    queue(queued)
    checkpoint = folder_of(queued).checkpoints / "step_00000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text('{"step": 3, "files": {}, "scientific": {}}')
    with claim(running):
        planned = plan([new, finished, failed, running, queued, new, dataclasses.replace(finished, force=True)])
    assert [one.action for one in planned] == ["start", "finished", "start", "elsewhere", "resume", "twice", "twice"]
    assert planned[4].remaining_steps == 1
    assert "a rank died" in planned[2].remark
    assert "number 1" in planned[5].remark
    assert plan([dataclasses.replace(finished, force=True)])[0].action == "start"
    monkeypatch.setattr(RunConfig, "run_ids", (finished.run_id,))
    assert plan([new])[0].action == "refused"


def test_step_times_are_measured_ones(tmp_path: Path) -> None:
    config = configuration(tmp_path, 1)

    def source() -> tuple[float, str] | None:
        (told,) = forecasts(plan([config]))
        return None if told.step_time is None else (told.step_time.seconds, told.step_time.source)

    assert source() is None
    run(other(configuration(tmp_path, 2), micro_batch_size=4), "finished", [9.0])
    run(configuration(tmp_path, 3), "finished", [9.0], device="cuda")
    assert source() is None  # another batch, another device
    from tests.configurations import low_rank, tiny

    technique: Any = tiny("pp2", low_rank()).technique
    run(dataclasses.replace(configuration(tmp_path, 4), technique=technique), "finished", [7.0, 8.0, 900.0])
    assert (source() or (0.0, ""))[0] == 8.0
    assert "another technique" in (source() or ("", ""))[1]
    run(configuration(tmp_path, 5), "failed", [5.0, 6.0, 7.0])
    assert source() == (6.0, f"6.00 s a step, as {configuration(tmp_path, 5).run_id} took")
    run(config, "failed", [3.0])
    assert source() == (3.0, "3.00 s a step, as this run took before")
    queue(config)
    assert (source() or (0.0, ""))[0] == 3.0


def test_totals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "count_gpus", lambda: 8)
    monkeypatch.setattr(local, "_torch_is_cpu_build", lambda: False)
    configs = [other(configuration(tmp_path, seed), device="auto", steps=3600) for seed in (1, 2, 3)]
    run(configs[0], "failed", [2.0] * 5, device="cuda")
    run(configs[1], "finished", [1.0])
    text = dry_run(configs)
    rows = {line.split()[-1]: line.split() for line in text.splitlines() if "s1-" in line or "s3-" in line}
    disk = disk_budget.text(disk_budget.most_nbytes(configs[0]))
    assert rows[configs[0].run_id][:6] == ["start", "2", "1", "2", "4", disk.split()[0]]
    (total,) = [line.split() for line in text.splitlines() if line.split()[:1] == ["total"]]
    assert total[1:3] == ["4", "8"]
    assert "1 finished already" in text


def test_missing_numbers_are_missing(tmp_path: Path) -> None:
    text = dry_run([configuration(tmp_path, 1)])
    assert re.search(r"start +2 +1 +- ", text)
    limited = dry_run([configuration(tmp_path, 1, time_limit_h=2.5)])
    assert re.search(r"start +2 +1 +<= 2.5 ", limited)
    assert "not measured" in limited


def test_nothing_is_started_or_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    configs = [configuration(tmp_path / "runs", seed, dry_run=True) for seed in (1, 2)]
    outcomes = run_all(configs, job_command=lambda folder: pytest.fail("started"))
    assert exit_code(outcomes) == 0
    assert local.train(configs[0]) == {}
    assert capsys.readouterr().out.count("nothing is started, nothing is written") == 2
    assert list(tmp_path.iterdir()) == []


LARGE = "model=gpt_8_3b parallel=tp8_pp4_dp4 training=paper cluster=a100_hdr200"


def test_what_does_not_fit_here_can_be_planned(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.num_nodes"):
        one(LARGE)
    text = dry_run([one(f"{LARGE} launcher.dry_run=true runs_dir={tmp_path}")])
    assert re.search(r"start +128 +16 ", text)
    assert "needs launcher=slurm" in text
    assert "on this machine it can't run" in dry_run([one(f"training.device=cuda runs_dir={tmp_path}")])


def test_only_trainings_have_dry_runs() -> None:
    with pytest.raises(ConfigError, match=r"launcher\.dry_run"):
        composed("task=exposure launcher.dry_run=true")
