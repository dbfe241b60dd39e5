"""``data``: the corpus."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from optimus_cc.config.errors import Problem
from optimus_cc.config.schema import Name, PathText, strict

MAX_BLENDED = 32766
"""Parts that Megatron-core's BlendedDataset takes: their numbers are of 16 bits."""


@strict
class WikipediaSampleConfig:
    """About a hundred Wikipedia articles that an installed package carries: real text without a network."""

    name: Literal["wikipedia_sample"] = "wikipedia_sample"
    split: tuple[float, float, float] = (0.9, 0.05, 0.05)
    """Shares of the documents for training, validation and test."""
    cache_dir: PathText = "data_cache"
    """Where tokenised corpora are kept. Not part of a run's identity."""

    def problems(self) -> Iterator[Problem]:
        yield from _split_problems(self.split)


@strict
class JsonLinesConfig:
    """A user's own files: one JSON object a line; compressed ones are read as they are."""

    name: Literal["jsonl"] = "jsonl"
    path: PathText | tuple[PathText, ...]
    """One file or several."""
    weights: tuple[Annotated[float, Field(ge=1e-9, le=1e9)], ...] | None = None
    """Blend weight of each file; null: by number of tokens."""
    text_key: Annotated[str, Field(min_length=1)] = "text"
    """The key that holds a document's text."""
    label: Name = "jsonl"
    """Readable name of the corpus in run ids."""
    split: tuple[float, float, float] = (0.949, 0.05, 0.001)
    cache_dir: PathText = "data_cache"

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else tuple(self.path)

    def problems(self) -> Iterator[Problem]:
        yield from _split_problems(self.split)
        if not self.paths:
            yield Problem("data.path", self.path, "at least one file", "data.path=FILE or data.path=[FILE,FILE]")
        for path in self.paths:
            if not Path(path).is_file():
                yield Problem(
                    "data.path",
                    path,
                    "a readable JSON-lines file",
                    "check the path; it is relative to the current folder",
                )
        if self.weights is not None and len(self.paths) > MAX_BLENDED:
            yield Problem(
                "data.weights",
                f"of {len(self.paths)} files",
                f"null with more than {MAX_BLENDED} files, which is what Megatron-core blends",
                "data.weights=null, or fewer files",
            )
        elif self.weights is not None and len(self.weights) != len(self.paths):
            yield Problem(
                "data.weights",
                list(self.weights),
                f"one weight for each of the {len(self.paths)} files of data.path",
                "give as many weights as files, or data.weights=null",
            )


DataConfig = Annotated[WikipediaSampleConfig | JsonLinesConfig, Field(discriminator="name")]


def _split_problems(split: tuple[float, float, float]) -> Iterator[Problem]:
    if any(share < 0 for share in split) or not math.isclose(sum(split), 1.0, abs_tol=1e-6) or min(split[:2]) == 0:
        yield Problem(
            "data.split",
            list(split),
            "three shares >= 0 that sum to 1; those for training and validation above 0",
            "for example data.split=[0.9,0.05,0.05]",
        )
