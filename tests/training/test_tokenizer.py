from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, processors

from optimus_cc.training.errors import DataError
from optimus_cc.training.tokenizer import END_OF_DOCUMENT, Tokenizer
from tests.training.corpora import random_documents

TOKENIZER = Tokenizer.train(random_documents(40), 400)

any_text = st.one_of(
    st.text(),
    st.text(st.characters(codec="utf-8")).map(lambda text: f"{text}{END_OF_DOCUMENT}{text}"),
)


@given(any_text)
def test_round_trip(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.end_of_document not in ids
    assert all(0 <= token < TOKENIZER.vocabulary_size for token in ids)


@given(st.lists(any_text, max_size=5))
def test_batches_encode_like_single_texts(texts: list[str]) -> None:
    assert TOKENIZER.encode_batch(texts) == [TOKENIZER.encode(text) for text in texts]


def test_training_is_deterministic_and_exact() -> None:
    documents = random_documents(60, seed=3)
    first, second = (Tokenizer.train(iter(documents), 320) for _ in range(2))
    assert first._backend.to_str() == second._backend.to_str()
    assert first.vocabulary_size == 320
    assert first.padded_vocabulary_size == 1024
    assert first.end_of_document == 0
    assert first.decode([0]) == END_OF_DOCUMENT
    tiny = Tokenizer.train(["ab ab"], 4096)
    assert 257 <= tiny.vocabulary_size < 270


def test_save_and_load(tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    text = f"the river {END_OF_DOCUMENT} è 🙂"
    assert loaded.encode(text) == TOKENIZER.encode(text)
    assert loaded.end_of_document == TOKENIZER.end_of_document
    assert loaded.vocabulary_size == TOKENIZER.vocabulary_size


def test_gpt2_files(tmp_path: Path) -> None:
    model = json.loads(TOKENIZER._backend.to_str())["model"]
    entries = sorted((token for token in model["vocab"] if token != END_OF_DOCUMENT), key=model["vocab"].get)
    vocabulary = {token: number for number, token in enumerate([*entries, END_OF_DOCUMENT])}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (tmp_path / "encoder.json").write_text(json.dumps(vocabulary))
    (tmp_path / "vocab.bpe").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    tokenizer = Tokenizer.from_gpt2_files(tmp_path / "encoder.json", tmp_path / "vocab.bpe")
    assert tokenizer.end_of_document == len(vocabulary) - 1
    assert tokenizer.vocabulary_size == len(vocabulary)
    text = f"history of  the {END_OF_DOCUMENT}\n\n number ñ"
    assert [token + 1 for token in tokenizer.encode(text)] == TOKENIZER.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text

    del vocabulary[END_OF_DOCUMENT]
    (tmp_path / "encoder.json").write_text(json.dumps(vocabulary))
    with pytest.raises(DataError, match="endoftext"):
        Tokenizer.from_gpt2_files(tmp_path / "encoder.json", tmp_path / "vocab.bpe")
    (tmp_path / "encoder.json").write_text("not JSON")
    with pytest.raises(DataError, match=r"encoder\.json"):
        Tokenizer.from_gpt2_files(tmp_path / "encoder.json", tmp_path / "vocab.bpe")


def _word_level(folder: Path, tokens: list[str], **files: Any) -> Path:
    """A tokenizer folder as others write it: with truncation, padding and a start token added to each text."""
    vocabulary = {token: number for number, token in enumerate(["<s>", "a", "b", *tokens])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="b"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("tokens", "files", "expected"),
    [
        (["<x>", "</s>"], {"tokenizer_config": {"eos_token": "<x>"}}, 3),
        (["<x>", "</s>"], {"tokenizer_config": {"eos_token": {"content": "<x>", "lstrip": False}}}, 3),
        (["<x>", "</s>"], {"special_tokens_map": {"eos_token": "<x>"}}, 3),
        (["<x>", "</s>"], {"tokenizer_config": {"eos_token": None}}, 4),
        (["<x>", "</s>"], {}, 4),
        (["</s>", "<|endoftext|>"], {}, 4),
    ],
)
def test_huggingface_folder(tmp_path: Path, tokens: list[str], files: dict[str, Any], expected: int) -> None:
    tokenizer = Tokenizer.load(_word_level(tmp_path, tokens, **files))
    assert tokenizer.end_of_document == expected
    assert tokenizer.vocabulary_size == 3 + len(tokens)
    assert tokenizer.encode("a b a b a b") == [1, 2, 1, 2, 1, 2]
    assert tokenizer.encode_batch(["a", "b b"]) == [[1], [2, 2]]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "no end-of-document token: .*eos_token"),
        ({"tokenizer_config": {"eos_token": "<gone>"}}, "<gone> not in the vocabulary"),
        ({"tokenizer_config": ["eos_token"]}, r"tokenizer_config\.json: not a JSON object"),
    ],
)
def test_huggingface_folder_without_an_end_token(tmp_path: Path, files: dict[str, Any], expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        Tokenizer.load(_word_level(tmp_path, ["<x>"], **files))


def test_unreadable_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="can't be read"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(DataError, match="fast format"):
        Tokenizer.load(tmp_path)
