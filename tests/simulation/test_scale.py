"""From 8 to 4096 GPUs, and from 10 to 800 Gb/s: what grows, what hides, and where layouts change places."""

from __future__ import annotations

import pytest

from optimus_cc.config.compose import CONF
from optimus_cc.config.schema import changed
from optimus_cc.simulation import baseline_of, predict, speedup_percent
from tests.simulation.configurations import PAPER, composed

SEVEN_BILLION = (
    "model=gpt_8_3b model.num_layers=32 model.hidden_size=4096 model.num_attention_heads=32 model.sequence_length=4096 "
    "technique=baseline training=paper training.precision=bf16 training.micro_batch_size=1 "
    "parallel=single parallel.distributed_optimizer=true parallel.overlap_grad_reduce=true "
    "tokenizer.vocabulary_size=50257 cluster=h100_ndr400 cluster.num_nodes=512 simulation.ignore_memory=true"
)


def tokens_per_gpu(gpus: int, tp: int, pp: int, *, fully_sharded: bool, latency_us: float = 14.0) -> float:
    """A second, with two sequences for each GPU whatever the layout."""
    sizes = f"parallel.tensor_parallel_size={tp} parallel.pipeline_parallel_size={pp}"
    sizes += f" parallel.data_parallel_size={gpus // (tp * pp)} training.global_batch_size={2 * gpus}"
    config = composed(f"{SEVEN_BILLION} {sizes} simulation.fully_sharded={str(fully_sharded).lower()}")
    link = changed(config.cluster.inter_node, latency_us=latency_us)
    found = predict(changed(config, cluster=changed(config.cluster, inter_node=link)))
    return found.tokens_per_s / gpus


def test_data_parallelism_alone_wins_up_to_hundreds_of_gpus_and_loses_at_thousands() -> None:
    """Hardware scaling trends, 2411.13055: fully sharded data parallelism gives way to layouts with model parallelism
    between 128 and 2048 H100."""
    assert alone_against_others(8, 14.0) > 1
    assert alone_against_others(128, 14.0) > 1
    assert alone_against_others(2048, 14.0) < 1
    assert alone_against_others(4096, 14.0) < 1


def alone_against_others(gpus: int, latency_us: float) -> float:
    layouts = [(2, 1), (4, 1), (1, 4), (2, 4)]
    alone = tokens_per_gpu(gpus, 1, 1, fully_sharded=True, latency_us=latency_us)
    others = (tokens_per_gpu(gpus, *one, fully_sharded=False, latency_us=latency_us) for one in layouts)
    return alone / max(others)


def test_where_they_change_places_rests_on_an_assumed_latency_and_the_page_says_so() -> None:
    page = (CONF.parent / "docs" / "simulation.md").read_text(encoding="utf-8")
    table = page[page.index("| a hop between nodes, assumed |") :]
    for latency_us, name in ((5.0, "5 microseconds"), (14.0, "14")):
        ratios = [alone_against_others(gpus, latency_us) for gpus in (2048, 4096)]
        row = next(line for line in table.splitlines() if line.startswith(f"| {name} |"))
        assert row.endswith(" | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    assert alone_against_others(2048, 5.0) > 1 > alone_against_others(4096, 5.0)


def test_the_slower_the_network_the_more_compression_gains() -> None:
    """Down to where activations, which nothing compresses, take most of the step."""
    gains = {}
    for rate in (10, 25, 50, 100, 200, 400, 800):
        line = f"model=gpt_8_3b technique=cb_fe_sc {PAPER} cluster.inter_node.line_rate_gbit_s={rate}"
        config = composed(f"{line} simulation.bandwidth=line_rate")
        gains[rate] = speedup_percent(predict(baseline_of(config)), predict(config))
    falling = [gains[rate] for rate in (50, 100, 200, 400, 800)]
    assert falling == sorted(falling, reverse=True)
    assert gains[50] > 5 > 2 > gains[800] > 0
    assert gains[10] < gains[25]


def test_compressing_the_epilogue_alone_is_as_fast_as_compressing_every_gradient() -> None:
    """At 100 Gb/s and above, as the paper says."""
    for rate in (100, 200, 400, 800):
        line = f"model=gpt_8_3b {PAPER} cluster.inter_node.line_rate_gbit_s={rate} simulation.bandwidth=line_rate"
        epilogue, every = (predict(composed(f"{line} +ablation={name}")) for name in ("cb", "cb_no_epilogue"))
        assert every.step_time_s == pytest.approx(epilogue.step_time_s, rel=2e-3)


@pytest.mark.parametrize("gpus", [512, 4096])
def test_the_gain_holds_at_175b(gpus: int) -> None:
    stages = 16 if gpus == 4096 else 8
    layout = f"parallel.pipeline_parallel_size={stages} parallel.data_parallel_size={gpus // 8 // stages}"
    line = f"model=gpt_175b technique=cb_fe_sc {PAPER} {layout} cluster.num_nodes=512 training.global_batch_size=2048"
    config = composed(f"{line} simulation.ignore_memory=true")
    assert speedup_percent(predict(baseline_of(config)), predict(config)) > 5


def test_more_micro_batches_make_the_bubble_smaller() -> None:
    line = f"model=gpt_8_3b technique=baseline {PAPER}"
    shares = []
    for batch in (128, 256, 512, 1024):
        found = predict(composed(f"{line} training.global_batch_size={batch}"))
        shares.append(found.breakdown.bubble_s / found.step_time_s)
    assert shares == sorted(shares, reverse=True)
