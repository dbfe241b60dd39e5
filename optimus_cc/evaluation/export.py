"""``task=export``: a checkpoint as a folder that Hugging Face's ``transformers`` loads. Needs no ranks and no GPU."""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from optimus_cc.checkpoints import Checkpoint
from optimus_cc.config import RunConfig
from optimus_cc.config.model import ModelConfig
from optimus_cc.evaluation import trained
from optimus_cc.runs import RunFailed
from optimus_cc.training.safe_loading import read_index, weights_only
from optimus_cc.training.tokenizer import Tokenizer

Weights = dict[str, torch.Tensor]


def export(config: RunConfig) -> dict[str, Any]:
    """Write the checkpoint that ``config`` names in ``config.export.format``.

    Returns:
        ``path`` of the folder, ``step`` of the checkpoint, ``run`` and number of ``parameters``.

    Raises:
        RunFailed: the checkpoint can't be used, or the folder can't be written.
    """
    checkpoint = trained.chosen(config)
    folder = trained.run_folder(config)
    name = f"step_{checkpoint.step}_{config.export.format}"
    path = Path(config.export.path) if config.export.path is not None else folder.path / "export" / name
    partial = path.with_name(f".{path.name}.partial")
    if path.exists() and not config.force:
        print(f"{path} is there already; force=true writes it again")
        return {"path": str(path), "step": checkpoint.step, "run": folder.run_id}
    tokenizer = Tokenizer.load(trained.corpus_folder(config))
    model = huggingface_model(config.model, read_weights(checkpoint), tokenizer)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write(model, tokenizer, config, partial)
        if path.exists():
            shutil.rmtree(path)
        partial.rename(path)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise RunFailed(f"{path} can't be written: {error.strerror or error}") from None
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{folder.run_id}, step {checkpoint.step}, {parameters:,} parameters without padding: {path}")
    return {"path": str(path), "step": checkpoint.step, "run": folder.run_id, "parameters": parameters}


def read_weights(checkpoint: Checkpoint) -> Weights:
    """The model's whole tensors by Megatron-core's names, on the CPU; those of layers stacked, [layers, ...].

    Raises:
        RunFailed: the checkpoint is damaged.
    """
    if damaged := checkpoint.damaged_files():
        raise RunFailed(f"{checkpoint.path} can't be used: {damaged[0]} is damaged")
    try:
        read_index(checkpoint.path)
        reader = FileSystemReader(checkpoint.path)
        index = reader.read_metadata().state_dict_metadata
        state: Weights = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in index.items()
            if name.startswith(("embedding.", "decoder.", "output_layer."))
            if isinstance(entry, TensorStorageMetadata)
        }
        with weights_only(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(state, storage_reader=reader, no_dist=True)
    except (OSError, ValueError, KeyError, pickle.UnpicklingError, CheckpointException) as error:
        raise RunFailed(f"{checkpoint.path} can't be read: {error}") from None
    return state


def huggingface_model(model: ModelConfig, weights: Weights, tokenizer: Tokenizer) -> Any:
    """A ``transformers`` model, in evaluation mode: GPT-2, or GPT-NeoX where positions are rotary.

    Args:
        weights: as :func:`read_weights` gives them; the rows that pad the vocabulary are left out.
    """
    from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM
    from transformers.utils import logging as transformers_logging

    learned = model.position_embedding == "learned"
    common: dict[str, Any] = {
        "vocab_size": tokenizer.vocabulary_size,
        "bos_token_id": tokenizer.end_of_document,
        "eos_token_id": tokenizer.end_of_document,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tied_embeddings,
        "dtype": weights["decoder.final_layernorm.weight"].dtype,
    }
    if learned:
        settings = GPT2Config(
            n_positions=model.sequence_length,
            n_embd=model.hidden_size,
            n_layer=model.num_layers,
            n_head=model.num_attention_heads,
            n_inner=model.ffn_width,
            activation_function="gelu_new",
            resid_pdrop=model.dropout,
            embd_pdrop=model.dropout,
            attn_pdrop=model.dropout,
            layer_norm_epsilon=model.layernorm_epsilon,
            **common,
        )
    else:
        settings = GPTNeoXConfig(
            max_position_embeddings=model.sequence_length,
            hidden_size=model.hidden_size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_attention_heads,
            intermediate_size=model.ffn_width,
            hidden_act="gelu_new",
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
            hidden_dropout=model.dropout,
            attention_dropout=model.dropout,
            layer_norm_eps=model.layernorm_epsilon,
            use_parallel_residual=False,
            **common,
        )
    named = dict(_as_gpt2(model, weights) if learned else _as_gpt_neox(model, weights))
    table = "transformer.wte.weight" if learned else "gpt_neox.embed_in.weight"
    head = "lm_head.weight" if learned else "embed_out.weight"
    named[head] = named[table] if model.tied_embeddings else weights["output_layer.weight"]
    for name in (table, head):
        named[name] = named[name][: tokenizer.vocabulary_size]
    named = {name: value.contiguous() for name, value in named.items()}
    transformers_logging.disable_progress_bar()
    kind = GPT2LMHeadModel if learned else GPTNeoXForCausalLM
    loaded, told = kind.from_pretrained(None, config=settings, state_dict=named, output_loading_info=True)
    if wrong := [name for names in told.values() for name in names]:
        raise RuntimeError(f"the names of transformers' weights are others than expected: {wrong}")
    return loaded.eval()


_LAYER = "decoder.layers."
_PARTS = {
    "input_norm": "self_attention.linear_qkv.layer_norm_",
    "qkv": "self_attention.linear_qkv.",
    "projection": "self_attention.linear_proj.",
    "mlp_norm": "mlp.linear_fc1.layer_norm_",
    "mlp_in": "mlp.linear_fc1.",
    "mlp_out": "mlp.linear_fc2.",
}


def _layers(weights: Weights, names: dict[str, str]) -> Iterator[tuple[str, str, torch.Tensor]]:
    """The part, the name after ``names`` (with ``{}`` for the layer's number), and the tensor, of every layer."""
    for part, theirs in names.items():
        for kind in ("weight", "bias"):
            for number, value in enumerate(weights[f"{_LAYER}{_PARTS[part]}{kind}"]):
                yield part, f"{theirs.format(number)}.{kind}", value


def _as_gpt2(model: ModelConfig, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    yield "transformer.wte.weight", weights["embedding.word_embeddings.weight"]
    yield "transformer.wpe.weight", weights["embedding.position_embeddings.weight"]
    yield "transformer.ln_f.weight", weights["decoder.final_layernorm.weight"]
    yield "transformer.ln_f.bias", weights["decoder.final_layernorm.bias"]
    layer = "transformer.h.{}."
    names = {
        "input_norm": f"{layer}ln_1",
        "qkv": f"{layer}attn.c_attn",
        "projection": f"{layer}attn.c_proj",
        "mlp_norm": f"{layer}ln_2",
        "mlp_in": f"{layer}mlp.c_fc",
        "mlp_out": f"{layer}mlp.c_proj",
    }
    heads = model.num_attention_heads
    for part, name, value in _layers(weights, names):
        if part == "qkv":  # Megatron-core: queries, keys and values head by head; GPT-2: all queries, all keys, ...
            rows = value.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
            yield name, rows.t() if rows.dim() == 2 else rows
        else:  # GPT-2's linear layers hold [inputs, outputs]
            yield name, value.t() if value.dim() == 2 else value


def _as_gpt_neox(model: ModelConfig, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    yield "gpt_neox.embed_in.weight", weights["embedding.word_embeddings.weight"]
    yield "gpt_neox.final_layer_norm.weight", weights["decoder.final_layernorm.weight"]
    yield "gpt_neox.final_layer_norm.bias", weights["decoder.final_layernorm.bias"]
    layer = "gpt_neox.layers.{}."
    names = {
        "input_norm": f"{layer}input_layernorm",
        "qkv": f"{layer}attention.query_key_value",
        "projection": f"{layer}attention.dense",
        "mlp_norm": f"{layer}post_attention_layernorm",
        "mlp_in": f"{layer}mlp.dense_h_to_4h",
        "mlp_out": f"{layer}mlp.dense_4h_to_h",
    }
    for _, name, value in _layers(weights, names):
        yield name, value


def _write(model: Any, tokenizer: Tokenizer, config: RunConfig, folder: Path) -> None:
    from transformers import GenerationConfig

    model.save_pretrained(folder)
    tokenizer.save(folder)
    end = tokenizer.end_of_document_token
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings |= {"bos_token": end, "unk_token": end, "model_max_length": config.model.sequence_length}
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    GenerationConfig(
        bos_token_id=tokenizer.end_of_document,
        eos_token_id=tokenizer.end_of_document,
        pad_token_id=tokenizer.end_of_document,
        max_length=config.model.sequence_length,
    ).save_pretrained(folder)
