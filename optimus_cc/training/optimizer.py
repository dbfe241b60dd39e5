"""Megatron-core's optimizer and learning-rate schedule from a run's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer import optimizer as megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from optimus_cc.config import RunConfig


def build_optimizer(
    config: RunConfig, model: Sequence[torch.nn.Module]
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """The optimizer of this rank's parameters, and its schedule counted in optimizer steps."""
    optimizer = get_megatron_optimizer(optimizer_config(config), list(model), use_gloo_process_groups=False)
    # From 0.19 on, ranks agree once per process which kinds of norms there are. Asked in the first step, that would be
    # traffic of a step, and a run that went on would count it twice.
    for kind in getattr(megatron_optimizer, "SEPARATE_GRAD_NORM_GROUPS", ()):
        optimizer.has_grad_norm_group(kind)
    return optimizer, build_schedule(config, optimizer)


def optimizer_config(config: RunConfig) -> OptimizerConfig:
    """The run's optimizer in Megatron-core's terms."""
    ours = config.optimizer
    bf16 = config.training.precision == "bf16"
    return OptimizerConfig(
        optimizer=ours.name,
        lr=ours.learning_rate,
        min_lr=ours.min_learning_rate,
        weight_decay=ours.weight_decay,
        adam_beta1=ours.beta1,
        adam_beta2=ours.beta2,
        adam_eps=ours.epsilon,
        sgd_momentum=ours.momentum,
        clip_grad=ours.clip_grad,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=config.parallel.distributed_optimizer,
    )


def build_schedule(config: RunConfig, optimizer: Any) -> OptimizerParamScheduler:
    """Learning rate and weight decay of ``optimizer``, counted in optimizer steps."""
    ours = config.optimizer
    warmup_steps, decay_steps = ours.schedule_steps(config.training.steps)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=ours.learning_rate,
        min_lr=ours.min_learning_rate,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=ours.decay_style,
        start_wd=ours.weight_decay,
        end_wd=ours.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def parts_of(optimizer: Any) -> list[Any]:
    """Megatron-core's optimizers for the parts of a model.

    Each holds torch's own as ``optimizer``, which is None on a rank without parameters of its kind.
    """
    return getattr(optimizer, "chained_optimizers", None) or [optimizer]
