from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

from analysis.__main__ import main
from analysis.table import collect, render, short_names, to_frame
from optimus_cc.records import to_json
from optimus_cc.runs import RunFolder, Status

IDS = [
    "gpt_tiny-pp4-baseline-s1234-00000001",
    "gpt_tiny-pp4-cb-s1234-00000002",
    "gpt_tiny-pp4-cb_no_epilogue-s1234-00000003",
]


def _traffic(logical: float, wire: float) -> dict[str, float]:
    return {
        "logical_bytes": 300 * logical,
        "wire_bytes": 300 * wire,
        "logical_bytes_per_step": logical,
        "wire_bytes_per_step": wire,
    }


def _run(runs: Path, run_id: str, started: str = "2024-01-01", state: Any = "finished", **summary: Any) -> RunFolder:
    folder = RunFolder(runs / run_id)
    folder.path.mkdir(parents=True)
    folder.write_status(Status(state, step=300, total_steps=300, started=started))
    folder.write_summary(
        {
            "steps": 300,
            "validation": {"loss": 4.6, "perplexity": 99.48, "tokens": 100},
            "step_time_s": {"mean": 0.5, "median": 0.4321, "p95": 0.6},
            "tokens_per_s": 9000.0,
            "traffic": {
                "pipeline_forward": _traffic(1.5e6, 1.5e6),
                "pipeline_backward": _traffic(1.5e6, 0.25e6),
                "data_parallel": _traffic(0.0, 0.0),
                "other": _traffic(100.0, 100.0),
            },
            **summary,
        }
    )
    return folder


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three finished runs; the working directory is where a person would stand."""
    monkeypatch.chdir(tmp_path)
    for index, run_id in enumerate(IDS):
        _run(Path("runs"), run_id, started=f"2024-01-0{index + 1}")
    return Path("runs")


def test_three_runs_fit_the_screen(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table"]) == 0
    output = capsys.readouterr().out
    lines = output.splitlines()
    assert lines[0].split() == ["baseline", "cb", "cb_no_epilogue"]
    assert max(map(len, lines)) <= 120
    found = {" ".join(line.split()[:-3]): line.split()[-3:] for line in lines if line}
    assert found["validation token perplexity"] == ["99.48"] * 3
    assert found["step time, median (s)"] == ["0.432"] * 3
    assert found["pipeline_backward, wire (MB/step)"] == ["0.250"] * 3
    assert found["pipeline_backward, logical (MB/step)"] == ["1.500"] * 3
    assert found["total, wire (MB/step)"] == ["1.750"] * 3
    assert "data_parallel" not in output
    assert "other, wire" in output
    assert lines[-3:] == [
        f"{name:<14}  runs/{run_id}" for name, run_id in zip(("baseline", "cb", "cb_no_epilogue"), IDS, strict=True)
    ]


def test_runs_stand_in_the_order_of_their_start(runs: Path) -> None:
    _run(runs, "gpt_tiny-pp4-first-s1234-00000004", started="2023-01-01")
    rows, _ = collect(runs)
    assert [row["run"].split("-")[2] for row in rows] == ["first", "baseline", "cb", "cb_no_epilogue"]


@pytest.mark.parametrize(
    ("filters", "count"), [([], 3), (["cb"], 2), (["*-cb-*"], 1), (["baseline", "epilogue"], 2), (["nothing"], 0)]
)
def test_filters(filters: list[str], count: int, runs: Path) -> None:
    rows, remarks = collect(runs, filters)
    assert len(rows) == count
    assert not remarks


def test_broken_and_foreign_folders(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "holiday photos").mkdir()
    (runs / ".sweeps").mkdir()
    (runs / "notes.txt").touch()
    half = _run(runs, "half")
    half.summary_path.write_text('{"steps": 3')
    half.status_path.write_bytes(b"\0\0\0")
    odd = _run(runs, "odd", validation=[1], step_time_s="fast", traffic={"pipeline_forward": 3}, steps=None)
    odd.metrics_path.mkdir()
    bare = RunFolder(runs / "bare")
    bare.path.mkdir()
    bare.config_path.write_text(": : :")
    assert main(["table", "runs", "--width", "60"]) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [
        "runs/half: status.json can't be read",
        "runs/half: summary.json can't be read",
        "runs/holiday photos: not a run folder",
    ]
    assert max(len(line) for line in captured.out.split("\n\n")[0].splitlines()) <= 60
    rows = {row["run"]: row for row in collect(runs)[0]}
    assert set(rows) == {*IDS, "half", "odd", "bare"}
    for name in ("half", "odd", "bare"):
        (line,) = [line for line in render([rows[name]]).splitlines() if line.startswith("validation token perplexity")]
        assert line.split()[-1] in ("-", "99.48")


def test_a_run_without_summary_is_described_by_its_metrics(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.write_status(Status("failed", cause="rank 1 exited with code 3", step=19, total_steps=300))
    for step in range(1, 21):
        counts = {"pipeline_backward": {"logical_bytes": 8e6, "wire_bytes": step * 1e6}}
        seconds = 9.0 if step < 6 else 0.5
        folder.append_metrics({"kind": "train", "step": step, "step_time_s": seconds, "traffic": counts})
    folder.append_metrics({"kind": "validation", "step": 20, "loss": math.nan, "perplexity": math.nan})
    with folder.metrics_path.open("a") as file:
        file.write('{"kind": "train", "st')
    (row,), remarks = collect(tmp_path)
    assert not remarks
    assert (row["state"], row["steps"], row["step_time_median_s"]) == ("failed", 20, 0.5)
    assert row["wire_bytes.pipeline_backward"] == 10.5e6
    assert row["logical_bytes.total"] == 8e6
    text = render([row])
    assert "nan" in text
    assert "run: rank 1 exited with code 3" in text


def test_a_run_whose_process_is_gone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.status_path.write_text('{"state": "running", "updated": "2020-01-01T00:00:00+00:00", "host": "h", "pid": 1}')
    assert collect(tmp_path)[0][0]["state"] == "abandoned"


@pytest.mark.parametrize(
    ("ids", "names"),
    [
        (IDS, ["baseline", "cb", "cb_no_epilogue"]),
        (["m-pp4-cb-s1-aa", "m-pp4-cb-s2-bb"], ["cb-s1", "cb-s2"]),
        (["m-pp4-cb-s1-aa", "m-pp4-cb-s1-bb"], ["cb-aa", "cb-bb"]),
        (["m-pp4-cb-s1-aa", "n-pp2-cb-s1-bb"], ["m-pp4-cb", "n-pp2-cb"]),
        (["m-pp4-cb-s1-aa", "something"], ["m-pp4-cb-s1-aa", "something"]),
        ([], []),
    ],
)
def test_short_names(ids: list[str], names: list[str]) -> None:
    if ids:
        assert short_names(ids) == names


def test_machine_readable(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(runs, "x", validation={"loss": math.inf, "perplexity": math.inf})
    main(["table", "runs", "--json"])
    records = json.loads(capsys.readouterr().out)
    assert {record["run"] for record in records} == {*IDS, "x"}
    main(["table", "runs", "--csv"])
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [line["run"] for line in lines] == [record["run"] for record in records]
    assert lines[0]["wire_bytes.pipeline_backward"] == "250000.0"


def test_frame(runs: Path) -> None:
    frame = to_frame(collect(runs)[0])
    assert frame["validation_token_perplexity"].mean() == pytest.approx(99.48)
    assert len(frame) == 3


def test_nothing_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", str(tmp_path)]) == 1
    assert capsys.readouterr().out == "no runs\n"
    assert main(["table", str(tmp_path / "missing")]) == 1
    assert "No such file" in capsys.readouterr().err
    assert to_json([]) == "[]"
