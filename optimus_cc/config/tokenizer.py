"""``tokenizer``: text to token ids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from optimus_cc.config.errors import Problem
from optimus_cc.config.schema import PathText, strict

GPT2_VOCABULARY_SIZE = 50257


@strict
class BpeTokenizerConfig:
    """Byte-level BPE, trained on the corpus's training documents."""

    name: Literal["bpe"] = "bpe"
    vocabulary_size: Annotated[int, Field(ge=260)] = 2048
    """At least the 256 bytes and the end-of-document token; a small corpus may yield fewer entries than asked for."""

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that determine the vocabulary, besides the corpus."""
        return ()

    def problems(self) -> Iterator[Problem]:
        yield from ()


@strict
class Gpt2TokenizerConfig:
    """GPT-2's own vocabulary, from local files."""

    name: Literal["gpt2"] = "gpt2"
    vocab_file: PathText
    """``encoder.json`` / ``vocab.json``."""
    merges_file: PathText
    """``vocab.bpe`` / ``merges.txt``."""

    @property
    def files(self) -> tuple[Path, ...]:
        return Path(self.vocab_file), Path(self.merges_file)

    def problems(self) -> Iterator[Problem]:
        for key in ("vocab_file", "merges_file"):
            path = getattr(self, key)
            if not Path(path).is_file():
                yield Problem(
                    f"tokenizer.{key}", path, "an existing file", f"tokenizer.{key}=PATH of GPT-2's vocabulary files"
                )


@strict
class HuggingFaceTokenizerConfig:
    """A folder that holds ``tokenizer.json``; ``eos_token`` of ``tokenizer_config.json`` ends documents."""

    name: Literal["huggingface"] = "huggingface"
    path: PathText

    @property
    def files(self) -> tuple[Path, ...]:
        names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
        return tuple(path for name in names if (path := Path(self.path) / name).is_file())

    def problems(self) -> Iterator[Problem]:
        if not (Path(self.path) / "tokenizer.json").is_file():
            yield Problem(
                "tokenizer.path",
                self.path,
                "a folder that holds tokenizer.json",
                "save the tokenizer there in its fast form",
            )


TokenizerConfig = Annotated[
    BpeTokenizerConfig | Gpt2TokenizerConfig | HuggingFaceTokenizerConfig, Field(discriminator="name")
]
