"""What ranks run in distributed tests: our trainer, and a plain Megatron-core loop that shares no code with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from optimus_cc.config import RunConfig
from tests.configurations import SEQUENCE, VOCABULARY

Batch = dict[str, torch.Tensor]


def backend_in_world(config: RunConfig) -> Any:
    """A backend over the world that the rank pool has already made."""
    from optimus_cc.training import backend

    backend.join(config)
    return backend.Backend(
        device=torch.device("cpu"),
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        control_group=dist.new_group(backend="gloo"),
    )


def random_tokens(config: RunConfig, offset: int = 0) -> Callable[[int], Iterator[Batch]]:
    """Endless micro-batches of this data-parallel rank; the same samples in a step for every layout."""
    from megatron.core import parallel_state

    replica = parallel_state.get_data_parallel_rank()
    return lambda step: _batches(config, replica, step + offset)


def _batches(config: RunConfig, replica: int, step: int) -> Iterator[Batch]:
    training = config.training
    while True:
        generator = torch.Generator().manual_seed(77 + step)
        shape = (training.global_batch_size, SEQUENCE + 1)
        # A skewed distribution, so that there is something to learn.
        samples = (torch.rand(shape, generator=generator) ** 3 * VOCABULARY).long()
        stride = training.micro_batch_size * config.parallel.data_parallel_size
        for microbatch in range(config.num_microbatches):
            first = microbatch * stride + replica * training.micro_batch_size
            tokens = samples[first : first + training.micro_batch_size]
            yield {
                "tokens": tokens[:, :-1].contiguous(),
                "labels": tokens[:, 1:].contiguous(),
                "loss_mask": torch.ones(training.micro_batch_size, SEQUENCE),
                "position_ids": torch.arange(SEQUENCE).repeat(training.micro_batch_size, 1),
            }
        step += 1


def train_ours(config: RunConfig) -> dict[str, Any]:
    """Train with our loop; records, summary and this rank's final weights and compressor state."""
    from optimus_cc.training import loop

    trainer = loop.Trainer.build(config, backend_in_world(config), VOCABULARY)
    records: list[dict[str, Any]] = []
    summary = loop.run(trainer, random_tokens(config), random_tokens(config, offset=10**6), records.append)
    weights = {
        f"{index}.{name}": value.detach().clone()
        for index, chunk in enumerate(trainer.model)
        for name, value in chunk.module.named_parameters()
    }
    return {"records": records, "summary": summary, "weights": weights, "state": trainer.attachment.state_dict()}


def train_plain(config: RunConfig) -> dict[str, Any]:
    """The same training with Megatron-core alone, written as its own documentation would."""
    from functools import partial

    import torch.nn.functional as F
    from megatron.core import parallel_state as ps
    from megatron.core import tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    par, training, shape = config.parallel, config.training, config.model
    virtual = par.num_chunks if par.num_chunks > 1 else None
    ps.initialize_model_parallel(
        par.tensor_parallel_size, par.pipeline_parallel_size, virtual, create_gloo_process_groups=False
    )
    torch.manual_seed(training.seed + 100 * ps.get_pipeline_model_parallel_rank())
    tensor_parallel.model_parallel_cuda_manual_seed(training.seed + 100 * ps.get_pipeline_model_parallel_rank())
    bf16 = training.precision == "bf16"
    recomputes: dict[str, dict[str, Any]] = {
        "none": {},
        "selective": {"recompute_granularity": "selective"},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    }
    tf = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        hidden_dropout=shape.dropout,
        attention_dropout=shape.dropout,
        activation_func=partial(F.gelu, approximate="tanh"),
        tensor_model_parallel_size=par.tensor_parallel_size,
        pipeline_model_parallel_size=par.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        bf16=bf16,
        overlap_p2p_comm=par.overlap_p2p,
        batch_p2p_comm=par.batch_p2p,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        **recomputes[training.recompute],
    )
    chunks = []
    for index in range(par.num_chunks):
        where: dict[str, Any] = {"ignore_virtual": False, "vp_stage": index} if virtual else {}
        chunk = GPTModel(
            config=tf,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=ps.is_pipeline_first_stage(**where),
            post_process=ps.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=True,
            vp_stage=index if virtual else None,
        )
        wrapped = Float16Module(tf, chunk) if bf16 else chunk
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=par.overlap_grad_reduce,
            use_distributed_optimizer=par.distributed_optimizer,
        )
        chunks.append(DistributedDataParallel(tf, ddp, wrapped, disable_bucketing=index > 0))
    for chunk in chunks:
        chunk.broadcast_params()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=config.optimizer.learning_rate,
            min_lr=0.0,
            weight_decay=config.optimizer.weight_decay,
            adam_beta1=0.9,
            adam_beta2=0.999,
            adam_eps=1e-8,
            clip_grad=1.0,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            use_distributed_optimizer=par.distributed_optimizer,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    schedule = OptimizerParamScheduler(
        optimizer,
        0.0,
        config.optimizer.learning_rate,
        0.0,
        training.steps // 4,
        training.steps,
        "cosine",
        0.01,
        0.01,
        0,
        "constant",
    )
    tf.finalize_model_grads_func = finalize_model_grads
    tf.grad_scale_func = optimizer.scale_loss
    if par.overlap_grad_reduce:
        tf.no_sync_func = [chunk.no_sync for chunk in chunks] if virtual else chunks[0].no_sync

    def forward_step(batches: Iterator[Batch], model: Any) -> Any:
        batch = next(batches)

        def loss_func(output: torch.Tensor) -> Any:
            loss = (output.float() * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
            return loss, {"loss": loss.detach().clone()}

        return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]), loss_func

    sources = [random_tokens(config)(0) for _ in chunks]
    losses, norms = [], []
    for _ in range(training.steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        out = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=sources if virtual else sources[0],
            model=chunks if virtual else chunks[0],
            num_microbatches=config.num_microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=training.micro_batch_size,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        schedule.step(increment=1)
        losses.append([float(item["loss"]) for item in out])
        norms.append(float(norm))
    weights = {
        f"{index}.{name}": value.detach().clone()
        for index, chunk in enumerate(chunks)
        for name, value in chunk.module.named_parameters()
    }
    return {"losses": losses, "norms": norms, "weights": weights}
