"""Every technique in conf/, as it stands there, in every kind of layout and with both kinds of optimizer."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

from optimus_cc import stage_traffic
from optimus_cc.config import ConfigError, RunConfig, load
from optimus_cc.config.compose import CONF
from tests.config.command_line import one
from tests.configurations import LAYOUTS, VOCABULARY, tiny
from tests.ranks import RankPool
from tests.training_runs import backend_in_world, random_tokens

PRESETS = sorted(file.stem for file in (CONF / "technique").glob("*.yaml"))
OPTIMIZERS: dict[str, dict[str, Any]] = {"plain": {}, "sharded": {"distributed_optimizer": True}}
NAMES = ("tp2_pp2_dp2", "pp4_dp2", "pp4_v2", "pp2_v2_overlap")
SIZES: dict[str, dict[str, Any]] = {
    **{name: LAYOUTS[name] for name in NAMES},
    # For what needs data parallelism.
    **{f"{name}_dp2": {**LAYOUTS[name], "data_parallel_size": 2} for name in ("pp4_v2", "pp2_v2_overlap")},
}
STEPS = 3
ROUNDING = 1e-5
"""Relative difference that sums in another order may make to a loss within these few steps."""
EMBEDDINGS = ("embedding.word_embeddings.weight", "output_layer.weight")
Results = list[dict[str, Any]]
"""What each rank reports of one training."""


@cache
def technique(preset: str) -> dict[str, Any]:
    """The preset as it is composed, with ranks and warm-up for a model of this size."""
    sizes = "model.cb_rank=2 model.sc_rank=2 model.sc_warmup_steps=1"
    composed: dict[str, Any] = one(f"technique={preset} parallel=pp4_dp2 {sizes}").to_mapping()["technique"]
    return composed


def configured(layout: str, optimizer: str, preset: str) -> RunConfig:
    parallel = {**SIZES[layout], **OPTIMIZERS[optimizer]}
    layers = max(4, parallel["pipeline_parallel_size"] * parallel.get("num_chunks", 1))
    config = tiny(parallel, technique(preset), steps=STEPS, num_microbatches=4, model={"num_layers": layers})
    return load({**config.to_mapping(), "tokenizer": {"name": "bpe", "vocabulary_size": VOCABULARY - 5}})


def needs_replicas(preset: str) -> bool:
    return bool(technique(preset)["sc"]["enabled"])


def has_replicas(layout: str) -> bool:
    return bool(SIZES[layout].get("data_parallel_size", 1) > 1)


def presets_in(layout: str) -> list[str]:
    """Those that are trained in a layout."""
    if not has_replicas(layout):
        return [preset for preset in PRESETS if not needs_replicas(preset)]
    return [preset for preset in PRESETS if layout in NAMES or needs_replicas(preset) or preset == "baseline"]


def fullest(layout: str) -> str:
    """The preset that switches most on, of those that are trained in a layout."""
    nodes = ("cb", "fe", "sc")
    return max(presets_in(layout), key=lambda preset: sum(technique(preset)[node]["enabled"] for node in nodes))


# -- on the ranks ------------------------------------------------------------------------------------------------------


def _train(cells: list[tuple[RunConfig, bool]]) -> list[dict[str, Any]]:
    """One training after the other, with or without evaluation between the steps. All are of one layout."""
    from optimus_cc.training.backend import seed_everything

    backend = backend_in_world(cells[0][0])
    reports = []
    for config, evaluate in cells:
        seed_everything(config.training.seed)
        reports.append(_train_one(config, backend, evaluate))
    return reports


def _train_one(config: RunConfig, backend: Any, evaluate: bool) -> dict[str, Any]:
    from megatron.core import parallel_state

    from optimus_cc.training import loop

    trainer = loop.Trainer.build(config, backend, VOCABULARY)
    batches = trainer.batches_for_chunks(random_tokens(config), 0)
    report: dict[str, Any] = {
        "tp": parallel_state.get_tensor_model_parallel_rank(),
        "pp": parallel_state.get_pipeline_model_parallel_rank(),
        "dp": parallel_state.get_data_parallel_rank(),
        "last": parallel_state.is_pipeline_last_stage(),
        **{name: [] for name in ("own_losses", "losses", "norms", "traffic")},
    }
    for step in range(STEPS):
        trainer.attachment.traffic()  # of the set-up, or of the evaluation
        loss, norm = trainer.train_step(batches)
        report["traffic"].append(
            {name: (count.logical_bytes, count.wire_bytes) for name, count in trainer.attachment.traffic().items()}
        )
        report["own_losses"].append(float(loss))
        report["losses"].append(trainer.mean_loss(loss))
        report["norms"].append(norm)
        if evaluate and step < STEPS - 1:
            trainer.validate(trainer.batches_for_chunks(random_tokens(config, offset=10**6), 0), num_batches=1)
    report["weights"] = {
        f"{index}.{name}": _digest(value)
        for index, chunk in enumerate(trainer.model)
        for name, value in chunk.module.named_parameters()
    }
    trainer.attachment.detach()
    return report


def _digest(value: torch.Tensor) -> str:
    return hashlib.sha256(value.detach().numpy().tobytes()).hexdigest()


# -- what is held against it -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(ranks: RankPool) -> Callable[[str], dict[tuple[str, str, bool], Results]]:
    """What came of all trainings of a layout, by optimizer, preset and whether it was evaluated in between."""

    @cache
    def run(layout: str) -> dict[tuple[str, str, bool], Results]:
        cells = {
            (optimizer, preset, evaluate): configured(layout, optimizer, preset)
            for optimizer in OPTIMIZERS
            for preset in presets_in(layout)
            for evaluate in (True, False)
            if evaluate or preset == fullest(layout)
        }
        world_size = next(iter(cells.values())).parallel.world_size
        arguments = [(config, evaluate) for (_, _, evaluate), config in cells.items()]
        by_rank = ranks.run(world_size, _train, arguments, timeout_s=600.0)
        return {cell: [results[index] for results in by_rank] for index, cell in enumerate(cells)}

    return run


Trained = Callable[[str], dict[tuple[str, str, bool], Results]]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layout", NAMES)
def test_preset(trained: Trained, layout: str, optimizer: str, preset: str) -> None:
    if needs_replicas(preset) and not has_replicas(layout):
        with pytest.raises(ConfigError) as caught:
            configured(layout, optimizer, preset)
        assert [problem.key for problem in caught.value.problems] == ["technique.sc.enabled"]
        layout = f"{layout}_dp2"
    config, cells = configured(layout, optimizer, preset), trained(layout)
    results = cells[optimizer, preset, True]
    _ranks_agree(config, results)
    _traffic_is_as_foretold(config, results)
    _copies_are_equal(config, results)
    losses = _losses(results)
    _differs_where_it_compresses(config, losses, _losses(cells[optimizer, "baseline", True]))
    for twin in presets_in(layout):  # that differ in nothing but what makes no difference
        if technique(twin) == {**technique(preset), "name": twin, "fe": technique(twin)["fe"]}:
            assert losses == pytest.approx(_losses(cells[optimizer, twin, True]), rel=ROUNDING)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layout", SIZES)
def test_evaluation_in_between_changes_nothing(trained: Trained, layout: str, optimizer: str) -> None:
    with_it, without = (trained(layout)[optimizer, fullest(layout), evaluate] for evaluate in (True, False))
    assert with_it == without


def _losses(results: Results) -> list[float]:
    losses: list[float] = results[0]["losses"]
    return losses


def _ranks_agree(config: RunConfig, results: Results) -> None:
    assert all(math.isfinite(value) for result in results for key in ("losses", "norms") for value in result[key])
    for key in ("losses", "norms"):
        assert all(result[key] == results[0][key] for result in results)
    assert len(set(_losses(results))) == STEPS, "nothing is learned"
    own: dict[int, list[list[float]]] = {}
    for result in results:
        if result["last"]:
            own.setdefault(result["dp"], []).append(result["own_losses"])
    assert len(own) == config.parallel.data_parallel_size
    for peers in own.values():
        assert len(peers) == config.parallel.tensor_parallel_size
        assert all(losses == peers[0] for losses in peers)
    means = [sum(values) / len(own) for values in zip(*(peers[0] for peers in own.values()), strict=True)]
    assert means == pytest.approx(_losses(results), rel=1e-9)


def _traffic_is_as_foretold(config: RunConfig, results: Results) -> None:
    said = stage_traffic.traffic(config)
    cb, sc = config.technique.cb, config.technique.sc
    exact = ["pipeline_forward", "pipeline_backward", "embedding"]
    if not sc.enabled and not config.parallel.distributed_optimizer:  # whose buffers are padded
        exact.append("data_parallel")
    for step in range(STEPS):
        total = {
            name: tuple(sum(result["traffic"][step][name][i] for result in results) for i in (0, 1)) for name in said
        }
        for name in exact:
            assert total[name] == (said[name]["logical_bytes"], said[name]["wire_bytes"]), (name, step)
        assert (total["pipeline_backward"][1] < total["pipeline_backward"][0]) == cb.enabled
        assert (total["data_parallel"][1] < total["data_parallel"][0]) == (sc.enabled and step >= sc.warmup_steps)


def _copies_are_equal(config: RunConfig, results: Results) -> None:
    first = {(result["tp"], result["pp"]): result["weights"] for result in results if result["dp"] == 0}
    assert all(result["weights"] == first[result["tp"], result["pp"]] for result in results)
    copies: dict[int, list[str]] = {}
    for result in results:
        copies.setdefault(result["tp"], []).extend(_embeddings(result["weights"]))
    for found in copies.values():
        assert len(found) == 2 * config.parallel.data_parallel_size
        assert len(set(found)) == 1


def _embeddings(weights: dict[str, str]) -> Iterator[str]:
    return (digest for name, digest in weights.items() if name.endswith(EMBEDDINGS))


def _differs_where_it_compresses(config: RunConfig, losses: list[float], baseline: list[float]) -> None:
    """From the baseline; a loss is computed before what its own step compresses has had an effect."""
    cb, sc = config.technique.cb, config.technique.sc
    starts = [1] * cb.enabled + [sc.warmup_steps + 1] * sc.enabled
    start = min(starts, default=STEPS)
    assert start < STEPS or not starts, "too few steps to see it"
    rounding = ROUNDING if config.technique.fe.enabled else 0
    assert losses[:start] == pytest.approx(baseline[:start], rel=rounding, abs=0)
    for ours, plain in zip(losses[start:], baseline[start:], strict=True):
        assert ours != pytest.approx(plain, rel=rounding, abs=0)
