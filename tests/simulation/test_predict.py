"""Predictions: limits that hold exactly, bytes, what is exposed, and that better hardware is never slower."""

from __future__ import annotations

import dataclasses
import math
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimus_cc import stage_traffic
from optimus_cc.config import ConfigError, RunConfig, load
from optimus_cc.simulation import baseline_of, predict, speedup_percent
from optimus_cc.simulation.hardware import hardware
from optimus_cc.simulation.memory import GIB, memory, passes_in_flight
from optimus_cc.simulation.plan import plan
from optimus_cc.simulation.step import price
from tests.configurations import LAYOUTS, low_rank, tiny
from tests.simulation.configurations import PAPER, changed, cluster, composed, device, small

TECHNIQUES = ("baseline", "cb", "cb_fe", "cb_fe_sc", "naive_dp", "cb_topk", "fe", "sc")


@st.composite
def configurations(draw: st.DrawFn) -> RunConfig:
    """Any layout that fits on 128 ranks, with any technique that it allows."""
    stages = draw(st.sampled_from([1, 2, 4]))
    replicas = draw(st.sampled_from([1, 2, 4]))
    tp = draw(st.sampled_from([1, 2, 8]))
    options: dict[str, Any] = {
        "sequence_parallel": tp > 1 and draw(st.booleans()),
        "distributed_optimizer": draw(st.booleans()),
        "overlap_grad_reduce": draw(st.booleans()),
    }
    options["split_over_tensor_parallel"] = tp > 1 and not options["sequence_parallel"] and draw(st.booleans())
    if stages == 4 and draw(st.booleans()):
        overlap = draw(st.booleans())
        options |= {"num_chunks": 2, "overlap_p2p": overlap, "batch_p2p": not overlap}
    technique = "baseline"
    if stages > 1 and replicas > 1:
        technique = draw(st.sampled_from(TECHNIQUES))
    elif stages > 1:
        technique = draw(st.sampled_from(["cb", "cb_topk"]))
    microbatches = stages * draw(st.integers(1, 4))
    micro = draw(st.sampled_from([1, 4]))
    config = composed(f"model=gpt_8_3b technique={technique} {PAPER}")
    sizes: dict[str, Any] = {
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": stages,
        "data_parallel_size": replicas,
    }
    config = changed(
        config,
        parallel={**sizes, **options},
        training={
            "micro_batch_size": micro,
            "global_batch_size": micro * replicas * microbatches,
            "recompute": draw(st.sampled_from(["none", "selective", "full"])),
            "precision": draw(st.sampled_from(["fp32", "bf16"])),
        },
        simulation={"ignore_memory": True},
    )
    return load(config.to_mapping())


@settings(max_examples=40, deadline=None)
@given(configurations())
def test_parts_add_up_and_bytes_are_those_of_the_traffic_report(config: RunConfig) -> None:
    found = predict(config)
    parts = dataclasses.asdict(found.breakdown)
    assert math.fsum(parts.values()) == pytest.approx(found.step_time_s)
    assert min(parts.values()) >= -1e-9
    assert found.traffic == stage_traffic.traffic(config)


@settings(max_examples=40, deadline=None)
@given(configurations())
def test_what_is_priced_is_what_stages_send(config: RunConfig) -> None:
    """The same bytes, made from the passes and the messages that are priced."""
    step = plan(config)
    nbytes: dict[tuple[str, int], int] = {}
    for node in step.graph.nodes:
        work = step.graph.works[node.work]
        if work.kind.startswith("send"):
            stage = work.place if work.kind == "send_forward" else work.place + 1
            sent = config.compressed_message_nbytes if work.compressed else config.message_nbytes
            nbytes[work.kind, stage] = nbytes.get((work.kind, stage), 0) + sent
    for one in step.stages:
        traffic, tensor = one.traffic, one.tensor_parallel
        assert nbytes.get(("send_forward", traffic.virtual_stage), 0) == traffic.forward_wire_bytes
        assert nbytes.get(("send_backward", traffic.virtual_stage), 0) == traffic.backward_wire_bytes
        passes = (tensor.forward + tensor.backward) * tensor.passes_bytes + tensor.loss_bytes
        size = config.parallel.tensor_parallel_size
        received = sum(
            other.traffic.forward_messages * (other.traffic.virtual_stage == traffic.virtual_stage - 1)
            + other.traffic.backward_messages * (other.traffic.virtual_stage == traffic.virtual_stage + 1)
            for other in step.stages
        )
        whole = math.prod((config.model.sequence_length, config.training.micro_batch_size, config.model.hidden_size))
        gathered = received * whole * config.message_itemsize * (size - 1) / size
        expected = config.num_microbatches * passes + gathered * config.parallel.split_over_tensor_parallel
        assert expected == pytest.approx(traffic.tensor_parallel_bytes)


BETTER: dict[str, Any] = {
    "network": lambda c: dataclasses.replace(
        c, inter_node=dataclasses.replace(c.inter_node, line_rate_gbit_s=400.0, ring_gbit_s=8.0, p2p_gbit_s=20.0)
    ),
    "latency": lambda c: dataclasses.replace(c, inter_node=dataclasses.replace(c.inter_node, latency_us=1.0)),
    "nvlink": lambda c: dataclasses.replace(c, intra_node=dataclasses.replace(c.intra_node, ring_gbit_s=3000.0)),
    "memory": lambda c: dataclasses.replace(c, device=dataclasses.replace(c.device, memory_gbyte_s=3000.0)),
    "arithmetic": lambda c: dataclasses.replace(
        c, device=dataclasses.replace(c.device, fp32_tflops=300.0, bf16_tflops=500.0)
    ),
}


@settings(max_examples=60, deadline=None)
@given(configurations(), st.sampled_from(sorted(BETTER)), st.sampled_from(["effective", "line_rate"]))
def test_better_hardware_is_never_slower(config: RunConfig, what: str, bandwidth: str) -> None:
    this: Any = config
    better = dataclasses.replace(this, cluster=BETTER[what](config.cluster))
    assert predict(better, bandwidth=bandwidth).step_time_s <= predict(config, bandwidth=bandwidth).step_time_s + 1e-9


@settings(max_examples=30, deadline=None)
@given(configurations())
def test_without_latency_and_with_endless_bandwidth_only_computation_is_left(config: RunConfig) -> None:
    free = cluster(gbit_s=None, intra_gbit_s=None)
    this: Any = config
    plain: Any = baseline_of(dataclasses.replace(this, cluster=free))
    parts = predict(plain).breakdown
    assert parts.exposed_s + parts.codec_s + parts.overhead_s == pytest.approx(0, abs=1e-9)
    assert parts.forward_s > 0
    if config.technique.cb.enabled or config.technique.sc.enabled:  # codecs cost, and there is nothing to gain
        assert predict(dataclasses.replace(this, cluster=free)).step_time_s >= predict(plain).step_time_s


@pytest.mark.parametrize("layout", ["pp4", "pp4_v2", "pp4_v2_overlap"])
def test_the_bubble_of_equal_stages(layout: str) -> None:
    """With nothing to send, and stages but for the ends alike: at least (P - 1) / (M v) of what a rank computes."""
    config = small(layout, cluster(gbit_s=None, intra_gbit_s=None), num_microbatches=8, model={"num_layers": 512})
    parts = predict(config).breakdown
    least = 3 / (8 * config.parallel.num_chunks) * (parts.forward_s + parts.backward_s)
    assert parts.bubble_s == pytest.approx(least, rel=0.05)


@pytest.mark.parametrize("rank", range(4))
def test_a_reduction_hides_behind_as_many_backward_passes_as_exposure_says(rank: int) -> None:
    """Of rank p behind p passes, but for what is shorter than a pass; rank 0's behind none."""
    config = small("pp4_dp2", num_microbatches=8, model={"num_layers": 64, "tied_embeddings": False})
    free = hardware(cluster(gbit_s=None, intra_gbit_s=None), "fp32", "line_rate")
    step = plan(config)
    time = price(step, free)
    backward = [event for event in time.events() if event.kind == "backward"]
    ends = [max(event.end_s for event in backward if event.rank == one) for one in range(4)]
    passes = config.schedule.backward_steps_left(rank)
    longest = max(event.end_s - event.begin_s for event in backward)
    shortest = min(event.end_s - event.begin_s for event in backward)
    assert passes * shortest <= max(ends) - ends[rank] + 1e-12 <= passes * longest + 1e-9


def test_only_what_ends_last_is_exposed() -> None:
    """Compressing the last stage's gradients gains nothing as long as its reduction hides; the first stage's does."""
    quick = composed(
        f"model=gpt_8_3b technique=sc {PAPER} technique.sc.warmup_steps=0 cluster.inter_node.ring_gbit_s=15"
    )
    three = predict(quick)
    every = predict(changed(quick, technique={"sc": dataclasses.replace(quick.technique.sc, fraction=1.0)}))
    none = predict(baseline_of(quick))
    assert three.step_time_s == pytest.approx(every.step_time_s, rel=1e-3)
    assert none.step_time_s > three.step_time_s


def test_overlapped_reductions_hide_in_the_last_backward_pass() -> None:
    line = f"model=gpt_8_3b technique=baseline {PAPER} parallel=tp8_pp2_dp8"
    waiting, hidden = (predict(composed(f"{line} parallel.overlap_grad_reduce={value}")) for value in ("false", "true"))
    assert 0 < hidden.breakdown.data_parallel_s < waiting.breakdown.data_parallel_s


def test_the_distributed_optimizer_halves_the_reduction_and_gathers() -> None:
    line = f"model=gpt_8_3b technique=baseline {PAPER}"
    plain, sharded = (
        predict(composed(f"{line} parallel.distributed_optimizer={value}")) for value in ("false", "true")
    )
    ratio = sharded.breakdown.data_parallel_s / plain.breakdown.data_parallel_s
    assert 0.4 < ratio < 0.6
    assert sharded.breakdown.parameter_gather_s == pytest.approx(sharded.breakdown.data_parallel_s, rel=0.1)
    assert sharded.memory.optimizer == pytest.approx(plain.memory.optimizer / 4, rel=0.01)


def test_days_count_the_warm_up_of_selective_compression() -> None:
    config = composed(f"model=gpt_8_3b technique=cb_fe_sc {PAPER}")
    found, before = predict(config), predict(composed(f"model=gpt_8_3b technique=cb_fe {PAPER}"))
    seconds = 30_000 * before.step_time_s + 200_000 * found.step_time_s
    assert found.days == pytest.approx(seconds / 86400)


def test_what_does_not_fit_is_refused_with_the_excess() -> None:
    line = f"model=gpt_175b technique=baseline {PAPER}"
    with pytest.raises(ConfigError, match=r"cluster\.device\.memory_gib.* needs [\d.]+ GiB, [\d.]+ too many") as error:
        predict(composed(line))
    found = predict(composed(f"{line} simulation.ignore_memory=true"))
    excess = found.memory.total / GIB - 80
    assert f"{excess:.1f} too many" in str(error.value)


def test_memory_by_hand() -> None:
    """GPT-8.3B's first stage of four: 4 + 4 + 8 bytes of each of its weights; four micro-batches in flight."""
    config = composed(f"model=gpt_8_3b technique=baseline {PAPER}")
    found = predict(config).memory
    weights = (18 * 12 * 3072**2 + 51200 * 3072) / 8 + 1024 * 3072
    assert found.weights == pytest.approx(4 * weights, rel=0.002)
    assert (found.gradients, found.optimizer) == (found.weights, 2 * found.weights)
    assert found.pipeline_rank == 0
    assert passes_in_flight(config.schedule, 0) == 4
    assert found.activations >= 4 * 18 * 1024 * 8 * 3072 * 4  # the inputs of 18 layers


def test_unknown_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster=a100_hdr200"):
        predict(tiny("pp4"))


def test_a_layout_that_is_too_large_says_how_many_nodes_it_takes() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.num_nodes=32"):
        composed(f"model=gpt_8_3b technique=baseline {PAPER} parallel.data_parallel_size=8")


def test_every_residual_policy_and_direction_is_priced() -> None:
    on = cluster(per_node=1, gbit_s=1.0, device=device(codec_gbit_s=1e6))
    shape: dict[str, Any] = {"hidden_size": 512, "sequence_length": 512}
    plain = predict(small("pp4", on, num_microbatches=8, model=shape))
    gains = {
        name: speedup_percent(plain, predict(small("pp4", on, technique=technique, num_microbatches=8, model=shape)))
        for name, technique in {
            "epilogue": low_rank(4),
            "carry": low_rank(4, residual="carry"),
            "flush": low_rank(4, residual="flush"),
            "all": low_rank(4, epilogue_only=False),
            "forward": low_rank(4, epilogue_only=False, compress_forward=True),
        }.items()
    }
    assert gains["carry"] == gains["epilogue"]
    # In the steady state a gradient and an activation pass each other, and the activation is whole: compressing every
    # gradient gains no more than compressing those of the epilogue.
    assert gains["all"] == pytest.approx(gains["epilogue"], rel=1e-3)
    assert 0 < gains["flush"] < gains["epilogue"] < gains["forward"]


def could_run(config: RunConfig) -> bool:
    """Whether layers, heads, MLP, vocabulary, sequence and batch come out even, and ranks have a place."""
    model, parallel, training = config.model, config.parallel, config.training
    tp, pp, dp, chunks = (
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.data_parallel_size,
        parallel.num_chunks,
    )
    microbatches, rest = divmod(training.global_batch_size, training.micro_batch_size * dp)
    shared = parallel.sequence_parallel or parallel.split_over_tensor_parallel
    sends_well = not (chunks > 1 and parallel.overlap_p2p == parallel.batch_p2p) and not (
        chunks > 1 and pp == 2 and not parallel.overlap_p2p
    )
    return all(
        (
            model.num_layers % (pp * chunks) == 0,
            model.hidden_size % model.num_attention_heads == model.num_attention_heads % tp == 0,
            model.ffn_width % tp == 1024 % tp == 0,
            not shared or (tp > 1 and model.sequence_length % tp == 0),
            not (parallel.sequence_parallel and parallel.split_over_tensor_parallel),
            rest == 0 and (chunks == 1 or microbatches % pp == 0),
            chunks == 1 or pp > 1,
            not parallel.overlap_p2p or chunks > 1,
            sends_well,
            tp * pp * dp <= config.cluster.num_ranks,
        )
    )


def test_what_python_puts_together_is_predicted_or_refused_and_only_what_can_run_is_predicted() -> None:
    """One check for a command line and for ``dataclasses.replace``; never a bare failure, never a price of nothing."""
    random = Random(20230325)
    base = small("single", cluster(nodes=8))
    outcomes = {True: 0, False: 0}
    for _ in range(400):
        chunks = random.choice([1, 1, 2, 3])
        overlap = chunks > 1 and random.random() < 0.6
        config = changed(
            base,
            model={
                "num_layers": random.choice([4, 6, 12, 72]),
                "num_attention_heads": random.choice([2, 4, 5, 8]),
                "hidden_size": random.choice([32, 40, 48]),
                "sequence_length": random.choice([16, 20]),
                "ffn_hidden_size": random.choice([None, 96, 100]),
            },
            parallel={
                "tensor_parallel_size": random.choice([1, 1, 2, 3, 4, 7]),
                "pipeline_parallel_size": random.choice([1, 2, 3, 4, 5]),
                "data_parallel_size": random.choice([1, 2, 3, 8]),
                "num_chunks": chunks,
                "overlap_p2p": overlap,
                "batch_p2p": overlap is (random.random() < 0.1),
                "sequence_parallel": random.random() < 0.2,
                "split_over_tensor_parallel": random.random() < 0.2,
            },
            training={"global_batch_size": random.choice([8, 12, 24, 48]), "micro_batch_size": random.choice([1, 2])},
        )
        try:
            seconds = predict(config).step_time_s
        except ConfigError:
            predicted = False
        else:
            predicted = True
            assert 0 < seconds < math.inf
        assert predicted is could_run(config), config.parallel
        outcomes[predicted] += 1
    assert min(outcomes.values()) > 30


def test_who_checks_a_step_asks_nothing_that_a_command_line_is_not_asked() -> None:
    wrong = changed(small("pp4_dp2"), parallel={"pipeline_parallel_size": 3, "tensor_parallel_size": 7})
    assert wrong.model.num_layers == 4
    step, every = list(wrong.step_problems()), list(wrong.problems())
    assert len(step) >= 3
    assert all(problem in every for problem in step)


@pytest.mark.parametrize(
    ("parallel", "key"),
    [
        ({"pipeline_parallel_size": 5}, "model.num_layers"),
        ({"tensor_parallel_size": 7}, "model.num_attention_heads"),
        ({"data_parallel_size": 3}, "training.global_batch_size"),
        ({"num_chunks": 2, "pipeline_parallel_size": 12}, "training.global_batch_size"),
    ],
)
def test_a_layout_that_does_not_come_out_even_is_named(parallel: dict[str, Any], key: str) -> None:
    config = changed(
        composed(f"model=gpt_8_3b technique=baseline {PAPER}"), parallel=parallel, cluster={"num_nodes": 99}
    )
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        predict(config)


def test_sequence_parallelism_shares_out_what_full_recomputation_keeps() -> None:
    """Of each layer the input alone, s b h / t elements (Korthikanti et al., 2205.05198, section 5): for GPT-175B in
    8 x 8 that is 0.56 GiB on the first stage, beside the one layer that is being computed again."""
    line = (
        "model=gpt_175b technique=baseline parallel=tp8_pp4_dp4 parallel.pipeline_parallel_size=8 "
        "parallel.data_parallel_size=1 training=paper training.precision=bf16 training.recompute=full "
        "model.sequence_length=2048 training.micro_batch_size=1 training.global_batch_size=8 "
        "tokenizer.vocabulary_size=50257 "
        "cluster=a100_hdr800 simulation.ignore_memory=true"
    )
    kept = {}
    for shared in (False, True):
        how = f"parallel.sequence_parallel={shared} parallel.split_over_tensor_parallel={not shared}".lower()
        step = plan(composed(f"{line} {how}"))
        alike = changed(step.config, model={"num_layers": 8})
        layers = step.stages[0].layers
        passes = passes_in_flight(step.config.schedule, 0)
        found, fewer = memory(step).activations, memory(plan(alike)).activations
        kept[shared] = (found - fewer) / (passes * (layers - 1))
    model = step.config.model
    assert kept[False] == model.sequence_length * model.hidden_size * 2
    assert kept[True] == kept[False] / 8
    assert passes * layers * kept[True] == 0.5625 * GIB


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_every_layout_can_be_predicted(layout: str) -> None:
    assert predict(small(layout)).step_time_s > 0
