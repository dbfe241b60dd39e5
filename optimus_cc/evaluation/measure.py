"""What an evaluation measures, with all that a reader of the result has to know. Runs on rank 0."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from optimus_cc.config import RunConfig
from optimus_cc.config.fingerprint import fingerprint
from optimus_cc.config.tokenizer import BpeTokenizerConfig
from optimus_cc.evaluation import documents, results
from optimus_cc.evaluation.harness import MegatronLM, ScoreRequests
from optimus_cc.evaluation.model import layout_of
from optimus_cc.provenance import utc_now
from optimus_cc.training.corpus import cache_folder
from optimus_cc.training.tokenizer import Tokenizer

_PACKAGES = ("lm_eval", "datasets", "tokenizers", "torch", "megatron-core")


def results_of(
    config: RunConfig,
    checkpoint: Mapping[str, Any],
    tokenizer: Tokenizer,
    score: ScoreRequests,
    device: str,
    begin: Callable[[str], None] = lambda kind: None,
) -> Iterator[dict[str, Any]]:
    """What is asked for and not there yet (all of it if ``config.force``), one result for each kind as it is ready.

    Args:
        config: of the evaluation.
        checkpoint: whose model scores, as :func:`optimus_cc.evaluation.results.describe` has it; it may be gone by now.
        score: scores requests with the model.
        begin: told what is about to be measured.
    """
    from optimus_cc.evaluation.trained import run_folder

    wanted = results.kinds(config) if config.force else results.missing(run_folder(config), checkpoint, config)
    for kind in wanted:
        begin(kind)
        started = time.monotonic()
        measure = _zero_shot if kind == "zero_shot" else _perplexity
        measured = measure(config, tokenizer, score)
        yield {
            "kind": kind,
            "run_id": run_folder(config).run_id,
            "checkpoint": checkpoint,
            **measured,
            "settings": results.settings(config, kind),
            "model": {"name": config.model.name, "window": config.model.sequence_length},
            "tokenizer": _tokenizer(config, tokenizer),
            "layout": layout_of(config.parallel).label,
            "device": device,
            "precision": config.training.precision,
            "batch_size": config.evaluation.batch_size,
            "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
            "time": utc_now(),
            "wall_s": time.monotonic() - started,
        }


def _zero_shot(config: RunConfig, tokenizer: Tokenizer, score: ScoreRequests) -> dict[str, Any]:
    from optimus_cc.evaluation import tasks

    loaded = tasks.load(config.evaluation)
    scored = tasks.evaluate(loaded, MegatronLM(tokenizer, config.model.sequence_length, score), config.evaluation)
    return {"tasks": scored, "limit": config.evaluation.limit, "data": tasks.source(config.evaluation, loaded)}


def _perplexity(config: RunConfig, tokenizer: Tokenizer, score: ScoreRequests) -> dict[str, Any]:
    read = documents.read(config, tokenizer)
    found = documents.measure(read, tokenizer.end_of_document, config.model.sequence_length, score)
    metrics = {
        name: {"value": value, "standard_error": None, "higher_is_better": False}
        for name, value in found.metrics().items()
    }
    return {
        "metrics": metrics,
        "items": found.counts(),
        "limit": config.evaluation.limit,
        "data": documents.source(config),
    }


def _tokenizer(config: RunConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    own = isinstance(config.tokenizer, BpeTokenizerConfig)
    files = (cache_folder(config) / "tokenizer.json",) if own else config.tokenizer.files
    return {
        "name": config.tokenizer.name,
        "vocabulary_size": tokenizer.vocabulary_size,
        "prefix": tokenizer.end_of_document_token,
        "files": {path.name: fingerprint(path) for path in files},
    }
