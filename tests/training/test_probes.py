"""Probes change nothing, and what they report is held against arithmetic and against captured tensors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from optimus_cc.communication.probe import Probe
from optimus_cc.config import RunConfig
from optimus_cc.exposure import Schedule
from optimus_cc.phases import PHASES
from optimus_cc.training.probes.spans import Span, phase_times
from tests.communication.test_data_parallel import sc
from tests.configurations import HIDDEN, SEQUENCE, VOCABULARY, low_rank, tiny
from tests.ranks import RankPool
from tests.training_runs import backend_in_world, random_tokens, train_ours

ALL: dict[str, Any] = {"memory": True, "phases": True, "interval_steps": 2, "trace_step": 5}
UNTIMED = ("step_time_s", "tokens_per_s", "tflop_per_s_per_rank", "wall_s")
CASES: dict[str, tuple[str, dict[str, Any] | None, dict[str, Any]]] = {
    "single": ("single", None, {}),
    "no epilogue": ("pp4", low_rank(epilogue_only=False, residual="carry"), {}),
    "naive": ("pp4", low_rank(epilogue_only=False, lazy_error_propagation=False), {}),
    "cb fe sc": ("pp4_dp2", sc(cb=True, fe=True, fraction=0.75, warmup_steps=1), {}),
    "bf16": ("tp2_pp2_dp2", sc(fe=True), {"precision": "bf16", "parallel": {"distributed_optimizer": True}}),
    "overlapped": ("tp2_pp2_v2_overlap", low_rank(), {"parallel": {"sequence_parallel": True}}),
    "recompute": ("pp2", None, {"recompute": "full", "model": {"dropout": 0.1}}),
}


def probed(records: list[dict[str, Any]], probe: str) -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] == "probe" and record["probe"] == probe]


@pytest.mark.parametrize("name", CASES)
def test_they_change_no_result(ranks: RankPool, name: str) -> None:
    layout, technique, keys = CASES[name]
    cb = technique is not None and technique.get("cb", {}).get("enabled", False)
    probes = {**ALL, "error_independence": cb}
    plain = tiny(layout, technique, steps=6, **keys)
    watched = tiny(layout, technique, steps=6, probes=probes, **keys)
    assert plain.run_id == watched.run_id
    off = ranks.run(plain.parallel.world_size, train_ours, plain)
    on = ranks.run(plain.parallel.world_size, train_ours, watched)
    for a, b in zip(on, off, strict=True):
        for kind in ("weights", "state"):
            assert a[kind].keys() == b[kind].keys()
            assert all(torch.equal(a[kind][key], value) for key, value in b[kind].items())
        kept = [record for record in a["records"] if record["kind"] != "probe"]
        for mine, theirs in zip(kept, b["records"], strict=True):
            assert all(mine[key] == value for key, value in theirs.items() if key not in UNTIMED)
        assert json.dumps(probed(a["records"], "phases")) == json.dumps(probed(on[0]["records"], "phases"))
    found = on[0]["records"]
    assert not [record for record in off[0]["records"] if record["kind"] == "probe"]
    world = plain.parallel.world_size
    assert [record["step"] for record in probed(found, "phases")] == [step for step in (2, 4, 6) for _ in range(world)]
    assert [record["step"] for record in probed(found, "memory")] == [3] * world  # step 5 is the trace's
    assert {record["step"] for record in probed(found, "error_independence")} == ({2, 4, 6} if cb else set())
    for record in probed(found, "phases"):
        fractions = record["fraction_of_step"]
        assert fractions.keys() == set(PHASES)
        assert min(fractions.values()) >= 0
        assert sum(fractions.values()) == pytest.approx(1, abs=1e-9)
        assert fractions["forward"] > 0
        assert fractions["backward"] > 0
        assert fractions["optimizer"] > 0
        assert fractions["gradient_norm"] > 0
        assert (fractions["inter_stage"] > 0) == (plain.parallel.pipeline_parallel_size > 1)
        compresses = cb and record["stage"] < plain.parallel.pipeline_parallel_size - 1  # receives, at least
        assert fractions["codec"] > 0 or not compresses
        assert fractions["codec"] == 0 or technique is not None
    for record in probed(found, "memory"):
        parts = [record[f"{part}_bytes"] for part in ("weights", "gradients", "optimizer_state", "activations")]
        assert record["baseline_bytes"] == sum(parts)
        assert min(parts) > 0
        assert max(record["baseline_bytes"], record["workspaces_bytes"]) <= record["peak_bytes"]
        most = record["baseline_bytes"] + record["workspaces_bytes"] + record["residuals_bytes"]
        assert record["peak_bytes"] <= most
        assert record["resident_peak_bytes"] > 0
        if technique is None:
            assert record["workspaces_bytes"] == record["residuals_bytes"] == 0
            assert record["peak_bytes"] == record["baseline_bytes"]


# -- error independence ------------------------------------------------------------------------------------------------


def _captured(config: RunConfig) -> dict[str, Any]:
    """Train; by micro-batch of each step, what each backward pass took in, gave out, and was given as gradient."""
    from megatron.core.pipeline_parallel import schedules

    steps: list[list[tuple[torch.Tensor | None, ...]]] = []
    original = schedules.backward_step

    def keep(value: Any) -> torch.Tensor | None:
        value = value[0] if isinstance(value, list) else value
        return None if value is None else value.detach().double().clone()

    def backward_step(input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, *args: Any) -> Any:
        taken = keep(input_tensor), keep(output_tensor_grad)
        result = original(input_tensor, output_tensor, output_tensor_grad, *args)
        if not steps or len(steps[-1]) == config.num_microbatches:
            steps.append([])
        steps[-1].append((taken[0], keep(result), taken[1]))
        return result

    schedules.backward_step = backward_step
    try:
        result = train_ours(config)
    finally:
        schedules.backward_step = original
    return {"records": result["records"], "steps": steps}


@pytest.mark.parametrize(
    ("layout", "keys", "training"),
    [
        ("pp4", {"epilogue_only": False}, {}),
        ("pp4", {"epilogue_only": True}, {}),
        ("pp4", {"epilogue_only": False, "lazy_error_propagation": False}, {}),
        ("pp4_dp2", {"epilogue_only": False, "residual": "flush"}, {}),
        ("tp2_pp2", {"epilogue_only": False}, {}),
        ("tp2_pp2", {"epilogue_only": False}, {"parallel": {"split_over_tensor_parallel": True}}),
    ],
)
def test_error_independence_against_what_stages_took_and_gave(
    ranks: RankPool, layout: str, keys: dict[str, Any], training: dict[str, Any]
) -> None:
    """A residual is what one stage gave, summed over micro-batches, less what the stage before was given of it."""
    config = tiny(
        layout, low_rank(**keys), steps=2, probes={"error_independence": True, "interval_steps": 1}, **training
    )
    parallel, microbatches = config.parallel, config.num_microbatches
    results = ranks.run(parallel.world_size, _captured, config)
    shards, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    expected: dict[tuple[int, int, int, int], dict[str, float]] = {}
    per_stage = shards * parallel.data_parallel_size
    for step in range(2):
        for boundary in range(stages - 1):
            for replica in range(parallel.data_parallel_size):
                before, after = (
                    results[stage * per_stage + replica * shards]["steps"][step] for stage in (boundary, boundary + 1)
                )
                sent_compressed = (
                    microbatches if not keys["epilogue_only"] else min(stages - boundary - 1, microbatches)
                )
                residual = torch.zeros_like(after[0][0])
                for index in range(microbatches - sent_compressed, microbatches - 1):
                    lost = after[index][1] - before[index][2]
                    residual = residual + lost if keys.get("lazy_error_propagation", True) else lost
                    difference = after[index + 1][0] - after[index][0]
                    expected[step + 1, boundary, index, replica] = {
                        "cosine_similarity": float(
                            torch.nn.functional.cosine_similarity(residual.flatten(), difference.flatten(), dim=0)
                        ),
                        "residual_mean": float(residual.mean()),
                        "residual_rms": float(residual.square().mean().sqrt()),
                        "activation_difference_mean": float(difference.mean()),
                        "activation_difference_rms": float(difference.square().mean().sqrt()),
                    }
    found = {
        tuple(record[key] for key in ("step", "boundary", "microbatch", "data_parallel_rank")): record
        for record in probed(results[0]["records"], "error_independence")
    }
    assert found.keys() == expected.keys()
    assert expected
    for key, values in expected.items():
        record = found[key]
        # Gradients, messages and memories are rounded to fp32 on the way.
        assert record["cosine_similarity"] == pytest.approx(values["cosine_similarity"], abs=1e-4)
        for name in ("residual", "activation_difference"):
            size = values[f"{name}_rms"]
            assert size > 0
            assert record[f"{name}_rms"] == pytest.approx(size, rel=1e-4)
            assert record[f"{name}_mean"] == pytest.approx(values[f"{name}_mean"], abs=1e-5 * size)


# -- time --------------------------------------------------------------------------------------------------------------


def test_a_spans_time_is_counted_once() -> None:
    def span(phase: Any, parent: int | None, begin: float, end: float) -> Span:
        return Span(phase, phase, None, parent, begin, end)

    spans = [
        span("other", None, 0, 20),
        span("forward", 0, 1, 4),
        span("inter_stage", 0, 5, 11),
        span("codec", 2, 6, 8),
        span("codec", 2, 8, 9),
        span("inter_stage", 2, 9, 10),
        span("backward", 0, 11, 13),
    ]
    times = phase_times(spans)
    assert {phase: seconds for phase, seconds in times.items() if seconds} == {
        "forward": 3,
        "inter_stage": 3,
        "codec": 3,
        "backward": 2,
        "other": 9,
    }


def test_nobody_listening_is_one_shared_context() -> None:
    probe = Probe()
    assert probe.span("codec", "encode") is probe.span("forward")
    with probe.span("codec"), probe.span("codec"):
        pass


def _failing_step(config: RunConfig) -> tuple[bool, ...]:
    """A probed step that an exception ends; whether everything is as it was before, then and after a good one."""
    from optimus_cc.training import loop
    from optimus_cc.training.history import History
    from optimus_cc.training.probes import Probes

    trainer = loop.Trainer.build(config, backend_in_world(config), VOCABULARY)
    history, probes = History(trainer), Probes(trainer)
    batches = trainer.batches_for_chunks(random_tokens(config), 0)

    def untouched() -> bool:
        probe = trainer.attachment.probe
        return (
            probe.spans is None
            and probe.messages is None
            and trainer.model[0].config.timers is None
            and "get_grad_norm" not in vars(trainer.optimizer)
        )

    history.resume()
    before = untouched()
    failed = False
    try:
        with probes.step(history, lambda record: None):
            assert not untouched()
            raise KeyError
    except KeyError:
        failed = untouched()
    with probes.step(history, lambda record: None):
        history.add(*trainer.train_step(batches))
    return before, failed, untouched()


def test_they_leave_nothing_installed(ranks: RankPool) -> None:
    config = tiny("pp2", steps=2, probes={"phases": True, "interval_steps": 1})
    assert ranks.run(2, _failing_step, config) == [(True, True, True)] * 2


# -- memory ------------------------------------------------------------------------------------------------------------


def test_allocations_are_counted_as_tensors_come_and_go() -> None:
    from optimus_cc.training.probes.memory import TensorAllocations

    held = torch.zeros(100)
    memory = TensorAllocations([held, held[:50], held.view(10, 10)])
    assert memory.allocated() == 400
    with memory.watching():
        held.add_(1)
        held[3:7].mul_(2)
        assert memory.allocated() == 400, "views and in-place operations allocate nothing"
        a = held + 1
        b = a.to(torch.bfloat16)
        assert memory.allocated() == 400 + 400 + 200
        del a
        assert memory.allocated() == 400 + 200
        assert memory.take_peak() == 1000
        assert memory.take_peak() == 600
        c = held.view(10, 10) @ held.view(10, 10)
        view = c[0]
        del c
        assert memory.allocated() == 1000, "a view keeps the storage alive"
        b.data = torch.empty(1, dtype=b.dtype)
        assert memory.allocated() == 800 + 2
        del b, view
        assert memory.take_peak() == 1002
    assert memory.allocated() == 400
    made_outside = torch.zeros(1000)
    assert memory.allocated() == 400
    del made_outside, held


def test_the_peak_is_divided_as_defined() -> None:
    """A codec that needs 800 bytes to make a memory of 400, between two uses of memory by training."""
    from types import SimpleNamespace

    from optimus_cc.training.probes.memory import MemoryMeter

    weight, gradient = torch.zeros(250), torch.zeros(250)
    kept: list[torch.Tensor] = []
    meter = MemoryMeter(SimpleNamespace(is_cuda=False), lambda: kept, {"weights": [weight], "gradients": [gradient]})  # type: ignore[arg-type]
    with meter.watching():
        meter.open("forward", "", None)
        activation = torch.zeros(500)
        meter.close()
        meter.open("inter_stage", "", None)
        meter.open("codec", "encode", None)
        scratch = torch.zeros(200)
        kept.append(torch.zeros(100))
        del scratch
        meter.close()
        meter.close()
        meter.open("backward", "", None)
        del activation
        temporary = torch.zeros(650)
        del temporary
        meter.close()
        meter.finish()
    result = meter.result()
    assert result["weights_bytes"] == result["gradients_bytes"] == 1000
    assert result["residuals_bytes"] == 400
    assert result["workspaces_bytes"] == 800
    assert result["baseline_bytes"] == 2000 + 2600
    assert result["activations_bytes"] == 2600
    assert result["peak_bytes"] == 2000 + 2000 + 1200


@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_named_bytes_are_those_counted_by_hand(ranks: RankPool, distributed_optimizer: bool) -> None:
    technique = sc(cb=True, fraction=0.5)
    technique["cb"] |= {"epilogue_only": False}
    config = tiny(
        "pp4_dp2",
        technique,
        steps=3,
        probes={"memory": True, "interval_steps": 2},
        parallel={"distributed_optimizer": distributed_optimizer},
    )
    results = ranks.run(8, train_ours, config)
    records = probed(results[0]["records"], "memory")
    assert [record["rank"] for record in records] == list(range(8))
    message, query = SEQUENCE * 2 * HIDDEN * 4, HIDDEN * 2 * 4
    for record, result in zip(records, results, strict=True):
        elements = sum(weight.numel() for weight in result["weights"].values())
        assert record["source"] == "tensors"
        steps = 4 * len(result["weights"])  # Adam's step counters
        if distributed_optimizer:  # buffers and shards are padded
            assert record["weights_bytes"] == pytest.approx(4 * elements, rel=0.05)
            assert record["gradients_bytes"] == record["weights_bytes"]
            assert record["optimizer_state_bytes"] == pytest.approx(2 * 4 * elements / 2, rel=0.05)
        else:
            assert record["weights_bytes"] == 4 * elements
            assert 4 * elements <= record["gradients_bytes"] <= 1.05 * 4 * elements
            assert 8 * elements <= record["optimizer_state_bytes"] <= 8 * elements + steps
        # The sender of gradients keeps what it left out, and its query.
        expected = message + query if record["stage"] > 0 else 0
        if record["stage"] < 2:  # half of the stages, earliest first
            for name, weight in result["weights"].items():
                if weight.dim() == 2 and "position" not in name:
                    expected += 4 * (weight.numel() + weight.shape[1] * 2)
        assert record["residuals_bytes"] == expected, record["rank"]


# -- trace -------------------------------------------------------------------------------------------------------------


def _traced(config: RunConfig, path: Path) -> None:
    from optimus_cc.training import loop

    trainer = loop.Trainer.build(config, backend_in_world(config), VOCABULARY)
    source = random_tokens(config)
    loop.run(trainer, source, source, lambda record: None, trace_path=path)


@pytest.mark.parametrize(
    ("layout", "technique"),
    [
        ("single", None),
        ("pp4", None),
        ("pp4_v2", low_rank(epilogue_only=False)),
        ("tp2_pp2_v2_overlap", None),
        ("pp4_dp2", sc(cb=True, fe=True, fraction=0.75)),
    ],
)
def test_the_trace_is_well_formed(ranks: RankPool, tmp_path: Path, layout: str, technique: dict[str, Any]) -> None:
    config = tiny(layout, technique, steps=3, probes={"trace_step": 2})
    path = tmp_path / "trace.json"
    world, passes = config.parallel.world_size, config.num_microbatches * config.parallel.num_chunks
    ranks.run(world, _traced, config, path)
    content = json.loads(path.read_text())
    assert content["otherData"]["step"] == 2
    assert content["otherData"]["clock_offset_spread_us"] >= 0
    events = content["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named.keys() == set(range(world))
    assert len(set(named.values())) == world
    sort = {event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"}
    assert sorted(sort.values()) == list(range(world))
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0
    parallel = config.parallel
    schedule = Schedule(parallel.pipeline_parallel_size, parallel.num_chunks, config.num_microbatches)
    for rank in range(world):
        row = [event for event in events if event["ph"] == "X" and event["pid"] == rank]
        assert {event["tid"] for event in row} == {0}
        assert {event["cat"] for event in row} <= set(PHASES)
        assert min(event["dur"] for event in row) >= 0
        assert [event["name"] for event in row if event["cat"] == "other"] == ["step"]
        _assert_nested(row)
        for phase, order in (("forward", schedule.forward_order), ("backward", schedule.backward_order)):
            computed = [event["name"] for event in sorted(row, key=lambda e: e["ts"]) if event["cat"] == phase]
            assert len(computed) == passes
            assert computed == [f"{phase} micro-batch {microbatch} chunk {chunk}" for chunk, microbatch in order]
        transfers = [event["name"] for event in row if event["cat"] == "inter_stage"]
        assert bool(transfers) == (parallel.pipeline_parallel_size > 1)
        assert {event["name"] for event in row} >= {"optimizer", "gradient norm"}
        encoded = [event for event in row if event["name"] == "encode"]
        stage = int(named[rank].split()[1].rstrip(","))
        sent = schedule.sent_backward(stage)
        cb = config.technique.cb
        compressed = [
            (message.boundary, message.microbatch)
            for message in sent
            if cb.enabled and message.is_compressed(epilogue_only=cb.epilogue_only, flush=cb.flushes)
        ]
        assert [(event["args"]["boundary"], event["args"]["microbatch"]) for event in encoded] == compressed


def _assert_nested(row: list[dict[str, Any]]) -> None:
    """No event of a row overlaps another one in part."""
    slack = 1e-3  # a nanosecond, in microseconds: times are rounded to that
    ends: list[float] = []
    for event in sorted(row, key=lambda event: (event["ts"], -event["dur"])):
        begin, end = event["ts"], event["ts"] + event["dur"]
        while ends and ends[-1] <= begin + slack:
            ends.pop()
        assert not ends or end <= ends[-1] + slack, event
        ends.append(end)


def test_a_gradient_is_not_received_before_its_backward_pass_began(ranks: RankPool, tmp_path: Path) -> None:
    """Causality between rows: the clocks agree to within what they say, and the rows are of one step."""
    config = tiny("pp4", steps=2, probes={"trace_step": 2})
    path = tmp_path / "trace.json"
    ranks.run(4, _traced, config, path)
    content = json.loads(path.read_text())
    slack = content["otherData"]["clock_offset_spread_us"]
    begins: dict[tuple[int, str], float] = {}
    ends: dict[tuple[int, str], float] = {}
    for event in content["traceEvents"]:
        if event["ph"] == "X":
            begins[event["pid"], event["name"]] = event["ts"]
            ends[event["pid"], event["name"]] = event["ts"] + event["dur"]
    for microbatch in range(config.num_microbatches):
        name = f"backward micro-batch {microbatch} chunk 0"
        for stage in range(3):
            assert begins[stage, name] >= ends[stage + 1, name] - slack
        name = f"forward micro-batch {microbatch} chunk 0"
        for stage in range(3):
            assert begins[stage + 1, name] >= ends[stage, name] - slack


def test_what_is_not_finite_has_no_cosine() -> None:
    from optimus_cc.training.probes.error_independence import records
    from optimus_cc.training.probes.place import Place

    place = Place(0, 1, 0, 0)
    (record,) = records(3, [(place, {(0, 1): [math.nan, math.nan, 1.0, math.nan, 1.0, 4.0]})], shared_out=False)
    assert math.isnan(record["cosine_similarity"])
    (record,) = records(3, [(place, {(0, 1): [0.0, 0.0, 1.0, 0.0, 2.0, 4.0]})], shared_out=False)
    assert math.isnan(record["cosine_similarity"])
    assert record["activation_difference_mean"] == 0.5
