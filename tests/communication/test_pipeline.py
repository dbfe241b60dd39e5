"""Compressed backpropagation in real runs on gloo ranks."""

from __future__ import annotations

import functools
import math
from itertools import product
from typing import Any

import pytest
import torch

from optimus_cc.config import RunConfig
from optimus_cc.exposure import Schedule
from tests.configurations import HIDDEN, SEQUENCE, low_rank, tiny
from tests.ranks import RankPool
from tests.training_runs import train_ours

LAYOUTS = ["pp2", "pp4", "tp2_pp2_dp2", "pp4_dp2", "pp4_v2", "pp4_v2_overlap", "pp2_v2_overlap"]
VARIANTS: dict[str, dict[str, Any]] = {
    "cb": {},
    "no epilogue": {"epilogue_only": False},
    "flush": {"epilogue_only": False, "residual": "flush"},
    "forward": {"compress_forward": True},
}
MESSAGE_BYTES = SEQUENCE * 2 * HIDDEN * 4


def train(ranks: RankPool, config: RunConfig) -> list[dict[str, Any]]:
    return ranks.run(config.parallel.world_size, train_ours, config)


def losses(results: list[dict[str, Any]]) -> list[float]:
    return [record["loss"] for record in results[0]["records"]]


@pytest.mark.megatron
@pytest.mark.parametrize("layout", LAYOUTS)
def test_full_rank_equals_uncompressed_to_rounding(ranks: RankPool, layout: str) -> None:
    """Training amplifies rounding, so the bound is on a few steps and the codec's is on the residuals."""
    plain = train(ranks, tiny(layout, steps=3))
    full = train(ranks, tiny(layout, low_rank(10**6, epilogue_only=False, compress_forward=True), steps=3))
    assert losses(full) == pytest.approx(losses(plain), rel=1e-4)
    norms = [[record["grad_norm"] for record in run[0]["records"] if "grad_norm" in record] for run in (full, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


@pytest.mark.megatron
def test_every_toggle_changes_the_result_and_none_the_first_loss(ranks: RankPool) -> None:
    """The first loss is computed before anything compressed has had an effect."""
    variants = {
        "baseline": None,
        "cb": low_rank(),
        "cb carry": low_rank(residual="carry"),
        "cb flush": low_rank(residual="flush"),
        "no epilogue": low_rank(epilogue_only=False),
        "no lazy error": low_rank(lazy_error_propagation=False),
        "naive": low_rank(epilogue_only=False, lazy_error_propagation=False),
        "cold": low_rank(warm_start=False),
        "rank 4": low_rank(4),
    }
    seen = {name: losses(train(ranks, tiny("pp4", technique, steps=3))) for name, technique in variants.items()}
    assert len({values[0] for values in seen.values()}) == 1
    assert len({tuple(values) for values in seen.values()}) == len(variants)
    assert all(math.isfinite(value) for values in seen.values() for value in values)


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("layout", "variant"),
    [*((layout, "cb") for layout in LAYOUTS), *product(("pp4", "pp4_v2_overlap"), sorted({*VARIANTS} - {"cb"}))],
)
def test_pipeline_traffic_is_what_the_schedule_and_the_rank_say(ranks: RankPool, layout: str, variant: str) -> None:
    """Bytes against arithmetic from the layout; the meter itself holds them against the transport at every record."""
    config = tiny(layout, low_rank(2, **VARIANTS[variant]), steps=2)
    results = train(ranks, config)
    parallel, microbatches = config.parallel, config.num_microbatches
    boundaries = parallel.num_virtual_stages - 1
    replicas = parallel.tensor_parallel_size * parallel.data_parallel_size
    payload_bytes = (SEQUENCE * 2 + HIDDEN) * 2 * 4
    messages = boundaries * microbatches
    counts = Schedule(parallel.pipeline_parallel_size, parallel.num_chunks, microbatches).compressed_counts(
        epilogue_only=variant in ("cb", "forward"), flush=variant == "flush"
    )
    compressed = sum(counts.values())
    if parallel.num_chunks == 1:
        stages = parallel.pipeline_parallel_size
        expected = {
            "cb": sum(min(stages - p, microbatches) for p in range(1, stages)),
            "no epilogue": messages,
            "flush": boundaries * (microbatches - 1),
            "forward": sum(min(stages - p, microbatches) for p in range(1, stages)),
        }
        assert compressed == expected[variant]
    for record in results[0]["records"]:
        if record["kind"] != "train":
            continue
        backward, forward = record["traffic"]["pipeline_backward"], record["traffic"]["pipeline_forward"]
        assert backward["logical_bytes"] == forward["logical_bytes"] == replicas * messages * MESSAGE_BYTES
        assert backward["wire_bytes"] == replicas * (
            compressed * payload_bytes + (messages - compressed) * MESSAGE_BYTES
        )
        assert forward["wire_bytes"] == replicas * messages * (payload_bytes if variant == "forward" else MESSAGE_BYTES)


def _sent_and_arrived(config: RunConfig) -> dict[str, Any]:
    """Train with a communicator that keeps, by message identity, what was to be sent and what arrived."""
    from optimus_cc.communication import pipeline
    from optimus_cc.compression import Payload

    sent: dict[tuple[str, int, int, int], torch.Tensor] = {}
    arrived: dict[tuple[str, int, int, int], torch.Tensor] = {}
    step = 0
    cls = pipeline.CompressedP2PCommunicator
    original = cls._communicate, cls.begin, cls._next, cls._outgoing
    last: dict[tuple[int, str], Any] = {}

    def begin(self: Any, num_microbatches: int, forward_only: bool) -> None:
        nonlocal step
        step += not forward_only
        original[1](self, num_microbatches, forward_only)

    def next_(self: Any, ledger: Any, direction: str, verb: str) -> Any:
        message = original[2](self, ledger, direction, verb)
        last[id(ledger), direction] = message
        return message

    def outgoing(self: Any, tensor: Any, direction: str) -> Any:
        result = original[3](self, tensor, direction)
        message = last.pop((id(self._to_send), direction), None)
        if message is not None:
            as_sent: Any
            as_sent, encoded = result
            if encoded:
                as_sent = self._codec.decode(Payload(self._codec.wire_format(tensor.shape, tensor.dtype), as_sent))
            sent[direction, step, message.boundary, message.microbatch] = as_sent.detach().clone()
        return result

    def keep(key: tuple[str, int, int, int], tensor: torch.Tensor) -> None:
        arrived[key] = tensor.detach().clone()

    def communicate(self: Any, **kwargs: Any) -> Any:
        previous, following, requests = original[0](self, **kwargs)
        for tensor, direction, name in ((previous, "forward", "recv_prev"), (following, "backward", "recv_next")):
            message = last.pop((id(self._to_receive), direction), None)
            if tensor is None or message is None:
                continue
            key = (direction, step, message.boundary, message.microbatch)
            if requests and name in requests:
                work = requests[name]
                requests[name] = pipeline._AfterWait(work, functools.partial(keep, key, tensor), None)
            else:
                keep(key, tensor)
        return previous, following, requests

    cls._communicate, cls.begin, cls._next, cls._outgoing = communicate, begin, next_, outgoing  # type: ignore[method-assign]
    try:
        train_ours(config)
    finally:
        cls._communicate, cls.begin, cls._next, cls._outgoing = original  # type: ignore[method-assign]
    return {"sent": sent, "arrived": arrived}


@pytest.mark.megatron
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["pp4", "pp4_v2", "pp4_v2_overlap", "pp2_v2_overlap"])
def test_both_ends_agree_on_every_message(ranks: RankPool, layout: str, precision: str) -> None:
    """What arrives under an identity is what was sent under it, with validation passes in between."""
    technique = low_rank(2, residual="flush", compress_forward=True)
    config = tiny(layout, technique, steps=3, validation_interval=1, precision=precision)
    results = ranks.run(config.parallel.world_size, _sent_and_arrived, config)
    sent = {key: value for result in results for key, value in result["sent"].items()}
    arrived = {key: value for result in results for key, value in result["arrived"].items()}
    boundaries = config.parallel.num_virtual_stages - 1
    assert len(sent) == len(arrived) == 2 * 3 * boundaries * config.num_microbatches
    for key, value in sent.items():
        assert torch.equal(arrived[key], value), key


@pytest.mark.megatron
def test_validation_does_not_disturb_training(ranks: RankPool) -> None:
    often = train(ranks, tiny("pp4", low_rank(residual="carry"), steps=4, validation_interval=1))
    never = train(ranks, tiny("pp4", low_rank(residual="carry"), steps=4, validation_interval=100))
    for a, b in zip(often, never, strict=True):
        assert all(torch.equal(a["weights"][key], value) for key, value in b["weights"].items())
        assert a["state"].keys() == b["state"].keys()
        assert all(torch.equal(a["state"][key], value) for key, value in b["state"].items())


@pytest.mark.megatron
@pytest.mark.parametrize("residual", ["carry", "reset", "flush"])
def test_memory_at_the_end_of_a_mini_batch(ranks: RankPool, residual: str) -> None:
    results = train(ranks, tiny("pp4", low_rank(residual=residual, epilogue_only=False), steps=2))
    memories = {key for result in results for key in result["state"] if key.endswith(".memory")}
    assert memories == ({f"backward.{boundary}.memory" for boundary in range(3)} if residual == "carry" else set())


@pytest.mark.megatron
def test_tensor_parallel_ranks_send_the_same(ranks: RankPool) -> None:
    config = tiny("tp2_pp2_dp2", low_rank(residual="carry"), steps=3)
    results = train(ranks, config)
    states = [result["state"] for result in results if result["state"]]
    assert len(states) == 4  # the last stage's ranks: 2 tensor-parallel x 2 data-parallel
    for key, value in states[0].items():
        assert torch.equal(states[1][key], value) == (key != "owner"), key
        if key.endswith("memory"):
            assert not torch.equal(states[2][key], value), "data-parallel replicas see other samples"


@pytest.mark.megatron
def test_same_seed_same_run_other_seed_other_run(ranks: RankPool) -> None:
    runs = [train(ranks, tiny("pp4", low_rank(), steps=3, seed=seed)) for seed in (1, 1, 2)]
    assert losses(runs[0]) == losses(runs[1])
    assert losses(runs[0]) != losses(runs[2])


def _lost_message(config: RunConfig) -> str:
    """A schedule that sends fewer messages than the exposure map expects."""
    from optimus_cc.communication.pipeline import CompressedP2PCommunicator, ScheduleMismatch
    from optimus_cc.communication.traffic import TrafficMeter
    from tests.training_runs import backend_in_world

    backend_in_world(config)
    from megatron.core import parallel_state

    from optimus_cc.training.model import transformer_config

    class Device:
        is_cuda = False

    communicator = CompressedP2PCommunicator(
        parallel_state.get_pipeline_model_parallel_group(),
        transformer_config(config, Device()),  # type: ignore[arg-type]
        config.technique.cb,
        TrafficMeter({}),
    )
    communicator.begin(4, forward_only=False)
    try:
        communicator.end()
    except ScheduleMismatch as error:
        return str(error)
    return ""


@pytest.mark.megatron
def test_a_schedule_that_the_map_does_not_know_is_an_error(ranks: RankPool) -> None:
    messages = ranks.run(2, _lost_message, tiny("pp2", low_rank()))
    assert "received" in messages[0] or "sent" in messages[0]
    assert "sent" in messages[1]


@pytest.mark.megatron
def test_flush_sends_all_that_was_left_out(ranks: RankPool) -> None:
    """Over a mini-batch and across a boundary, the sum of what arrives is the sum of what was to be sent."""
    config = tiny("pp4", low_rank(1, residual="flush", epilogue_only=False), steps=2)
    results = ranks.run(4, _gradients_in_and_out, config)
    sums: dict[tuple[int, int], list[torch.Tensor]] = {}
    for result in results:
        for key, pair in result.items():
            sums[key] = list(pair)
    assert len(sums) == 2 * 3
    for key, (wanted, arrived) in sums.items():
        torch.testing.assert_close(arrived, wanted, rtol=1e-4, atol=1e-6 * float(wanted.abs().max()), msg=str(key))


def _gradients_in_and_out(config: RunConfig) -> dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]:
    """By (step, boundary): sums of the gradients that this rank was to send, and of what its peer will make of them."""
    from optimus_cc.communication import pipeline
    from optimus_cc.compression import Payload

    found: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    cls = pipeline.CompressedP2PCommunicator
    original = cls._outgoing, cls.begin
    step = 0

    def begin(self: Any, num_microbatches: int, forward_only: bool) -> None:
        nonlocal step
        step += not forward_only
        original[1](self, num_microbatches, forward_only)

    def outgoing(self: Any, tensor: Any, direction: str) -> Any:
        out: Any
        out, encoded = original[0](self, tensor, direction)
        if tensor is not None and direction == "backward" and self._schedule is not None:
            arriving = out
            if encoded:
                arriving = self._codec.decode(Payload(self._codec.wire_format(tensor.shape, tensor.dtype), out))
            key = (step, self.pp_group.rank() - 1)
            before = found.get(key, (torch.zeros_like(tensor), torch.zeros_like(tensor)))
            found[key] = before[0] + tensor.detach(), before[1] + arriving.detach()
        return out, encoded

    cls._outgoing, cls.begin = outgoing, begin  # type: ignore[method-assign]
    try:
        train_ours(config)
    finally:
        cls._outgoing, cls.begin = original  # type: ignore[method-assign]
    return found


@pytest.mark.megatron
def test_each_virtual_boundary_has_a_memory_of_its_own(ranks: RankPool) -> None:
    technique = low_rank(2, residual="carry", epilogue_only=False)
    results = train(ranks, tiny("pp4_v2", technique, steps=2))
    held = [sorted(key for key in result["state"] if key.endswith("memory")) for result in results]
    # Rank r holds those of the gradients that it sends: virtual stages r and 4 + r.
    assert held[0] == ["backward.3.memory"]
    for rank in (1, 2, 3):
        assert held[rank] == [f"backward.{rank - 1}.memory", f"backward.{rank + 3}.memory"]


def _interrupted(config: RunConfig) -> bool:
    """A mini-batch that an exception ends, then another one."""
    from optimus_cc.training import loop
    from tests.configurations import VOCABULARY
    from tests.training_runs import backend_in_world, random_tokens

    trainer = loop.Trainer.build(config, backend_in_world(config), VOCABULARY)
    communicator = trainer.attachment._communicator
    assert communicator is not None
    trainer.train_step(trainer.batches_for_chunks(random_tokens(config), 0))
    communicator._stream("backward.0").memory = torch.ones(3)
    communicator.begin(config.num_microbatches, forward_only=True)
    kept = communicator._stream("backward.0").memory is not None
    communicator.begin(config.num_microbatches, forward_only=False)
    return kept and communicator._stream("backward.0").memory is None


@pytest.mark.megatron
def test_aborted_mini_batch_leaves_nothing_under_reset(ranks: RankPool) -> None:
    assert all(ranks.run(2, _interrupted, tiny("pp2", low_rank())))
