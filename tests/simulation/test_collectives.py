"""Rings and messages against arithmetic by hand."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest

from optimus_cc.simulation.collectives import Group, message_s, ring_s
from optimus_cc.simulation.hardware import hardware
from optimus_cc.simulation.plan import plan
from optimus_cc.simulation.reduction import embedding_s
from tests.simulation.configurations import cluster, small

GB = 1e9


def test_inside_a_node_a_ring_goes_at_its_link() -> None:
    rates = hardware(cluster(gbit_s=8.0, intra_gbit_s=80.0, latency_us=1.0), "fp32", "line_rate")
    # An all-reduce of 4 GB over 4 ranks: each sends 6 GB in 6 messages at 10 GB/s.
    assert ring_s(rates, Group(4, 1), 6 * GB, 6) == pytest.approx(0.6 + 6e-6)
    assert ring_s(rates, Group(1, 1), 6 * GB, 0) == 0


def test_rings_side_by_side_share_the_nodes_link() -> None:
    rates = hardware(cluster(gbit_s=80.0, intra_gbit_s=8000.0), "fp32", "line_rate")
    # Data-parallel groups of tensor-parallel ranks: eight leave each node, or four with two members in it.
    assert ring_s(rates, Group(4, 8), GB, 6) == pytest.approx(8 * 0.1)
    assert ring_s(rates, Group(4, 4), GB, 6) == pytest.approx(4 * 0.1)
    # One group of all ranks leaves a node once.
    assert ring_s(rates, Group(16, 1), GB, 30) == pytest.approx(0.1)
    # Its latency is that of the edges which leave a node, one of eight.
    slow = hardware(cluster(gbit_s=None, intra_gbit_s=None, latency_us=8.0), "fp32", "line_rate")
    assert ring_s(slow, Group(16, 1), GB, 30) == pytest.approx(30 * 8e-6)


def test_messages_leave_the_node_where_stages_do() -> None:
    rates = hardware(cluster(gbit_s=80.0, intra_gbit_s=800.0), "fp32", "line_rate")
    assert message_s(rates, 4, 0, 1, GB) == pytest.approx(0.01)  # two stages in a node
    assert message_s(rates, 4, 1, 2, GB) == pytest.approx(4 * 0.1)  # four ranks send at once
    assert message_s(rates, 32, 0, 1, GB) == pytest.approx(8 * 0.1)
    assert message_s(rates, 4, 2, 1, GB) == message_s(rates, 4, 1, 2, GB)


def test_effective_rates_are_those_of_a_rank_while_all_of_its_node_send() -> None:
    plain: Any = cluster(gbit_s=200.0)
    link: Any = plain.inter_node
    measured = dataclasses.replace(plain, inter_node=dataclasses.replace(link, ring_gbit_s=4.0, p2p_gbit_s=2.0))
    rates = hardware(measured, "fp32", "effective")
    assert ring_s(rates, Group(4, 8), GB, 6) == pytest.approx(8 / 4.0)
    assert message_s(rates, 8, 0, 1, GB) == pytest.approx(8 / 2.0)
    slower = dataclasses.replace(measured, inter_node=dataclasses.replace(measured.inter_node, line_rate_gbit_s=16.0))
    assert ring_s(hardware(slower, "fp32", "effective"), Group(4, 8), GB, 6) == pytest.approx(8 * 8 / 16)
    line = hardware(measured, "fp32", "line_rate")
    assert ring_s(line, Group(4, 8), GB, 6) == pytest.approx(8 * 8 / 200)


@pytest.mark.parametrize("replicas", [2, 3, 4, 8, 16])
def test_fused_embedding_synchronisation_has_its_closed_form(replicas: int) -> None:
    """V (3 D - 2) / D against V (2 D - 1) / D, priced: 1.429 times as fast at D = 4."""
    rates = hardware(cluster(nodes=64, intra_gbit_s=None), "fp32", "line_rate")
    volume = 80e6
    reduced = ring_s(rates, Group(replicas, 8), 2 * volume * (replicas - 1) / replicas, 2 * (replicas - 1))
    copies = ring_s(rates, Group(2, 8 * replicas * 3), volume, 2)
    fused = ring_s(rates, Group(2 * replicas, 8), volume * (2 * replicas - 1) / replicas, 2 * (2 * replicas - 1))
    assert (reduced + copies) / fused == pytest.approx((3 * replicas - 2) / (2 * replicas - 1))


@pytest.mark.parametrize("per_node", [1, 4, 8, 16])
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8, 16])
def test_what_leaves_a_node_is_what_rank_numbers_say(tp: int, per_node: int) -> None:
    """Against the ranks themselves, also where they don't fill nodes evenly."""
    rates = dataclasses.replace(
        hardware(cluster(gbit_s=8.0, intra_gbit_s=1e9), "fp32", "line_rate"), ranks_per_node=per_node
    )
    for dp, pp in itertools.product((1, 2, 3, 4), (1, 2, 3, 4)):
        at = {(p, d, t): ((p * dp + d) * tp + t) // per_node for p in range(pp) for d in range(dp) for t in range(tp)}
        tensor = [{at[p, d, t] for t in range(tp)} for p in range(pp) for d in range(dp)]
        data = [{at[p, d, t] for d in range(dp)} for p in range(pp) for t in range(tp)]
        assert Group(tp, 1, dp * pp).spans_nodes(per_node) == any(len(nodes) > 1 for nodes in tensor)
        assert Group(dp, tp, pp).spans_nodes(per_node) == any(len(nodes) > 1 for nodes in data)
        for p in range(pp - 1):
            pairs = [(at[p, d, t], at[p + 1, d, t]) for d in range(dp) for t in range(tp)]
            leaving = max(Counter(here for here, there in pairs if here != there).values(), default=0)
            if tp * dp > per_node:  # one that is not full of senders counts as if it were
                leaving = per_node
            assert message_s(rates, tp * dp, p, p + 1, GB) == pytest.approx(leaving, abs=1e-3)


@pytest.mark.parametrize("per_node", [1, 4, 8, 16])
@pytest.mark.parametrize(("tp", "dp", "pp"), [(1, 4, 4), (2, 1, 4), (2, 2, 4), (1, 2, 4), (4, 2, 2), (8, 1, 2)])
def test_copies_of_the_embedding_lie_where_the_first_and_the_last_stage_do(
    tp: int, dp: int, pp: int, per_node: int
) -> None:
    at = {(p, d, t): ((p * dp + d) * tp + t) // per_node for p in (0, pp - 1) for d in range(dp) for t in range(tp)}
    pairs = Counter(at[0, d, t] for d in range(dp) for t in range(tp) if at[0, d, t] != at[pp - 1, d, t])
    rings = Counter[int]()
    for t in range(tp):
        ring = [at[p, d, t] for p in (0, pp - 1) for d in range(dp)]
        rings += Counter(here for here, there in zip(ring, ring[1:] + ring[:1], strict=True) if here != there)
    nodes = -(-tp * dp * pp // per_node)
    on = cluster(nodes, per_node, gbit_s=8.0, intra_gbit_s=None)
    layout = {"tensor_parallel_size": tp, "data_parallel_size": dp, "pipeline_parallel_size": pp}
    techniques: list[dict[str, Any]] = [{"name": "baseline"}, {"name": "fe", "fe": {"enabled": True}}]
    for technique, leaving in zip(techniques, (pairs, rings), strict=True):
        step = plan(small(layout, on, technique=technique, model={"num_attention_heads": 8}))
        volume = step.stages[0].traffic.embedding_bytes
        seconds = embedding_s(step, hardware(on, "fp32", "line_rate"))
        assert seconds == pytest.approx(volume * max(leaving.values(), default=0) / GB)
