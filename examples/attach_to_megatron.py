"""Compressed backpropagation in a plain Megatron-core training script.

    torchrun --nproc-per-node 4 examples/attach_to_megatron.py

Four pipeline stages of a small GPT learn to repeat random tokens, on GPUs where there is one per rank, else on the
CPU. The lines that optimus_cc adds are marked.
"""

import os
from functools import partial

import torch
import torch.distributed as dist

cuda = torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
if cuda:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
else:
    from optimus_cc.training import cpu  # only to run Megatron-core without CUDA

    cpu.enable()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

import optimus_cc  # noqa: E402
from optimus_cc.config.codec import LowRankConfig  # noqa: E402
from optimus_cc.config.technique import CompressedBackpropagationConfig, TechniqueConfig  # noqa: E402

STAGES, SEQUENCE, VOCABULARY, MICRO_BATCH, MICRO_BATCHES, STEPS = 4, 64, 1024, 4, 8, 20

dist.init_process_group("nccl" if cuda else "gloo")
parallel_state.initialize_model_parallel(pipeline_model_parallel_size=STAGES, create_gloo_process_groups=False)
torch.manual_seed(1)
tensor_parallel.model_parallel_cuda_manual_seed(1)
config = TransformerConfig(
    num_layers=STAGES,
    hidden_size=64,
    num_attention_heads=4,
    pipeline_model_parallel_size=STAGES,
    pipeline_dtype=torch.float32,
    use_cpu_initialization=True,
    gradient_accumulation_fusion=False,
    masked_softmax_fusion=False,
    bias_dropout_fusion=False,
    bias_activation_fusion=False,
)
gpt = GPTModel(
    config=config,
    transformer_layer_spec=get_gpt_layer_local_spec(),
    vocab_size=VOCABULARY,
    max_sequence_length=SEQUENCE,
    pre_process=parallel_state.is_pipeline_first_stage(),
    post_process=parallel_state.is_pipeline_last_stage(),
    share_embeddings_and_output_weights=True,
)
model = [DistributedDataParallel(config, DistributedDataParallelConfig(), gpt.cuda())]
optimizer = get_megatron_optimizer(OptimizerConfig(lr=2e-3), model, use_gloo_process_groups=False)
config.finalize_model_grads_func = finalize_model_grads

technique = TechniqueConfig(  # <-- what is compressed
    name="cb", cb=CompressedBackpropagationConfig(enabled=True, codec=LowRankConfig(rank=4))
)
plan = optimus_cc.attach(technique, model, seed=1)  # <-- installs it


def forward_step(batches, model):
    tokens = next(batches).cuda()
    positions = torch.arange(SEQUENCE, device=tokens.device).expand_as(tokens)
    return model(tokens, positions, None, labels=tokens), partial(lambda loss: (loss.mean(), loss.mean().detach()))


def random_tokens():
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randint(VOCABULARY, (MICRO_BATCH, SEQUENCE), generator=generator)


batches = random_tokens()
for step in range(1, STEPS + 1):
    model[0].zero_grad_buffer()
    optimizer.zero_grad()
    losses = plan.forward_backward_func(  # <-- in place of Megatron-core's get_forward_backward_func()
        forward_step_func=forward_step,
        data_iterator=batches,
        model=model,
        num_microbatches=MICRO_BATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=MICRO_BATCH,
        forward_only=False,
    )
    optimizer.step()
    backward = plan.traffic()["pipeline_backward"]
    if losses and step % 5 == 0:
        print(
            f"step {step}: loss {torch.stack(losses).mean():.3f}, last stage sent {backward.wire_bytes:.0f} bytes "
            f"backward of {backward.logical_bytes:.0f}",
            flush=True,
        )
plan.detach()
dist.destroy_process_group()
