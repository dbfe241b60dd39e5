"""The exposure report: against real runs on gloo ranks, against arithmetic, and for what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import run
from optimus_cc import exposure_report
from optimus_cc.config import RunConfig, load
from optimus_cc.stage_parameters import stage_parameters
from tests.config.command_line import one
from tests.configurations import LAYOUTS, VOCABULARY, low_rank, tiny
from tests.ranks import RankPool
from tests.training_runs import train_ours

PAPER = (
    "task=exposure model=gpt_8_3b parallel=tp8_pp4_dp4 optimizer=paper training=paper cluster=a100_hdr200 "
    "tokenizer.vocabulary_size=50257"
)
TOP_K = {"name": "cb", "cb": {"enabled": True, "codec": {"name": "top_k", "match_rank": 2}, "residual": "carry"}}
TECHNIQUES: dict[str, dict[str, Any] | None] = {
    "baseline": None,
    "cb": low_rank(residual="carry"),
    "flush": low_rank(epilogue_only=False, residual="flush"),
    "forward": low_rank(compress_forward=True, residual="carry"),
    "cold, bf16 wire": low_rank(warm_start=False, wire_dtype="bf16", residual="carry"),
    "top-k": TOP_K,
    "fe": {"name": "fe", "fe": {"enabled": True}},
}


def small(layout: str, technique: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    """A tiny configuration with the vocabulary of the tests' samples."""
    config = tiny(layout, technique, steps=2, **changes)
    return load({**config.to_mapping(), "tokenizer": {"name": "bpe", "vocabulary_size": VOCABULARY - 5}})


def measured(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record["traffic"] for record in results[0]["records"] if record["kind"] == "train"]


@pytest.mark.megatron
@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("layout", ["pp4", "tp2_pp2_dp2", "pp4_v2"])
def test_bytes_and_memory_are_those_of_a_run(ranks: RankPool, layout: str, technique: str) -> None:
    config = small(layout, TECHNIQUES[technique])
    results = ranks.run(config.parallel.world_size, train_ours, config)
    for step in measured(results):
        assert exposure_report.traffic(config) == {name: step[name] for name in exposure_report.traffic(config)}
    if config.technique.cb.residual == "carry":
        replicas = config.parallel.tensor_parallel_size * config.parallel.data_parallel_size
        memory = [
            # The query that a stream started from is kept too, so that a column that vanished can start afresh.
            sum(value.nbytes * (2 if key.endswith("query") else 1) for key, value in _kept(result["state"]))
            for result in results
        ]
        assert exposure_report.memory_by_rank(config) == memory[::replicas]


def _kept(state: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return [(key, value) for key, value in state.items() if key.endswith(("memory", "query"))]


@pytest.mark.megatron
@pytest.mark.parametrize("key", ["split_over_tensor_parallel", "sequence_parallel"])
def test_messages_that_are_shared_out(ranks: RankPool, key: str) -> None:
    config = small("tp2_pp2", low_rank(), parallel={key: True})
    said = exposure_report.traffic(config)
    for step in measured(ranks.run(4, train_ours, config)):
        assert said == {name: step[name] for name in said}


@pytest.mark.megatron
def test_the_distributed_optimizer_only_adds_padding(ranks: RankPool) -> None:
    config = small("tp2_pp2_dp2", low_rank(), parallel={"distributed_optimizer": True})
    said = exposure_report.traffic(config)
    for step in measured(ranks.run(8, train_ours, config)):
        for name in ("data_parallel", "parameter_gather"):
            assert said[name]["wire_bytes"] <= step[name]["wire_bytes"] <= 1.1 * said[name]["wire_bytes"]


MODELS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tied_embeddings": False},
    "rope": {"position_embedding": "rope"},
    "wide": {"ffn_hidden_size": 40},
}


@pytest.mark.megatron
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", ["single", "tp2", "pp2", "tp2_pp2_dp2", "pp4_v2"])
def test_parameters_are_those_of_the_real_model(ranks: RankPool, layout: str, model: str) -> None:
    config = small(layout, model=MODELS[model])
    parallel = config.parallel
    results = ranks.run(parallel.world_size, train_ours, config)
    for rank, result in enumerate(results):
        pipeline_rank = rank // (parallel.tensor_parallel_size * parallel.data_parallel_size)
        for chunk in range(parallel.num_chunks):
            weights = {key: value for key, value in result["weights"].items() if key.startswith(f"{chunk}.")}
            stage = chunk * parallel.pipeline_parallel_size + pipeline_rank
            expected = stage_parameters(config.model, parallel, VOCABULARY, stage)
            assert expected.total == sum(value.numel() for value in weights.values())
            rows = [value.numel() for key, value in weights.items() if "word_emb" in key or "output_layer" in key]
            assert expected.word_embedding == sum(rows)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_parameters_of_all_stages_are_those_of_the_model(layout: str, model: str) -> None:
    config = small(layout, model=MODELS[model])
    parallel, shape = config.parallel, config.model
    every = [stage_parameters(shape, parallel, VOCABULARY, stage) for stage in range(parallel.num_virtual_stages)]
    tp = parallel.tensor_parallel_size
    once = sum(tp * (stage.sharded + stage.word_embedding) + stage.replicated for stage in every)
    copy = VOCABULARY * shape.hidden_size if shape.tied_embeddings and parallel.num_virtual_stages > 1 else 0
    assert once == shape.num_parameters(VOCABULARY) + copy


def test_the_papers_layout(capsys: pytest.CaptureFixture[str]) -> None:
    """Against arithmetic written out: 16 micro-batches of 8 x 1024 tokens x 3072 hidden units, fp32, rank 16."""
    result = exposure_report.report(one(PAPER))
    message, payload = 8 * 1024 * 3072 * 4, 16 * (8 * 1024 + 3072) * 4
    ranks_per_stage = 32
    assert [stage["compressed_messages"] for stage in result["stages"]] == [0, 3, 2, 1]
    assert [stage["backward_messages"] for stage in result["stages"]] == [0, 16, 16, 16]
    assert result["traffic"]["pipeline_backward"] == {
        "logical_bytes": ranks_per_stage * 48 * message,
        "wire_bytes": ranks_per_stage * (42 * message + 6 * payload),
    }
    layer = (3 * 3072**2 + 3 * 3072 + 3072**2 + 8 * 3072**2 + 4 * 3072) // 8 + 6 * 3072
    assert result["stages"][1]["parameters"] == 18 * layer
    assert result["stages"][1]["data_parallel_bytes"] == 2 * 3 / 4 * 18 * layer * 4
    assert result["traffic"]["embedding"]["wire_bytes"] == 2 * 4 * 51200 * 3072 * 4
    assert result["memory_bytes_by_pipeline_rank"] == [0, *[message + 2 * 16 * 3072 * 4] * 3]
    shown = capsys.readouterr().out
    assert "128 ranks" in shown
    assert "30.0% less, or 1.429 times as fast" in shown
    assert max(len(line) for line in shown.splitlines() if not line.startswith("-")) <= 140


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("parallel=single technique=baseline", "one pipeline stage sends no messages"),
        ("parallel=dp2 technique=baseline", "Nor can fused embedding synchronisation"),
        ("parallel=pp4", "with one data-parallel rank none are exchanged"),
        ("parallel=pp4", "its one all-reduce is the one that runs anyway"),
        ("parallel=pp4", "between the stages 2 to 3"),
        ("parallel=pp2", "no residual reaches another message"),
        ("parallel=tp2_pp2_dp2", "2 tensor-parallel ranks send the same messages"),
        ("parallel=tp2_pp2_dp2 parallel.split_over_tensor_parallel=true", "1/2 of the bytes, without loss"),
        ("parallel=pp4_dp2 model.tied_embeddings=false", "the embeddings are not tied"),
        ("parallel=pp4_dp2", "1.5 times the embedding's gradient per rank in place of 2 times: 25.0% less"),
        ("technique.cb.codec.rank=1000", "nothing is saved"),
        ("technique=cb_topk technique.cb.codec.match_rank=1000", "nothing is saved"),
        ("training.global_batch_size=8", "hardly any message is outside the epilogue"),
        ("parallel=pp4_dp2 parallel.distributed_optimizer=true", "pads its buffers"),
        ("+ablation=cb_forward", "diverge"),
    ],
)
def test_what_can_not_help_is_said(line: str, said: str) -> None:
    remarks = list(exposure_report.remarks(one(f"task=exposure {line}")))
    assert any(said in remark for remark in remarks), remarks


@pytest.mark.parametrize(
    "line", ["technique=baseline", "technique=cb technique.cb.epilogue_only=false technique.cb.residual=carry"]
)
def test_and_nothing_else(line: str) -> None:
    remarks = " ".join(exposure_report.remarks(one(f"task=exposure parallel=pp4_dp2 {line}")))
    assert "can't help" not in remarks
    assert "residual" not in remarks


def test_a_tokenizer_that_is_there_already_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(
        '{"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"content": "b"}, {"content": "</s>"}]}'
    )
    config = one(f"task=exposure tokenizer=huggingface tokenizer.path={tmp_path}")
    assert exposure_report.vocabulary_size(config) == 3


def test_it_is_told_without_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", run.__file__, *PAPER.split()]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "pydantic" in imported
    assert not [name for name in imported if re.match(r"(torch|megatron|pandas|numpy|tokenizers)\b", name)]
    assert "pipeline_backward" in result.stdout
    assert list(tmp_path.iterdir()) == []
