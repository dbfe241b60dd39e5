"""task=simulate as it is asked for: one table for a sweep, files to look at, and words about how far to trust it."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launchers.forecast import forecasts
from launchers.plan import plan as plan_runs
from optimus_cc.config import ConfigError
from optimus_cc.config.compose import CONF
from optimus_cc.simulation import predict
from optimus_cc.simulation.report import simulate, simulate_all
from tests.config.command_line import composed as compose
from tests.simulation.configurations import PAPER, composed

SWEEP = f"-m task=simulate model=gpt_2_5b,gpt_8_3b technique=baseline,cb_fe_sc {PAPER}"


def test_a_sweep_is_one_table(tmp_path: Path) -> None:
    """And starts, claims and leaves nothing."""
    result = subprocess.run(
        [sys.executable, str(CONF.parent / "run.py"), *SWEEP.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CONF.parent)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert sum(line.startswith("predicted, not measured") for line in lines) == 1
    rows = [line for line in lines if line.startswith("gpt_")]
    assert [row.split()[0] for row in rows] == ["gpt_2_5b", "gpt_2_5b", "gpt_8_3b", "gpt_8_3b"]
    assert "+0.0 %" in rows[0]
    assert list(tmp_path.iterdir()) == []


def test_one_technique_stands_beside_its_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    config = composed(f"model=gpt_8_3b technique=cb_fe_sc {PAPER}")
    baseline = predict(composed(f"model=gpt_8_3b technique=baseline {PAPER}"))
    result = simulate(config)
    gain = 100 * (baseline.step_time_s / predict(config).step_time_s - 1)
    assert result["speedup_percent"]["effective"] == pytest.approx(gain)
    text = capsys.readouterr().out
    for said in (
        "predicted",
        f"{gain:+.1f} %",
        "fitted device.efficiency.matmul_fp32",
        "inside the range",
        "line rate 200",
    ):
        assert said in text


def test_what_it_rests_on_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    paper = f"model=gpt_8_3b technique=cb {PAPER}"
    simulate_all([composed(f"{paper} cluster=h100_ndr400"), composed(f"{paper} training.precision=bf16")])
    text = capsys.readouterr().out
    assert "nothing was fitted for it" in text
    assert "outside, in precision bf16" in text
    plain = composed(f"{paper} parallel.split_over_tensor_parallel=false tokenizer.vocabulary_size=2048")
    simulate(plain)
    text = capsys.readouterr().out
    assert "tokenizer.vocabulary_size=50257" in text
    assert "parallel.split_over_tensor_parallel=true" in text


def test_bandwidth_can_be_asked_for() -> None:
    line = f"model=gpt_8_3b technique=cb_fe_sc {PAPER}"
    quick = predict(composed(f"{line} simulation.bandwidth=line_rate"))
    assert quick.bandwidth == "line_rate"
    assert (
        quick.step_time_s
        == predict(composed(line), bandwidth="line_rate").step_time_s
        < predict(composed(line)).step_time_s
    )


def test_a_trace_has_rows_that_nothing_overlaps(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    config = composed(f"model=gpt_8_3b technique=cb_fe_sc {PAPER} simulation.trace={file}")
    simulate(config)
    content = json.loads(file.read_text())
    events = [event for event in content["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    assert min(event["ts"] for event in events) == 0
    end = max(event["ts"] + event["dur"] for event in events)
    assert end == pytest.approx(1e6 * predict(config).step_time_s, rel=1e-6)
    for stage in range(4):
        row = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if (e["pid"], e["tid"]) == (stage, 0) and e["dur"])
        assert all(later[0] >= earlier[1] - 0.01 for earlier, later in itertools.pairwise(row))
    kinds = {event["cat"].partition(",")[0] for event in events}
    assert {
        "forward",
        "backward",
        "send_forward",
        "send_backward",
        "data_parallel",
        "embedding",
        "codec",
        "encode",
    } <= kinds
    exposed = {(e["ts"], e["name"]): e["dur"] for e in events if e["cat"].endswith(",exposed")}
    covered = sum(exposed.values())  # what several stages do together counts once
    assert covered == pytest.approx(end, rel=0.01)


@pytest.mark.parametrize("suffix", ["png", "pdf"])
def test_a_figure_is_the_same_bytes_again(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / f"{name}.{suffix}" for name in ("a", "b")]
    for file in files:
        simulate(composed(f"model=gpt_2_5b technique=cb_fe {PAPER} simulation.gantt={file}"))
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].stat().st_size > 5000


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("simulation.trace=nowhere/trace.json", r"simulation\.trace"),
        ("simulation.gantt=figure.svg", r"\.pdf or \.png"),
        ("simulation.fully_sharded=true", r"simulation\.fully_sharded"),
        ("simulation.bandwidth=both", r"simulation\.bandwidth"),
    ],
)
def test_wrong_keys(line: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        composed(f"model=gpt_2_5b technique=cb {PAPER} {line}")


def test_a_sweep_does_not_write_one_file_twice(tmp_path: Path) -> None:
    configs = compose(f"{SWEEP} simulation.trace={tmp_path}/trace.json")
    with pytest.raises(ConfigError, match="a file for each run"):
        simulate_all(configs)
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_is_told_what_was_predicted(tmp_path: Path) -> None:
    line = f"model=gpt_8_3b technique=cb {PAPER} task=train launcher.dry_run=true runs_dir={tmp_path}"
    (config,) = compose(line)
    (told,) = forecasts(plan_runs([config]))
    assert told.step_time is not None
    assert told.step_time.seconds == pytest.approx(predict(config).step_time_s)
    assert "predicted" in told.step_time.source
    assert told.gpu_hours == pytest.approx(128 * 230_000 * told.step_time.seconds / 3600)
    for change in ("training.micro_batch_size=4", "training.device=cpu", "cluster=h100_ndr400"):
        (other,) = compose(f"{line} {change}")
        assert forecasts(plan_runs([other]))[0].step_time is None


@pytest.mark.parametrize(("key", "name"), [("trace", "step.json"), ("gantt", "step.png")])
def test_a_file_that_can_not_be_written(tmp_path: Path, key: str, name: str) -> None:
    config = composed(f"model=gpt_2_5b technique=cb {PAPER} simulation.{key}={tmp_path / name}")
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=f"simulation.{key}"):
        simulate(config)
