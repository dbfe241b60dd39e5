"""Configurations and hardware to predict with, made without Hydra or with it."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest

from optimus_cc.config import RunConfig
from optimus_cc.config.cluster import ClusterConfig, DeviceConfig, EfficiencyConfig, LinkConfig
from tests.config.command_line import one
from tests.configurations import tiny
from tests.shared import SHARED

NOTHING = EfficiencyConfig(
    matmul_depth=300.0, several_nodes=1.0, kernel_us=0.0, collective_us=0.0, wait_us=0.0, message_us=0.0, step_ms=0.0
)
"""No overheads."""
needs_measurements = pytest.mark.skipif(
    not (SHARED / "data").is_dir(), reason="measured step times are not here: set OPTIMUS_CC_SHARED to their folder"
)


def device(**changes: Any) -> DeviceConfig:
    known: dict[str, Any] = {
        "memory_gbyte_s": 2000.0,
        "fp32_tflops": 150.0,
        "bf16_tflops": 300.0,
        "efficiency": NOTHING,
    }
    return DeviceConfig(**{**known, **changes})


def cluster(
    nodes: int = 16,
    per_node: int = 8,
    *,
    gbit_s: float | None = 200.0,
    intra_gbit_s: float | None = 2400.0,
    latency_us: float = 0.0,
    **changes: Any,
) -> ClusterConfig:
    """Null rates are infinite."""
    return ClusterConfig(
        name="test",
        num_nodes=nodes,
        ranks_per_node=per_node,
        device=changes.pop("device", device()),
        intra_node=LinkConfig(line_rate_gbit_s=intra_gbit_s, latency_us=latency_us),
        inter_node=LinkConfig(line_rate_gbit_s=gbit_s, latency_us=latency_us),
        **changes,
    )


def small(layout: str | dict[str, Any] = "pp4_dp2", on: ClusterConfig | None = None, **about: Any) -> RunConfig:
    this: Any = tiny(layout, **about)
    changed: RunConfig = dataclasses.replace(this, cluster=on or cluster())
    return changed


@cache
def composed(line: str) -> RunConfig:
    return one(f"task=simulate {line}")


def changed(config: RunConfig, **groups: dict[str, Any]) -> RunConfig:
    """``config`` with other values of some keys of its groups."""
    this: Any = config
    parts = {name: dataclasses.replace(getattr(config, name), **values) for name, values in groups.items()}
    result: RunConfig = dataclasses.replace(this, **parts)
    return result


PAPER = (
    "parallel=tp8_pp4_dp4 parallel.split_over_tensor_parallel=true training=paper optimizer=paper "
    "tokenizer.vocabulary_size=50257 cluster=a100_hdr200"
)
