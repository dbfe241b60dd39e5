"""Corpora that several test modules share."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimus_cc.config import RunConfig
from optimus_cc.training import corpus
from tests.training.corpora import corpus_config, json_lines, random_documents, write_documents


@pytest.fixture(scope="session")
def wikipedia_config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    cache = tmp_path_factory.mktemp("wikipedia")
    tokenizer = {"name": "bpe", "vocabulary_size": 4096}
    return corpus_config(cache, {"name": "wikipedia_sample"}, tokenizer, sequence_length=256)


@pytest.fixture(scope="session")
def wikipedia_folder(wikipedia_config: RunConfig) -> Path:
    """The default corpus, prepared."""
    return corpus.prepare(wikipedia_config)


@pytest.fixture(scope="session")
def small_config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("small")
    path = write_documents(folder / "documents.jsonl", random_documents(40))
    return corpus_config(folder, json_lines(folder, path, split=[0.7, 0.2, 0.1]))


@pytest.fixture(scope="session")
def small_folder(small_config: RunConfig) -> Path:
    """Forty short documents, prepared."""
    return corpus.prepare(small_config)
