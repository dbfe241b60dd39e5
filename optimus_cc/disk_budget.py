"""What a run's checkpoints will take on the disk, told before it starts. Pure arithmetic, without torch."""

from __future__ import annotations

import shutil
from pathlib import Path

from optimus_cc.config.model import padded_vocabulary_size
from optimus_cc.config.run import RunConfig
from optimus_cc.stage_traffic import memory_by_rank, vocabulary_size

_FP32_BYTES = 4
_RANK_FILE_BYTES = 30_000
"""Random states and sums that each rank saves besides tensors of the model; about so much."""


def checkpoint_nbytes(config: RunConfig) -> int:
    """Bytes of one checkpoint: weights, optimizer state, what compressors remember, and a little for each rank."""
    parallel = config.parallel
    bf16 = config.training.precision == "bf16"
    weights = 2 if bf16 else _FP32_BYTES
    # The distributed optimizer saves its fp32 weights even where the model's own are fp32.
    main_weights = _FP32_BYTES if bf16 or parallel.distributed_optimizer else 0
    moments = 2 if config.optimizer.name == "adam" else int(config.optimizer.momentum > 0)
    parameters = config.model.num_parameters(padded_vocabulary_size(vocabulary_size(config)))
    replicas = parallel.tensor_parallel_size * parallel.data_parallel_size
    remembered = replicas * sum(memory_by_rank(config))
    per_parameter = weights + main_weights + moments * _FP32_BYTES
    return parameters * per_parameter + remembered + parallel.world_size * _RANK_FILE_BYTES


def most_nbytes(config: RunConfig) -> int:
    """Bytes of all checkpoints that a run has at a time: the oldest one goes when the newest is complete."""
    training = config.training
    return checkpoint_nbytes(config) * min(training.checkpoint.keep_last + 1, training.steps)


def free_nbytes(folder: Path) -> int:
    """Bytes that are free where ``folder`` is or would be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def told(config: RunConfig, folder: Path) -> tuple[str, list[str]]:
    """What to say about the disk of ``folder`` before a run starts: a line, and notices if it is too small."""
    each, most, free = checkpoint_nbytes(config), most_nbytes(config), free_nbytes(folder)
    line = f"checkpoints of about {text(each)} each, {text(most)} at most; {text(free)} are free"
    if free >= most:
        return line, []
    return line, [
        f"its checkpoints may take {text(most)}, and only {text(free)} are free in {folder}: saving would fail, and "
        "the run end there. Free some space, or set training.checkpoint.keep_last=1 or runs_dir=FOLDER."
    ]


def text(count: int) -> str:
    """``7.5 MB``, ``1.2 GB``."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
