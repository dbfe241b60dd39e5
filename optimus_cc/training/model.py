"""Megatron-core's GPTModel from a run's configuration: one module per chunk, wrapped for data parallelism."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from optimus_cc.config import RunConfig
from optimus_cc.training.backend import Backend, is_installed

_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def transformer_config(config: RunConfig, backend: Backend) -> TransformerConfig:
    """The run's model, layout and precision in Megatron-core's terms."""
    model, parallel = config.model, config.parallel
    bf16 = config.training.precision == "bf16"
    dtype = torch.bfloat16 if bf16 else torch.float32
    fused = backend.is_cuda
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        ffn_hidden_size=model.ffn_width,
        activation_func=partial(F.gelu, approximate="tanh") if not fused else F.gelu,
        hidden_dropout=model.dropout,
        attention_dropout=model.dropout,
        layernorm_epsilon=model.layernorm_epsilon,
        init_method_std=model.init_std,
        tensor_model_parallel_size=parallel.tensor_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.num_chunks if parallel.num_chunks > 1 else None,
        sequence_parallel=parallel.sequence_parallel,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=bf16,
        overlap_p2p_comm=parallel.overlap_p2p,
        batch_p2p_comm=parallel.batch_p2p,
        # Outputs that were sent need only their autograd graph, so Megatron frees their data; with overlapped
        # messages megatron-core 0.16 frees it while it is still being sent.
        deallocate_pipeline_outputs=not parallel.overlap_p2p,
        # Only old versions of torch need the device-wide wait after each batch of messages.
        batch_p2p_sync=False,
        use_cpu_initialization=not backend.is_cuda,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=fused and is_installed("scaled_masked_softmax_cuda"),
        bias_dropout_fusion=fused,
        bias_activation_fusion=fused,
        deterministic_mode=False,
        **_RECOMPUTE[config.training.recompute],
    )


def build_chunks(
    config: RunConfig, transformer: TransformerConfig, backend: Backend, padded_vocabulary: int
) -> list[torch.nn.Module]:
    """The chunks of this rank, on its device and in the run's precision."""
    chunks = [
        _build_chunk(config, transformer, padded_vocabulary, chunk, backend).to(backend.device)
        for chunk in range(config.parallel.num_chunks)
    ]
    return [Float16Module(transformer, chunk) for chunk in chunks] if transformer.bf16 else chunks


def build_model(config: RunConfig, backend: Backend, padded_vocabulary: int) -> list[DistributedDataParallel]:
    """The chunks of this rank, on its device, wrapped in Megatron-core's DistributedDataParallel."""
    transformer = transformer_config(config, backend)
    chunks = build_chunks(config, transformer, backend, padded_vocabulary)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=config.parallel.overlap_grad_reduce,
        use_distributed_optimizer=config.parallel.distributed_optimizer,
    )
    wrapped = [
        DistributedDataParallel(transformer, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        chunk.broadcast_params()
    if config.parallel.overlap_grad_reduce:
        transformer.no_sync_func = [chunk.no_sync for chunk in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    return wrapped


def _build_chunk(
    config: RunConfig, transformer: TransformerConfig, padded_vocabulary: int, chunk: int, backend: Backend
) -> GPTModel:
    virtual: dict[str, Any] = {"ignore_virtual": False, "vp_stage": chunk} if config.parallel.num_chunks > 1 else {}
    vp_stage = chunk if config.parallel.num_chunks > 1 else None
    model = GPTModel(
        config=transformer,
        transformer_layer_spec=_layer_spec(transformer, backend, vp_stage),
        vocab_size=padded_vocabulary,
        max_sequence_length=config.model.sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(**virtual),
        post_process=parallel_state.is_pipeline_last_stage(**virtual),
        share_embeddings_and_output_weights=config.model.tied_embeddings,
        position_embedding_type="learned_absolute" if config.model.position_embedding == "learned" else "rope",
        vp_stage=vp_stage,
    )
    for parameter in model.parameters():
        if not hasattr(parameter, "tensor_model_parallel"):
            parameter.tensor_model_parallel = False
    return model


def _layer_spec(transformer: TransformerConfig, backend: Backend, chunk: int | None) -> Any:
    if backend.is_cuda and is_installed("transformer_engine"):
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        return get_gpt_layer_with_transformer_engine_spec()
    if transformer.sequence_parallel:
        return _local_spec_with_sequence_parallel_norms(transformer, chunk)
    return get_gpt_layer_local_spec()


class SequenceParallelLayerNorm(torch.nn.LayerNorm):
    """LayerNorm over a share of the sequence, where Apex or Transformer Engine are not there to provide it.

    Megatron-core sums the gradients of parameters marked ``sequence_parallel`` over the tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = True  # type: ignore[attr-defined]


def _local_spec_with_sequence_parallel_norms(transformer: TransformerConfig, chunk: int | None) -> Any:
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = SequenceParallelLayerNorm
    layer.submodules.pre_mlp_layernorm = SequenceParallelLayerNorm
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(transformer, vp_stage=chunk), layer_norm=SequenceParallelLayerNorm
    )
