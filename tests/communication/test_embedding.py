"""Fused embedding synchronisation against Megatron-core's two all-reduces."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from optimus_cc.config import RunConfig, load
from optimus_cc.config.technique import TechniqueConfig
from tests.configurations import HIDDEN, VOCABULARY, low_rank, tiny
from tests.ranks import RankPool
from tests.training_runs import backend_in_world, train_ours

FE = {"name": "fe", "fe": {"enabled": True}}
EMBEDDING_BYTES = VOCABULARY * HIDDEN * 4
EMBEDDINGS = ("embedding.word_embeddings.weight", "output_layer.weight")
PP2_DP2 = {"pipeline_parallel_size": 2, "data_parallel_size": 2}
PP2_DP3 = {"pipeline_parallel_size": 2, "data_parallel_size": 3}
PP2_V2_DP2 = {"pipeline_parallel_size": 2, "num_chunks": 2, "overlap_p2p": True, "batch_p2p": False}
OVERLAP = {"overlap_grad_reduce": True}
SHARDED = {"distributed_optimizer": True}


def built(config: RunConfig) -> Any:
    from optimus_cc.training import loop

    return loop.Trainer.build(config, backend_in_world(config), VOCABULARY)


def without_technique(config: RunConfig) -> RunConfig:
    return load({**config.to_mapping(), "technique": {"name": "baseline"}})


def embedding_of(model: Any) -> torch.nn.Parameter | None:
    """This rank's copy of the embedding, found by name."""
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            if name.endswith(EMBEDDINGS):
                return parameter  # type: ignore[no-any-return]
    return None


def _both_ways(config: RunConfig, num_tokens: int | None = None) -> dict[str, Any]:
    """Integers in every gradient, reduced by Megatron-core and by the fused synchronisation."""
    import torch.distributed as dist
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.utils import get_model_config

    from optimus_cc.communication.attach import attach

    baseline = TechniqueConfig()
    trainer = built(without_technique(config))
    trainer.attachment.detach()
    model = trainer.model

    def reduced(finalize: Any) -> list[Any]:
        generator = torch.Generator().manual_seed(dist.get_rank())
        for chunk in model:
            chunk.zero_grad_buffer()
            for parameter in chunk.parameters():
                values = torch.randint(-64, 64, parameter.shape, generator=generator)
                parameter.main_grad.copy_(values)
        tokens = None if num_tokens is None else torch.tensor(num_tokens)
        finalize(model, tokens)
        return [owned(parameter) for chunk in model for parameter in chunk.parameters()]

    def owned(parameter: Any) -> Any:
        """What the optimizer of this rank will read."""
        gradient = parameter.main_grad.flatten().clone()
        if not config.parallel.distributed_optimizer:
            return gradient
        for chunk in model:
            for group in chunk.bucket_groups:
                if parameter in group.param_to_bucket:
                    bucket = group.param_to_bucket[parameter]
                    # Not bucket.param_to_index, which megatron-core 0.16 fills without the padding between parameters.
                    start = parameter.main_grad.storage_offset() - bucket.grad_data.storage_offset()
                    end = start + gradient.numel()
                    size = group.intra_distributed_optimizer_instance_size
                    length = bucket.grad_data.numel() // size
                    mine = group.intra_distributed_optimizer_instance_rank * length
                    return gradient[max(mine - start, 0) : max(min(mine + length, end) - start, 0)]
        raise KeyError

    def attached(technique: TechniqueConfig) -> tuple[list[torch.Tensor], dict[str, float]]:
        handle = attach(technique, model)
        handle.traffic()
        gradients = reduced(get_model_config(model[0]).finalize_model_grads_func)
        traffic = {name: count.wire_bytes for name, count in handle.traffic().items()}
        handle.detach()
        return gradients, traffic

    plain, plain_traffic = attached(baseline)
    fused, traffic = attached(config.technique)
    again = reduced(get_model_config(model[0]).finalize_model_grads_func)
    weight = embedding_of(model)
    return {
        "equal": all(torch.equal(a, b) for a, b in zip(plain, fused, strict=True)),
        "restored": all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
        and get_model_config(model[0]).finalize_model_grads_func is finalize_model_grads
        and "finish_grad_sync" not in vars(model[-1]),
        "nonzero": all(bool(value.any()) for value in plain if value.numel()),
        "holds": weight is not None,
        "embedding_bytes": traffic["embedding"],
        "saved_bytes": sum(plain_traffic.values()) - sum(traffic.values()),
    }


EXACT: dict[str, tuple[Any, dict[str, Any], str]] = {
    "pp2": ("pp2", {}, "fp32"),
    "pp2_dp2": (PP2_DP2, {}, "fp32"),
    "pp2_dp4": ({"pipeline_parallel_size": 2, "data_parallel_size": 4}, {}, "fp32"),
    "pp4_dp2": ("pp4_dp2", {}, "fp32"),
    "overlap": (PP2_DP2, OVERLAP, "fp32"),
    "bf16": (PP2_DP2, {}, "bf16"),
    "tp2": ("tp2_pp2_dp2", {}, "fp32"),
    "sharded": (PP2_DP2, SHARDED, "fp32"),
    "sharded dp4": ({"pipeline_parallel_size": 2, "data_parallel_size": 4}, SHARDED, "fp32"),
    "sharded tp2 bf16 overlap": ("tp2_pp2_dp2", {**SHARDED, **OVERLAP}, "bf16"),
    "chunks": (PP2_V2_DP2, {}, "fp32"),
    "chunks dp2": ({**PP2_V2_DP2, "data_parallel_size": 2}, OVERLAP, "fp32"),
}


@pytest.mark.megatron
@pytest.mark.parametrize("name", EXACT)
def test_integers_are_reduced_to_the_same_bits_at_the_promised_volume(ranks: RankPool, name: str) -> None:
    layout, flags, precision = EXACT[name]
    config = tiny(layout, FE, parallel=flags, precision=precision)
    results = ranks.run(config.parallel.world_size, _both_ways, config)
    replicas = config.parallel.data_parallel_size
    volume = EMBEDDING_BYTES / config.parallel.tensor_parallel_size
    assert sum(result["holds"] for result in results) == 2 * replicas * config.parallel.tensor_parallel_size
    for result in results:
        assert result["equal"]
        assert result["nonzero"]
        assert result["restored"]
        if not result["holds"]:
            assert result["embedding_bytes"] == result["saved_bytes"] == 0
        elif not flags.get("distributed_optimizer"):
            before, after = (3 * replicas - 2) / replicas, (2 * replicas - 1) / replicas
            assert result["embedding_bytes"] == pytest.approx(volume * after)
            assert result["saved_bytes"] == pytest.approx(volume * (before - after))
        else:  # after the reduce-scatter's V(D-1)/D: V/D in place of V
            assert result["embedding_bytes"] == pytest.approx(volume / replicas)
            assert result["saved_bytes"] == pytest.approx(volume * (replicas - 1) / replicas)


@pytest.mark.megatron
def test_scaling_by_the_number_of_tokens_comes_after(ranks: RankPool) -> None:
    config = tiny(PP2_DP2, FE)
    for result in ranks.run(4, _both_ways, config, num_tokens=64):
        assert result["equal"]


REAL: dict[str, tuple[Any, dict[str, Any], str]] = {
    "dp2": (PP2_DP2, {}, "fp32"),
    "dp3": (PP2_DP3, {}, "fp32"),
    "dp3 overlap": (PP2_DP3, OVERLAP, "fp32"),
    "bf16 overlap": (PP2_DP2, OVERLAP, "bf16"),
    "sharded": (PP2_DP2, SHARDED, "fp32"),
    "sharded dp3 overlap": (PP2_DP3, {**SHARDED, **OVERLAP}, "fp32"),
    "sharded bf16": (PP2_DP2, SHARDED, "bf16"),
    "tp2": ("tp2_pp2_dp2", OVERLAP, "fp32"),
    "pp4_dp2": ("pp4_dp2", {}, "fp32"),
    "chunks": ({**PP2_V2_DP2, "data_parallel_size": 2}, OVERLAP, "fp32"),
}


@pytest.mark.megatron
@pytest.mark.parametrize("name", REAL)
def test_training_is_the_same_to_rounding_and_copies_stay_equal(ranks: RankPool, name: str) -> None:
    layout, flags, precision = REAL[name]
    settings: dict[str, Any] = {"parallel": flags, "precision": precision, "steps": 4}
    config = tiny(layout, FE, **settings)
    size = config.parallel.world_size
    plain = ranks.run(size, train_ours, tiny(layout, **settings))
    fused = ranks.run(size, train_ours, config)
    tolerance = 1e-5 if precision == "fp32" else 1e-2
    for a, b in zip(plain[0]["records"], fused[0]["records"], strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=tolerance)
        if a["kind"] == "train":
            assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=100 * tolerance)
    copies = [
        value
        for result in fused
        for key, value in result["weights"].items()
        if key.endswith(EMBEDDINGS) and value.numel()
    ]
    replicas, shards = config.parallel.data_parallel_size, config.parallel.tensor_parallel_size
    assert len(copies) == 2 * replicas * shards
    distinct: list[torch.Tensor] = []
    for value in copies:
        if not any(torch.equal(value, other) for other in distinct):
            distinct.append(value)
    assert len(distinct) == shards
    plain_weights = plain[0]["weights"]
    for key, value in fused[0]["weights"].items():
        assert torch.allclose(value.float(), plain_weights[key].float(), rtol=0, atol=2e-3), key


def _refusal(config: RunConfig) -> str:
    from megatron.core.utils import get_model_config

    from optimus_cc.communication.attach import attach

    trainer = built(config)
    trainer.attachment.detach()
    before = get_model_config(trainer.model[0]).finalize_model_grads_func
    try:
        attach(tiny("pp2", FE).technique, trainer.model)
    except ValueError as error:
        assert get_model_config(trainer.model[0]).finalize_model_grads_func is before
        return str(error)
    return ""


@pytest.mark.megatron
def test_one_stage_and_untied_embeddings_are_refused_on_every_rank(ranks: RankPool) -> None:
    for message in ranks.run(2, _refusal, tiny("dp2")):
        assert "more than one pipeline stage" in message
    for message in ranks.run(2, _refusal, tiny("pp2", model={"tied_embeddings": False})):
        assert "tied embeddings" in message


def _cut_differently(config: RunConfig) -> str:
    """The last stage's copy lies in one bucket with other weights, the first stage's in one of its own."""
    from megatron.core import parallel_state

    from optimus_cc.training import model

    build = model._build_chunk

    def build_last_stage_unmarked(*args: Any) -> Any:
        chunk: Any = build(*args)
        if parallel_state.is_pipeline_last_stage():
            chunk.shared_embedding_or_output_weight().shared_embedding = False
        return chunk

    model._build_chunk = build_last_stage_unmarked  # type: ignore[assignment]
    try:
        built(config)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.megatron
def test_shards_that_are_cut_differently_are_refused_on_every_rank(ranks: RankPool) -> None:
    messages = ranks.run(4, _cut_differently, tiny(PP2_DP2, FE, parallel=SHARDED))
    assert "both copies must be cut alike" in messages[0]
    assert len(set(messages)) == 1
    assert ranks.run(4, _cut_differently, tiny(PP2_DP2, FE)) == [""] * 4, "whole copies are not cut"


def _forgetful(config: RunConfig) -> dict[str, Any]:
    """A fused synchronisation that never synchronises."""
    from optimus_cc.communication.embedding import FusedEmbeddingSync

    original = FusedEmbeddingSync.synchronize
    FusedEmbeddingSync.synchronize = lambda self, force_all_reduce=False: None  # type: ignore[method-assign]
    try:
        return _both_ways(config)
    finally:
        FusedEmbeddingSync.synchronize = original  # type: ignore[method-assign]


@pytest.mark.megatron
@pytest.mark.parametrize("flags", [{}, SHARDED], ids=["plain", "sharded"])
def test_a_forgotten_embedding_is_noticed(ranks: RankPool, flags: dict[str, Any]) -> None:
    results = ranks.run(4, _forgetful, tiny(PP2_DP2, FE, parallel=flags))
    assert not any(result["equal"] for result in results if result["holds"])
    assert all(result["embedding_bytes"] == 0 for result in results)


@pytest.mark.megatron
def test_it_composes_with_compressed_backpropagation(ranks: RankPool) -> None:
    technique = {**low_rank(), **FE, "name": "cb_fe"}
    results = ranks.run(8, train_ours, tiny("tp2_pp2_dp2", technique, parallel=OVERLAP))
    records = results[0]["records"]
    assert records[-2]["loss"] < records[0]["loss"]
    backward = records[0]["traffic"]["pipeline_backward"]
    assert backward["wire_bytes"] < backward["logical_bytes"]
