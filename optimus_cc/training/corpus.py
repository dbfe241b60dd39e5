"""The tokenised corpus on disk: built once, then shared by every run that asks for the same text and vocabulary.

``python -m optimus_cc.training.corpus CONFIG.yaml`` prepares the corpus of a resolved run configuration.
Importing this module does not import torch.
"""

from __future__ import annotations

import argparse
import errno
import functools
import hashlib
import importlib.metadata
import itertools
import json
import shutil
import socket
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optimus_cc.config import ConfigError, RunConfig, load
from optimus_cc.config.data import JsonLinesConfig
from optimus_cc.config.fingerprint import fingerprint
from optimus_cc.config.tokenizer import BpeTokenizerConfig, Gpt2TokenizerConfig
from optimus_cc.process import let_threads_sleep
from optimus_cc.training.documents import read_json_lines, read_wikipedia, wikipedia_dump
from optimus_cc.training.errors import DataError

if TYPE_CHECKING:
    from optimus_cc.training.tokenizer import Tokenizer

__all__ = ["SPLITS", "DataError", "cache_folder", "is_prepared", "main", "manifest", "prefix", "prepare"]

SPLITS = ("training", "validation", "test")
MANIFEST = "corpus.json"

_FORMAT_VERSION = 1
"""To be raised whenever the same configuration would lead to other content."""
_SPLIT_SEED = 20230325
_BATCH_DOCUMENTS = 1024
_BATCH_CHARACTERS = 4 * 2**20

Report = Callable[[str], None]


# --- Where a corpus lies, and whether it is there --------------------------------------------------------------------


def cache_folder(config: RunConfig) -> Path:
    """Folder of the tokenised corpus: ``data.cache_dir`` / a readable name and a hash of all that determines it.

    Raises:
        DataError: if a source file is missing.
    """
    return _folder(config, _content(config))


def is_prepared(config: RunConfig) -> bool:
    """Whether :func:`prepare` would find the corpus complete and undamaged. Cheap; never imports torch.

    Raises:
        DataError: if a source file is missing.
    """
    content = _content(config)
    return _is_complete(_folder(config, content), content)


def manifest(folder: str | Path) -> dict[str, Any]:
    """``corpus.json`` of a prepared corpus.

    Keys: ``content`` (what the corpus was made from), ``tokenizer``, ``skipped_documents``, ``splits`` and, the same
    numbers for each part of the blend, ``parts``. Each split has ``documents``, ``tokens`` (end-of-document tokens
    included) and ``text_bytes`` (UTF-8). ``validation_bytes_per_token`` turns a perplexity per token into one per
    byte: ``perplexity_per_byte = perplexity_per_token ** (1 / validation_bytes_per_token)``.

    Raises:
        DataError: if the folder holds no complete corpus.
    """
    path = Path(folder) / MANIFEST
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} holds no prepared corpus ({MANIFEST}: {error})") from None
    return content


def prefix(split: str, part: int) -> str:
    """Name inside the corpus folder of an indexed dataset, without ``.bin`` and ``.idx``."""
    return f"{split}_{part}"


def _content(config: RunConfig) -> dict[str, Any]:
    """All that determines what the prepared corpus holds. JSON-compatible."""
    mapping = config.to_mapping()
    drop = {"cache_dir", "path", "label", "weights", "vocab_file", "merges_file"}
    content: dict[str, Any] = {
        "format": _FORMAT_VERSION,
        "data": {key: value for key, value in mapping["data"].items() if key not in drop},
        "tokenizer": {key: value for key, value in mapping["tokenizer"].items() if key not in drop},
        "versions": {"tokenizers": _version("tokenizers")},
    }
    if not isinstance(config.data, JsonLinesConfig):
        content["versions"]["mwparserfromhell"] = _version("mwparserfromhell")
    try:
        content["parts"] = [[fingerprint(path) for path in paths] for paths in _parts(config)]
        content["tokenizer"]["files"] = [fingerprint(path) for path in config.tokenizer.files]
    except OSError as error:
        raise DataError(f"{error.filename}: can't be read: {error.strerror or error}") from None
    return content


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _parts(config: RunConfig) -> list[list[Path]]:
    """Source files of each part of the blend: every file for itself if weights are given, else all of them together."""
    if not isinstance(config.data, JsonLinesConfig):
        return [[wikipedia_dump()]]
    paths = [Path(path) for path in config.data.paths]
    return [paths] if config.data.weights is None else [[path] for path in paths]


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _folder(config: RunConfig, content: dict[str, Any]) -> Path:
    corpus = config.data.label if isinstance(config.data, JsonLinesConfig) else config.data.name
    vocabulary: str = config.tokenizer.name
    if isinstance(config.tokenizer, BpeTokenizerConfig):
        vocabulary += str(config.tokenizer.vocabulary_size)
    return Path(config.data.cache_dir) / f"{corpus}-{vocabulary}-{_digest(content)[:12]}"


def _is_complete(folder: Path, content: dict[str, Any]) -> bool:
    try:
        found = manifest(folder)
        return bool(found["content"] == content) and all(
            fingerprint(folder / name) == expected for name, expected in found["files"].items()
        )
    except (DataError, OSError, KeyError, TypeError, AttributeError):
        return False


# --- Preparing it ----------------------------------------------------------------------------------------------------


def prepare(config: RunConfig, report: Report = print) -> Path:
    """Make sure that the tokenised corpus is there, and return its folder.

    Any number of processes, on any number of hosts that share ``data.cache_dir``, may call this at once: one builds,
    the others wait. The folder appears complete or not at all.

    Args:
        report: takes lines that say how far the work is, about one a second at most.

    Raises:
        DataError: if the sources or the tokenizer can't be used, a split would be too small to train or validate on,
            or the cache can't be written. Nothing half-built stays behind.
    """
    content = _content(config)
    folder = _folder(config, content)
    if not _is_complete(folder, content):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _lock(folder, report):
                if not _is_complete(folder, content):  # another process may have built it in the meantime
                    _build(config, content, folder, report)
        except OSError as error:
            raise _cache_error(folder, error) from error
    _check_size(config, folder, report)
    return folder


@contextmanager
def _lock(folder: Path, report: Report) -> Iterator[None]:
    import filelock

    lock = filelock.FileLock(folder.parent / f".{folder.name}.lock")
    try:
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            report(f"corpus {folder.name}: another process is preparing it; waiting")
            lock.acquire()
    except NotImplementedError:
        # Some network file systems have no locks. The work may then be done twice, the result is the same.
        yield
        return
    try:
        _remove_leftovers(folder)
        yield
    finally:
        lock.release()


def _building_prefix(folder: Path) -> str:
    return f".{folder.name}.{socket.gethostname()}."


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed builds of this host left; other hosts may be building if the lock does not reach them."""
    for leftover in folder.parent.iterdir():
        if leftover.name.startswith(_building_prefix(folder)) and leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)


def _build(config: RunConfig, content: dict[str, Any], folder: Path, report: Report) -> None:
    started = time.monotonic()
    report(f"corpus {folder.name}: preparing it in {folder}")
    building = folder.parent / f"{_building_prefix(folder)}{uuid.uuid4().hex}"
    damaged = building.with_name(f"{building.name}.damaged")
    building.mkdir()
    try:
        _write(config, content, building, _Progress(report, folder.name))
        if _content(config) != content:
            raise DataError("a source file changed while the corpus was being prepared; start again")
        if folder.exists():  # incomplete or damaged
            folder.rename(damaged)
        try:
            building.rename(folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY) or not _is_complete(folder, content):
                raise
    finally:
        for leftover in (building, damaged):
            shutil.rmtree(leftover, ignore_errors=True)
    splits = manifest(folder)["splits"]
    summary = ", ".join(
        f"{name} {counts['documents']:,} documents {counts['tokens']:,} tokens" for name, counts in splits.items()
    )
    report(f"corpus {folder.name}: done in {time.monotonic() - started:.0f} s: {summary}")


def _cache_error(folder: Path, error: OSError) -> DataError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DataError(
            f"no space left for the tokenised corpus in {folder.parent} ({error.strerror}). Nothing half-written was "
            "kept. Free some space, or choose another place: data.cache_dir=FOLDER"
        )
    return DataError(
        f"can't write the tokenised corpus to {folder.parent}: {error}. Choose another place: data.cache_dir=FOLDER"
    )


@dataclass(frozen=True)
class _Source:
    """Files that are split and indexed together."""

    paths: list[Path]
    documents: Callable[[], Iterator[str]]
    """The same texts at each call; ``""`` for a document without text."""


def _sources(config: RunConfig) -> list[_Source]:
    data = config.data
    if isinstance(data, JsonLinesConfig):
        text_key = data.text_key

        def read(paths: list[Path]) -> Iterator[str]:
            for path in paths:
                yield from read_json_lines(path, text_key)

        return [_Source(paths, functools.partial(read, paths)) for paths in _parts(config)]

    path = wikipedia_dump()

    articles: list[str] = []

    def clean_once() -> Iterator[str]:
        if articles:
            yield from articles
        else:
            for article in read_wikipedia(path):
                articles.append(article)
                yield article

    return [_Source([path], clean_once)]


class _Progress:
    """Says how far the work is, at most once a second."""

    def __init__(self, report: Report, corpus: str) -> None:
        self._report = report
        self._corpus = corpus
        self._last = time.monotonic()

    def __call__(self, done: int, doing: str, total: int | None = None) -> None:
        now = time.monotonic()
        if now - self._last >= 1.0:
            self._last = now
            self._report(f"corpus {self._corpus}: {done:,}{f' of {total:,}' if total else ''} documents {doing}")


def _write(config: RunConfig, content: dict[str, Any], building: Path, progress: _Progress) -> None:
    """Fill the folder: tokenizer, one indexed dataset per split and part, manifest."""
    sources = _sources(config)
    assignments, skipped = [], []
    for part, source in enumerate(sources):
        num_documents, num_skipped = _count(source, progress)
        assignments.append(_assign(num_documents, config.data.split, part, source.paths))
        skipped.append(num_skipped)
    total = sum(map(len, assignments))

    tokenizer = _tokenizer(config, sources, assignments, progress)
    tokenizer.save(building)
    parts: list[dict[str, Any]] = []
    for part, (source, assignment) in enumerate(zip(sources, assignments, strict=True)):
        before = sum(map(len, assignments[:part]))

        def tokenised(done: int, before: int = before) -> None:
            progress(before + done, "tokenised", total)

        splits = _write_part(building, part, source, assignment, tokenizer, tokenised)
        parts.append(
            {"files": [str(path) for path in source.paths], "skipped_documents": skipped[part], "splits": splits}
        )
    splits = {
        split: {key: sum(part["splits"][split][key] for part in parts) for key in ("documents", "tokens", "text_bytes")}
        for split in SPLITS
    }
    record = {
        "content": content,
        "tokenizer": {
            "name": config.tokenizer.name,
            "vocabulary_size": tokenizer.vocabulary_size,
            "padded_vocabulary_size": tokenizer.padded_vocabulary_size,
            "end_of_document": tokenizer.end_of_document,
            "end_of_document_token": tokenizer.end_of_document_token,
        },
        "splits": splits,
        "validation_bytes_per_token": splits["validation"]["text_bytes"] / splits["validation"]["tokens"],
        "skipped_documents": sum(skipped),
        "parts": parts,
        "files": {path.name: fingerprint(path) for path in sorted(building.iterdir())},
    }
    (building / MANIFEST).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _count(source: _Source, progress: _Progress) -> tuple[int, int]:
    """Documents with and without text. Finds every broken line before the long work starts."""
    num_documents = num_skipped = 0
    for text in source.documents():
        if text:
            num_documents += 1
            progress(num_documents, "read")
        else:
            num_skipped += 1
    return num_documents, num_skipped


def _assign(
    num_documents: int, shares: tuple[float, float, float], part: int, paths: list[Path]
) -> np.ndarray[Any, np.dtype[np.int8]]:
    """Index into :data:`SPLITS` for each document: a fixed random split with the given shares of documents.

    Training and validation get one document at least.
    """
    if num_documents < 2:
        raise DataError(
            f"{', '.join(map(str, paths))}: {num_documents} documents with text; at least 2 are needed, one to train "
            "on and one to validate on (in each file, if there are data.weights)."
        )
    num_validation = min(max(1, round(shares[1] * num_documents)), num_documents - 1)
    num_test = min(round(shares[2] * num_documents), num_documents - 1 - num_validation)
    # RandomState's stream never changes between NumPy versions; the split must not either.
    order = np.random.RandomState(_SPLIT_SEED + part).permutation(num_documents)
    assignment = np.zeros(num_documents, dtype=np.int8)
    assignment[order[:num_validation]] = SPLITS.index("validation")
    assignment[order[num_validation : num_validation + num_test]] = SPLITS.index("test")
    return assignment


def _assigned(source: _Source, assignment: np.ndarray[Any, np.dtype[np.int8]]) -> Iterator[tuple[int, str]]:
    """Split and text of each document."""
    for split, text in itertools.zip_longest(assignment, filter(None, source.documents())):
        if split is None or text is None:
            names = ", ".join(map(str, source.paths))
            raise DataError(f"{names}: changed while the corpus was being prepared; start again")
        yield int(split), text


def _tokenizer(
    config: RunConfig,
    sources: list[_Source],
    assignments: list[np.ndarray[Any, np.dtype[np.int8]]],
    progress: _Progress,
) -> Tokenizer:
    from optimus_cc.training.tokenizer import Tokenizer

    settings = config.tokenizer
    if isinstance(settings, Gpt2TokenizerConfig):
        return Tokenizer.from_gpt2_files(settings.vocab_file, settings.merges_file)
    if not isinstance(settings, BpeTokenizerConfig):
        return Tokenizer.load(settings.path)

    def training_documents() -> Iterator[str]:
        done = 0
        for source, assignment in zip(sources, assignments, strict=True):
            for split, text in _assigned(source, assignment):
                done += 1
                progress(done, "read to train the vocabulary", sum(map(len, assignments)))
                if split == 0:
                    yield text

    return Tokenizer.train(training_documents(), settings.vocabulary_size)


def _write_part(
    building: Path,
    part: int,
    source: _Source,
    assignment: np.ndarray[Any, np.dtype[np.int8]],
    tokenizer: Tokenizer,
    tokenised: Callable[[int], None],
) -> dict[str, dict[str, int]]:
    """Tokenise one part into an indexed dataset per split; returns documents, tokens and bytes of text per split."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of accelerator packages that are not installed
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    statistics = {split: {"documents": 0, "tokens": 0, "text_bytes": 0} for split in SPLITS}
    dtype = DType.optimal_dtype(tokenizer.vocabulary_size)
    with ExitStack() as stack:
        builders = {}
        for index, split in enumerate(SPLITS):
            if np.any(assignment == index):
                builders[split] = IndexedDatasetBuilder(str(building / f"{prefix(split, part)}.bin"), dtype=dtype)
                stack.callback(builders[split].data_file.close)
        for batch in _batches_of_text(_assigned(source, assignment)):
            for (index, text), ids in zip(batch, tokenizer.encode_batch([text for _, text in batch]), strict=True):
                ids.append(tokenizer.end_of_document)
                builders[SPLITS[index]].add_document(np.array(ids, dtype=dtype), [len(ids)])
                counts = statistics[SPLITS[index]]
                counts["documents"] += 1
                counts["tokens"] += len(ids)
                counts["text_bytes"] += len(text.encode())
            tokenised(sum(counts["documents"] for counts in statistics.values()))
        for split, builder in builders.items():
            builder.finalize(str(building / f"{prefix(split, part)}.idx"))
    return statistics


def _batches_of_text(documents: Iterator[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Enough documents at a time to occupy all cores, few enough to bound the memory."""
    batch: list[tuple[int, str]] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document[1])
        if len(batch) == _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _check_size(config: RunConfig, folder: Path, report: Report) -> None:
    """Refuse a corpus of which a part is shorter than one sample; tell when validation would see text twice."""
    record = manifest(folder)
    needed = config.model.sequence_length + 1
    for part in record["parts"]:
        for split, key in (("training", 0), ("validation", 1)):
            tokens = part["splits"][split]["tokens"]
            if tokens < needed:
                raise DataError(
                    f"{', '.join(part['files'])}: the {split} split has {tokens:,} tokens, one sample takes {needed:,} "
                    f"(model.sequence_length + 1). Give more text, a larger share (data.split, entry {key + 1} is now "
                    f"{config.data.split[key]}), or a smaller model.sequence_length."
                )
    samples = (record["splits"]["validation"]["tokens"] - 1) // config.model.sequence_length
    wanted = config.training.validation_batches * config.training.global_batch_size
    if wanted > samples:
        report(
            f"corpus {folder.name}: one validation pass takes {wanted:,} samples and the validation split has "
            f"{samples:,}, so some are used more than once (training.validation_batches, data.split)"
        )


def main(arguments: list[str] | None = None) -> int:
    """Prepare the corpus of a resolved configuration. Returns 0, 2 for a configuration error, 3 for a data error."""
    parser = argparse.ArgumentParser(prog="python -m optimus_cc.training.corpus", description=main.__doc__)
    parser.add_argument("config", metavar="CONFIG.yaml", type=Path, help="a resolved run configuration")
    path = parser.parse_args(arguments).config
    let_threads_sleep()
    from omegaconf import OmegaConf

    try:
        mapping: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
        prepare(load(mapping), report=functools.partial(print, flush=True))
    except DataError as error:
        print(f"DataError: {error}", file=sys.stderr)
        return 3
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
