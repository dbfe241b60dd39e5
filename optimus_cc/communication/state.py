"""What a plan's saved state must be like for a rank to go on from it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from megatron.core import parallel_state

OWNER = "owner"
"""Key under which a state says whose it is."""
_OWNER = ("tensor-parallel", "pipeline", "data-parallel")
Shape = tuple[int | None, ...]
"""Sizes of a tensor; None: any."""


def owner() -> torch.Tensor:
    """Rank and size of this rank's tensor-parallel, pipeline and data-parallel group: 3 x 2."""
    data_parallel = (
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
    )
    return torch.tensor(
        [
            (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()),
            (
                parallel_state.get_pipeline_model_parallel_rank(),
                parallel_state.get_pipeline_model_parallel_world_size(),
            ),
            data_parallel,
        ]
    )


def check(state: Mapping[str, torch.Tensor], kept: Mapping[str, Shape]) -> None:
    """See to it that a state is one of this rank.

    Args:
        kept: what may be in it, with its shape; () is a whole number.

    Raises:
        ValueError: it isn't; names what is wrong and what is expected.
    """
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{key}: a {type(value).__name__} where a tensor is expected")
        if key == OWNER:
            _check_owner(value)
        elif key not in kept:
            expected = ", ".join(sorted(kept)[:6]) + (", ..." if len(kept) > 6 else "") if kept else "nothing"
            raise ValueError(f"{key}: this rank keeps no such state; it keeps {expected}")
        elif len(value.shape) != len(kept[key]) or any(
            wanted not in (None, size) for wanted, size in zip(kept[key], value.shape, strict=True)
        ):
            raise ValueError(f"{key}: {_shown(tuple(value.shape))} where {_shown(kept[key])} is expected")
        elif value.is_floating_point() != bool(kept[key]):
            kind = "floating point" if kept[key] else "a whole number"
            raise ValueError(f"{key}: {value.dtype} where {kind} is expected")


def _check_owner(theirs: torch.Tensor) -> None:
    ours = owner()
    if theirs.shape != ours.shape:
        raise ValueError(f"{OWNER}: {_shown(tuple(theirs.shape))} where {_shown(tuple(ours.shape))} is expected")
    for name, found, expected in zip(_OWNER, theirs.tolist(), ours.tolist(), strict=True):
        if found != expected:
            raise ValueError(
                f"{OWNER}: the state of {name} rank {found[0]} of {found[1]}, where that of rank {expected[0]} of "
                f"{expected[1]} is expected"
            )


def _shown(shape: Shape) -> str:
    return " x ".join("any" if size is None else str(size) for size in shape) or "one number"
