"""Numbers of a cluster by their dotted keys, as ``device.efficiency.memory``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from optimus_cc.config.cluster import ClusterConfig


def value_of(cluster: ClusterConfig, key: str) -> float | None:
    """The number that ``cluster`` has for ``key``; None: it says none."""
    node: Any = cluster
    for part in key.split("."):
        node = getattr(node, part)
    return None if node is None else float(node)


def with_values(cluster: ClusterConfig, values: Mapping[str, float]) -> ClusterConfig:
    """``cluster`` with other values of some of its keys."""
    changed: Any = cluster
    for key, value in values.items():
        changed = _replaced(changed, key.split("."), float(value))
    result: ClusterConfig = changed
    return result


def _replaced(node: Any, path: Sequence[str], value: float) -> Any:
    child = value if len(path) == 1 else _replaced(getattr(node, path[0]), path[1:], value)
    return replace(node, **{path[0]: child})
