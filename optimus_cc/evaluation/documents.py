"""Held-out documents and their perplexities, each named after the unit it is per."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimus_cc.config import RunConfig
from optimus_cc.config.fingerprint import fingerprint
from optimus_cc.evaluation import windows
from optimus_cc.evaluation.windows import Part
from optimus_cc.training import corpus
from optimus_cc.training.documents import read_json_lines
from optimus_cc.training.errors import DataError
from optimus_cc.training.history import perplexity
from optimus_cc.training.tokenizer import Tokenizer

BLOCK = 1024
"""Documents that are scored together."""
_SPLIT = "validation"


@dataclass(frozen=True)
class Document:
    text: str
    tokens: list[int]
    """Without an end-of-document token: it is no part of the text."""


@dataclass
class Perplexity:
    """Sums over documents, and what they come to."""

    documents: int = 0
    tokens: int = 0
    words: int = 0
    """What blanks and line ends separate."""
    text_bytes: int = 0
    """UTF-8."""
    log_likelihood: float = 0.0
    """Natural logarithm, of all tokens."""

    def add(self, document: Document, log_likelihood: float) -> None:
        self.documents += 1
        self.tokens += len(document.tokens)
        self.words += len(document.text.split())
        self.text_bytes += len(document.text.encode())
        self.log_likelihood += log_likelihood

    def metrics(self) -> dict[str, float]:
        """Perplexities per unit, bits per byte, and the mean loss per token in nats."""
        units = {"token": self.tokens, "word": self.words, "byte": self.text_bytes}
        perplexities = {f"{unit}_perplexity": perplexity(-self.log_likelihood / count) for unit, count in units.items()}
        return {
            **perplexities,
            "bits_per_byte": -self.log_likelihood / self.text_bytes / math.log(2),
            "token_loss": -self.log_likelihood / self.tokens,
        }

    def counts(self) -> dict[str, int]:
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "words": self.words,
            "text_bytes": self.text_bytes,
        }


def measure(
    documents: Iterator[Document], prefix: int, window: int, score: Callable[[Sequence[Sequence[Part]]], list[Any]]
) -> Perplexity:
    """Every token of every document predicted once, after as much of the document as fits the model's window.

    Args:
        prefix: the token that a document's first one is predicted from.
        window: the most tokens that the model takes.
        score: as :meth:`optimus_cc.evaluation.scoring.Scorer.score`.

    Raises:
        DataError: there is no document with anything in it.
    """
    found = Perplexity()
    while block := list(itertools.islice(documents, BLOCK)):
        parts = [list(windows.rolling(document.tokens, prefix, window)) for document in block]
        for document, scored in zip(block, score(parts), strict=True):
            found.add(document, scored.log_probability)
    if not found.words:
        raise DataError("the held-out documents hold no text")
    return found


def read(config: RunConfig, tokenizer: Tokenizer) -> Iterator[Document]:
    """The held-out documents that ``config`` names: at most evaluation.limit of them, blank ones left out.

    Raises:
        DataError: there are none, or they can't be read.
    """
    settings = config.evaluation
    if settings.documents is None:
        found = _of_corpus(corpus.cache_folder(config), tokenizer)
    else:
        texts = read_json_lines(Path(settings.documents), settings.text_key, said_by="evaluation.text_key")
        found = (Document(text, tokenizer.encode(text)) for text in texts if text)
    return itertools.islice(found, settings.limit)


def source(config: RunConfig) -> dict[str, Any]:
    """Where the held-out documents come from, and what they are."""
    if config.evaluation.documents is not None:
        return {"file": config.evaluation.documents, **fingerprint(config.evaluation.documents)}
    folder = corpus.cache_folder(config)
    found = corpus.manifest(folder)["files"]
    files = {name: entry for name, entry in found.items() if name.startswith(f"{_SPLIT}_") and name.endswith(".bin")}
    return {"corpus": folder.name, "split": _SPLIT, "files": files}


def _of_corpus(folder: Path, tokenizer: Tokenizer) -> Iterator[Document]:
    """The validation documents of a prepared corpus, in its order, back from their tokens."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of accelerator packages that are not installed
        from megatron.core.datasets.indexed_dataset import IndexedDataset

    for part in range(len(corpus.manifest(folder)["parts"])):
        dataset = IndexedDataset(str(folder / corpus.prefix(_SPLIT, part)))
        for index in range(len(dataset)):
            tokens = [int(token) for token in dataset[index][:-1]]
            if tokens and (text := tokenizer.decode(tokens)).strip():
                yield Document(text, tokens)
