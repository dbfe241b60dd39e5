"""Text to token ids and back, on the Hugging Face ``tokenizers`` library. Never imports torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from optimus_cc.config import model
from optimus_cc.files import read_text
from optimus_cc.training.errors import DataError

END_OF_DOCUMENT = "<|endoftext|>"
"""GPT-2's end-of-document token, also used for vocabularies trained here."""
_COMMON_END_TOKENS = (END_OF_DOCUMENT, "</s>", "<|end_of_text|>", "<eos>")


class Tokenizer:
    """A vocabulary with an end-of-document token.

    Text is always encoded as text: a document that happens to spell out a special token does not yield that token,
    and nothing is added, cut off or padded.
    """

    def __init__(self, backend: tokenizers.Tokenizer, end_of_document_token: str) -> None:
        """Take over ``backend``; its truncation and padding are switched off.

        Raises:
            DataError: if ``end_of_document_token`` is not in the vocabulary.
        """
        end_of_document = backend.token_to_id(end_of_document_token)
        if end_of_document is None:
            raise DataError(f"the end-of-document token {end_of_document_token!r} is not in the vocabulary")
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend = backend
        self.end_of_document_token = end_of_document_token
        self.end_of_document: int = end_of_document
        """Token id that closes each document."""
        self.vocabulary_size: int = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        """One more than the highest token id."""

    @property
    def padded_vocabulary_size(self) -> int:
        """Rows of the embedding."""
        return model.padded_vocabulary_size(self.vocabulary_size)

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, without an end-of-document token."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, computed on all cores."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special tokens are spelled out."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text

    def save(self, folder: str | Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` into an existing folder, in Hugging Face's format."""
        folder = Path(folder)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.end_of_document_token}
        (folder / "tokenizer.json").write_text(self._backend.to_str(pretty=True) + "\n", encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read a Hugging Face tokenizer folder, or one that :meth:`save` wrote.

        The end-of-document token is ``eos_token`` of ``tokenizer_config.json`` or ``special_tokens_map.json``; where
        neither names one, a common one that the vocabulary holds.

        Raises:
            DataError: if ``tokenizer.json`` is missing or unreadable, or no end-of-document token can be found.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        try:
            backend = tokenizers.Tokenizer.from_str(read_text(path))
        except OSError as error:
            raise DataError(f"{path}: can't be read: {error.strerror or error}") from None
        except Exception as error:  # the library raises nothing more specific
            raise DataError(f"{path}: not a tokenizer in Hugging Face's fast format ({error})") from None
        named = _eos_token(folder / "tokenizer_config.json") or _eos_token(folder / "special_tokens_map.json")
        candidates = (named,) if named else _COMMON_END_TOKENS
        for token in candidates:
            if backend.token_to_id(token) is not None:
                return cls(backend, token)
        raise DataError(
            f"{folder}: no end-of-document token: {' / '.join(candidates)} not in the vocabulary. "
            'Name one of its tokens in tokenizer_config.json, for example {"eos_token": "</s>"}.'
        )

    @classmethod
    def from_gpt2_files(cls, vocab_file: str | Path, merges_file: str | Path) -> Tokenizer:
        """GPT-2's byte-level BPE from ``encoder.json`` and ``vocab.bpe`` (``vocab.json`` and ``merges.txt``).

        Raises:
            DataError: if a file is missing or not in that format, or the end-of-document token is not in it.
        """
        try:
            bpe = models.BPE.from_file(str(vocab_file), str(merges_file))
        except Exception as error:  # the library raises nothing more specific
            raise DataError(
                f"{vocab_file} and {merges_file}: not a byte-level BPE vocabulary and its merges "
                f"(encoder.json and vocab.bpe of GPT-2): {error}"
            ) from None
        backend = tokenizers.Tokenizer(bpe)
        if backend.token_to_id(END_OF_DOCUMENT) is None:
            raise DataError(f"{vocab_file}: GPT-2's vocabulary holds {END_OF_DOCUMENT!r}, this one does not")
        _make_byte_level(backend)
        backend.add_special_tokens([END_OF_DOCUMENT])
        return cls(backend, END_OF_DOCUMENT)

    @classmethod
    def train(cls, documents: Iterable[str], vocabulary_size: int) -> Tokenizer:
        """Byte-level BPE trained on ``documents``, with at most ``vocabulary_size`` entries; fewer if pairs run out.

        The same documents give the same vocabulary. Id 0 is the end-of-document token. Streams over ``documents``.
        """
        backend = tokenizers.Tokenizer(models.BPE())
        _make_byte_level(backend)
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary_size,
            special_tokens=[END_OF_DOCUMENT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(documents, trainer)
        return cls(backend, END_OF_DOCUMENT)


def _make_byte_level(backend: tokenizers.Tokenizer) -> None:
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()


def _eos_token(path: Path) -> str | None:
    """``eos_token`` of a Hugging Face JSON file, or None if there is no such file or entry."""
    if not path.is_file():
        return None
    try:
        entry: Any = json.loads(read_text(path)).get("eos_token")
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{path}: not a JSON object ({error})") from None
    if isinstance(entry, dict):  # an added token with its options
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None
