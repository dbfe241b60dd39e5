"""Run folders of all kinds to tables, once and again; the page that describes the columns."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.__main__ import main
from analysis.collect import Collected, collect, load, save, table_path
from analysis.columns import TABLES, empty
from analysis.convert import to_frame
from launchers.status import select
from optimus_cc.config.compose import CONF
from optimus_cc.runs import RunFolder, Status
from tests.analysis.run_folders import CLASSES, config_of, write_run
from tests.records import NO_RECORDS

CB = "technique=cb parallel=pp4_dp2"
FE = "technique=cb_fe_sc parallel=pp4_dp2"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("runs")


def rows(found: Collected, table: str) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = found.tables[table].to_dict("records")
    return records


def test_a_run_is_told_as_its_files_tell_it(runs: Path) -> None:
    folder = write_run(runs, FE, 7, perplexity=88.5, step_time_s=0.25, wire={"data_parallel": 123.0}, probes=True)
    found = collect([runs])
    (row,) = rows(found, "runs")
    config = config_of(FE)
    expected = {
        "run": folder.run_id,
        "folder": f"runs/{folder.run_id}",
        "state": "finished",
        "model": "gpt_tiny",
        "layout": "pp4_dp2",
        "technique": "cb_fe_sc",
        "seed": 7,
        "usual_ranks": True,
        "cb_rank": config.model.cb_rank,
        "sc_rank": config.model.sc_rank,
        "sc_fraction": 0.75,
        "total_steps": 40,
        "num_parameters": 1_000_000,
        "hidden_size": 128,
        "data_parallel_size": 2,
        "validation_token_perplexity": 88.5,
        "step_time_median_s": 0.25,
        "commit": "c0ffee",
        "device": "cpu",
    }
    assert {key: row[key] for key in expected} == expected
    sent = {row["traffic_class"]: row["wire_bytes_per_step"] for row in rows(found, "traffic")}
    assert sent == {**dict.fromkeys(CLASSES, 1e6), "data_parallel": 123.0}
    metrics = found.tables["metrics"]
    for kind in ("train", "validation"):
        assert metrics.loc[metrics["kind"] == kind, "step"].tolist() == [10, 20, 30, 40]
    probes = found.tables["probes"]
    assert probes["probe"].value_counts().to_dict() == {"phases": 32, "memory": 32, "error_independence": 4}
    assert probes["forward_fraction"].dropna().unique().tolist() == [0.3]
    assert probes["workspaces_bytes"].dropna().unique().tolist() == [6.0]
    assert not found.remarks


def test_columns_have_their_types_also_without_rows(runs: Path) -> None:
    runs.mkdir()
    nothing = collect([runs])
    write_run(runs, CB, probes=True)
    for found in (nothing, collect([runs])):
        for table, columns in TABLES.items():
            assert {name: str(dtype) for name, dtype in found.tables[table].dtypes.items()} == {
                name: column.dtype for name, column in columns.items()
            }


def test_settings_and_variants(runs: Path) -> None:
    """A setting has all techniques and seeds of one model, layout and length; a variant all seeds of one technique."""
    lines = (CB, CB, FE, f"{CB} training.global_batch_size=32", f"{CB} technique.cb.codec.rank=2")
    for index, line in enumerate(lines):
        write_run(runs, line, index)
    by_seed = collect([runs]).tables["runs"].set_index("seed")
    settings, variants = by_seed["setting"], by_seed["variant"]
    assert settings[0] == settings[1] == settings[2] == settings[4] != settings[3]
    assert variants[0] == variants[1] == variants[3]
    assert len(set(variants[[0, 2, 4]])) == 3
    assert by_seed["usual_ranks"].to_dict() == {0: True, 1: True, 2: True, 3: True, 4: False}


def test_what_is_no_finished_run_is_reported(runs: Path) -> None:
    good = write_run(runs, CB, 1)
    failed = write_run(runs, CB, 2, state="failed")
    failed.write_status(Status("failed", cause="rank 3 exited with code 1", step=7, total_steps=40))
    failed.append_metrics({"kind": "train", "step": 1, "loss": 7.0})
    (runs / "holiday photos").mkdir()
    (runs / "benchmarks").mkdir()
    shutil.copytree(good.path, runs / "a copy")
    half = write_run(runs, CB, 3)
    half.summary_path.write_text('{"steps": 3')
    bare = RunFolder(runs / "bare")
    bare.path.mkdir()
    bare.status_path.write_text("{")
    found = collect([runs, Path("nowhere")])
    states = {row["run"]: row["state"] for row in rows(found, "runs")}
    assert states == {good.run_id: "finished", failed.run_id: "failed", half.run_id: "unknown", "bare": "unknown"}
    for table in ("metrics", "traffic"):
        assert set(found.tables[table]["run"]) == {good.run_id}
    said = "\n".join(found.remarks)
    for part in (
        "runs/holiday photos: not a run folder",
        f"runs/a copy: holds the same run as runs/{good.run_id}; left out",
        f"runs/{failed.run_id}: failed: rank 3 exited with code 1; not used",
        f"runs/{half.run_id}: finished, but its summary can't be read",
        "runs/bare: no status that can be read",
        "runs/bare: no config.yaml",
        "nowhere: No such file or directory",
    ):
        assert part in said, said


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_what_was_written_is_what_was_collected(runs: Path, suffix: str) -> None:
    write_run(runs, CB, probes=True)
    write_run(runs, FE, perplexity=math.inf)
    found = collect([runs]).tables
    output = Path(f"out/results{suffix}")
    assert {path.name for path in save(found, output)} == {
        f"results{f'.{table}' if table != 'runs' else ''}{suffix}" for table in TABLES
    }
    back = load(output)
    for table in TABLES:
        pd.testing.assert_frame_equal(back[table], found[table])


def test_only_what_changed_is_read_again(runs: Path) -> None:
    folders = [write_run(runs, CB, seed) for seed in (1, 2, 3)]
    running = write_run(runs, CB, 4, state="running")
    before = collect([runs])
    assert (before.read, before.unchanged) == (4, 0)
    again = collect([runs], before.tables)
    assert (again.read, again.unchanged) == (1, 3)  # the one that runs may have ended meanwhile
    for table in TABLES:
        pd.testing.assert_frame_equal(again.tables[table], before.tables[table])
    summary = folders[1].summary()
    assert summary is not None
    folders[1].write_summary({**summary, "validation": {"loss": 1.0, "perplexity": 2.7}})
    shutil.rmtree(folders[2].path)
    running.write_status(Status("cancelled"))
    later = collect([runs], again.tables)
    assert (later.read, later.unchanged) == (2, 1)
    assert later.tables["runs"].set_index("run")["validation_token_perplexity"].dropna().to_dict() == {
        folders[0].run_id: 100.0,
        folders[1].run_id: 2.7,
    }
    fresh = collect([runs])
    for table in TABLES:
        pd.testing.assert_frame_equal(later.tables[table], fresh.tables[table])


def test_evaluations_are_read_too_and_make_a_folder_changed(runs: Path) -> None:
    folder = write_run(runs, CB)
    before = collect([runs])
    folder.evaluation.mkdir()
    score = {"value": 0.25, "standard_error": 0.01}
    zero_shot = {"kind": "zero_shot", "checkpoint": {"step": 40}, "limit": 9}
    tasks = {
        "piqa": {"metrics": {"acc": score, "acc_norm": {**score, "standard_error": None}}, "items": {"evaluated": 9}}
    }
    (folder.evaluation / "step_00000040-zero_shot-0.json").write_text(json.dumps({**zero_shot, "tasks": tasks}))
    perplexity = {"kind": "perplexity", "checkpoint": {"step": 40}, "items": {"tokens": 77}}
    measures = {"metrics": {"word_perplexity": {"value": 50.0}}}
    (folder.evaluation / "step_00000040-perplexity-0.json").write_text(json.dumps({**perplexity, **measures}))
    (folder.evaluation / "step_00000041-zero_shot-0.json").write_text("{")
    found = collect([runs], before.tables)
    assert found.read == 1
    seen = {(row["task"], row["metric"]): row for row in rows(found, "evaluation")}
    assert len(seen) == 3
    assert seen["piqa", "acc"]["value"] == 0.25
    assert seen["piqa", "acc"]["items"] == seen["piqa", "acc"]["limit"] == 9
    assert math.isnan(seen["piqa", "acc_norm"]["standard_error"])
    (own,) = [row for row in seen.values() if row["kind"] == "perplexity"]
    assert (own["metric"], own["value"], own["items"]) == ("word_perplexity", 50.0, 77)
    assert found.remarks == [f"runs/{folder.run_id}: evaluation/step_00000041-zero_shot-0.json can't be read"]


def test_damaged_tables_are_made_anew(runs: Path) -> None:
    write_run(runs, CB)
    output = Path("results.parquet")
    save(collect([runs]).tables, output)
    output.write_bytes(b"PAR1 and then nothing")
    assert main(["collect", "runs", "-o", "results.parquet"]) == 0
    assert len(pd.read_parquet(output)) == 1
    pd.DataFrame({"run": ["other"]}).to_parquet(output)
    assert load(output)["runs"].empty


def test_with_one_table_lost_all_are_made_anew(runs: Path) -> None:
    write_run(runs, CB, probes=True)
    output = Path("results.parquet")
    for table in TABLES:
        save(collect([runs]).tables, output)
        table_path(output, table).unlink()
        again = collect([runs], load(output))
        assert again.read == 1
        for other, frame in collect([runs]).tables.items():
            pd.testing.assert_frame_equal(again.tables[other], frame)


def test_a_copy_that_was_there_first_gives_way(runs: Path) -> None:
    good = write_run(runs, CB)
    kept = runs.parent / good.path.name
    (runs / "a copy").mkdir()
    shutil.move(good.path, kept)
    shutil.copytree(kept, runs / "a copy", dirs_exist_ok=True)
    before = collect([runs])
    assert before.tables["runs"]["folder"].tolist() == ["runs/a copy"]
    shutil.move(kept, good.path)
    after = collect([runs], before.tables)
    assert after.tables["runs"]["folder"].tolist() == [f"runs/{good.run_id}"]
    assert after.remarks == collect([runs]).remarks


def test_files_that_are_no_tables_are_named(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(runs, CB)
    for command in (["show"], ["compare", "a", "b"], ["push"]):
        with pytest.raises(SystemExit, match=r"missing\.parquet: no tables that can be read"):
            main([*command, "--from", "missing.parquet"])
    Path("file").touch()
    assert main(["collect", "runs", "-o", "file/results.parquet"]) == 1
    assert "file/results.parquet can't be written" in capsys.readouterr().err


def test_folders_of_any_content_are_survived(runs: Path) -> None:
    """Each file cut short, and each file holding something else."""
    good = write_run(runs, CB, 1, probes=True)
    files = [good.config_path, good.provenance_path, good.status_path, good.summary_path, good.metrics_path]
    random = np.random.default_rng(0)
    number = 0
    for file in files:
        content = file.read_bytes()
        cuts = [content[: int(at)] for at in random.integers(0, len(content), 6)]
        for other in (*cuts, b"", b"[1, 2]", b'{"state": 3}\n', b"\xff\xfe\x00", b"{" * 2000, b'"text"\n\n7\nnull\n'):
            number += 1
            copy = runs / f"copy-{number}"
            shutil.copytree(good.path, copy)
            (copy / file.name).write_bytes(other)
            origin = json.loads(good.provenance_path.read_text())
            if file != good.provenance_path:
                (copy / "provenance.json").write_text(json.dumps({**origin, "run_id": copy.name}))
    found = collect([runs])
    assert good.run_id in set(found.tables["runs"]["run"])
    assert found.read == number + 1
    save(found.tables, Path("results.parquet"))


def test_values_of_other_types_are_missing(runs: Path) -> None:
    folder = write_run(runs, CB)
    folder.metrics_path.unlink()
    for step, value in enumerate(("fast", True, None, [1], "NaN", "Infinity", 10**400, 3)):
        folder.append_metrics({"kind": "train", "step": step, "loss": value})
    frame = collect([runs]).tables["metrics"]
    assert frame["loss"].dropna().tolist() == [math.inf, 3.0]
    assert len(frame) == 8
    assert frame["step"].tolist() == list(range(8))


def test_what_is_no_record_changes_no_table_and_no_status(runs: Path) -> None:
    folder = write_run(runs, CB, probes=True)
    before, told = collect([runs]).tables, select(runs)
    for odd in NO_RECORDS[:-2]:  # of those two only the number is lost
        folder.append_metrics(odd)
    after = collect([runs]).tables
    assert select(runs) == told
    for name in ("metrics", "probes"):
        pd.testing.assert_frame_equal(before[name], after[name])


def test_benchmarks_of_codecs(runs: Path) -> None:
    folder = RunFolder(runs / "benchmarks" / "codecs-single-2024")
    folder.path.mkdir(parents=True)
    folder.config_path.write_text("model: {name: gpt_tiny}\nbenchmark: {name: codecs, shapes: null}\n")
    folder.write_status(Status("finished", device="cpu"))
    case = {"codec": "low_rank", "rank": 4, "rows": 256, "columns": 128, "logical_bytes": 131072, "encode_gbyte_s": 2.0}
    folder.write_summary({"benchmark": "codecs", "device": "cuda", "codecs": [case, "junk"]})
    (row,) = rows(collect([runs]), "codecs")
    assert row["model"] == "gpt_tiny"
    assert (row["device"], row["rank"], row["encode_gbyte_s"]) == ("cuda", 4, 2.0)


def test_the_command_line(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(runs, CB)
    (runs / "odd").mkdir()
    assert main(["collect", "-o", "results.csv"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "runs/odd: not a run folder\n"
    assert re.search(r"1 finished; 1 folders read, 0 unchanged, [\d.]+ s", captured.out)
    assert main(["collect", "-o", "results.csv"]) == 0
    assert "0 folders read, 1 unchanged" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["collect", "-o", "results.xlsx"])
    assert ".parquet or .csv" in capsys.readouterr().err
    assert main(["collect", "elsewhere"]) == 1


def test_the_page_describes_every_column() -> None:
    text = (CONF.parent / "docs" / "analysis.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##)", text, re.MULTILINE | re.DOTALL))
    assert list(sections) == list(TABLES)
    for table, section in sections.items():
        stated = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \| (.*?) \|$", section, re.MULTILINE)
        assert stated == [
            (name, column.dtype, column.unit or "-", column.meaning) for name, column in TABLES[table].items()
        ]


@pytest.mark.parametrize("technique", ["NA", "null", "nan", "None", "N/A"])
def test_a_techniques_name_survives_csv(tmp_path: Path, technique: str) -> None:
    tables = {table: empty(table) for table in TABLES}
    row = {name: [technique if name == "technique" else None] for name in TABLES["runs"]}
    tables["runs"] = to_frame("runs", [row])
    save(tables, tmp_path / "results.csv")
    found = load(tmp_path / "results.csv")["runs"]
    assert list(found["technique"]) == [technique]
    assert found["cause"].isna().all()
