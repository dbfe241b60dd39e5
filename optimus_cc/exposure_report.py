"""What a composed configuration sends, what of it is compressed, and what can't help: told before anything runs.

Bytes are those of one training step, counted as the traffic meter counts them in a run: point-to-point by what is
sent, a collective by what the ring algorithm makes a rank send.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from optimus_cc.config.codec import LowRankConfig
from optimus_cc.config.model import padded_vocabulary_size
from optimus_cc.config.run import RunConfig
from optimus_cc.config.tokenizer import GPT2_VOCABULARY_SIZE, BpeTokenizerConfig, HuggingFaceTokenizerConfig
from optimus_cc.exposure import Message
from optimus_cc.stage_parameters import stage_parameters
from optimus_cc.wire_size import matrix_shape

_GRADIENT_BYTES = 4  # gradients are kept and reduced in fp32
_MEMORY_BYTES = 4  # so are error memories and queries


@dataclass(frozen=True)
class StageExposure:
    """One virtual stage: chunk ``virtual_stage // P`` of pipeline rank ``virtual_stage % P``. Bytes are per step."""

    virtual_stage: int
    pipeline_rank: int
    parameters: int
    """On one rank."""
    backward_messages: int
    """That one rank sends."""
    epilogue_messages: int
    compressed_messages: int
    forward_messages: int
    forward_logical_bytes: int
    forward_wire_bytes: int
    backward_logical_bytes: int
    backward_wire_bytes: int
    data_parallel_bytes: float
    """That one rank sends for its gradients, in a ring."""
    embedding_bytes: float
    """That one rank sends to keep the copies of a tied word embedding equal."""
    parameter_gather_bytes: float
    """That one rank sends of its updated shard, with the distributed optimizer."""
    error_memory_bytes: int
    """Of one rank."""
    query_bytes: int
    """Of one rank: the warm-started query of each stream, and the one that it started from."""


def stages(config: RunConfig) -> list[StageExposure]:
    """Every virtual stage of ``config``, in the order in which a sample passes them."""
    parallel = config.parallel
    size, last_stage = parallel.pipeline_parallel_size, parallel.num_virtual_stages - 1
    replicas = parallel.data_parallel_size
    backward: dict[int, list[Message]] = {}
    forward: dict[int, list[Message]] = {}
    for rank in range(size):
        for message in config.schedule.sent_backward(rank):
            backward.setdefault(message.boundary + 1, []).append(message)
        for message in config.schedule.sent_forward(rank):
            forward.setdefault(message.boundary, []).append(message)
    vocabulary = padded_vocabulary_size(vocabulary_size(config))
    result = []
    for stage in range(last_stage + 1):
        parameters = stage_parameters(config.model, parallel, vocabulary, stage)
        gradients = parameters.total * _GRADIENT_BYTES
        shared = config.model.tied_embeddings and size > 1 and stage in (0, last_stage)
        reductions = 1 if parallel.distributed_optimizer else 2
        weights = parameters.total * config.message_itemsize
        ring = (replicas - 1) / replicas
        copy = parameters.word_embedding * _GRADIENT_BYTES if shared else 0
        embedding = float(copy)
        if config.technique.fe.enabled:
            # One ring over 2 D ranks, without the embedding in the reduction; or only the rank's own shard after that.
            embedding *= 1 / replicas if parallel.distributed_optimizer else (2 * replicas - 1) / replicas
            gradients -= 0 if parallel.distributed_optimizer else copy
        result.append(
            StageExposure(
                virtual_stage=stage,
                pipeline_rank=stage % size,
                parameters=parameters.total,
                data_parallel_bytes=reductions * ring * gradients,
                embedding_bytes=embedding,
                parameter_gather_bytes=ring * weights if parallel.distributed_optimizer else 0.0,
                **_messages(config, backward.get(stage, []), forward.get(stage, [])),
            )
        )
    return result


def _messages(config: RunConfig, backward: Sequence[Message], forward: Sequence[Message]) -> dict[str, int]:
    """What one virtual stage sends to its neighbours, and what the codecs of these streams keep in memory."""
    cb = config.technique.cb
    compressed = sum(
        cb.enabled and message.is_compressed(epilogue_only=cb.epilogue_only, flush=cb.flushes) for message in backward
    )
    forward_compressed = len(forward) if cb.enabled and cb.compress_forward else 0
    plain, encoded = config.message_nbytes, config.compressed_message_nbytes
    whole = plain * _shares(config)
    query = 0
    if isinstance(cb.codec, LowRankConfig) and cb.codec.warm_start:
        rows, columns = matrix_shape(config.message_shape)
        query = 2 * columns * min(cb.codec.rank, rows, columns) * _MEMORY_BYTES
    memory = math.prod(config.message_shape) * _MEMORY_BYTES if cb.lazy_error_propagation else 0
    return {
        "backward_messages": len(backward),
        "epilogue_messages": sum(message.epilogue for message in backward),
        "compressed_messages": compressed,
        "forward_messages": len(forward),
        "forward_logical_bytes": len(forward) * whole,
        "forward_wire_bytes": (len(forward) - forward_compressed) * plain + forward_compressed * encoded,
        "backward_logical_bytes": len(backward) * whole,
        "backward_wire_bytes": (len(backward) - compressed) * plain + compressed * encoded,
        "error_memory_bytes": memory * bool(compressed),
        "query_bytes": query * (bool(compressed) + bool(forward_compressed)),
    }


def _shares(config: RunConfig) -> int:
    """Over how many tensor-parallel ranks a message that all of them hold is shared out."""
    return config.parallel.tensor_parallel_size if config.parallel.split_over_tensor_parallel else 1


def traffic(config: RunConfig) -> dict[str, dict[str, float]]:
    """Bytes that all ranks together send in one step, by traffic class, as a run's records name them."""
    replicas = config.parallel.tensor_parallel_size * config.parallel.data_parallel_size
    every = stages(config)

    def total(logical: str, wire: str) -> dict[str, float]:
        return {
            "logical_bytes": replicas * sum(getattr(stage, logical) for stage in every),
            "wire_bytes": replicas * sum(getattr(stage, wire) for stage in every),
        }

    return {
        "pipeline_forward": total("forward_logical_bytes", "forward_wire_bytes"),
        "pipeline_backward": total("backward_logical_bytes", "backward_wire_bytes"),
        **{
            name: total(f"{name}_bytes", f"{name}_bytes") for name in ("data_parallel", "embedding", "parameter_gather")
        },
    }


def memory_by_rank(config: RunConfig) -> list[int]:
    """Bytes that error memories and queries take on a rank of each pipeline rank, over all its chunks."""
    memory = [0] * config.parallel.pipeline_parallel_size
    for stage in stages(config):
        memory[stage.pipeline_rank] += stage.error_memory_bytes + stage.query_bytes
    return memory


def vocabulary_size(config: RunConfig) -> int:
    """Entries of the tokenizer's vocabulary; for one that is yet to be trained, as many as were asked for."""
    tokenizer = config.tokenizer
    if isinstance(tokenizer, BpeTokenizerConfig):
        return tokenizer.vocabulary_size
    if isinstance(tokenizer, HuggingFaceTokenizerConfig):
        content = json.loads((Path(tokenizer.path) / "tokenizer.json").read_text(encoding="utf-8"))
        added = {token["content"] for token in content.get("added_tokens", [])}
        vocabulary = content["model"]["vocab"]  # a mapping, or for unigram models a list of pairs
        known = set(vocabulary) if isinstance(vocabulary, dict) else {token for token, _ in vocabulary}
        return len(known | added)
    return GPT2_VOCABULARY_SIZE


def remarks(config: RunConfig) -> Iterator[str]:
    """In plain sentences: what is gained, what can't help here, and why."""
    parallel, cb = config.parallel, config.technique.cb
    classes = traffic(config)
    everything = sum(count["logical_bytes"] for count in classes.values())
    if cb.enabled:
        # What sharing messages out saves is not the codec's.
        sent = {name: count["logical_bytes"] for name, count in classes.items()}
        for name in ("pipeline_forward", "pipeline_backward"):
            sent[name] /= _shares(config)
        saved = {name: sent[name] - count["wire_bytes"] for name, count in classes.items()}
        backward = sent["pipeline_backward"]
        line = (
            f"Compressed backpropagation saves {_share(saved['pipeline_backward'], backward)} of the backward "
            f"messages' bytes and {_share(sum(saved.values()), sum(sent.values()))} of all that is listed here."
        )
        if cb.epilogue_only:
            line += (
                " With epilogue_only its point is the time that these messages would be waited for, not their volume."
            )
        yield line
        encoded, plain = config.compressed_message_nbytes, config.message_nbytes
        yield f"A compressed message has {encoded:,} bytes in place of {plain:,}."
        yield (
            "Error memories and warm-started queries add up to "
            f"{_mb(max(memory_by_rank(config)))} MB on one rank, messages in flight not counted."
        )
        yield from config.notices()
        yield from _lonely_boundaries(config)
    if config.technique.sc.enabled:
        yield "technique.sc is not worked out here: data_parallel is what would be sent without it."
    yield from _limits(config)
    if everything and not parallel.distributed_optimizer:
        backward = classes["pipeline_backward"]["logical_bytes"]
        yield (
            f"Backward messages are {_share(backward, everything)} of these bytes, gradients "
            f"{_share(classes['data_parallel']['logical_bytes'], everything)}, the shared embedding "
            f"{_share(classes['embedding']['logical_bytes'], everything)}."
        )
    if parallel.distributed_optimizer and parallel.data_parallel_size > 1:
        yield (
            "The distributed optimizer pads its buffers, so data_parallel and parameter_gather are a little more "
            "than said here."
        )


def _lonely_boundaries(config: RunConfig) -> Iterator[str]:
    """Boundaries at which lazy error propagation has nothing to pass on, where there are others at which it has."""
    cb = config.technique.cb
    if not cb.lazy_error_propagation or cb.residual != "reset":
        return
    counts = config.schedule.compressed_counts(epilogue_only=cb.epilogue_only, flush=cb.flushes)
    lonely = [boundary for boundary, count in counts.items() if count == 1]
    if lonely and max(counts.values()) > 1:
        names = ", ".join(f"{boundary} to {boundary + 1}" for boundary in sorted(lonely))
        yield (
            f"One message per mini-batch is compressed between the stages {names}: lazy error propagation does nothing "
            "there under residual=reset."
        )


def _limits(config: RunConfig) -> Iterator[str]:
    """What would help in this layout and what can't, whether or not it is switched on."""
    parallel, model = config.parallel, config.model
    tp = parallel.tensor_parallel_size
    if parallel.pipeline_parallel_size > 1 and parallel.split_over_tensor_parallel:
        yield f"Each of {tp} tensor-parallel ranks sends its share of a message: 1/{tp} of the bytes, without loss."
    elif parallel.pipeline_parallel_size > 1 and tp > 1 and not parallel.sequence_parallel:
        yield (
            f"{tp} tensor-parallel ranks send the same messages. parallel.split_over_tensor_parallel=true would send "
            f"1/{tp} of these bytes between stages, without loss, and gather them inside the group."
        )
    stages, replicas = parallel.pipeline_parallel_size, parallel.data_parallel_size
    if stages == 1:
        yield (
            "Compressed backpropagation can't help: one pipeline stage sends no messages. Nor can fused embedding "
            "synchronisation: there is one copy of the word embedding."
        )
    if replicas == 1:
        yield (
            "Compressing data-parallel gradients, selectively or not, can't help: with one data-parallel rank none are "
            "exchanged."
        )
    if stages > 1 and not model.tied_embeddings:
        yield (
            "Fused embedding synchronisation can't help: the embeddings are not tied, so there is nothing to "
            "synchronise."
        )
    elif stages > 1 and replicas == 1:
        yield (
            "Fused embedding synchronisation can't help: with one data-parallel rank its one all-reduce is the one "
            "that runs anyway."
        )
    elif stages > 1:
        two_steps, fused = (3 * replicas - 2) / replicas, (2 * replicas - 1) / replicas
        sends = "sends" if config.technique.fe.enabled else "would send"
        yield (
            f"Fused embedding synchronisation {sends} {fused:.4g} times the embedding's gradient per rank in place "
            f"of {two_steps:.4g} times: {_share(two_steps - fused, two_steps)} less, "
            f"or {two_steps / fused:.3f} times as fast."
        )
    if stages > 1 and config.num_microbatches <= stages:
        yield (
            f"With {config.num_microbatches} micro-batches for {stages} stages hardly any message is outside the "
            "epilogue: epilogue_only makes little difference, and idle stages cost more than messages do."
        )


def report(config: RunConfig) -> dict[str, Any]:
    """Print the report of ``config``, and return its numbers."""
    every, classes, said = stages(config), traffic(config), list(remarks(config))
    vocabulary = vocabulary_size(config)
    parallel = config.parallel
    ranks = f"{parallel.world_size} rank{'s' * (parallel.world_size != 1)}"
    print(
        f"{config.model.name} in layout {parallel.label} ({ranks}), "
        f"{config.technique.label}: "
        f"{config.num_microbatches} micro-batches of {'x'.join(map(str, config.message_shape))}, "
        f"{config.training.precision}, vocabulary {vocabulary:,} padded to {padded_vocabulary_size(vocabulary):,}"
    )
    print("\nEach rank of a stage, per step (MB = 10^6 bytes; wire < logical where something is compressed)")
    print(_table(*_stage_rows(every)))
    header, rows = _class_rows(classes)
    if rows:
        print("\nAll ranks, per step")
        print(_table(header, rows))
    print()
    for line in said:
        print(f"- {line}")
    return {
        "stages": [asdict(stage) for stage in every],
        "traffic": classes,
        "memory_bytes_by_pipeline_rank": memory_by_rank(config),
        "remarks": said,
        "vocabulary_size": vocabulary,
        "padded_vocabulary_size": padded_vocabulary_size(vocabulary),
    }


def _stage_rows(every: Sequence[StageExposure]) -> tuple[list[str], list[list[str]]]:
    gathers = any(stage.parameter_gather_bytes for stage in every)
    header = ["stage", "rank", "parameters", "sent back", "epilogue", "compressed", "forward MB", "backward MB"]
    header += ["wire MB", "gradients MB", "embedding MB", *(["parameters MB"] if gathers else []), "memory MB"]
    rows = []
    for stage in every:
        counts = (stage.parameters, stage.backward_messages, stage.epilogue_messages, stage.compressed_messages)
        sizes: list[float] = [stage.forward_wire_bytes, stage.backward_logical_bytes, stage.backward_wire_bytes]
        sizes += [stage.data_parallel_bytes, stage.embedding_bytes]
        sizes += [stage.parameter_gather_bytes] if gathers else []
        sizes += [stage.error_memory_bytes + stage.query_bytes]
        rows.append(
            [str(stage.virtual_stage), str(stage.pipeline_rank), *(f"{count:,}" for count in counts), *map(_mb, sizes)]
        )
    return header, rows


def _class_rows(classes: dict[str, dict[str, float]]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for name, count in classes.items():
        logical, wire = count["logical_bytes"], count["wire_bytes"]
        if logical:
            rows.append([name, _mb(logical), _mb(wire), _mb(logical - wire), _share(logical - wire, logical)])
    return ["class", "logical MB", "wire MB", "saved MB", "saved"], rows


def _table(header: list[str], rows: list[list[str]]) -> str:
    """Text columns: the first one to the left, numbers to the right."""
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]
    lines = [
        "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(cells))
        for cells in (list(zip(line, widths, strict=True)) for line in (header, *rows))
    ]
    return "\n".join(lines)


def _mb(count: float) -> str:
    return f"{count / 1e6:,.1f}" if count >= 1e8 or not count else f"{count / 1e6:,.3f}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "0.0%"
