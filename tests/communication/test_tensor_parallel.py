"""Stage-to-stage messages between tensor-parallel stages: sequence parallelism and split messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from optimus_cc.config import RunConfig
from tests.configurations import HIDDEN, SEQUENCE, low_rank, tiny
from tests.ranks import RankPool
from tests.training_runs import train_ours


def train(ranks: RankPool, config: RunConfig) -> list[dict[str, Any]]:
    return ranks.run(config.parallel.world_size, train_ours, config)


def series(results: list[dict[str, Any]], key: str) -> list[float]:
    return [record[key] for record in results[0]["records"] if key in record]


@pytest.mark.megatron
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["tp2_pp2_dp2", "tp2_pp2_v2_overlap"])
def test_split_messages_change_nothing_but_their_size(ranks: RankPool, layout: str, precision: str) -> None:
    whole = train(ranks, tiny(layout, steps=2, precision=precision))
    split = train(ranks, tiny(layout, steps=2, precision=precision, parallel={"split_over_tensor_parallel": True}))
    for a, b in zip(split, whole, strict=True):
        assert all(torch.equal(a["weights"][key], value) for key, value in b["weights"].items())
    assert series(split, "loss") == series(whole, "loss")
    before, after = whole[0]["summary"]["traffic"], split[0]["summary"]["traffic"]
    for name in ("pipeline_forward", "pipeline_backward"):
        assert after[name]["logical_bytes"] == before[name]["logical_bytes"] == before[name]["wire_bytes"]
        assert after[name]["wire_bytes"] == before[name]["wire_bytes"] / 2
    # Gathering a share of 1/2 costs each of two ranks half a message, in the tensor-parallel group.
    moved = sum(before[name]["wire_bytes"] for name in ("pipeline_forward", "pipeline_backward")) / 2
    assert after["tensor_parallel"]["wire_bytes"] - before["tensor_parallel"]["wire_bytes"] == moved


@pytest.mark.megatron
@pytest.mark.parametrize("layout", ["tp2_pp2", "tp2_pp2_v2_overlap"])
def test_split_and_compressed_at_full_rank_equals_plain(ranks: RankPool, layout: str) -> None:
    plain = train(ranks, tiny(layout, steps=3))
    technique = low_rank(10**6, epilogue_only=False, compress_forward=True)
    split = train(ranks, tiny(layout, technique, steps=3, parallel={"split_over_tensor_parallel": True}))
    assert series(split, "loss") == pytest.approx(series(plain, "loss"), rel=1e-4)


@pytest.mark.megatron
def test_each_tensor_parallel_rank_compresses_its_own_rows(ranks: RankPool) -> None:
    """The factors are of (rows / TP) x hidden, whatever TP is."""
    technique = low_rank(2, epilogue_only=False, residual="carry")
    config = tiny("tp2_pp2", technique, steps=1, parallel={"split_over_tensor_parallel": True})
    results = train(ranks, config)
    (record,) = (record for record in results[0]["records"] if record["kind"] == "train")
    rows = SEQUENCE * config.training.micro_batch_size // 2
    payload = (rows + HIDDEN) * 2 * 4
    assert record["traffic"]["pipeline_backward"]["wire_bytes"] == 2 * config.num_microbatches * payload
    memories = [result["state"]["backward.0.memory"] for result in results if result["state"]]
    assert [tuple(memory.shape) for memory in memories] == [(SEQUENCE // 2, 2, HIDDEN)] * 2
    assert not torch.equal(memories[0], memories[1])


@pytest.mark.megatron
@pytest.mark.parametrize("technique", ["baseline", "cb"])
@pytest.mark.parametrize("layout", ["tp2", "tp2_pp2_dp2", "tp2_pp2_v2_overlap"])
def test_sequence_parallelism_computes_the_same(ranks: RankPool, layout: str, technique: str) -> None:
    """With a norm of this project's own where Megatron-core's local one refuses it."""
    # At full rank, so that sharing out the rows does not change what is sent.
    chosen = low_rank(10**6, epilogue_only=False) if technique == "cb" and layout != "tp2" else None
    plain = train(ranks, tiny(layout, chosen, steps=3))
    shared = train(ranks, tiny(layout, chosen, steps=3, parallel={"sequence_parallel": True}))
    assert series(shared, "loss") == pytest.approx(series(plain, "loss"), rel=1e-4)
    assert series(shared, "grad_norm") == pytest.approx(series(plain, "grad_norm"), rel=1e-3)
    sums = [result[0]["summary"]["traffic"]["pipeline_forward"]["wire_bytes"] for result in (shared, plain)]
    assert sums[0] == sums[1] / 2


@pytest.mark.megatron
def test_layernorm_gradients_count_as_other(ranks: RankPool) -> None:
    config = tiny("tp2", steps=1)
    results = train(ranks, tiny("tp2", steps=1, parallel={"sequence_parallel": True}))
    plain = train(ranks, config)
    # Two LayerNorms and two row-parallel biases a layer, and the last LayerNorm, all replicated: 2 h, 2 h, h, h, 2 h.
    # Position embeddings are replicated too, but not marked: their gradient is made before the sequence is shared out.
    elements = config.model.num_layers * 6 * HIDDEN + 2 * HIDDEN
    difference = (
        results[0]["summary"]["traffic"]["other"]["wire_bytes"] - plain[0]["summary"]["traffic"]["other"]["wire_bytes"]
    )
    assert difference == 2 * elements * 4


def _forward_of_odd_length(config: RunConfig) -> list[float]:
    """A forward pass over a sequence that tensor-parallel ranks can't share out evenly."""
    from optimus_cc.training import loop
    from tests.configurations import VOCABULARY
    from tests.training_runs import backend_in_world, random_tokens

    trainer = loop.Trainer.build(config, backend_in_world(config), VOCABULARY)
    length = SEQUENCE - 1
    whole = next(random_tokens(config)(0))
    cut = {name: value[:, :length].contiguous() for name, value in whole.items()}
    with torch.no_grad():
        losses = trainer.attachment.forward_backward_func(
            forward_step_func=trainer._forward_step,
            data_iterator=iter([cut] * 2),
            model=trainer.model[0],
            num_microbatches=2,
            seq_length=length,
            micro_batch_size=config.training.micro_batch_size,
            forward_only=True,
        )
    return [float(loss["loss"]) for loss in losses]


@pytest.mark.megatron
def test_messages_that_can_not_be_split_evenly_travel_whole(ranks: RankPool) -> None:
    whole = ranks.run(4, _forward_of_odd_length, tiny("tp2_pp2"))
    split = ranks.run(4, _forward_of_odd_length, tiny("tp2_pp2", parallel={"split_over_tensor_parallel": True}))
    assert split == whole
    assert any(losses for losses in whole)
