"""Selective stage compression against dense reduction and against PowerSGD in double precision."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from optimus_cc.config import RunConfig
from optimus_cc.config.technique import TechniqueConfig
from optimus_cc.exposure import stages_to_compress
from tests.configurations import HIDDEN, VOCABULARY, low_rank, tiny
from tests.ranks import RankPool
from tests.training_runs import backend_in_world, train_ours

OVERLAP = {"overlap_grad_reduce": True}
SHARDED = {"distributed_optimizer": True}
FLAGS: dict[str, dict[str, Any]] = {"plain": {}, "overlap": OVERLAP, "sharded": SHARDED}
PP2_DP2 = {"pipeline_parallel_size": 2, "data_parallel_size": 2}
PP2_V2_DP2 = {**PP2_DP2, "num_chunks": 2, "overlap_p2p": True, "batch_p2p": False}


def sc(rank: int = 2, *, cb: bool = False, fe: bool = False, **keys: Any) -> dict[str, Any]:
    codec = {key: keys.pop(key) for key in ("warm_start", "wire_dtype") if key in keys}
    technique = low_rank() if cb else {}
    return {
        **technique,
        "name": "sc",
        "fe": {"enabled": fe},
        "sc": {"enabled": True, "fraction": 1.0, "codec": {"name": "low_rank", "rank": rank, **codec}, **keys},
    }


FULL: dict[str, Any] = {"rank": 10**6, "min_compression_ratio": 1e-3}


def built(config: RunConfig) -> Any:
    from optimus_cc.training import loop

    return loop.Trainer.build(config, backend_in_world(config), VOCABULARY)


def finalize(trainer: Any) -> None:
    from megatron.core.utils import get_model_config

    get_model_config(trainer.model[0]).finalize_model_grads_func(trainer.model, None)


def fill(trainer: Any, step: int) -> dict[str, torch.Tensor]:
    """Random gradients that differ between ranks; a copy of them, by name."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    copies = {}
    for chunk in trainer.model:
        chunk.zero_grad_buffer()
        for name, parameter in chunk.module.named_parameters():
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
            copies[name] = parameter.main_grad.clone()
    return copies


def gradients(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.main_grad.clone() for chunk in trainer.model for name, p in chunk.module.named_parameters()}


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.megatron
@pytest.mark.parametrize("flags", FLAGS)
def test_before_it_starts_and_on_no_stage_training_is_bit_identical(ranks: RankPool, flags: str) -> None:
    def run(technique: dict[str, Any]) -> list[dict[str, Any]]:
        config = tiny(PP2_DP2, technique, parallel=FLAGS[flags], steps=4, validation_interval=100)
        return ranks.run(4, train_ours, config)

    without = run(low_rank())
    warming = run(sc(cb=True, warmup_steps=3))
    nowhere = run(sc(cb=True, fraction=0.0))
    for rank, result in enumerate(nowhere):
        for key, value in without[rank]["weights"].items():
            assert torch.equal(result["weights"][key], value)
    records = [[r for r in result[0]["records"] if r["kind"] == "train"] for result in (without, warming)]
    for step, (a, b) in enumerate(zip(*records, strict=True), start=1):
        assert a["loss"] == b["loss"]  # the fourth is computed before compression has had an effect
        assert (a["grad_norm"] == b["grad_norm"]) == (step <= 3)
        assert (a["traffic"]["data_parallel"] == b["traffic"]["data_parallel"]) == (step <= 3)


LAYOUTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dp2": ("dp2", {}),
    "dp3 overlap": ({"data_parallel_size": 3}, OVERLAP),
    "pp2_dp2 overlap": (PP2_DP2, OVERLAP),
    "pp2_dp2 sharded": (PP2_DP2, SHARDED),
    "pp2_dp2 sharded overlap": (PP2_DP2, {**SHARDED, **OVERLAP}),
    "tp2_pp2_dp2": ("tp2_pp2_dp2", {}),
    "chunks": (PP2_V2_DP2, OVERLAP),
    "chunks sharded": (PP2_V2_DP2, SHARDED),
}


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("name", "fe"),
    [
        pytest.param(name, fe, id=f"{name}-{'fe sc' if fe else 'sc'}")
        for name, (layout, _) in LAYOUTS.items()
        for fe in (False, True)
        if not fe or tiny(layout).parallel.pipeline_parallel_size > 1  # one stage has one copy of the embedding
    ],
)
def test_full_rank_equals_dense_to_rounding(ranks: RankPool, name: str, fe: bool) -> None:
    layout, flags = LAYOUTS[name]
    plain_config = tiny(layout, parallel=flags, steps=3)
    size = plain_config.parallel.world_size
    plain = ranks.run(size, train_ours, plain_config)
    full = ranks.run(size, train_ours, tiny(layout, sc(**FULL, fe=fe), parallel=flags, steps=3))
    for a, b in zip(plain[0]["records"], full[0]["records"], strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
        if a["kind"] == "train":
            assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3)
            assert b["traffic"]["data_parallel"]["wire_bytes"] > 0


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("layout", "flags", "technique", "precision"),
    [
        ("pp4_dp2", {}, sc(cb=True, fe=True, fraction=0.75), "fp32"),
        ("pp4_dp2", SHARDED, sc(cb=True, fe=True, fraction=0.75), "fp32"),
        ("tp2_pp2_dp2", OVERLAP, sc(cb=True, fe=True, fraction=0.75), "bf16"),
        (PP2_V2_DP2, OVERLAP, sc(cb=True, fe=True, fraction=0.5, error_feedback=False), "fp32"),
        ("dp2", OVERLAP, sc(warm_start=False, wire_dtype="bf16"), "fp32"),
    ],
    ids=["cb_fe_sc", "sharded", "tp2 bf16", "chunks, no feedback", "cold, bf16 wire"],
)
def test_it_trains_and_replicas_stay_equal(
    ranks: RankPool, layout: Any, flags: dict[str, Any], technique: dict[str, Any], precision: str
) -> None:
    config = tiny(layout, technique, parallel=flags, precision=precision, steps=6, optimizer={"learning_rate": 3e-3})
    results = ranks.run(config.parallel.world_size, train_ours, config)
    losses = [record["loss"] for record in results[0]["records"] if record["kind"] == "train"]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]
    tp, replicas = config.parallel.tensor_parallel_size, config.parallel.data_parallel_size
    compressing = stages_to_compress(config.parallel.pipeline_parallel_size, config.technique.sc.fraction)
    for rank, result in enumerate(results):
        replica, stage = rank // tp % replicas, rank // (tp * replicas)
        first = results[rank - replica * tp]["weights"]
        assert all(torch.equal(value, first[key]) for key, value in result["weights"].items())
        named = {key for key in result["state"] if key.startswith("sc.") and key != "sc.steps"}
        assert bool(named) == (stage < compressing)
        assert not any("norm" in key or "bias" in key or "position" in key for key in named)
        assert all(torch.isfinite(result["state"][key]).all() for key in named)
        if config.technique.fe.enabled:
            assert not any("word_embeddings" in key or "output_layer" in key for key in named)
        elif stage == 0 and named:
            assert any("word_embeddings" in key for key in named)


# -- one reduction -----------------------------------------------------------------------------------------------------


def _against_double_precision(config: RunConfig, num_steps: int) -> dict[str, float]:
    """Largest relative differences from PowerSGD, each rank's own factor in its memory, for some random gradients."""
    trainer = built(config)
    replicas = dist.get_world_size()
    rank = config.technique.sc.codec.rank  # type: ignore[union-attr]
    errors: dict[str, torch.Tensor] = {}
    queries: dict[str, torch.Tensor] = {}
    worst = {"out": 0.0, "memory": 0.0, "invariant": 0.0, "dense": 0.0, "changed": 0.0}

    def gathered(value: torch.Tensor) -> list[torch.Tensor]:
        values = [torch.empty_like(value) for _ in range(replicas)]
        dist.all_gather(values, value)
        return values

    def far(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a.double() - b.double()).norm() / b.double().norm())

    (groups,) = [trainer.attachment._factored.groups]
    for step in range(num_steps):
        local = fill(trainer, step)
        finalize(trainer)
        out, state = gradients(trainer), trainer.attachment.state_dict()
        for _, reduction in groups:
            for batch in reduction._factors._batches:
                for name, first in zip(batch._names, batch._first, strict=True):
                    queries.setdefault(name.removeprefix("0."), first.double().T)
        for name, gradient in local.items():
            everyones = gathered(gradient)
            if name not in queries:
                worst["dense"] = max(worst["dense"], far(out[name], torch.stack(everyones).mean(0)))
                continue
            deltas = [value.double() for value in everyones]
            if step:
                deltas = [d + errors[f"{name}.{i}"] for i, d in enumerate(deltas)]
            mean = torch.stack(deltas).mean(0)
            p = torch.linalg.qr(mean @ queries[name]).Q
            q = mean.T @ p
            assert q.shape[1] == min(rank, *mean.shape)
            for i, delta in enumerate(deltas):
                errors[f"{name}.{i}"] = delta - p @ (p.T @ delta)  # by its own factor, not by the mean
            queries[name] = q / q.norm(dim=0)
            memories = gathered(state[f"sc.memory.0.{name}"])
            worst["out"] = max(worst["out"], far(out[name], p @ q.T))
            worst["memory"] = max(worst["memory"], far(memories[0], errors[f"{name}.0"]))
            applied = out[name].double() + torch.stack(memories).double().mean(0)
            worst["invariant"] = max(worst["invariant"], far(applied, mean))
            worst["changed"] = max(worst["changed"], far(out[name], torch.stack(everyones).mean(0)))
    return worst


@pytest.mark.megatron
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("size", [2, 3])
def test_it_is_power_sgd_with_error_feedback(ranks: RankPool, size: int, flags: str) -> None:
    """The distributed optimizer's full buffer is compared too: every rank forms the whole average."""
    config = tiny({"data_parallel_size": size}, sc(3), parallel=FLAGS[flags])
    for worst in ranks.run(size, _against_double_precision, config, 3):
        assert worst["out"] < 1e-4
        assert worst["memory"] < 1e-4
        assert worst["invariant"] < 1e-5
        assert worst["dense"] < 1e-5 or flags == "sharded"
        assert worst["changed"] > 0.1  # rank 3 of random gradients is far from them


@contextmanager
def _counted(calls: list[str]) -> Iterator[None]:
    originals = {name: vars(dist.ProcessGroup)[name] for name in ("allreduce", "allreduce_coalesced")}

    def counting(name: str, original: Any) -> Any:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(group, *args, **kwargs)

        return call

    for name in originals:
        setattr(dist.ProcessGroup, name, counting(name, getattr(dist.ProcessGroup, name)))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, original)


def _collectives_and_bytes(config: RunConfig) -> dict[str, Any]:
    trainer = built(config)
    fill(trainer, 0)
    trainer.attachment.traffic()
    calls: list[str] = []
    with _counted(calls):
        finalize(trainer)
    count = trainer.attachment.traffic()["data_parallel"]
    return {
        "calls": calls,
        "groups": sum(len(chunk.bucket_groups) for chunk in trainer.model),
        "logical": count.logical_bytes,
        "wire": count.wire_bytes,
        "shapes": [tuple(p.shape) for chunk in trainer.model for p in chunk.module.parameters()],
    }


@pytest.mark.megatron
def test_a_bucket_takes_two_collectives_and_one_for_the_rest(ranks: RankPool) -> None:
    rank, size = 2, 2
    config = tiny("dp2", sc(rank, min_compression_ratio=4.0))
    for result in ranks.run(size, _collectives_and_bytes, config):
        assert result["groups"] == 1
        assert sorted(result["calls"]) == ["allreduce", "allreduce", "allreduce_coalesced"]
        ring = 2 * (size - 1) / size * 4
        matrices = [shape for shape in result["shapes"] if len(shape) == 2 and shape != (16, HIDDEN)]
        assert len(matrices) == config.model.num_layers * 4 + 1
        factors = sum(rank * (n + m) for n, m in matrices)
        everything = sum(math.prod(shape) for shape in result["shapes"])
        rest = everything - sum(n * m for n, m in matrices)
        assert result["logical"] == pytest.approx(ring * everything)
        assert result["wire"] == pytest.approx(ring * (factors + rest))


@pytest.mark.megatron
def test_the_gate_leaves_small_matrices_dense(ranks: RankPool) -> None:
    """A square 32 x 32 matrix is 8 times its factors of rank 2, the others of a layer more."""
    for result in ranks.run(2, _collectives_and_bytes, tiny("dp2", sc(2, min_compression_ratio=9.0))):
        matrices = [shape for shape in result["shapes"] if len(shape) == 2 and shape[0] not in (16, HIDDEN)]
        narrow = [shape for shape in result["shapes"] if shape == (HIDDEN, 4 * HIDDEN)]
        factors = sum(2 * (n + m) for n, m in matrices + narrow)
        everything = sum(math.prod(shape) for shape in result["shapes"])
        rest = everything - sum(n * m for n, m in matrices + narrow)
        assert result["wire"] == pytest.approx(4 * (factors + rest))


def _logical_is_megatrons(config: RunConfig, dense: RunConfig) -> tuple[float, float]:
    from megatron.core import parallel_state

    results = []
    for each in (config, dense):
        trainer = built(each)
        fill(trainer, 0)
        trainer.attachment.traffic()
        finalize(trainer)
        results.append(trainer.attachment.traffic()["data_parallel"].logical_bytes)
        parallel_state.destroy_model_parallel()
    return results[0], results[1]


@pytest.mark.megatron
@pytest.mark.parametrize("flags", FLAGS)
def test_logical_bytes_are_what_megatron_would_have_sent(ranks: RankPool, flags: str) -> None:
    compressed, dense = (tiny(PP2_DP2, technique, parallel=FLAGS[flags]) for technique in (sc(), None))
    for ours, megatrons in ranks.run(4, _logical_is_megatrons, compressed, dense):
        assert ours == pytest.approx(megatrons)


# -- state, refusals, what is not finite -------------------------------------------------------------------------------


def _resumed(config: RunConfig) -> bool:
    """From a saved state the same gradients lead to the same bits; without it they do not."""
    trainer = built(config)
    for step in range(2):
        fill(trainer, step)
        finalize(trainer)
    saved = {key: value.clone() for key, value in trainer.attachment.state_dict().items()}

    def next_step() -> dict[str, torch.Tensor]:
        fill(trainer, 2)
        finalize(trainer)
        return gradients(trainer)

    straight = next_step()
    trainer.attachment.load_state_dict(saved)
    loaded = trainer.attachment.state_dict()
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[key], saved[key]) for key in saved)
    resumed = next_step()
    trainer.attachment.load_state_dict({})
    assert trainer.attachment.state_dict().keys() == {"sc.steps", "owner"}
    afresh = next_step()
    same = all(torch.equal(straight[key], value) for key, value in resumed.items())
    return same and any(not torch.equal(straight[key], value) for key, value in afresh.items())


@pytest.mark.megatron
@pytest.mark.parametrize("keys", [{}, {"error_feedback": False}, {"warm_start": False}], ids=str)
def test_state_is_named_and_comes_back(ranks: RankPool, keys: dict[str, Any]) -> None:
    assert all(ranks.run(2, _resumed, tiny("dp2", sc(**keys))))


def _detached(config: RunConfig, dense: RunConfig) -> bool:
    from optimus_cc.communication.attach import attach

    trainer = built(dense)
    results: list[dict[str, torch.Tensor]] = []
    for compress in (False, True, False):
        if compress:
            trainer.attachment.detach()
            trainer.attachment = attach(config.technique, trainer.model)
        elif results:
            trainer.attachment.detach()
        fill(trainer, 0)
        finalize(trainer)
        results.append(gradients(trainer))
    before, during, after = results
    groups = [group for chunk in trainer.model for group in chunk.bucket_groups]
    assert not any({"start_grad_sync", "finish_grad_sync"} & vars(group).keys() for group in groups)
    assert any(not torch.equal(before[key], value) for key, value in during.items())
    return all(torch.equal(before[key], value) for key, value in after.items())


@pytest.mark.megatron
@pytest.mark.parametrize("flags", FLAGS)
def test_detach_gives_back_megatrons_reduction(ranks: RankPool, flags: str) -> None:
    configs = [tiny(PP2_DP2, technique, parallel=FLAGS[flags]) for technique in (sc(fe=True), None)]
    assert all(ranks.run(4, _detached, *configs))


def _not_finite(config: RunConfig, value: float) -> dict[str, bool]:
    trainer = built(config)
    fill(trainer, 0)
    finalize(trainer)
    fill(trainer, 1)
    name, spoilt = next((n, p) for n, p in trainer.model[0].module.named_parameters() if n.endswith("fc1.weight"))
    if dist.get_rank() == 0:
        spoilt.main_grad[3, 5] = value
    finalize(trainer)
    state = trainer.attachment.state_dict()
    result = {
        "comes out": not bool(torch.isfinite(spoilt.main_grad).any()),
        "others are finite": all(torch.isfinite(g).all() for n, g in gradients(trainer).items() if n != name),
        "state is finite": all(bool(torch.isfinite(v).all()) for v in state.values()),
        "memory is empty": not bool(state[f"sc.memory.0.{name}"].any()),
    }
    fill(trainer, 2)
    finalize(trainer)
    result["recovers"] = all(bool(torch.isfinite(g).all()) and bool(g.any()) for g in gradients(trainer).values())
    for chunk in trainer.model:
        chunk.zero_grad_buffer()
    trainer.attachment.load_state_dict({})
    finalize(trainer)
    result["zero stays zero"] = not any(bool(g.any()) for g in gradients(trainer).values())
    return result


@pytest.mark.megatron
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_comes_out_and_leaves_nothing_behind(ranks: RankPool, value: float) -> None:
    for result in ranks.run(2, _not_finite, tiny("dp2", sc()), value):
        assert all(result.values()), result


def _summed(config: RunConfig, dense: RunConfig) -> float:
    """Largest relative difference where gradients are added up and not averaged, as with a loss per token."""
    from optimus_cc.communication.attach import attach

    trainer = built(dense)
    trainer.attachment.detach()
    for chunk in trainer.model:
        for group in chunk.bucket_groups:
            for bucket in group.buckets:
                bucket.gradient_scaling_factor = 1.0
    fill(trainer, 0)
    finalize(trainer)
    expected = gradients(trainer)
    trainer.attachment = attach(config.technique, trainer.model)
    fill(trainer, 0)
    finalize(trainer)
    for key, value in trainer.attachment.state_dict().items():
        if "memory" in key:  # each is a rank's difference from the mean: nothing is left of them together
            dist.all_reduce(value)
            assert float(value.abs().max()) < 1e-4
    found = gradients(trainer)
    return max(float((found[key] - value).norm() / value.norm()) for key, value in expected.items())


@pytest.mark.megatron
def test_sums_stay_sums(ranks: RankPool) -> None:
    for size in (2, 3):
        layout = {"data_parallel_size": size}
        assert max(ranks.run(size, _summed, tiny(layout, sc(**FULL)), tiny(layout))) < 1e-5


def _refusal(config: RunConfig, technique: TechniqueConfig) -> str:
    from optimus_cc.communication.attach import attach

    trainer = built(config)
    trainer.attachment.detach()
    try:
        attach(technique, trainer.model)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.megatron
def test_what_can_not_help_is_refused(ranks: RankPool) -> None:
    technique = tiny("dp2", sc()).technique
    assert "more than one data-parallel rank" in ranks.run(1, _refusal, tiny("single"), technique)[0]
    unreachable = replace(technique, sc=replace(technique.sc, min_compression_ratio=100.0))
    for message in ranks.run(2, _refusal, tiny("dp2"), unreachable):
        assert "rank 2 save less than min_compression_ratio=100.0 on every matrix of this stage" in message


@pytest.mark.parametrize(
    ("stages", "fraction", "expected"),
    [(4, 0.75, 3), (2, 0.75, 2), (1, 0.75, 1), (4, 0.0, 0), (4, 1.0, 4), (4, 0.1, 0), (4, 0.125, 1), (50, 0.29, 15)],
)
def test_the_fraction_of_stages_is_rounded_half_up(stages: int, fraction: float, expected: int) -> None:
    assert stages_to_compress(stages, fraction) == expected
