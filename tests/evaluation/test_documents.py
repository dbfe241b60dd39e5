"""Perplexities of held-out documents: units, windows, where documents come from; and a training's own validation."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optimus_cc.config import RunConfig
from optimus_cc.evaluation import documents
from optimus_cc.evaluation.documents import Document
from optimus_cc.evaluation.scoring import Score
from optimus_cc.evaluation.windows import Part
from optimus_cc.training import corpus
from optimus_cc.training.errors import DataError
from optimus_cc.training.tokenizer import Tokenizer
from tests.configurations import SEQUENCE, VOCABULARY, tiny
from tests.ranks import RankPool
from tests.training.corpora import corpus_config, json_lines, random_documents, write_documents
from tests.training_runs import backend_in_world, random_tokens


def each_token_costs(nats: float) -> Any:
    def score(requests: Sequence[Sequence[Part]]) -> list[Score]:
        return [Score(-nats * sum(len(part.targets) for part in parts), False) for parts in requests]

    return score


def test_each_perplexity_is_per_its_unit() -> None:
    texts = ["aé b", "ccc  dd\nee"]  # 5 and 10 bytes, 2 and 3 words
    found = documents.measure(
        iter([Document(text, list(range(length))) for text, length in zip(texts, (7, 13), strict=True)]),
        0,
        4,
        each_token_costs(0.5),
    )
    assert found.counts() == {"documents": 2, "tokens": 20, "words": 5, "text_bytes": 15}
    metrics = found.metrics()
    assert metrics["token_loss"] == pytest.approx(0.5)
    assert metrics["token_perplexity"] == pytest.approx(math.exp(0.5))
    assert metrics["word_perplexity"] == pytest.approx(math.exp(10 / 5))
    assert metrics["byte_perplexity"] == pytest.approx(math.exp(10 / 15))
    assert metrics["bits_per_byte"] == pytest.approx(10 / 15 / math.log(2))
    assert metrics["byte_perplexity"] == pytest.approx(2 ** metrics["bits_per_byte"])


def test_a_hopeless_model_has_an_infinite_perplexity() -> None:
    found = documents.measure(iter([Document("a", [1])]), 0, 4, each_token_costs(1e4))
    assert found.metrics()["token_perplexity"] == math.inf


def test_documents_without_text() -> None:
    with pytest.raises(DataError, match="hold no text"):
        documents.measure(iter([]), 0, 4, each_token_costs(1.0))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("documents")
    path = write_documents(folder / "documents.jsonl", [*random_documents(40), "naïve  \n text 日本"])
    return corpus_config(folder, json_lines(folder, path, split=[0.6, 0.4, 0.0]))


def evaluating(config: RunConfig, **evaluation: Any) -> RunConfig:
    this: Any = config
    settings: Any = config.evaluation
    changed: RunConfig = replace(this, evaluation=replace(settings, **evaluation))
    return changed


def test_own_documents_are_those_that_validation_was_given(config: RunConfig) -> None:
    folder = corpus.prepare(config)
    found = list(documents.read(config, Tokenizer.load(folder)))
    counts = corpus.manifest(folder)["splits"]["validation"]
    assert len(found) == counts["documents"]
    assert sum(len(document.tokens) + 1 for document in found) == counts["tokens"]
    assert sum(len(document.text.encode()) for document in found) == counts["text_bytes"]
    assert {document.text for document in found} <= {*random_documents(40), "naïve  \n text 日本"}
    assert len(list(documents.read(evaluating(config, limit=3), Tokenizer.load(folder)))) == 3
    assert set(documents.source(config)["files"]) == {"validation_0.bin"}


def test_documents_of_a_file(config: RunConfig, tmp_path: Path) -> None:
    folder = corpus.prepare(config)
    tokenizer = Tokenizer.load(folder)
    path = write_documents(tmp_path / "held_out.jsonl", ["one river", " ", "large state"], key="content")
    chosen = evaluating(config, documents=str(path), text_key="content")
    found = list(documents.read(chosen, tokenizer))
    assert [document.text for document in found] == ["one river", "large state"]
    assert [document.tokens for document in found] == [tokenizer.encode(document.text) for document in found]
    assert documents.source(chosen)["file"] == str(path)
    with pytest.raises(DataError, match="line 1"):
        list(documents.read(evaluating(config, documents=str(path)), tokenizer))
    path.write_text(json.dumps({"content": 3}))
    with pytest.raises(DataError, match="line 1"):
        list(documents.read(chosen, tokenizer))


def same_windows(config: RunConfig) -> tuple[float, float]:
    """The loss per token that training validates with, and that of the same windows as they are evaluated."""
    from optimus_cc.communication.gradient_sync import unwrapped
    from optimus_cc.evaluation.scoring import Scorer
    from optimus_cc.training import loop

    backend = backend_in_world(config)
    trainer = loop.Trainer.build(config, backend, VOCABULARY)
    source = random_tokens(config, offset=10**6)
    record = loop.validation_record(trainer, source)
    parts: list[list[Part]] = []
    batches = itertools.islice(source(0), config.num_microbatches)
    for batch in backend.everyone([(one["tokens"].tolist(), one["labels"].tolist()) for one in batches]):
        for inputs, labels in batch:
            rows = zip(inputs, labels, strict=True)
            parts += [[Part(tuple(row), tuple(label))] for row, label in rows]
    (model,) = trainer.model
    model.eval()
    scorer = Scorer(unwrapped(model), backend, vocabulary_size=VOCABULARY, batch_size=3)
    scores = scorer.score(parts)
    return record["loss"], -sum(score.log_probability for score in scores) / (len(parts) * SEQUENCE)


@pytest.mark.parametrize("layout", ["single", "tp2_pp2"])
def test_the_same_windows_have_the_loss_of_a_trainings_validation(ranks: RankPool, layout: str) -> None:
    config = tiny(layout, model={"init_std": 0.2})
    for validated, evaluated in ranks.run(config.parallel.world_size, same_windows, config):
        assert validated == pytest.approx(evaluated, rel=1e-6)
        assert validated > 1


def test_a_document_longer_than_the_window_counts_all_its_tokens() -> None:
    generator = random.Random(0)
    tokens = [generator.randrange(50) for _ in range(23)]
    seen: list[Part] = []

    def score(requests: Sequence[Sequence[Part]]) -> list[Score]:
        seen.extend(part for parts in requests for part in parts)
        return [Score(-1.0, False) for _ in requests]

    documents.measure(iter([Document("text", tokens)]), 99, 5, score)
    assert [token for part in seen for token in part.targets] == tokens
    assert max(len(part.inputs) for part in seen) == 5
    assert seen[0].inputs[0] == 99
