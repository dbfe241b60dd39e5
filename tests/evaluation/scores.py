"""What test ranks run: a small model saved, and scores of it in any layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optimus_cc.config import RunConfig
from optimus_cc.evaluation.windows import Part
from tests.configurations import SEQUENCE, VOCABULARY
from tests.training_runs import backend_in_world

Request = tuple[list[int], list[int]]
"""A context and its continuation."""


def save(config: RunConfig, folder: Path) -> None:
    """A checkpoint of the model as it is initialised."""
    from optimus_cc.training import loop
    from optimus_cc.training.checkpoint import Checkpoints

    backend = backend_in_world(config)
    Checkpoints(config, folder, backend).save(loop.Trainer.build(config, backend, VOCABULARY), {})


def scores(config: RunConfig, folder: Path, requests: Sequence[Request], **options: Any) -> list[tuple[float, bool]]:
    """Log-probability, and whether it is the likeliest, of each continuation."""
    from optimus_cc.evaluation import windows

    parts = [windows.continuation(context, target, SEQUENCE) for context, target in requests]
    return scores_of_parts(config, folder, parts, **options)


def scores_of_parts(
    config: RunConfig,
    folder: Path,
    parts: Sequence[Sequence[Part]],
    *,
    batch_size: int = 4,
    vocabulary_size: int = VOCABULARY,
    padded: int = VOCABULARY,
) -> list[tuple[float, bool]]:
    """The same of requests that are cut into parts."""
    from optimus_cc import checkpoints
    from optimus_cc.evaluation.model import for_evaluation, load_model
    from optimus_cc.evaluation.scoring import Scorer

    config = for_evaluation(config)
    backend = backend_in_world(config)
    found = checkpoints.newest(folder)
    assert found is not None
    model = load_model(config, backend, padded, found)
    scorer = Scorer(model, backend, vocabulary_size=vocabulary_size, batch_size=batch_size)
    return [(score.log_probability, score.greedy) for score in scorer.score(parts)]


def whole_logits(config: RunConfig, folder: Path, rows: Sequence[list[int]]) -> list[Any]:
    """[sequence, vocabulary] of each row by itself, in double precision: a plain pass through the whole model."""
    import torch

    from optimus_cc import checkpoints
    from optimus_cc.evaluation.model import load_model

    backend = backend_in_world(config)
    found = checkpoints.newest(folder)
    assert found is not None
    model = load_model(config, backend, VOCABULARY, found)
    results = []
    with torch.no_grad():
        for row in rows:
            tokens = torch.tensor([row])
            results.append(model(tokens, torch.arange(len(row)).unsqueeze(0), None)[0].double())
    return results
