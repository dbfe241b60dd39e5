"""The loop around Megatron-core: records, validation, stopping."""

from __future__ import annotations

import math
import os
import signal
import sys
from typing import Any

import pytest

from optimus_cc.config import RunConfig
from tests.configurations import SEQUENCE, VOCABULARY, low_rank, tiny
from tests.ranks import RankPool
from tests.training_runs import backend_in_world, random_tokens, train_ours


def records(ranks: RankPool, config: RunConfig, kind: str = "train") -> list[dict[str, Any]]:
    results = ranks.run(config.parallel.world_size, train_ours, config)
    everyone = [[record for record in result["records"] if record["kind"] == kind] for result in results]
    untimed = ("step_time_s", "tokens_per_s", "tflop_per_s_per_rank", "wall_s")
    for mine in everyone[1:]:
        for a, b in zip(mine, everyone[0], strict=True):
            assert {k: v for k, v in a.items() if k not in untimed} == {k: v for k, v in b.items() if k not in untimed}
    return everyone[0]


def test_records_over_several_steps_are_means_and_validation_disturbs_none(ranks: RankPool) -> None:
    each = records(ranks, tiny("pp2_v2_overlap", low_rank(), steps=7, validation_interval=2))
    some = records(ranks, tiny("pp2_v2_overlap", low_rank(), steps=7, validation_interval=2, log_interval=3))
    assert [record["step"] for record in each] == [1, 2, 3, 4, 5, 6, 7]
    assert [record["step"] for record in some] == [3, 6, 7]
    for record, of_steps in zip(some, (each[:3], each[3:6], each[6:]), strict=True):
        for key in ("loss", "grad_norm"):
            assert record[key] == pytest.approx(sum(one[key] for one in of_steps) / len(of_steps), rel=1e-6)
        assert record["learning_rate"] == of_steps[-1]["learning_rate"]
        for name, counts in record["traffic"].items():
            if name != "other":  # control messages belong to records
                assert counts == of_steps[0]["traffic"][name]


@pytest.mark.megatron
def test_loss_does_not_depend_on_tensor_or_data_parallelism(ranks: RankPool) -> None:
    """Stages are seeded apart, as in Megatron-LM, so pipelines start from other weights; the rest must agree."""
    batch = {"single": (8, 2), "dp2": (4, 2), "tp2": (8, 2)}
    found = {}
    for layout, (microbatches, size) in batch.items():
        config = tiny(layout, num_microbatches=microbatches, micro_batch_size=size, validation_interval=1, steps=3)
        found[layout] = [
            [record["loss"] for record in records(ranks, config, kind)] for kind in ("train", "validation")
        ]
    for layout in ("dp2", "tp2"):
        for mine, single in zip(found[layout], found["single"], strict=True):
            assert mine == pytest.approx(single, rel=1e-5)


@pytest.mark.megatron
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_nothing_but_memory(ranks: RankPool, recompute: str) -> None:
    model = {"dropout": 0.1}
    plain = records(ranks, tiny("pp2", low_rank(), steps=3, model=model))
    again = records(ranks, tiny("pp2", low_rank(), steps=3, model=model, recompute=recompute))
    assert [record["loss"] for record in again] == pytest.approx([record["loss"] for record in plain], rel=1e-6)


def test_validation_counts_its_tokens(ranks: RankPool) -> None:
    config = tiny("dp2", steps=2, validation_batches=3)
    validated = records(ranks, config, "validation")
    assert [record["step"] for record in validated] == [2]
    assert validated[0]["tokens"] == 3 * config.training.global_batch_size * SEQUENCE


def _asked_on_one_rank(config: RunConfig) -> tuple[int, list[int]]:
    """Rank 1 alone is sent SIGTERM while it takes its third step."""
    from optimus_cc.training import loop

    trainer = loop.Trainer.build(config, backend_in_world(config), VOCABULARY)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
    stop = loop.StopRequest.by_signals()
    steps: list[int] = []

    def heartbeat() -> None:
        if trainer.step == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        result = loop.run(
            trainer,
            random_tokens(config),
            random_tokens(config),
            lambda values: steps.append(values["step"]),
            heartbeat=heartbeat,
            stop=stop,
        )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert isinstance(result, loop.Stopped)
    return result.step, steps


def test_all_ranks_stop_at_the_same_step_boundary(ranks: RankPool) -> None:
    results = ranks.run(4, _asked_on_one_rank, tiny("pp4", steps=50, validation_interval=100))
    assert results == [(3, [1, 2, 3])] * 4


def _diverging(config: RunConfig) -> str:
    from optimus_cc.training import loop

    try:
        train_ours(config)
    except loop.NonFiniteLoss as error:
        return str(error)
    return ""


def test_loss_that_is_not_a_number_ends_every_rank_with_one_message(ranks: RankPool) -> None:
    config = tiny("pp2", steps=20, optimizer={"learning_rate": 1e16, "name": "sgd", "clip_grad": 0.0})
    messages = ranks.run(2, _diverging, config)
    assert messages[0] == messages[1]
    assert "training.on_nonfinite_loss=continue" in messages[0]


def _validate_with_dropout(config: RunConfig) -> list[float]:
    from optimus_cc.training import loop

    trainer = loop.Trainer.build(config, backend_in_world(config), VOCABULARY)
    losses = [trainer.validate(trainer.batches_for_chunks(random_tokens(config), 0), 1)[0] for _ in range(2)]
    return losses + [float(chunk.training) for chunk in trainer.model]


@pytest.mark.megatron
def test_validation_drops_nothing_out(ranks: RankPool) -> None:
    without = ranks.run(2, _validate_with_dropout, tiny("pp2"))[0]
    with_dropout = ranks.run(2, _validate_with_dropout, tiny("pp2", model={"dropout": 0.5}))[0]
    assert with_dropout == without
    assert without[0] == without[1]
    assert without[2] == 1.0, "training goes on in training mode"


def test_perplexity_of_what_is_no_number_is_none() -> None:
    from optimus_cc.training.history import perplexity

    assert math.isnan(perplexity(math.nan))
    assert math.isinf(perplexity(1e4))
    assert perplexity(0.0) == 1.0


def _loaded_by_training(config: RunConfig) -> list[str]:
    before = set(sys.modules)
    train_ours(config)
    return sorted(set(sys.modules) - before)


def test_test_ranks_share_what_they_load(ranks: RankPool) -> None:
    """What tests.preload lacks every rank of every test loads anew, which once took longer than all else they did."""
    for loaded in ranks.run(2, _loaded_by_training, tiny("pp2", steps=1)):
        assert len(loaded) < 40, loaded
