"""Model and optimizer in Megatron-core's distributed checkpoints, so that any layout can take them.

Tensors are found by name, whatever made the checkpoint. An optimizer's moments have one name everywhere; the fp32
weights that a bf16 model is trained in have one name under the distributed optimizer, another without it, and are the
model's own weights in fp32. Plain values (settings of the optimizer, schedule) are not taken from a checkpoint: they
are those of the run that goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, extract_matching_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

from optimus_cc.communication.gradient_sync import unwrapped
from optimus_cc.training.optimizer import parts_of

CONTENT = {
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
    "distrib_optim_sharding_type": "fully_reshardable",
}
"""How Megatron-core lays out what it saves."""
SHARDED = (ShardedTensor, ShardedTensorFactory)
_OPTIMIZER = "optimizer.state."
_MASTERS = ("fp32_param", "param")
"""Names of the fp32 weights: without the distributed optimizer, and with it."""
_MOMENTUM = "momentum_buffer"


class Mismatch(ValueError):
    """A checkpoint holds something else than the model."""


def to_save(model: Sequence[torch.nn.Module], optimizer: Any) -> dict[str, Any]:
    """What Megatron-core is to save."""
    state = model_state(model)
    state["optimizer"] = optimizer.sharded_state_dict({**state}, metadata=dict(CONTENT))
    return _without_objects(state)


def model_state(model: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """Of the chunks alone."""
    chunks: list[Any] = [unwrapped(chunk) for chunk in model]
    return {f"model{index}": chunk.sharded_state_dict(metadata=dict(CONTENT)) for index, chunk in enumerate(chunks)}


def load_model(model: Sequence[torch.nn.Module], place: Path, stored: Mapping[str, torch.dtype | None]) -> None:
    """Bring the chunks of this rank to the weights in ``place``. Collective.

    Args:
        stored: the tensors that are there; see :func:`~optimus_cc.training.safe_loading.read_index`.
    """
    _set_model(model, _load(_without_objects(model_state(model)), place, stored))


def load(
    model: Sequence[torch.nn.Module], optimizer: Any, place: Path, stored: Mapping[str, torch.dtype | None], step: int
) -> None:
    """Bring model and optimizer to what ``place`` holds, ``step`` being the steps taken until then. Collective."""
    state = model_state(model)
    _fill_optimizer_state(optimizer)
    moments = optimizer.sharded_state_dict({**state}, is_loading=True, metadata=dict(CONTENT))
    # One after the other: weights of both may have to come from the same tensor.
    loaded = _load(_without_objects(moments), place, stored)
    _set_model(model, _load(_without_objects(state), place, stored))
    _set_optimizer(optimizer, loaded, step)


def _load(wanted: dict[str, Any], place: Path, stored: Mapping[str, torch.dtype | None]) -> dict[str, Any]:
    _, wanted = extract_matching_values(wanted, lambda value: _is_absent_momentum(value, stored))
    dict_list_map_inplace(lambda value: _named_as_stored(value, stored), wanted)
    # Under a name of its own, apart from the plain values in the checkpoint, which Megatron-core lays it over.
    found: dict[str, Any] = dist_checkpointing.load({"wanted": wanted}, str(place))["wanted"]
    return found


def _is_absent_momentum(value: Any, stored: Mapping[str, torch.dtype | None]) -> bool:
    """Whether it is the momentum of a run whose checkpoint was made without one: it stays zero."""
    return isinstance(value, SHARDED) and value.key.startswith(_OPTIMIZER + _MOMENTUM) and value.key not in stored


def _named_as_stored(value: Any, stored: Mapping[str, torch.dtype | None]) -> Any:
    """A tensor that is wanted, under the name that it has among the ``stored`` ones."""
    if not isinstance(value, SHARDED):
        return value
    masters = [f"{_OPTIMIZER}{name}." for name in _MASTERS]
    own = next((prefix for prefix in masters if value.key.startswith(prefix)), None)
    if own is not None:
        weight = value.key.removeprefix(own)
        value.key = next((key for key in (value.key, *(m + weight for m in masters)) if key in stored), weight)
    elif not value.key.startswith(_OPTIMIZER):  # a weight; where it was rounded, what it was rounded from
        exact = next((key for key in (prefix + value.key for prefix in masters) if key in stored), None)
        dtype = value.data.dtype
        if exact is not None and stored[value.key] != dtype and stored[exact] == dtype:
            value.key = exact
    return value


def _without_objects(state: dict[str, Any]) -> dict[str, Any]:
    """Without Transformer Engine's extra states: empty unless FP8 is used, and pickled objects if it is."""
    _, rest = extract_matching_values(state, lambda value: isinstance(value, ShardedObject))
    plain: dict[str, Any] = rest
    return plain


def _fill_optimizer_state(optimizer: Any) -> None:
    """Give every parameter its state, so that there is something to load into; the values are overwritten.

    A step that changes no weight makes it, whatever the optimizer: those of Megatron-core differ in how they would, or
    can't.
    """
    for inner in (one.optimizer for one in parts_of(optimizer)):
        if inner is None or inner.state:
            continue
        parameters = [parameter for group in inner.param_groups for parameter in group["params"] if parameter.numel()]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        with _settings(inner, lr=0.0, weight_decay=0.0):
            inner.step()
        for parameter in parameters:
            parameter.grad = None


@contextlib.contextmanager
def _settings(inner: torch.optim.Optimizer, **values: float) -> Iterator[None]:
    before = [{name: group[name] for name in values} for group in inner.param_groups]
    for group in inner.param_groups:
        group.update(values)
    try:
        yield
    finally:
        for group, old in zip(inner.param_groups, before, strict=True):
            group.update(old)


def _set_model(model: Sequence[torch.nn.Module], loaded: Mapping[str, Any]) -> None:
    for index, chunk in enumerate(model):
        result = unwrapped(chunk).load_state_dict(loaded[f"model{index}"], strict=False)
        keys = (*result.missing_keys, *result.unexpected_keys)
        if missing := [key for key in keys if not key.endswith("_extra_state")]:
            raise Mismatch(f"the checkpoint and the model do not hold the same parameters: {missing[0]}")


@torch.no_grad()
def _set_optimizer(optimizer: Any, loaded: Mapping[Any, Any], step: int) -> None:
    optimizers = parts_of(optimizer)
    for index, one in enumerate(optimizers):
        if one.optimizer is None:
            continue  # this rank has no parameters of its kind
        part = loaded if len(optimizers) == 1 else loaded[index]
        # With torch's Adam, Megatron-core's distributed optimizer expects each parameter's step among the shards, where
        # it isn't, and leaves one tensor that all parameters would count in.
        states = one.optimizer.state
        steps = {key: torch.as_tensor(values.pop("step")) for key, values in states.items() if "step" in values}
        if "param_state" in part:
            one.load_parameter_state_from_fully_reshardable(part["param_state"])
        else:
            _set_plain(one, part)
        for group in one.optimizer.param_groups:
            if "step" in group:  # some count for each group,
                group["step"] = step
        for key, before in steps.items():  # and some for each parameter
            states[key]["step"] = torch.full_like(before, step)


def _set_plain(one: Any, part: Mapping[str, Any]) -> None:
    parameters = [parameter for group in one.optimizer.param_groups for parameter in group["params"]]
    for index, values in part.get("optimizer", part).get("state", {}).items():
        for name, value in values.items():
            one.optimizer.state[parameters[index]][name].copy_(value)
    for mine, theirs in zip(
        getattr(one, "fp32_from_float16_groups", ()), part.get("fp32_from_fp16_params", ()), strict=True
    ):
        for weight, value in zip(mine, theirs, strict=True):
            weight.data.copy_(value)
