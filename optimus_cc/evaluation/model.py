"""What a rank of an evaluation needs of a run: its model with the weights of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import torch

from optimus_cc.checkpoints import Checkpoint
from optimus_cc.config import RunConfig
from optimus_cc.config.parallel import ParallelConfig
from optimus_cc.config.schema import changed
from optimus_cc.training.backend import Backend
from optimus_cc.training.checkpoint import Checkpoints
from optimus_cc.training.model import build_chunks, transformer_config


def layout_of(parallel: ParallelConfig) -> ParallelConfig:
    """The layout that a run with ``parallel`` is evaluated in: one chunk for each stage, all else the simplest.

    What is left out changes how messages travel and where optimizer states lie, and none of the sizes.
    """
    return ParallelConfig(
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        data_parallel_size=parallel.data_parallel_size,
    )


def for_evaluation(config: RunConfig) -> RunConfig:
    """The same model and layout with nothing that only training needs."""
    return changed(config, parallel=layout_of(config.parallel), training=changed(config.training, recompute="none"))


def load_model(
    config: RunConfig,
    backend: Backend,
    padded_vocabulary: int,
    found: Checkpoint,
    heartbeat: Callable[[], None] = lambda: None,
) -> torch.nn.Module:
    """This rank's part of the model as ``found`` holds it, ready to predict. Collective.

    Args:
        config: what :func:`for_evaluation` gave; its layout need not be the one that the checkpoint was made in.

    Raises:
        CheckpointError: the checkpoint can't be loaded.
    """
    (model,) = build_chunks(config, transformer_config(config, backend), backend, padded_vocabulary)
    Checkpoints(config, found.path.parent, backend, heartbeat).load_model([model], found)
    return model.eval()
