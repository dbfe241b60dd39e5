"""Whole benchmarks through ``python run.py``, on real ranks. What was measured is for no test to judge."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from analysis.table import collect
from optimus_cc.config.compose import compose, parse
from optimus_cc.runs import RunFolder

ROOT = Path(__file__).parents[2]
TINY = (
    *("model.num_layers=2", "model.hidden_size=32", "model.num_attention_heads=2", "model.sequence_length=16"),
    *("tokenizer.vocabulary_size=300", "training.global_batch_size=4", "technique.cb.codec.rank=2"),
    *("model.sc_rank=2", "training.device=cpu"),
)


def measure(folder: Path, *overrides: str) -> tuple[str, RunFolder, dict[str, Any]]:
    """What was printed, the one new folder, and the result in it."""
    command = [sys.executable, str(ROOT / "run.py"), "task=benchmark", *TINY, *overrides]
    result = subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = (folder / "runs" / "benchmarks").iterdir()
    found = RunFolder(path)
    summary = found.summary()
    assert summary is not None
    assert {"git", "versions", "host", "command"} <= (found.provenance() or {}).keys()
    assert collect(folder / "runs") == ([], []), "a benchmark was taken for a run"
    return result.stdout, found, summary


def test_cost(tmp_path: Path) -> None:
    """Both members of each pair are recorded, each ratio is theirs, and the layer's state is the only difference."""
    chosen = ("benchmark=cost", "benchmark.pairs=6", "benchmark.warmup_steps=1", "parallel=pp2")
    output, folder, result = measure(tmp_path, *chosen, "benchmark.measure=[cb,fe]")
    assert [row["technique"] for row in result["techniques"]] == ["plain_again", "off", "cb", "fe"]
    for row in result["techniques"]:
        pairs = [pair for pair in folder.metrics("pair") if pair["technique"] == row["technique"]]
        assert len(pairs) == row["ratio"]["samples"] == 6
        assert sum(pair["plain_first"] for pair in pairs) == 3
        for kind, time in (("ratio", "s"), ("processor_ratio", "processor_s")):
            ratios = sorted(pair[f"technique_{time}"] / pair[f"plain_{time}"] for pair in pairs)
            assert row[kind]["value"] == pytest.approx((ratios[2] + ratios[3]) / 2)
            assert (row[kind]["low"], row[kind]["high"]) == pytest.approx((ratios[0], ratios[-1]))
        assert row["technique"] in output
    assert [pair["done"] for pair in folder.metrics("pair")] == list(range(1, 25))


def test_links(tmp_path: Path) -> None:
    """What is written composes, by the folder and by the path that was asked for."""
    mine = tmp_path / "cluster" / "mine.yaml"
    mine.parent.mkdir()
    chosen = ("benchmark=links", "benchmark.repetitions=2", "benchmark.max_bytes=65536")
    _, folder, result = measure(tmp_path, *chosen, "parallel=tp2_pp2_dp2", f"benchmark.cluster_file={mine}")
    groups = {group["group"]: group for group in result["groups"]}
    assert {name: (group["operation"], group["ranks"]) for name, group in groups.items()} == {
        "tensor": ("all_reduce", 2),
        "pipeline": ("p2p", 2),
        "data": ("all_reduce", 2),
        "embedding": ("all_reduce", 2),
    }
    for group in groups.values():
        assert [sample["message_bytes"] for sample in group["samples"]] == [1024, 4096, 16384, 65536]
        assert [sample["sent_bytes"] for sample in group["samples"]] == [1024, 4096, 16384, 65536]
        assert all(sample["time_s"] > 0 for sample in group["samples"])
        assert not group["spans_nodes"]
    (own,) = (folder.path / "conf" / "cluster").iterdir()
    for config_dir, file in ((folder.path / "conf", own), (tmp_path, mine)):
        arguments, _ = parse(["--config-dir", str(config_dir), f"cluster={file.stem}"])
        (composed,) = compose(arguments)
        written = yaml.safe_load(file.read_text())
        assert composed.to_mapping()["cluster"] == written
        assert written["intra_node"]["latency_us"] is not None
        assert set(written["inter_node"].values()) == {None}
        comments = [line for line in file.read_text().splitlines() if line.startswith("# ")]
        assert any("gloo" in line and "torch" in line for line in comments)
    again = [sys.executable, str(ROOT / "run.py"), "task=benchmark", *TINY, *chosen, "parallel=pp2"]
    refused = subprocess.run(
        [*again, f"benchmark.cluster_file={mine}"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert refused.returncode == 2
    assert "none is overwritten" in refused.stderr


def test_codecs(tmp_path: Path) -> None:
    output, folder, result = measure(
        tmp_path,
        "benchmark=codecs",
        "parallel=pp2",
        "benchmark.repetitions=2",
        "benchmark.ranks=[1,2]",
        "benchmark.shapes=[[8,16]]",
    )
    assert [(row["codec"], row["rank"]) for row in result["codecs"]] == [
        ("low_rank", 1),
        ("top_k", 1),
        ("low_rank", 2),
        ("top_k", 2),
    ]
    for row in result["codecs"]:
        assert row["logical_bytes"] == 8 * 16 * 4
        assert row["rank"] * 24 * 4 - 6 < row["wire_bytes"] <= row["rank"] * 24 * 4
    assert "low_rank" in output
    paths = ("message", "gradients", "torch_hook", "alternating")
    assert [(row["path"], row["rank"]) for row in result["memory_paths"]] == [(p, r) for r in (1, 2) for p in paths]
    assert all(row["per_products"]["value"] > 0 for row in result["memory_paths"])
    for row in result["bases"]:
        assert row["orthogonality"] < 1e-5
        # A column that is zero makes Gram-Schmidt divide by zero; the two that are used bear it.
        assert row["basis"] == "gram_schmidt" or row["norm_without_full_rank"] < 1 + 1e-5
    assert "torch_hook" in output
    assert "cholesky" in output
    assert not (folder.path / "conf").exists()


def test_a_rank_that_fails_is_named(tmp_path: Path) -> None:
    """A file where the tokenizer's should be is broken: the ranks find out, and the person is told where to look."""
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {}}))
    command = [sys.executable, str(ROOT / "run.py"), "task=benchmark", *TINY[:4], "benchmark=cost", "parallel=pp2"]
    command += ["tokenizer=huggingface", f"tokenizer.path={tmp_path}", "training.device=cpu"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert result.returncode == 1
    assert "the benchmark ended: rank" in result.stderr
    assert "KeyError" in result.stderr
    assert "Folder: runs/benchmarks/cost-pp2-" in result.stderr
