"""The exposure report: against real runs on gloo ranks, against arithmetic, and for what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import run
from optimus_cc import exposure_report, stage_traffic
from optimus_cc.config import RunConfig, load
from optimus_cc.gradient_buckets import gradient_buckets
from optimus_cc.stage_parameters import stage_parameters
from tests.config.command_line import one
from tests.configurations import LAYOUTS, VOCABULARY, low_rank, tiny
from tests.ranks import RankPool
from tests.training_runs import backend_in_world, train_ours

PAPER = (
    "task=exposure model=gpt_8_3b parallel=tp8_pp4_dp4 optimizer=paper training=paper cluster=a100_hdr200 "
    "parallel.split_over_tensor_parallel=false tokenizer.vocabulary_size=50257"
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


def selective(**changes: Any) -> dict[str, Any]:
    """Selective stage compression from the second step on."""
    codec = {"name": "low_rank", "rank": changes.pop("rank", 2), "warm_start": changes.pop("warm_start", True)}
    codec["wire_dtype"] = changes.pop("wire_dtype", "input")
    return {"enabled": True, "codec": codec, "fraction": 0.5, "warmup_steps": 1, **changes}


SELECTIVE: dict[str, dict[str, Any]] = {
    "sc": {"sc": selective()},
    "every stage": {"sc": selective(fraction=1.0, rank=3)},
    # Attention's output projection is below this gate, with one tensor-parallel rank and with two.
    "above the gate": {"sc": selective(rank=4, min_compression_ratio=4.5)},
    "no feedback, cold, bf16 wire": {"sc": selective(error_feedback=False, warm_start=False, wire_dtype="bf16")},
    "fp16 wire": {"sc": selective(fraction=1.0, rank=3, wire_dtype="fp16")},
    "fe and sc": {"sc": selective(fraction=1.0), "fe": {"enabled": True}},
    "all": {**low_rank(residual="carry"), "sc": selective(), "fe": {"enabled": True}},
}


SMALL_LAYOUTS = {
    **LAYOUTS,
    "pp2_dp2": {"pipeline_parallel_size": 2, "data_parallel_size": 2},
    "pp2_dp3": {"pipeline_parallel_size": 2, "data_parallel_size": 3},
    "pp2_v2_dp2": {**LAYOUTS["pp2_v2_overlap"], "data_parallel_size": 2},
    "tp2_dp2": {"tensor_parallel_size": 2, "data_parallel_size": 2},
    "tp4_pp2": {"tensor_parallel_size": 4, "pipeline_parallel_size": 2},
}


def small(layout: str, technique: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    """A tiny configuration with the vocabulary of the tests' samples."""
    config = tiny(layout, technique, **{"steps": 2, **changes})
    return load({**config.to_mapping(), "tokenizer": {"name": "bpe", "vocabulary_size": VOCABULARY - 5}})


def measured(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The traffic of each training step, norms and control messages (all of it ``other``) left out."""
    records = [record["traffic"] for record in results[0]["records"] if record["kind"] == "train"]
    return [{name: count for name, count in record.items() if name != "other"} for record in records]


def told(config: RunConfig) -> dict[str, dict[str, float]]:
    return {name: count for name, count in stage_traffic.traffic(config).items() if name != "other"}


def memory(results: list[dict[str, Any]]) -> list[int]:
    """Bytes of error memories and queries that each rank keeps."""
    return [
        # The query that a stream started from is kept too, so that a column that vanished can start afresh.
        sum(value.nbytes * (2 if "query" in key.split(".") else 1) for key, value in _kept(result["state"]))
        for result in results
    ]


def _kept(state: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return [(key, value) for key, value in state.items() if {"memory", "query"} & set(key.split("."))]


@pytest.mark.parametrize(
    ("layout", "technique"),
    [
        *(("pp4", technique) for technique in TECHNIQUES),
        *(("tp2_pp2_dp2", technique) for technique in ("cb", "forward", "fe")),
        *(("pp4_v2", technique) for technique in ("flush", "cold, bf16 wire", "top-k")),
    ],
)
def test_bytes_and_memory_are_those_of_a_run(ranks: RankPool, layout: str, technique: str) -> None:
    config = small(layout, TECHNIQUES[technique])
    results = ranks.run(config.parallel.world_size, train_ours, config)
    assert measured(results) == [told(config)] * 2
    if config.technique.cb.residual == "carry":
        replicas = config.parallel.tensor_parallel_size * config.parallel.data_parallel_size
        assert stage_traffic.memory_by_rank(config) == memory(results)[::replicas]


@pytest.mark.parametrize(
    ("layout", "technique", "options"),
    [
        *(("pp2_dp2", technique, "") for technique in SELECTIVE),
        *(("pp2_dp2", technique, "distributed_optimizer") for technique in ("sc", "fe and sc")),
        ("pp2_v2_dp2", "above the gate", "overlap_grad_reduce"),
        ("pp2_v2_dp2", "all", "distributed_optimizer"),
        ("pp2_v2_dp2", "fp16 wire", "distributed_optimizer"),
        ("tp2_pp2_dp2", "above the gate", "distributed_optimizer"),
        ("tp2_pp2_dp2", "all", ""),
    ],
)
def test_gradients_of_selective_stages_are_those_of_a_run(
    ranks: RankPool, layout: str, technique: str, options: str
) -> None:
    parallel = {**SMALL_LAYOUTS[layout], **({options: True} if options else {})}
    config = small("single", {"name": "sc", **SELECTIVE[technique]}, parallel=parallel, num_microbatches=4)
    results = ranks.run(config.parallel.world_size, train_ours, config)
    expected = told(config)
    before, after = measured(results)
    assert after == expected
    # In the warm-up all gradients travel as Megatron-core sends them.
    assert before["data_parallel"]["wire_bytes"] == expected["data_parallel"]["logical_bytes"]
    assert after["data_parallel"]["wire_bytes"] < after["data_parallel"]["logical_bytes"]
    replicas = config.parallel.tensor_parallel_size * config.parallel.data_parallel_size
    assert stage_traffic.memory_by_rank(config) == memory(results)[::replicas]


TENSOR_PARALLEL: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence": {"parallel": {"sequence_parallel": True}},
    "split": {"parallel": {"split_over_tensor_parallel": True}},
    "rope": {"model": {"position_embedding": "rope"}},
    "rope, sequence": {"model": {"position_embedding": "rope"}, "parallel": {"sequence_parallel": True}},
    "untied": {"model": {"tied_embeddings": False}},
    "recomputed": {"recompute": "full"},
    "recomputed, sequence": {"recompute": "full", "parallel": {"sequence_parallel": True}},
    "attention recomputed": {"recompute": "selective"},
    "bf16": {"precision": "bf16"},
    "bf16, sequence": {"precision": "bf16", "parallel": {"sequence_parallel": True}},
    "distributed, bf16": {"precision": "bf16", "parallel": {"distributed_optimizer": True}},
}


@pytest.mark.parametrize(
    ("layout", "case"),
    [
        *(("tp2", case) for case in TENSOR_PARALLEL if "split" not in case and "distributed" not in case),
        *(("tp2_pp2", case) for case in ("plain", "sequence", "split", "untied")),
        ("tp2_dp2", "distributed, bf16"),
        ("tp2_pp2_v2_overlap", "split"),
        ("tp4_pp2", "sequence"),
    ],
)
def test_tensor_parallel_traffic_is_that_of_a_run(ranks: RankPool, layout: str, case: str) -> None:
    parallel = {**SMALL_LAYOUTS[layout], **TENSOR_PARALLEL[case].get("parallel", {})}
    technique = low_rank() if "pipeline_parallel_size" in parallel else None
    changes = {**TENSOR_PARALLEL[case], "parallel": parallel, "num_microbatches": 4}
    config = small("single", technique, **changes)
    results = ranks.run(config.parallel.world_size, train_ours, config)
    assert measured(results) == [told(config)] * 2


@pytest.mark.parametrize("layout", ["tp2_pp2"])
def test_sums_of_norm_gradients_are_those_of_a_run(ranks: RankPool, layout: str) -> None:
    """All that sequence parallelism adds to ``other``: the rest of it, which is not told, stays the same."""
    plain, shared = small(layout), small(layout, parallel={"sequence_parallel": True})
    sent = []
    for config in (plain, shared):
        results = ranks.run(config.parallel.world_size, train_ours, config)
        sent.append([record["traffic"]["other"]["wire_bytes"] for record in results[0]["records"][:1]])
    assert stage_traffic.traffic(plain)["other"]["wire_bytes"] == 0
    assert sent[1][0] - sent[0][0] == stage_traffic.traffic(shared)["other"]["wire_bytes"] > 0


OPTIONS = ("overlap_grad_reduce", "distributed_optimizer")
Buckets = list[tuple[int, list[str]]]


def _buckets(cases: list[tuple[RunConfig, int]]) -> list[list[Buckets]]:
    """Elements and parameters of each bucket of each chunk that Megatron-core makes, by case."""
    import functools

    from optimus_cc.communication.gradient_sync import bucket_groups, parameter_names
    from optimus_cc.training import model

    backend = backend_in_world(cases[0][0])
    real = vars(model)["DistributedDataParallelConfig"]
    made = []
    for config, bucket_size in cases:
        vars(model)["DistributedDataParallelConfig"] = functools.partial(real, bucket_size=bucket_size)
        chunks = model.build_model(config, backend, VOCABULARY)
        names = parameter_names(chunks)
        made.append(
            [
                [
                    (bucket.grad_data.numel(), [names[parameter].partition(".")[2] for parameter in bucket.params_list])
                    for group in bucket_groups([chunk])
                    for bucket in group.buckets
                ]
                for chunk in chunks
            ]
        )
    return made


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layout", ["dp2", "pp2_dp3", "pp2_v2_dp2"])
def test_buckets_are_megatrons(ranks: RankPool, layout: str, tied: bool) -> None:
    # Sizes that are no multiples of what parameters and buckets are padded to.
    model = {"hidden_size": 20, "tied_embeddings": tied, "ffn_hidden_size": 36}
    cases = [
        (small("single", parallel={**SMALL_LAYOUTS[layout], **dict.fromkeys(options, True)}, model=model), bucket_size)
        for options in ([], ["overlap_grad_reduce"], ["distributed_optimizer"], [*OPTIONS])
        for bucket_size in (1, 5000, 10**9)
    ]
    parallel = cases[0][0].parallel
    results = ranks.run(parallel.world_size, _buckets, cases)
    for index, (config, bucket_size) in enumerate(cases):
        for stage in range(parallel.num_virtual_stages):
            chunk, pipeline_rank = divmod(stage, parallel.pipeline_parallel_size)
            weights = stage_parameters(config.model, config.parallel, VOCABULARY, stage).weights
            expected = gradient_buckets(weights, config.parallel, stage, tied_embeddings=tied, bucket_size=bucket_size)
            real = results[pipeline_rank * parallel.data_parallel_size][index][chunk]
            assert sorted((bucket.numel, [weight.name for weight in bucket.weights]) for bucket in expected) == sorted(
                real
            )


MODELS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tied_embeddings": False},
    "rope": {"position_embedding": "rope"},
    "wide": {"ffn_hidden_size": 40},
}


def _weights(configs: list[RunConfig]) -> list[list[list[tuple[str, tuple[int, ...]]]]]:
    """Names and shapes of the parameters of each chunk that Megatron-core makes, in its order, by configuration."""
    from optimus_cc.training import model

    backend = backend_in_world(configs[0])
    return [
        [
            [(name.removeprefix("module."), tuple(value.shape)) for name, value in chunk.module.named_parameters()]
            for chunk in model.build_model(config, backend, VOCABULARY)
        ]
        for config in configs
    ]


@pytest.mark.parametrize("layout", ["single", "tp2", "pp2", "tp2_pp2_dp2", "pp4_v2"])
def test_parameters_are_those_of_the_real_model(ranks: RankPool, layout: str) -> None:
    configs = [small(layout, model=model) for model in MODELS.values()]
    parallel = configs[0].parallel
    for rank, results in enumerate(ranks.run(parallel.world_size, _weights, configs)):
        pipeline_rank = rank // (parallel.tensor_parallel_size * parallel.data_parallel_size)
        for config, chunks in zip(configs, results, strict=True):
            for chunk, weights in enumerate(chunks):
                stage = chunk * parallel.pipeline_parallel_size + pipeline_rank
                expected = stage_parameters(config.model, parallel, VOCABULARY, stage)
                assert [(weight.name, weight.shape) for weight in expected.weights] == weights
                rows = [prod(shape) for name, shape in weights if "word_emb" in name or "output_layer" in name]
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


def test_selective_stage_compression_in_the_papers_layout() -> None:
    """Against arithmetic written out: rank 128 on three of four stages, of matrices cut for 8 tensor-parallel ranks."""
    line = f"{PAPER} technique=cb_fe_sc"
    every = stage_traffic.stages(one(line))
    assert [stage.compressed_matrices for stage in every] == [72, 72, 72, 0]
    shapes = [(9216 // 8, 3072), (3072, 3072 // 8), (12288 // 8, 3072), (3072, 12288 // 8)]
    vectors = 9216 // 8 + 12288 // 8 + 6 * 3072
    factors = 128 * sum(rows + columns for rows, columns in shapes)
    ring = 2 * 3 / 4 * 4  # of an element in fp32 over four ranks
    assert every[1].data_parallel_wire_bytes == ring * 18 * (factors + vectors)
    assert every[0].data_parallel_wire_bytes == ring * (18 * (factors + vectors) + 1024 * 3072)
    assert every[3].data_parallel_wire_bytes == every[3].data_parallel_logical_bytes
    memory = sum(rows * columns + 2 * 128 * columns for rows, columns in shapes)
    assert every[2].gradient_memory_bytes == 18 * memory * 4
    assert every[3].gradient_memory_bytes == 0
    # With the embedding in the ordinary reduction it is compressed as well.
    (alone, *_) = stage_traffic.stages(one(f"{PAPER} technique=sc"))
    assert alone.compressed_matrices == 73
    assert alone.data_parallel_wire_bytes - every[0].data_parallel_wire_bytes == ring * 128 * (51200 // 8 + 3072)


def test_tensor_parallel_traffic_in_the_papers_layout() -> None:
    """Per layer and micro-batch two all-reduces forward, two recomputed and two backward."""
    every = stage_traffic.stages(one(f"{PAPER} technique=cb"))
    activations = 1024 * 8 * 3072 * 4
    assert every[1].tensor_parallel_bytes == 16 * 18 * 6 * 2 * 7 / 8 * activations
    assert every[0].tensor_parallel_bytes - every[1].tensor_parallel_bytes == 16 * 2 * 7 / 8 * activations


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
    assert result["stages"][1]["data_parallel_logical_bytes"] == 2 * 3 / 4 * 18 * layer * 4
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
        ("parallel=pp4_dp2 parallel.distributed_optimizer=true", "1 times the embedding's gradient per rank in place"),
        ("parallel=pp4_dp2", "Rank p's has p backward steps of other ranks to hide behind, the last rank's 3."),
        ("parallel=pp4_dp2", "the reduction of its gradients is on the critical path: nothing hides it"),
        ("parallel=pp4_dp2 parallel.overlap_grad_reduce=true", "but for what overlap_grad_reduce hides"),
        ("parallel=pp4_dp2 model.sc_rank=64", "can't help at rank 64"),
        ("parallel=pp4_dp2 technique=sc", "on pipeline ranks 0 to 2 of 4 (75%) saves"),
        ("parallel=pp4_dp2 technique=sc", "from step 21 on"),
        ("parallel=pp4_dp2 technique=sc", "the gradients of vectors and position embeddings stay dense"),
        ("parallel=pp4_dp2 technique=cb_fe_sc", "the word embedding (reduced by fused embedding synchronisation)"),
        ("parallel=pp4_dp2 technique=sc technique.sc.fraction=0", "no stage compresses"),
        ("parallel=pp4_dp2 technique=naive_dp", "The last rank's gradients are compressed too"),
        ("parallel=tp2_pp2_dp2 technique=sc technique.sc.codec.rank=24", "linear_proj (128 x 64)"),
        ("parallel=tp2_pp2_dp2 technique=sc technique.sc.codec.rank=24", "whole ones gain more"),
        ("parallel=pp4_dp2 technique=sc parallel.distributed_optimizer=true", "only above a compression ratio of 2"),
        (
            "parallel=pp4_dp2 technique=sc parallel.distributed_optimizer=true technique.sc.codec.rank=64 "
            "technique.sc.min_compression_ratio=1",
            "more bytes than without",
        ),
        ("parallel=tp2_pp2_dp2 parallel.sequence_parallel=true", "their LayerNorms' gradients"),
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
    assert "tensor_parallel" not in remarks
    assert "Selective stage compression" not in remarks


def test_a_tokenizer_that_is_there_already_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(
        '{"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"content": "b"}, {"content": "</s>"}]}'
    )
    config = one(f"task=exposure tokenizer=huggingface tokenizer.path={tmp_path}")
    assert stage_traffic.vocabulary_size(config) == 3


def test_it_is_told_without_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", run.__file__, *PAPER.split()]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "pydantic" in imported
    assert not [name for name in imported if re.match(r"(torch|megatron|pandas|numpy|tokenizers)\b", name)]
    assert "pipeline_backward" in result.stdout
    assert list(tmp_path.iterdir()) == []
