"""Run configurations and JSON-lines files for tests of the corpus."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from optimus_cc.config import RunConfig, load

WORDS = ["the", "of", "energy", "river", "people", "state", "between", "large", "history", "species", "number", "in"]


def corpus_mapping(
    cache: Path,
    data: dict[str, Any],
    tokenizer: dict[str, Any] | None = None,
    *,
    sequence_length: int = 16,
    **training: Any,
) -> dict[str, Any]:
    """A whole configuration, as composed, around the given corpus."""
    return {
        "task": {"name": "train"},
        "model": {
            "name": "test",
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "sequence_length": sequence_length,
        },
        "parallel": {},
        "technique": {},
        "data": {"cache_dir": str(cache), **data},
        "tokenizer": tokenizer or {"name": "bpe", "vocabulary_size": 300},
        "optimizer": {"learning_rate": 1e-3},
        "training": {
            "steps": 4,
            "global_batch_size": 4,
            "micro_batch_size": 1,
            "validation_batches": 1,
            **training,
        },
        "cluster": {"name": "test", "ranks_per_node": 1},
    }


def corpus_config(cache: Path, data: dict[str, Any], *arguments: Any, **options: Any) -> RunConfig:
    return load(corpus_mapping(cache, data, *arguments, **options))


def changed(config: RunConfig, group: str, **values: Any) -> RunConfig:
    """``config`` with other values in one group."""
    mapping = config.to_mapping()
    mapping[group].update(values)
    return load(mapping)


def json_lines(cache: Path, *paths: Path, **data: Any) -> dict[str, Any]:
    """The ``data`` node for the given files."""
    names = [str(path) for path in paths]
    return {"name": "jsonl", "path": names, "cache_dir": str(cache), **data}


def write_documents(path: Path, texts: Iterable[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def random_documents(count: int, *, seed: int = 0) -> list[str]:
    """Documents of different lengths, each of which starts with a name of its own."""
    source = random.Random(seed)
    return [f"{seed}_{number} " + " ".join(source.choices(WORDS, k=source.randint(30, 120))) for number in range(count)]
