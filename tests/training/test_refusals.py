"""What a configuration that was accepted asks of Megatron-core, Megatron-core doesn't refuse."""

from __future__ import annotations

import itertools
import random
import traceback
from datetime import timedelta
from typing import Any

from optimus_cc.config import ConfigError, RunConfig, load
from optimus_cc.config.parallel import ParallelConfig
from optimus_cc.config.schema import changed
from tests.configurations import VOCABULARY, tiny
from tests.ranks import RankPool
from tests.training_runs import backend_in_world, random_tokens

EXTREME = (0, 1, 2, 3, 7, 1000, 2**31 - 1, 2**31, 2**63, 10**30)
NUMBERS = (0.0, 5e-324, 1e-30, 1e-12, 1e-3, 0.5, 1 - 2**-53, 1.0, 3e4, 1e16, 1e300, float("inf"), float("nan"))
FLAGS = (False, True)
VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "model": {
        "num_layers": (1, 2, 3, 4, 6, 8, *EXTREME),
        "hidden_size": (1, 2, 4, 6, 9, 10, 12, 24, *EXTREME),
        "num_attention_heads": (1, 2, 3, 4, 5, 6, *EXTREME),
        "ffn_hidden_size": (None, 1, 6, 24, *EXTREME),
        "tied_embeddings": FLAGS,
        "position_embedding": ("learned", "rope"),
        "dropout": (0.1, *NUMBERS),
        "init_std": NUMBERS,
        "layernorm_epsilon": NUMBERS,
    },
    "parallel": {
        **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), (1, 2, 4, *EXTREME)),
        "num_chunks": (1, 2, *EXTREME),
        **dict.fromkeys(("overlap_p2p", "batch_p2p", "sequence_parallel", "split_over_tensor_parallel"), FLAGS),
        **dict.fromkeys(("overlap_grad_reduce", "distributed_optimizer"), FLAGS),
    },
    "optimizer": {
        "name": ("adam", "sgd"),
        **dict.fromkeys(("learning_rate", "min_learning_rate", "weight_decay", "clip_grad", "epsilon"), NUMBERS),
        **dict.fromkeys(("warmup_fraction", "beta1", "beta2", "momentum"), NUMBERS),
        "decay_steps": (None, *EXTREME),
        "decay_style": ("cosine", "linear", "constant"),
    },
    "training": {
        **dict.fromkeys(("steps", "global_batch_size", "micro_batch_size", "validation_batches"), (2, 4, 8, *EXTREME)),
        "seed": EXTREME,
        "precision": ("fp32", "bf16"),
        "recompute": ("none", "selective", "full"),
        "timeout_s": (1e-9, 1e-3, 10.0, *NUMBERS),
    },
}


NUM_BUILT, NUM_TRAINED = 300, 30
SMALL = 10**5
"""Elements of a layer's matrix, up to which a test trains it."""


def accepted(draw: random.Random, most_changes: int) -> RunConfig | None:
    """A small run with a few of its keys set to anything; None if it is refused."""
    mapping = tiny(steps=1, num_microbatches=4).to_mapping()
    mapping["training"]["on_nonfinite_loss"] = "continue"
    for _ in range(draw.randint(1, most_changes)):
        group = draw.choice(list(VALUES))
        key = draw.choice(list(VALUES[group]))
        mapping[group][key] = draw.choice(VALUES[group][key])
    try:
        return load(mapping)
    except ConfigError:
        return None


def _some_accepted(seed: int, number: int, most_changes: int) -> list[RunConfig]:
    draw = random.Random(seed)
    drawn = (accepted(draw, most_changes) for _ in itertools.count())
    return list(itertools.islice((config for config in drawn if config is not None), number))


def _is_small(config: RunConfig) -> bool:
    model, training = config.model, config.training
    sizes = (model.hidden_size * (model.ffn_width + model.hidden_size), model.num_layers, training.micro_batch_size)
    return sizes[0] <= SMALL and sizes[1] <= 8 and sizes[2] <= 8 and config.num_microbatches <= 8


def _what_is_refused(built: list[RunConfig], trained: list[RunConfig]) -> list[str]:
    """On one rank: what an exception ended, with the exception."""
    from megatron.core import parallel_state

    from optimus_cc.training import loop

    backend = backend_in_world(tiny())
    refused = []

    def attempt(config: RunConfig, action: Any) -> None:
        try:
            action(config)
        except Exception:
            refused.append(f"{config}\n{traceback.format_exc()}")

    def build(config: RunConfig) -> None:
        import torch
        from megatron.core.distributed import DistributedDataParallelConfig

        from optimus_cc.training.model import transformer_config
        from optimus_cc.training.optimizer import build_schedule, optimizer_config

        transformer_config(config, backend)
        optimizer_config(config)
        DistributedDataParallelConfig(use_distributed_optimizer=config.parallel.distributed_optimizer)
        schedule = build_schedule(config, torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0))
        schedule.step(config.training.steps)
        torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=config.training.timeout_s))

    def train(config: RunConfig) -> None:
        trainer = loop.Trainer.build(config, backend, VOCABULARY)
        loop.run(trainer, random_tokens(config), random_tokens(config), lambda record: None)

    for config in built:
        attempt(config, build)
    for config in trained:
        attempt(config, train)
    parallel_state.destroy_model_parallel()
    return refused


def test_what_is_accepted_megatron_core_takes(ranks: RankPool) -> None:
    """Configurations over extreme values: each is refused before anything starts, or can be built and trained."""
    built = _some_accepted(1, NUM_BUILT, most_changes=4)
    trained = []
    for config in filter(_is_small, _some_accepted(2, 4 * NUM_TRAINED, most_changes=6)):
        ours = config.parallel
        alone = ParallelConfig(
            distributed_optimizer=ours.distributed_optimizer, overlap_grad_reduce=ours.overlap_grad_reduce
        )
        trained.append(
            changed(config, parallel=alone, training=changed(config.training, steps=1, validation_batches=1))
        )
    assert len(trained) >= NUM_TRAINED
    (refused,) = ranks.run(1, _what_is_refused, built, trained[:NUM_TRAINED])
    assert not refused, f"{len(refused)}, the first of them:\n{refused[0]}"
