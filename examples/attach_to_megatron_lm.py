"""Compressed backpropagation in Megatron-LM's own training loop.

    torchrun --nproc-per-node 4 examples/attach_to_megatron_lm.py \
        --pipeline-model-parallel-size 4 --num-layers 4 --hidden-size 64 --num-attention-heads 4 \
        --seq-length 64 --max-position-embeddings 64 --micro-batch-size 4 --global-batch-size 32 \
        --train-iters 10 --lr 2e-3 --eval-interval 5 --eval-iters 1 --log-interval 1 --seed 1 \
        --mock-data --tokenizer-type NullTokenizer --vocab-size 1023 --transformer-impl local \
        --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm

Four pipeline stages of a small GPT, on GPUs where there is one per rank, else on the CPU. It needs
``megatron.training``, which Megatron-LM's repository and the megatron-core package from 0.19 on (Python 3.12) have. All
arguments are Megatron-LM's, but for those under "optimus_cc". The lines that optimus_cc adds are marked; the others
are what a pretraining script for Megatron-LM consists of.
"""

import os
import sys
from functools import partial

import torch

if torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
    from optimus_cc.training import cpu  # only to run Megatron-LM without CUDA

    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # read when Megatron-core is imported: torch.compile would look for a GPU
    cpu.enable()
    # Without a device Megatron-LM refuses to start; torch itself asks torch.accelerator.
    torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
    torch.accelerator.is_available = lambda: False
    sys.argv += ["--distributed-backend", "gloo", "--use-cpu-initialization", "--num-workers", "0"]
    sys.argv += ["--no-bias-gelu-fusion", "--no-bias-dropout-fusion"]

from megatron.core.datasets import utils as dataset_helpers
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split

import optimus_cc
from optimus_cc.config.codec import LowRankConfig
from optimus_cc.config.technique import CompressedBackpropagationConfig, TechniqueConfig


def add_arguments(parser):
    group = parser.add_argument_group("optimus_cc")  # <--
    group.add_argument("--technique", choices=("none", "baseline", "cb"), default="cb", help="none: attach nothing")
    group.add_argument("--cb-rank", type=int, default=4)
    return parser


def datasets(num_samples, vp_stage=None):
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    dataset = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(dataset, num_samples, lambda: True, config).build()


datasets.is_distributed = True  # every rank builds them


def loss_function(mask, losses):
    mask = mask.view(-1).float()
    loss = (losses.view(-1).float() * mask).sum()
    tokens = mask.sum()
    return loss, tokens.int(), {"lm loss": torch.stack((loss, tokens)).detach().clone()}


def forward_step(batches, model):
    batch = {name: tensor.cuda(non_blocking=True) for name, tensor in next(batches).items()}
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(loss_function, batch["loss_mask"])


args = parse_and_validate_args(add_arguments)
# The package has these helpers compiled, and not what Megatron-LM would compile them from.
dataset_helpers.compile_helpers = lambda: None

if args.technique != "none":
    technique = TechniqueConfig(  # <-- what is compressed
        name=args.technique,
        cb=CompressedBackpropagationConfig(enabled=args.technique == "cb", codec=LowRankConfig(rank=args.cb_rank)),
    )
    loop = optimus_cc.attach_to_megatron_lm(technique, seed=args.seed)  # <-- before pretrain

configuration = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
pretrain(configuration, datasets, ModelType.encoder_or_decoder, forward_step)

if args.technique != "none":
    for name, count in loop.plan.traffic().items():  # <-- what this rank has sent in training and evaluation
        print(f"rank {args.rank} sent {name}: {count.wire_bytes:.0f} bytes of {count.logical_bytes:.0f}", flush=True)
    loop.detach()  # <--
torch.distributed.destroy_process_group()
