"""Samples and micro-batches from a prepared corpus, through Megatron-core's GPT dataset."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import shutil
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from optimus_cc.config import RunConfig
from optimus_cc.training import corpus
from optimus_cc.training.errors import DataError

Sample = dict[str, Tensor]
SAMPLE_KEYS = ("tokens", "labels", "loss_mask", "position_ids")

_VALIDATION_SEED = 1
"""Of the order of validation samples: the same ones for every training seed."""


def build_datasets(
    config: RunConfig, folder: str | Path, *, train_samples: int, validation_samples: int
) -> tuple[Dataset[Sample], Dataset[Sample]]:
    """The training and the validation set, of exactly the given numbers of samples.

    A sample is a dict of ``tokens``, ``labels`` (int64, [sequence_length]; labels are the next tokens), ``loss_mask``
    (float32, [sequence_length]) and ``position_ids`` (int64, [sequence_length]). Samples run across documents, which
    end-of-document tokens separate. Text is repeated, in another order, where more samples are asked for than one pass
    over the split has.

    The training set depends on ``training.seed`` and ``train_samples``. The validation set depends on neither, nor on
    the layout: its first samples are the same however many are asked for, as long as one pass over the split has them.

    Collective: every rank of an initialised torch.distributed world calls it. Indices are kept inside ``folder``.

    Args:
        folder: what :func:`optimus_cc.training.corpus.prepare` returned.

    Raises:
        DataError: if the folder holds no prepared corpus.
    """
    folder = Path(folder).resolve()
    record = corpus.manifest(folder)

    def build(split: str, num_samples: int, seed: int) -> Dataset[Sample]:
        return _FixedLength(_build(config, folder, record, split, num_samples, seed), num_samples)

    return (
        build("training", train_samples, config.training.seed),
        build("validation", validation_samples, _VALIDATION_SEED),
    )


def batches(
    dataset: Dataset[Sample],
    *,
    start_step: int,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> Iterator[Sample]:
    """Micro-batches of one data-parallel rank, from ``start_step`` to the last whole step of ``dataset``.

    Sample j of micro-batch m of step s on rank r is number ``s * global_batch_size + (m * data_parallel_size + r) *
    micro_batch_size + j`` of the dataset: a step consists of the same samples in every layout. Tensors are
    [micro_batch_size, sequence_length]. No global random state is used.

    Args:
        num_workers: processes that read ahead; 0: read in this process.
        pin_memory: put batches into page-locked memory, from which a CUDA device copies without blocking.
    """
    per_micro_batch = micro_batch_size * data_parallel_size
    if global_batch_size % per_micro_batch:
        raise ValueError(f"global batch {global_batch_size} is not a multiple of micro-batch x DP = {per_micro_batch}")
    num_samples = len(dataset)  # type: ignore[arg-type]
    first, end = start_step * global_batch_size, num_samples // global_batch_size * global_batch_size
    loader = DataLoader(
        dataset,
        batch_sampler=(
            list(range(start, start + micro_batch_size))
            for start in range(first + data_parallel_rank * micro_batch_size, end, per_micro_batch)
        ),
        num_workers=num_workers,
        pin_memory=pin_memory,
        # An iterator draws a base seed for its workers: from the global generator unless it is given its own.
        generator=torch.Generator(),
    )
    return iter(loader) if num_workers == 0 else _of_workers(iter(loader))


def _of_workers(found: Iterator[Sample]) -> Iterator[Sample]:
    """What workers read ahead; a failure of theirs for want of shared memory says what helps.

    Raises:
        DataError: their batches don't fit into the machine's shared memory.
    """
    try:
        yield from found
    except (RuntimeError, OSError) as error:
        if not any(word in str(error) for word in ("shared memory", "shm", "Bus error", "torch_")):
            raise
        raise DataError(
            f"processes that read batches ahead found too little shared memory (/dev/shm): "
            f"training.data_workers=0 needs none, and docker run --shm-size gives more ({error})"
        ) from error


class _FixedLength(Dataset[Sample]):
    """The first ``num_samples`` samples of a Megatron dataset, reduced to :data:`SAMPLE_KEYS`."""

    def __init__(self, dataset: Any, num_samples: int) -> None:
        self._dataset = dataset
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self._num_samples:
            raise IndexError(index)
        sample = self._dataset[index]
        return {key: sample[key] for key in SAMPLE_KEYS}


@dataclass(frozen=True)
class _Vocabulary:
    """What Megatron's dataset asks of a tokenizer. There is no padding token: every sample is full."""

    vocab_size: int
    eod: int
    unique_identifiers: OrderedDict[str, Any]


def _build(
    config: RunConfig, folder: Path, record: dict[str, Any], split: str, num_samples: int, seed: int
) -> Dataset[Any]:
    prefixes = [str(folder / corpus.prefix(split, part)) for part in range(len(record["parts"]))]
    weights = _weights(config) if len(prefixes) > 1 else [1.0]
    position = corpus.SPLITS.index(split)
    vocabulary = _Vocabulary(
        record["tokenizer"]["vocabulary_size"], record["tokenizer"]["end_of_document"], OrderedDict()
    )
    sequence_length = config.model.sequence_length

    def per_split(value: Any, default: Any) -> list[Any]:
        return [value if index == position else default for index in range(len(corpus.SPLITS))]

    def build(index_folder: Path) -> Dataset[Any]:
        datasets = []
        for prefix, weight in zip(prefixes, weights, strict=True):
            settings = GPTDatasetConfig(
                random_seed=seed,
                sequence_length=sequence_length,
                blend_per_split=per_split(([prefix], None), None),
                path_to_cache=str(index_folder),
                tokenizer=vocabulary,
                reset_position_ids=False,
                reset_attention_mask=False,
                eod_mask_loss=False,
                create_attention_mask=False,
            )
            # Megatron's own way to size the parts of a blend (a relative margin) fails where shares are a few samples.
            size = num_samples if len(prefixes) == 1 else math.ceil(weight * num_samples) + 1
            builder = BlendedMegatronDatasetBuilder(GPTDataset, per_split(size, 0), lambda: True, settings)
            datasets.append(builder.build()[position])
        dataset: Dataset[Any] = datasets[0]
        if len(datasets) > 1:
            dataset = BlendedMegatronDatasetBuilder.build_generic_dataset(
                BlendedDataset, lambda: True, True, datasets, weights, num_samples, settings
            )
        return dataset

    # Everything that the indices depend on: Megatron's own file names leave part of it out.
    version = importlib.metadata.version("megatron-core")
    determinants = [record["content"], prefixes, weights, num_samples, seed, sequence_length, version]
    digest = hashlib.sha256(json.dumps(determinants, sort_keys=True).encode()).hexdigest()
    return _with_index_folder(build, folder / "indices" / f"{split}-{digest[:16]}")


def _weights(config: RunConfig) -> list[float]:
    """Share of each part in the samples."""
    weights: tuple[float, ...] = getattr(config.data, "weights", None) or ()
    return [weight / sum(weights) for weight in weights]


def _with_index_folder(build: Callable[[Path], Dataset[Any]], folder: Path) -> Dataset[Any]:
    """Run ``build`` on an index folder that is either complete or absent, whoever else starts or dies meanwhile.

    Megatron writes its index files in place, so they are written into a folder of this run's own, which then takes
    the shared name. Collective.
    """
    choice: list[Path | None] = [None]
    if dist.get_rank() == 0 and not folder.is_dir():
        choice = [folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")]
    dist.broadcast_object_list(choice, src=0)
    (own,) = choice
    if own is not None:
        build(own)
        dist.barrier()
        if dist.get_rank() == 0:
            with suppress(OSError):  # another run was faster; its indices are the same
                own.rename(folder)
            shutil.rmtree(own, ignore_errors=True)
        dist.barrier()
    return build(folder)
