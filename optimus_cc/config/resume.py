"""``training.resume_from``: going on from a checkpoint of another run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from optimus_cc import checkpoints
from optimus_cc.config.errors import Problem
from optimus_cc.config.identity import without_dead_keys
from optimus_cc.config.model import padded_vocabulary_size
from optimus_cc.config.tokenizer import GPT2_VOCABULARY_SIZE

_KEY = "training.resume_from"
_MUST_AGREE = (("model", None), ("optimizer", "name"), ("training", "global_batch_size"))
"""(group, key) of what a checkpoint's run must have in common with one that goes on from it; None: all of the group."""


def resumed_from(path: str) -> dict[str, Any]:
    """The run and the step that a checkpoint's path names: what counts for the identity of a run that starts there."""
    place = Path(path)
    return {"run_id": place.parent.parent.name, "checkpoint": place.name}


def resume_problems(path: str, science: Mapping[str, Any], steps: int) -> Iterator[Problem]:
    """What keeps a run with the scientific configuration ``science`` and this many steps from going on there."""
    place = Path(path)
    found = checkpoints.at(place)
    if found is None:
        folders = (place / "checkpoints", place, place.parent)
        choices = next(filter(None, map(checkpoints.all_in, folders)), [])
        how = f"{_KEY}={choices[0].path}" if choices else f"{_KEY}=runs/ID/checkpoints/step_00000300"
        yield Problem(_KEY, path, "the folder of one checkpoint", how)
        return
    if (broken := found.problem()) is not None:
        yield Problem(_KEY, path, f"a complete checkpoint; {broken}", f"another one in {place.parent}")
        return
    if found.step >= steps:
        yield Problem(_KEY, path, f"a checkpoint before training.steps = {steps}", f"training.steps={2 * found.step}")
    theirs = without_dead_keys((found.manifest() or {"scientific": {}})["scientific"])
    sizes = [_padded_vocabulary(one.get("tokenizer")) for one in (science, theirs)]
    if None not in sizes and sizes[0] != sizes[1]:
        allowed = f"a checkpoint of a model with a vocabulary padded to {sizes[0]}; its own is {sizes[1]}"
        yield Problem(_KEY, path, allowed, "the same tokenizer")
    for group, key in _MUST_AGREE:
        ours = science[group] if key is None else science[group][key]
        other = theirs.get(group)
        if key is not None:
            other = other.get(key) if isinstance(other, Mapping) else None
        if ours != other:
            name = group if key is None else f"{group}.{key}"
            value = _difference(other, ours) if isinstance(other, Mapping) else other
            yield Problem(_KEY, path, f"a checkpoint made with the same {name}; its own is {value}", f"the same {name}")


def _padded_vocabulary(tokenizer: Any) -> int | None:
    """As far as a tokenizer's settings tell."""
    settings = tokenizer if isinstance(tokenizer, Mapping) else {}
    size = GPT2_VOCABULARY_SIZE if settings.get("name") == "gpt2" else settings.get("vocabulary_size")
    return padded_vocabulary_size(size) if isinstance(size, int) else None


def _difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in theirs.items() if ours.get(key) != value}
