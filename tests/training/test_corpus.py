from __future__ import annotations

import errno
import gzip
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
import zstandard
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from optimus_cc.config import RunConfig, load
from optimus_cc.training import corpus
from optimus_cc.training.errors import DataError
from optimus_cc.training.tokenizer import Tokenizer
from tests.training.corpora import changed, corpus_config, corpus_mapping, json_lines, random_documents, write_documents

REPOSITORY = Path(__file__).parents[2]


def documents(folder: Path, split: str, part: int = 0) -> list[list[int]]:
    """Token ids of every document of one indexed dataset."""
    path = folder / corpus.prefix(split, part)
    if not path.with_suffix(".idx").exists():
        return []
    dataset = IndexedDataset(str(path))
    assert list(dataset.document_indices) == list(range(len(dataset) + 1))
    return [dataset[index].tolist() for index in range(len(dataset))]


def texts(folder: Path, split: str, part: int = 0) -> list[str]:
    tokenizer = Tokenizer.load(folder)
    return [tokenizer.decode(ids[:-1]) for ids in documents(folder, split, part)]


def silent(line: str) -> None:
    pass


# --- The default corpus ----------------------------------------------------------------------------------------------


def test_default_corpus_is_clean_and_large_enough(wikipedia_folder: Path) -> None:
    every = [text for split in corpus.SPLITS for text in texts(wikipedia_folder, split)]
    assert len(every) > 90
    assert len(set(every)) == len(every)
    assert sum(len(text.encode()) for text in every) > 2_000_000
    whole = "\n".join(every)
    for markup in ("{{", "}}", "[[", "]]", "<ref", "{|", "|}", "''"):
        assert markup not in whole
    assert not re.search(r"\b(file|image|category):\w", whole, re.IGNORECASE)
    for heading in ("References", "External links", "See also"):
        assert heading not in whole.split("\n")
    assert any(text.startswith("Abraham Lincoln\n\nAbraham Lincoln (February 12, 1809") for text in every)


def test_default_vocabulary(wikipedia_folder: Path) -> None:
    record = corpus.manifest(wikipedia_folder)
    assert record["tokenizer"]["vocabulary_size"] == record["tokenizer"]["padded_vocabulary_size"] == 4096
    validation = record["splits"]["validation"]
    assert record["validation_bytes_per_token"] == pytest.approx(validation["text_bytes"] / validation["tokens"])
    assert 3 < record["validation_bytes_per_token"] < 4


# --- Splits and documents --------------------------------------------------------------------------------------------


def test_every_document_is_in_exactly_one_split(small_folder: Path) -> None:
    splits = {split: texts(small_folder, split) for split in corpus.SPLITS}
    assert {split: len(found) for split, found in splits.items()} == {"training": 28, "validation": 8, "test": 4}
    assert sorted(text for found in splits.values() for text in found) == sorted(random_documents(40))


def test_documents_end_with_the_token_for_it(small_folder: Path) -> None:
    end = Tokenizer.load(small_folder).end_of_document
    for split in corpus.SPLITS:
        for ids in documents(small_folder, split):
            assert ids[-1] == end
            assert end not in ids[:-1]


def test_manifest_counts(small_folder: Path) -> None:
    record = corpus.manifest(small_folder)
    for split in corpus.SPLITS:
        found = documents(small_folder, split)
        assert record["splits"][split] == {
            "documents": len(found),
            "tokens": sum(map(len, found)),
            "text_bytes": sum(len(text.encode()) for text in texts(small_folder, split)),
        }


def test_vocabulary_is_trained_on_training_documents_only(tmp_path: Path) -> None:
    plain = random_documents(20)
    path = write_documents(tmp_path / "a.jsonl", plain)
    first = corpus.prepare(corpus_config(tmp_path, json_lines(tmp_path, path, split=[0.5, 0.5, 0.0])), silent)
    held_out = set(texts(first, "validation"))
    changed = [f"{text} zqzqzqzqzqzq jxjxjxjxjx" * 20 if text in held_out else text for text in plain]
    write_documents(path, changed)
    second = corpus.prepare(corpus_config(tmp_path, json_lines(tmp_path, path, split=[0.5, 0.5, 0.0])), silent)
    assert first != second
    assert (first / "tokenizer.json").read_bytes() == (second / "tokenizer.json").read_bytes()
    assert texts(first, "training") == texts(second, "training")


def test_compressed_sources_give_the_same_corpus(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "a.jsonl", random_documents(12))
    content = path.read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(content))
    folders = [
        corpus.prepare(corpus_config(tmp_path, json_lines(tmp_path, tmp_path / name)), silent)
        for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst")
    ]
    assert len(set(folders)) == 3
    for name in ("tokenizer.json", "training_0.bin", "training_0.idx", "validation_0.bin", "validation_0.idx"):
        assert len({(folder / name).read_bytes() for folder in folders}) == 1, name


def test_several_files(tmp_path: Path) -> None:
    small = write_documents(tmp_path / "a.jsonl", random_documents(6, seed=1))
    large = write_documents(tmp_path / "b.jsonl", random_documents(30, seed=2))
    together = corpus.prepare(corpus_config(tmp_path, json_lines(tmp_path, small, large)), silent)
    apart = corpus.prepare(corpus_config(tmp_path, json_lines(tmp_path, small, large, weights=[3.0, 1.0])), silent)
    assert len(corpus.manifest(together)["parts"]) == 1
    assert len(corpus.manifest(apart)["parts"]) == 2
    expected = sorted(random_documents(6, seed=1) + random_documents(30, seed=2))
    for folder, parts in ((together, 1), (apart, 2)):
        found = [text for split in corpus.SPLITS for part in range(parts) for text in texts(folder, split, part)]
        assert sorted(found) == expected
    again = corpus_config(tmp_path, json_lines(tmp_path, small, large, weights=[1.0, 9.0]))
    assert corpus.cache_folder(again) == apart


def test_blank_documents_are_skipped_and_counted(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "a.jsonl", ["", *random_documents(4), " \n", ""])
    folder = corpus.prepare(corpus_config(tmp_path, json_lines(tmp_path, path)), silent)
    record = corpus.manifest(folder)
    assert record["skipped_documents"] == 3
    assert sum(split["documents"] for split in record["splits"].values()) == 4


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"name": "gpt2", "vocab_file": "{0}/encoder.json", "merges_file": "{0}/vocab.bpe"},
            "not a byte-level BPE vocabulary",
        ),
        ({"name": "huggingface", "path": "{0}"}, "fast format"),
    ],
)
def test_unusable_tokenizer(tmp_path: Path, settings: dict[str, str], expected: str) -> None:
    for name in ("encoder.json", "vocab.bpe", "tokenizer.json"):
        (tmp_path / name).write_text("{")
    path = write_documents(tmp_path / "a.jsonl", random_documents(4))
    tokenizer = {key: value.format(tmp_path) for key, value in settings.items()}
    with pytest.raises(DataError, match=expected):
        corpus.prepare(corpus_config(tmp_path / "cache", json_lines(tmp_path / "cache", path), tokenizer), silent)


def test_huggingface_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    Tokenizer.train(random_documents(20), 280).save(tmp_path / "tokenizer")
    path = write_documents(tmp_path / "a.jsonl", random_documents(6))
    config = corpus_config(
        tmp_path, json_lines(tmp_path, path), {"name": "huggingface", "path": str(tmp_path / "tokenizer")}
    )
    folder = corpus.prepare(config, silent)
    assert corpus.manifest(folder)["tokenizer"]["vocabulary_size"] == 280
    assert sorted(texts(folder, "training") + texts(folder, "validation")) == sorted(random_documents(6))
    Tokenizer.train(random_documents(20), 290).save(tmp_path / "tokenizer")
    assert corpus.cache_folder(config) != folder


# --- Too little, broken, unwritable ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "options", "expected"),
    [
        ([], {}, "0 documents with text; at least 2 are needed"),
        (["", "only one with text, of some length and then more"], {}, "1 documents with text; at least 2 are needed"),
        (random_documents(4), {"sequence_length": 4096}, "split has .* tokens, one sample takes 4,097"),
    ],
)
def test_too_little_text(tmp_path: Path, found: list[str], options: dict[str, Any], expected: str) -> None:
    path = write_documents(tmp_path / "a.jsonl", found)
    with pytest.raises(DataError, match=rf"{re.escape(str(path))}.*{expected}"):
        corpus.prepare(corpus_config(tmp_path, json_lines(tmp_path, path), **options), silent)


def test_repeated_validation_text_is_announced(small_config: RunConfig, small_folder: Path) -> None:
    lines: list[str] = []
    corpus.prepare(changed(small_config, "training", validation_batches=1000), lines.append)
    assert len(lines) == 1
    assert "some are used more than once" in lines[0]


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def test_broken_line_leaves_nothing(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "a.jsonl", random_documents(5))
    path.write_bytes(path.read_bytes() + b"{\n")
    cache = tmp_path / "cache"
    with pytest.raises(DataError, match=r"a\.jsonl, line 6: not JSON"):
        corpus.prepare(corpus_config(cache, json_lines(cache, path)), silent)
    assert leftovers(cache) == []


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def add_document(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = write_documents(tmp_path / "a.jsonl", random_documents(5))
    cache = tmp_path / "cache"
    config = corpus_config(cache, json_lines(cache, path))
    with monkeypatch.context() as patch:
        patch.setattr(IndexedDatasetBuilder, "add_document", add_document)
        with pytest.raises(DataError, match=r"no space left for the tokenised corpus in .*data\.cache_dir=FOLDER"):
            corpus.prepare(config, silent)
    assert leftovers(cache) == []
    assert not corpus.is_prepared(config)
    corpus.prepare(config, silent)
    assert corpus.is_prepared(config)


def test_unwritable_cache(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "a.jsonl", random_documents(5))
    (tmp_path / "cache").write_text("a file where a folder should be")
    cache = tmp_path / "cache"
    with pytest.raises(DataError, match="can't write the tokenised corpus"):
        corpus.prepare(corpus_config(cache, json_lines(cache, path)), silent)


def test_source_that_changes_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_documents(tmp_path / "a.jsonl", random_documents(5))
    count = corpus._count

    def count_and_change(*arguments: Any) -> tuple[int, int]:
        counted = count(*arguments)
        write_documents(path, random_documents(6))
        return counted

    monkeypatch.setattr(corpus, "_count", count_and_change)
    cache = tmp_path / "cache"
    with pytest.raises(DataError, match="changed while the corpus was being prepared"):
        corpus.prepare(corpus_config(cache, json_lines(cache, path)), silent)
    assert leftovers(cache) == []


# --- The cache -------------------------------------------------------------------------------------------------------


def test_prepared_only_while_untouched(small_config: RunConfig, small_folder: Path, tmp_path: Path) -> None:
    config = changed(small_config, "data", cache_dir=str(tmp_path))
    folder = corpus.cache_folder(config)
    assert not corpus.is_prepared(config)
    assert folder.name == small_folder.name
    for name in sorted(path.name for path in small_folder.iterdir() if path.is_file()):
        shutil.copytree(small_folder, folder)
        assert corpus.is_prepared(config), "a copy of a prepared corpus is one"
        (folder / name).unlink()
        assert not corpus.is_prepared(config), f"without {name}"
        shutil.copy(small_folder / name, folder)
        with (folder / name).open("r+b") as file:  # one byte, same length
            file.seek(20)
            byte = file.read(1)
            file.seek(20)
            file.write(bytes([byte[0] ^ 1]))
        assert not corpus.is_prepared(config), f"with {name} changed"
        shutil.rmtree(folder)

    shutil.copytree(small_folder, folder)
    (folder / "training_0.bin").write_bytes(b"")
    assert corpus.prepare(config, silent) == folder
    assert (folder / "training_0.bin").read_bytes() == (small_folder / "training_0.bin").read_bytes()
    assert leftovers(tmp_path) == [folder.name]


def test_folder_follows_content_and_nothing_else(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "a.jsonl", random_documents(5))

    def folder(cache: Path = tmp_path, source: Path = path, tokenizer: Any = None, **data: Any) -> str:
        return corpus.cache_folder(corpus_config(cache, json_lines(cache, source, **data), tokenizer)).name

    first = folder()
    moved = tmp_path / "elsewhere.jsonl"
    shutil.copy(path, moved)
    assert folder(source=moved) == first
    assert folder(cache=tmp_path / "other") == first
    assert folder(label="mine").split("-")[-1] == first.split("-")[-1]
    others = [
        folder(split=[0.8, 0.1, 0.1]),
        folder(tokenizer={"name": "bpe", "vocabulary_size": 301}),
        folder(text_key="content"),
    ]
    stamp = path.stat()
    path.write_bytes(path.read_bytes().replace(b"river", b"ravir"))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    others.append(folder())
    assert len({first, *others}) == 5


def test_large_files_are_fingerprinted_by_windows(tmp_path: Path) -> None:
    from optimus_cc.config.fingerprint import fingerprint

    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(200 * 2**20)
    empty = fingerprint(path)
    seen = [empty]
    for position in (0, 2**20 - 1, 200 * 2**20 - 1):
        with path.open("r+b") as file:
            file.seek(position)
            file.write(b"x")
        assert fingerprint(path) not in seen
        seen.append(fingerprint(path))


def command(config: Path) -> list[str]:
    return [sys.executable, "-m", "optimus_cc.training.corpus", str(config)]


def write_config(folder: Path, data: dict[str, Any], **options: Any) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(corpus_mapping(folder / "cache", data, **options)))
    return path


def test_two_processes_build_once(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "a.jsonl", random_documents(200))
    config = write_config(tmp_path, json_lines(tmp_path / "cache", path))
    processes = [
        subprocess.Popen(command(config), cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    printed = [line for output, _ in outputs for line in output.splitlines()]
    assert sum(": preparing it in " in line for line in printed) == 1
    assert sum(": done in " in line for line in printed) == 1
    typed = load(yaml.safe_load(config.read_text()))
    assert corpus.is_prepared(typed)
    assert leftovers(tmp_path / "cache") == [corpus.cache_folder(typed).name]


DIES = """
import sys
from pathlib import Path
from optimus_cc.training import corpus

def write_part(building, *arguments):
    (building / "training_0.bin").write_bytes(b"half")
    print("writing", flush=True)
    sys.stdin.read()

corpus._write_part = write_part
corpus.main(sys.argv[1:])
"""


def test_killed_build_is_not_taken_for_complete(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "a.jsonl", random_documents(10))
    config = write_config(tmp_path, json_lines(tmp_path / "cache", path))
    typed = load(yaml.safe_load(config.read_text()))
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", DIES, str(config)], cwd=REPOSITORY, stdin=pipe, stdout=pipe, text=True
    ) as process:
        assert process.stdout is not None
        while process.stdout.readline().strip() != "writing":
            assert process.poll() is None
        lines: list[str] = []
        assert not corpus.is_prepared(typed)
        assert not corpus.cache_folder(typed).exists()
        process.send_signal(signal.SIGKILL)
    assert len(leftovers(tmp_path / "cache")) == 1
    assert not corpus.is_prepared(typed)
    folder = corpus.prepare(typed, lines.append)
    assert corpus.is_prepared(typed)
    assert leftovers(tmp_path / "cache") == [folder.name]


def test_command_reports_data_errors(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "a.jsonl", random_documents(3))
    path.write_bytes(path.read_bytes() + b'{"text": 1}\n')
    config = write_config(tmp_path, json_lines(tmp_path / "cache", path))
    done = subprocess.run(command(config), cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert done.stderr.startswith(f"DataError: {path}, line 4: 'text' holds a JSON number")
    assert "Traceback" not in done.stderr
    missing = write_config(tmp_path, json_lines(tmp_path / "cache", tmp_path / "missing.jsonl"))
    done = subprocess.run(command(missing), cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "data.path" in done.stderr


def test_looking_for_a_corpus_imports_neither_torch_nor_megatron(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "a.jsonl", random_documents(3))
    config = write_config(tmp_path, json_lines(tmp_path / "cache", path))
    code = (
        "import sys, yaml; from optimus_cc.config import load; from optimus_cc.training import corpus;"
        "print(corpus.is_prepared(load(yaml.safe_load(open(sys.argv[1])))),"
        "sorted({'torch', 'megatron', 'gensim', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(config)], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "False []\n", done.stderr


def test_progress_of_a_long_preparation_takes_few_lines() -> None:
    """They stay on the screen, and in the log of whoever has no terminal."""
    now = 0.0
    lines: list[str] = []
    progress = corpus._Progress(lines.append, "x", clock=lambda: now)
    for second in range(60):
        now = float(second)
        progress(second, "read")
    assert [line.split()[2] for line in lines] == ["2", "6", "14", "30"]
