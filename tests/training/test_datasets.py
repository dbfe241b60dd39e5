from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from optimus_cc.config import RunConfig
from optimus_cc.training import corpus
from optimus_cc.training.datasets import SAMPLE_KEYS, Sample, batches, build_datasets
from optimus_cc.training.tokenizer import Tokenizer
from tests.ranks import RankPool
from tests.training.corpora import changed, corpus_config, json_lines, random_documents, write_documents


class Numbered(Dataset[Sample]):
    """Sample i holds i everywhere."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Sample:
        return {key: torch.full((3,), index) for key in SAMPLE_KEYS}


def numbers(iterator: Iterator[Sample]) -> list[list[int]]:
    """Sample numbers of each micro-batch."""
    found = []
    for batch in iterator:
        assert set(batch) == set(SAMPLE_KEYS)
        assert batch["tokens"].shape[1:] == (3,)
        found.append(batch["tokens"][:, 0].tolist())
    return found


@pytest.mark.parametrize("data_parallel_size", [1, 2, 4])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
@pytest.mark.parametrize("start_step", [0, 2])
def test_batches_follow_the_formula(data_parallel_size: int, micro_batch_size: int, start_step: int) -> None:
    global_batch_size, num_samples = 8, 8 * 5 + 3
    num_microbatches = global_batch_size // (micro_batch_size * data_parallel_size)
    steps: dict[int, set[int]] = {}
    for rank in range(data_parallel_size):
        found = numbers(
            batches(
                Numbered(num_samples),
                start_step=start_step,
                global_batch_size=global_batch_size,
                micro_batch_size=micro_batch_size,
                data_parallel_rank=rank,
                data_parallel_size=data_parallel_size,
            )
        )
        expected = [
            [
                step * global_batch_size + m * micro_batch_size * data_parallel_size + rank * micro_batch_size + j
                for j in range(micro_batch_size)
            ]
            for step in range(start_step, 5)
            for m in range(num_microbatches)
        ]
        assert found == expected
        for position, batch in enumerate(found):
            steps.setdefault(start_step + position // num_microbatches, set()).update(batch)
    # The samples of a step are the same in every layout.
    assert steps == {step: set(range(step * 8, step * 8 + 8)) for step in range(start_step, 5)}


def test_batches_with_workers_and_private_randomness() -> None:
    layout: dict[str, Any] = {
        "global_batch_size": 4,
        "micro_batch_size": 2,
        "data_parallel_rank": 1,
        "data_parallel_size": 2,
    }
    torch.manual_seed(3)
    before = torch.get_rng_state()
    alone = numbers(batches(Numbered(40), start_step=1, **layout))
    with_workers = numbers(batches(Numbered(40), start_step=1, num_workers=2, **layout))
    assert torch.equal(torch.get_rng_state(), before)
    assert alone == with_workers
    assert numbers(batches(Numbered(40), start_step=10, **layout)) == []


def test_batches_refuse_a_batch_that_does_not_divide() -> None:
    with pytest.raises(ValueError, match="not a multiple"):
        batches(
            Numbered(8),
            start_step=0,
            global_batch_size=6,
            micro_batch_size=2,
            data_parallel_rank=0,
            data_parallel_size=2,
        )


# --- On ranks --------------------------------------------------------------------------------------------------------


def all_samples(
    config: RunConfig, folder: Path, train_samples: int, validation_samples: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens, with the last label, of every sample of both sets."""
    sets = build_datasets(config, folder, train_samples=train_samples, validation_samples=validation_samples)
    return tuple([whole(dataset[index]) for index in range(len(dataset))] for dataset in sets)  # type: ignore[return-value, arg-type]


def whole(sample: Sample) -> list[int]:
    tokens, labels = sample["tokens"], sample["labels"]
    assert torch.equal(tokens[1:], labels[:-1])
    assert torch.equal(sample["loss_mask"], torch.ones(len(tokens)))
    assert torch.equal(sample["position_ids"], torch.arange(len(tokens)))
    assert {key: (value.dtype, value.shape) for key, value in sample.items()} == {
        "tokens": (torch.int64, tokens.shape),
        "labels": (torch.int64, tokens.shape),
        "loss_mask": (torch.float32, tokens.shape),
        "position_ids": (torch.int64, tokens.shape),
    }
    return [*tokens.tolist(), int(labels[-1])]


def stream(folder: Path, split: str) -> list[list[int]]:
    """Documents as the indexed dataset's bytes hold them."""
    ids = torch.frombuffer(bytearray((folder / f"{split}_0.bin").read_bytes()), dtype=torch.uint16).long()
    end = Tokenizer.load(folder).end_of_document
    ends = (ids == end).nonzero()[:, 0].add(1).tolist()
    return [piece.tolist() for piece in torch.tensor_split(ids, torch.tensor(ends))][:-1]


@pytest.mark.megatron
def test_samples(ranks: RankPool, small_config: RunConfig, small_folder: Path) -> None:
    sequence = small_config.model.sequence_length
    ((training, validation),) = ranks.run(1, all_samples, small_config, small_folder, 60, 20)
    assert (len(training), len(validation)) == (60, 20)
    assert {len(sample) for sample in training + validation} == {sequence + 1}
    # Text that stands nowhere in the split can't be in a sample: every document piece is a piece of some document.
    for samples, split in ((training, "training"), (validation, "validation")):
        documents = [f" {' '.join(map(str, ids))} " for ids in stream(small_folder, split)]
        for sample in samples:
            piece: list[int] = []
            pieces = []
            for token in sample:
                piece.append(token)
                if token == 0:  # end of document
                    pieces.append(piece)
                    piece = []
            for found in filter(None, [*pieces, piece]):
                text = f" {' '.join(map(str, found))} "
                assert any(text in document for document in documents)

    # Fixed by the seed, on any number of ranks, also when the index is there already.
    for result in ranks.run(2, all_samples, small_config, small_folder, 60, 20):
        assert result == (training, validation)
    ((other, same),) = ranks.run(1, all_samples, changed(small_config, "training", seed=7), small_folder, 60, 20)
    assert other != training
    assert same == validation
    ((_, fewer),) = ranks.run(1, all_samples, small_config, small_folder, 61, 9)
    assert fewer == validation[:9]


@pytest.mark.megatron
def test_more_samples_than_one_epoch(ranks: RankPool, small_config: RunConfig, small_folder: Path) -> None:
    tokens = corpus.manifest(small_folder)["splits"]["training"]["tokens"]
    per_epoch = (tokens - 1) // small_config.model.sequence_length
    wanted = 3 * per_epoch + 5
    ((training, _),) = ranks.run(1, all_samples, small_config, small_folder, wanted, 4)
    assert len(training) == wanted
    counts = torch.bincount(torch.tensor([sample[:-1] for sample in training]).flatten(), minlength=300)
    split = torch.tensor([token for ids in stream(small_folder, "training") for token in ids])
    once = torch.bincount(split, minlength=300)
    assert (counts - 3 * once).abs().max() <= 2 * small_config.model.sequence_length + once.max() // 4


ALPHABETS = ("qwert", "asdfg", "zxcvb")


def blended(tmp_path: Path, weights: list[float]) -> RunConfig:
    """Three files, each of which has letters of its own."""
    source = random.Random(0)
    files = [
        write_documents(
            tmp_path / f"{alphabet}.jsonl",
            (
                " ".join("".join(source.choices(alphabet, k=3)) for _ in range(source.randint(30, 90)))
                for _ in range(count)
            ),
        )
        for alphabet, count in zip(ALPHABETS, (6, 40, 20), strict=True)
    ]
    data = json_lines(tmp_path, *files, weights=weights, split=[0.8, 0.2, 0.0])
    return corpus_config(tmp_path, data, sequence_length=32)


@pytest.mark.megatron
def test_blend_weights(ranks: RankPool, tmp_path: Path) -> None:
    weights = [6.0, 1.0, 3.0]
    config = blended(tmp_path, weights)
    folder = corpus.prepare(config, lambda line: None)
    num_samples = 300
    ((training, validation),) = ranks.run(1, all_samples, config, folder, num_samples, 50)
    assert (len(training), len(validation)) == (num_samples, 50)
    tokenizer = Tokenizer.load(folder)
    for samples in (training, validation):
        letters = [set(tokenizer.decode([token for token in sample if token])) - {" "} for sample in samples]
        counts = [sum(found <= set(alphabet) for found in letters) for alphabet in ALPHABETS]
        assert sum(counts) == len(samples)
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - len(samples) * weight / sum(weights)) <= 2
    for result in ranks.run(2, all_samples, config, folder, num_samples, 50):
        assert result == (training, validation)
    # Very unequal shares of very few samples.
    skewed = changed(config, "data", weights=[1000.0, 1.0, 1.0])
    ((training, _),) = ranks.run(1, all_samples, skewed, folder, 7, 1)
    assert len(training) == 7


def first_samples(config: RunConfig, folder: Path, num_samples: int) -> tuple[list[list[int]], list[str]]:
    training, _ = all_samples(config, folder, num_samples, 4)
    return training, sorted(path.name for path in (folder / "indices").iterdir())


@pytest.mark.megatron
def test_indices_are_private_until_complete(ranks: RankPool, tmp_path: Path) -> None:
    path = write_documents(tmp_path / "a.jsonl", random_documents(20))
    config = corpus_config(tmp_path, json_lines(tmp_path, path))
    folder = corpus.prepare(config, lambda line: None)
    ((training, names),) = ranks.run(1, first_samples, config, folder, 30)
    assert len(names) == 2
    assert not any(name.startswith(".") for name in names)
    # What a run that was killed while it wrote leaves behind is never read.
    index = folder / "indices" / next(name for name in names if name.startswith("training"))
    abandoned = index.with_name(f".{index.name}.0")
    index.rename(abandoned)
    for file in abandoned.iterdir():
        file.write_bytes(b"")
    ((again, names),) = ranks.run(1, first_samples, config, folder, 30)
    assert again == training
    assert index.name in names
    # Neither is an index for another length.
    longer = changed(config, "model", sequence_length=24)
    ((other, _),) = ranks.run(1, first_samples, longer, folder, 30)
    assert {len(sample) for sample in other} == {25}
    assert corpus.is_prepared(config)


def micro_batches(config: RunConfig, folder: Path, data_parallel_size: int, start_step: int) -> list[list[Tensor]]:
    training, _ = build_datasets(config, folder, train_samples=16, validation_samples=4)
    options: dict[str, Any] = {"global_batch_size": 4, "micro_batch_size": 1, "data_parallel_size": data_parallel_size}
    return [
        [batch["tokens"] for batch in batches(training, start_step=start_step, data_parallel_rank=rank, **options)]
        for rank in range(data_parallel_size)
    ]


@pytest.mark.megatron
def test_real_batches_start_anywhere(ranks: RankPool, small_config: RunConfig, small_folder: Path) -> None:
    ((training, _),) = ranks.run(1, all_samples, small_config, small_folder, 16, 4)
    expected = torch.tensor(training)[:, :-1]
    ((everything,),) = ranks.run(1, micro_batches, small_config, small_folder, 1, 0)
    assert torch.equal(torch.cat(everything), expected)
    ((tail,),) = ranks.run(1, micro_batches, small_config, small_folder, 1, 3)
    assert torch.equal(torch.cat(tail), expected[12:])
    (halves,) = ranks.run(1, micro_batches, small_config, small_folder, 2, 0)
    assert torch.equal(torch.stack([torch.cat(half) for half in halves], dim=1).flatten(0, 1), expected)
