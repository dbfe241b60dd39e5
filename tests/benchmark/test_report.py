"""What is made of a benchmark's result: the file for the cluster group, and tables."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from optimus_cc.benchmark.report import cluster_file
from optimus_cc.config.cluster import ClusterConfig

KNOWN = {"name": "known", "num_nodes": 2, "ranks_per_node": 4, "inter_node": {"line_rate_gbit_s": 200.0}}
CLUSTER = TypeAdapter(ClusterConfig).validate_json(json.dumps(KNOWN))


def group(name: str, ranks: int, latency_us: float, gbit_s: float | None, spans: bool = False) -> dict[str, Any]:
    line = {"latency_s": latency_us / 1e6, "gbit_s": gbit_s, "worst_error": 0.1}
    operation = "p2p" if name == "pipeline" else "all_reduce"
    return {"group": name, "operation": operation, "ranks": ranks, "spans_nodes": spans, "line": line}


def written(*groups: dict[str, Any]) -> dict[str, Any]:
    text = cluster_file({"benchmark": "links", "groups": list(groups)}, "mine", CLUSTER, ["from here"])
    assert text.startswith("# from here\n")
    value: dict[str, Any] = yaml.safe_load(text)
    return value


def test_each_kind_of_link_gets_its_own_numbers() -> None:
    found = written(
        group("tensor", 4, 60.0, 900.0),
        group("pipeline", 2, 5.0, 150.0, spans=True),
        group("data", 2, 20.0, 80.0, spans=True),
    )
    assert (found["name"], found["num_nodes"], found["ranks_per_node"]) == ("mine", 2, 4)
    # A ring of 4 passes 6 messages one after the other.
    assert found["intra_node"] == {
        "line_rate_gbit_s": None,
        "ring_gbit_s": 900.0,
        "p2p_gbit_s": None,
        "latency_us": 10.0,
    }
    assert found["inter_node"] == {
        "line_rate_gbit_s": 200.0,
        "ring_gbit_s": 80.0,
        "p2p_gbit_s": 150.0,
        "latency_us": 5.0,
    }


@pytest.mark.parametrize("turned", [False, True])
def test_most_ranks_speak_then_the_slowest(turned: bool) -> None:
    groups = [group("tensor", 4, 1.0, 50.0), group("data", 4, 1.0, 40.0), group("embedding", 2, 1.0, 10.0)]
    found = written(*(reversed(groups) if turned else groups))
    assert found["intra_node"]["ring_gbit_s"] == 40.0


def test_what_is_not_known_is_null() -> None:
    found = written(group("pipeline", 2, 5.0, None))
    assert found["intra_node"]["p2p_gbit_s"] is None
    assert set(found["inter_node"].values()) == {200.0, None}
