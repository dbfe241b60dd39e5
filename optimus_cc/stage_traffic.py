"""What each stage of a composed configuration sends in one training step, and what that takes in memory.

Bytes are counted as the traffic meter counts them in a run: point-to-point by what is sent, a collective by what the
ring algorithm makes a rank send. Steps are those after selective stage compression's warm-up. Parameters and
activations are those of Megatron-core's own layers; Transformer Engine's may hide communication in their kernels, where
no meter sees it. Pure arithmetic, without torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimus_cc.config.codec import LowRankConfig
from optimus_cc.config.model import padded_vocabulary_size
from optimus_cc.config.run import RunConfig
from optimus_cc.config.technique import SelectiveStageCompressionConfig
from optimus_cc.config.tokenizer import GPT2_VOCABULARY_SIZE, BpeTokenizerConfig, HuggingFaceTokenizerConfig
from optimus_cc.exposure import Message, stages_to_compress
from optimus_cc.files import read_text
from optimus_cc.gradient_buckets import gradient_buckets
from optimus_cc.stage_parameters import StageParameters, Weight, stage_parameters
from optimus_cc.wire_size import mean_nbytes, message_matrix

_GRADIENT_BYTES = 4  # gradients are kept and reduced in fp32
_MEMORY_BYTES = 4  # so are error memories and queries
_LOSS_BYTES = 4  # so are the sums over the vocabulary from which the loss is made


@dataclass(frozen=True)
class StageTraffic:
    """One virtual stage: chunk ``virtual_stage // P`` of pipeline rank ``virtual_stage % P``.

    Counts and bytes are those of one of its ranks, per step.
    """

    virtual_stage: int
    pipeline_rank: int
    parameters: int
    backward_messages: int
    epilogue_messages: int
    compressed_messages: int
    forward_messages: int
    forward_logical_bytes: int
    forward_wire_bytes: int
    backward_logical_bytes: int
    backward_wire_bytes: int
    backward_steps_left: int
    """Backward steps of other ranks behind which the reduction of this rank's gradients can hide."""
    compressed_matrices: int
    """Whose gradients travel as factors."""
    data_parallel_logical_bytes: float
    data_parallel_wire_bytes: float
    embedding_bytes: float
    """To keep the copies of a tied word embedding equal; the mean over data-parallel ranks."""
    parameter_gather_bytes: float
    """Of its updated shard, with the distributed optimizer."""
    tensor_parallel_bytes: float
    """Activations and their gradients, the vocabulary's sums, and shares of messages that are put together again."""
    norm_gradient_bytes: float
    """Sums of gradients of LayerNorms and row-parallel biases, with sequence parallelism. They count as ``other``."""
    message_memory_bytes: int
    """Error memory and queries of compressed backpropagation: the warm-started query and the one it started from."""
    gradient_memory_bytes: int
    """The same of selective stage compression."""


def stages(config: RunConfig) -> list[StageTraffic]:
    """Every virtual stage of ``config``, in the order in which a sample passes them."""
    size = config.parallel.pipeline_parallel_size
    backward: dict[int, list[Message]] = {}
    forward: dict[int, list[Message]] = {}
    for rank in range(size):
        for message in config.schedule.sent_backward(rank):
            backward.setdefault(message.boundary + 1, []).append(message)
        for message in config.schedule.sent_forward(rank):
            forward.setdefault(message.boundary, []).append(message)
    result = []
    vocabulary = padded_vocabulary_size(vocabulary_size(config))
    for stage in range(config.parallel.num_virtual_stages):
        parameters = stage_parameters(config.model, config.parallel, vocabulary, stage)
        received = len(forward.get(stage - 1, [])) + len(backward.get(stage + 1, []))
        result.append(
            StageTraffic(
                virtual_stage=stage,
                pipeline_rank=stage % size,
                parameters=parameters.total,
                backward_steps_left=config.schedule.backward_steps_left(stage % size),
                tensor_parallel_bytes=_tensor_parallel(config, stage, received),
                norm_gradient_bytes=_norm_gradients(config, parameters),
                **_messages(config, backward.get(stage, []), forward.get(stage, [])),
                **_gradients(config, stage, parameters),
            )
        )
    return result


def traffic(config: RunConfig, every: Sequence[StageTraffic] | None = None) -> dict[str, dict[str, float]]:
    """Bytes that all ranks together send in one step, by traffic class, as a run's records name them.

    ``other`` holds the sums of LayerNorm gradients only: norms, barriers and control messages are left out.

    Args:
        every: the :func:`stages` of ``config``, if they are there already.
    """
    replicas = config.parallel.tensor_parallel_size * config.parallel.data_parallel_size
    every = stages(config) if every is None else every

    def total(logical: str, wire: str | None = None) -> dict[str, float]:
        return {
            "logical_bytes": replicas * sum(getattr(stage, logical) for stage in every),
            "wire_bytes": replicas * sum(getattr(stage, wire or logical) for stage in every),
        }

    return {
        "pipeline_forward": total("forward_logical_bytes", "forward_wire_bytes"),
        "pipeline_backward": total("backward_logical_bytes", "backward_wire_bytes"),
        "data_parallel": total("data_parallel_logical_bytes", "data_parallel_wire_bytes"),
        "embedding": total("embedding_bytes"),
        "tensor_parallel": total("tensor_parallel_bytes"),
        "parameter_gather": total("parameter_gather_bytes"),
        "other": total("norm_gradient_bytes"),
    }


def memory_by_rank(config: RunConfig) -> list[int]:
    """Bytes that error memories and queries take on a rank of each pipeline rank, over all its chunks."""
    memory = [0] * config.parallel.pipeline_parallel_size
    for stage in stages(config):
        memory[stage.pipeline_rank] += stage.message_memory_bytes + stage.gradient_memory_bytes
    return memory


def parameters_of(config: RunConfig, virtual_stage: int) -> StageParameters:
    """The parameters of one rank of ``virtual_stage``."""
    vocabulary = padded_vocabulary_size(vocabulary_size(config))
    return stage_parameters(config.model, config.parallel, vocabulary, virtual_stage)


def compressible(config: RunConfig, sc: SelectiveStageCompressionConfig, weights: Sequence[Weight]) -> list[Weight]:
    """Whose gradients ``sc`` would send as factors on a stage that compresses."""
    return [
        weight
        for weight in weights
        if len(weight.shape) == 2
        and not weight.is_position_embedding
        and not (weight.is_word_embedding and config.technique.fe.enabled)
        and sc.compresses(*weight.shape)
    ]


def compressing_ranks(config: RunConfig) -> range:
    """The pipeline ranks that compress their gradients."""
    sc = config.technique.sc
    return range(stages_to_compress(config.parallel.pipeline_parallel_size, sc.fraction) if sc.enabled else 0)


def shares(config: RunConfig) -> int:
    """Over how many tensor-parallel ranks a message that all of them hold is shared out."""
    return config.parallel.tensor_parallel_size if config.parallel.split_over_tensor_parallel else 1


def vocabulary_size(config: RunConfig) -> int:
    """Entries of the tokenizer's vocabulary; for one that is yet to be trained, as many as were asked for."""
    tokenizer = config.tokenizer
    if isinstance(tokenizer, BpeTokenizerConfig):
        return tokenizer.vocabulary_size
    if isinstance(tokenizer, HuggingFaceTokenizerConfig):
        content = json.loads(read_text(Path(tokenizer.path) / "tokenizer.json"))
        added = {token["content"] for token in content.get("added_tokens", [])}
        vocabulary = content["model"]["vocab"]  # a mapping, or for unigram models a list of pairs
        known = set(vocabulary) if isinstance(vocabulary, dict) else {token for token, _ in vocabulary}
        return len(known | added)
    return GPT2_VOCABULARY_SIZE


def _messages(config: RunConfig, backward: Sequence[Message], forward: Sequence[Message]) -> dict[str, int]:
    """What one virtual stage sends to its neighbours, and what the codecs of these streams keep in memory."""
    cb = config.technique.cb
    compressed = sum(
        cb.enabled and message.is_compressed(epilogue_only=cb.epilogue_only, flush=cb.flushes) for message in backward
    )
    forward_compressed = len(forward) if cb.enabled and cb.compress_forward else 0
    plain, encoded = config.message_nbytes, config.compressed_message_nbytes
    whole = plain * shares(config)
    memory = 0
    if cb.lazy_error_propagation and compressed:
        memory += math.prod(config.message_shape) * _MEMORY_BYTES
    if isinstance(cb.codec, LowRankConfig) and cb.codec.warm_start:
        rows, columns = message_matrix(config.message_shape)
        query = 2 * columns * min(cb.codec.rank, rows, columns) * _MEMORY_BYTES
        memory += query * (bool(compressed) + bool(forward_compressed))
    return {
        "backward_messages": len(backward),
        "epilogue_messages": sum(message.epilogue for message in backward),
        "compressed_messages": compressed,
        "forward_messages": len(forward),
        "forward_logical_bytes": len(forward) * whole,
        "forward_wire_bytes": (len(forward) - forward_compressed) * plain + forward_compressed * encoded,
        "backward_logical_bytes": len(backward) * whole,
        "backward_wire_bytes": (len(backward) - compressed) * plain + compressed * encoded,
        "message_memory_bytes": memory,
    }


def _gradients(config: RunConfig, stage: int, parameters: StageParameters) -> dict[str, Any]:
    """What one rank sends to reduce its gradients and to share its updated parameters."""
    parallel, model, sc = config.parallel, config.model, config.technique.sc
    replicas, scattered = parallel.data_parallel_size, parallel.distributed_optimizer
    ring = (replicas - 1) / replicas
    buckets = gradient_buckets(parameters.weights, parallel, stage, tied_embeddings=model.tied_embeddings)
    elements = sum(bucket.numel for bucket in buckets)
    reduced = elements
    compressed: list[Weight] = []
    if stage % parallel.pipeline_parallel_size in compressing_ranks(config):
        compressed = compressible(config, sc, parameters.weights)

    shared = model.tied_embeddings and parallel.pipeline_parallel_size > 1
    copy = parameters.word_embedding * _GRADIENT_BYTES if shared else 0
    embedding = float(copy)
    if config.technique.fe.enabled:
        # One ring over 2 D ranks, without the embedding in the reduction; or only the rank's own shard after that.
        embedding *= 1 / replicas if scattered else (2 * replicas - 1) / replicas
        reduced -= 0 if scattered else parameters.word_embedding

    # What is left of a bucket that holds compressed matrices can't be scattered.
    special = [bucket for bucket in buckets if set(compressed) & set(bucket.weights)] if scattered else []
    all_reduced = sum(bucket.numel for bucket in special) if scattered else reduced
    all_reduced -= sum(weight.numel for weight in compressed)
    rest = (reduced - sum(bucket.numel for bucket in special)) if scattered else 0
    # A bucket's factors travel together; those of a later chunk, whose buckets form one group, with each other.
    special_weights = set(compressed)
    chosen = [[weight for weight in bucket.weights if weight in special_weights] for bucket in buckets]
    if stage >= parallel.pipeline_parallel_size:
        chosen = [[weight for weights in chosen for weight in weights]]
    factors = sum(_factors(sc, weights, replicas) for weights in chosen)
    return {
        "compressed_matrices": len(compressed),
        "data_parallel_logical_bytes": (1 if scattered else 2) * ring * reduced * _GRADIENT_BYTES,
        "data_parallel_wire_bytes": ring * (2 * all_reduced + rest) * _GRADIENT_BYTES + factors,
        "embedding_bytes": embedding,
        "parameter_gather_bytes": ring * elements * config.message_itemsize if scattered else 0.0,
        "gradient_memory_bytes": _gradient_memory(sc, compressed),
    }


def _factors(sc: SelectiveStageCompressionConfig, weights: Sequence[Weight], replicas: int) -> float:
    """What one rank sends for the factors of matrices that travel together."""
    if not weights or not isinstance(sc.codec, LowRankConfig):
        return 0.0
    ranks = [min(sc.codec.rank, *weight.shape) for weight in weights]
    return sum(
        mean_nbytes(
            sum(rank * weight.shape[side] for rank, weight in zip(ranks, weights, strict=True)),
            len(weights),
            sc.codec.wire_dtype,
            replicas,
        )
        for side in (0, 1)
    )


def _gradient_memory(sc: SelectiveStageCompressionConfig, compressed: Sequence[Weight]) -> int:
    elements = sum(weight.numel for weight in compressed) if sc.error_feedback else 0
    if isinstance(sc.codec, LowRankConfig) and sc.codec.warm_start:
        elements += sum(2 * weight.shape[1] * min(sc.codec.rank, *weight.shape) for weight in compressed)
    return elements * _MEMORY_BYTES


def _tensor_parallel(config: RunConfig, stage: int, messages_received: int) -> float:
    """What one rank sends inside its tensor-parallel group.

    An all-gather or a reduce-scatter of n bytes makes a rank send n (TP - 1) / TP, an all-reduce twice that.
    """
    parallel, model = config.parallel, config.model
    size = parallel.tensor_parallel_size
    shared_out = parallel.sequence_parallel
    layers = model.num_layers // parallel.num_virtual_stages
    # All-gathers and reduce-scatters of one micro-batch's activations. In a layer attention and MLP each need two
    # forward and two backward; sequence parallelism gathers the inputs again for the gradients of the weights.
    forward, backward = 4, 6 if shared_out else 4
    if config.training.recompute == "full":
        backward += forward
    passes = layers * (forward + backward)
    if stage == 0:
        summed_in_shares = shared_out and model.position_embedding != "learned"
        passes += (1 if summed_in_shares else 2) + shared_out
    last = stage == parallel.num_virtual_stages - 1
    passes += (3 if shared_out else 2) * last
    tokens = model.sequence_length * config.training.micro_batch_size
    activations = tokens * model.hidden_size * config.message_itemsize
    sums = 3 * 2 * tokens * _LOSS_BYTES * last  # of the largest logit, the label's logit and the exponentials
    gathered = messages_received * activations if parallel.split_over_tensor_parallel else 0
    return (size - 1) / size * (config.num_microbatches * (passes * activations + sums) + gathered)


def _norm_gradients(config: RunConfig, parameters: StageParameters) -> float:
    size = config.parallel.tensor_parallel_size
    if not config.parallel.sequence_parallel:
        return 0.0
    summed = sum(
        weight.numel for weight in parameters.weights if not weight.sharded and not weight.is_position_embedding
    )
    return 2 * (size - 1) / size * summed * _GRADIENT_BYTES
