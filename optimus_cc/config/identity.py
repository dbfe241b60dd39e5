"""Which keys of a scientific configuration compute nothing beside the others, so that they don't tell runs apart."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

_OF_ADAM = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
_OF_SGD = {"momentum": 0.9}


def without_dead_keys(science: Mapping[str, Any]) -> dict[str, Any]:
    """``science`` with the default in place of what computes nothing, and of a default that is said aloud.

    The default stays rather than nothing, so that runs which never said anything of these keys keep their ids.

    Args:
        science: what ``RunConfig.scientific`` gives, or gave when an older folder or checkpoint was written.
    """
    result = copy.deepcopy(dict(science))
    model, optimizer = result.get("model"), result.get("optimizer")
    if isinstance(model, dict) and model.get("ffn_hidden_size") == 4 * model.get("hidden_size", 0):
        model["ffn_hidden_size"] = None
    if isinstance(optimizer, dict):
        optimizer |= _dead_in_optimizer(optimizer, result.get("training", {}).get("steps"))
    data = result.get("data")
    if isinstance(data, dict) and len(data.get("files") or []) == 1 and "weights" in data:
        data["weights"] = None  # all of a blend of one
    return result


def _dead_in_optimizer(optimizer: Mapping[str, Any], steps: int | None) -> dict[str, Any]:
    dead: dict[str, float | None] = dict(_OF_SGD if optimizer.get("name") == "adam" else _OF_ADAM)
    if optimizer.get("decay_style") == "constant":
        dead["min_learning_rate"] = 0.0
        if optimizer.get("warmup_fraction") == 0:  # else it is a share of these
            dead["decay_steps"] = None
    if optimizer.get("decay_steps") == steps:
        dead["decay_steps"] = None
    return {key: default for key, default in dead.items() if key in optimizer}
