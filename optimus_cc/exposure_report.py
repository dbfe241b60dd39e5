"""What a composed configuration sends, what of it is compressed, and what can't help: told before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from optimus_cc.config.model import padded_vocabulary_size
from optimus_cc.config.run import RunConfig
from optimus_cc.stage_parameters import Weight
from optimus_cc.stage_traffic import (
    StageTraffic,
    compressible,
    compressing_ranks,
    memory_by_rank,
    parameters_of,
    shares,
    stages,
    traffic,
    vocabulary_size,
)
from optimus_cc.wire_size import low_rank_elements

_INSIDE_GROUP = ("tensor_parallel", "other")
"""Classes that stay inside a tensor-parallel group; nothing here compresses them."""


def remarks(config: RunConfig) -> Iterator[str]:
    """In plain sentences: what is gained, what can't help here, and why."""
    every, classes = stages(config), traffic(config)
    yield from _compressed_backpropagation(config, classes)
    yield from _selective_stage_compression(config, every, classes)
    yield from config.notices()
    yield from _limits(config)
    yield from _totals(config, classes)


def _compressed_backpropagation(config: RunConfig, classes: dict[str, dict[str, float]]) -> Iterator[str]:
    cb = config.technique.cb
    if not cb.enabled:
        return
    # What sharing messages out saves is not the codec's.
    sent = {name: count["logical_bytes"] for name, count in _between_groups(classes).items()}
    for name in ("pipeline_forward", "pipeline_backward"):
        sent[name] /= shares(config)
    saved = sum(sent[name] - classes[name]["wire_bytes"] for name in ("pipeline_forward", "pipeline_backward"))
    backward = sent["pipeline_backward"]
    line = (
        "Compressed backpropagation saves "
        f"{_share(backward - classes['pipeline_backward']['wire_bytes'], backward)} of the backward messages' bytes "
        f"and {_share(saved, sum(sent.values()))} of all that leaves a tensor-parallel group."
    )
    if cb.epilogue_only:
        line += " With epilogue_only its point is the time that these messages would be waited for, not their volume."
    yield line
    yield (
        f"A compressed message has {config.compressed_message_nbytes:,} bytes in place of {config.message_nbytes:,}."
    )
    memory = [0] * config.parallel.pipeline_parallel_size
    for stage in stages(config):
        memory[stage.pipeline_rank] += stage.message_memory_bytes
    yield (
        f"Its error memories and warm-started queries add up to {_mb(max(memory))} MB on one rank, messages in flight "
        "not counted."
    )
    yield from _lonely_boundaries(config)


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


def _selective_stage_compression(
    config: RunConfig, every: Sequence[StageTraffic], classes: dict[str, dict[str, float]]
) -> Iterator[str]:
    """What it does to the gradients, and which reductions are on the critical path, whether or not it is on."""
    parallel, sc = config.parallel, config.technique.sc
    size, chosen = parallel.pipeline_parallel_size, compressing_ranks(config)
    if parallel.data_parallel_size == 1:
        return
    line = "Pipeline rank 0 ends its backward pass last, so the reduction of its gradients is on the critical path"
    line += ", but for what overlap_grad_reduce hides." if parallel.overlap_grad_reduce else ": nothing hides it."
    if size > 1:
        line += f" Rank p's has p backward steps of other ranks to hide behind, the last rank's {size - 1}."
    yield line
    if not chosen:
        return
    on_them = [stage for stage in every if stage.pipeline_rank in chosen]
    logical = sum(stage.data_parallel_logical_bytes for stage in on_them)
    saved = logical - sum(stage.data_parallel_wire_bytes for stage in on_them)
    total = classes["data_parallel"]["logical_bytes"]
    everything = sum(count["logical_bytes"] for count in _between_groups(classes).values())
    of_all = saved * parallel.tensor_parallel_size * parallel.data_parallel_size
    ranks = f"ranks 0 to {chosen[-1]}" if len(chosen) > 1 else "rank 0"
    yield (
        f"Selective stage compression on pipeline {ranks} of {size} ({len(chosen) / size:.0%}) saves "
        f"{_share(saved, logical)} of the gradients' bytes there, {_share(of_all, total)} of data_parallel and "
        f"{_share(of_all, everything)} of all that leaves a tensor-parallel group"
        + (f", from step {sc.warmup_steps + 1:,} on." if sc.warmup_steps else ".")
    )
    memory = [sum(s.gradient_memory_bytes for s in every if s.pipeline_rank == rank) for rank in range(size)]
    yield f"Its error memories and queries add up to {_mb(max(memory))} MB on one rank."
    yield from _left_dense(config, on_them)
    if size > 1 and size - 1 in chosen:
        yield (
            f"The last rank's gradients are compressed too, though their reduction has {_count(size - 1, 'step')} to "
            "hide behind: that costs quality where least time can be saved."
        )
    if parallel.distributed_optimizer:
        yield (
            "The distributed optimizer scatters gradients for half of what an all-reduce sends, but factors are "
            "all-reduced, and so is the rest of a bucket that holds compressed matrices: a matrix gains only above a "
            "compression ratio of 2."
        )
        if saved < 0:
            yield "Here that makes more bytes than without compression: selective stage compression can't help."


def _left_dense(config: RunConfig, on_them: Sequence[StageTraffic]) -> Iterator[str]:
    """What of the compressing ranks' parameters still travels whole."""
    sc, tp = config.technique.sc, config.parallel.tensor_parallel_size
    weights = [weight for stage in on_them for weight in parameters_of(config, stage.virtual_stage).weights]
    compressed = set(compressible(config, sc, weights))
    dense = [weight for weight in weights if weight not in compressed]
    kinds = {
        "vectors": any(len(weight.shape) == 1 for weight in dense),
        "position embeddings": any(weight.is_position_embedding for weight in dense),
        "the word embedding (reduced by fused embedding synchronisation)": config.technique.fe.enabled
        and any(weight.is_word_embedding for weight in dense),
    }
    named = [kind for kind, there in kinds.items() if there]
    yield f"On these ranks the gradients of {_listed(named)} stay dense."
    small = {
        _kind(weight): weight
        for weight in dense
        if len(weight.shape) == 2 and not weight.is_position_embedding and not sc.compresses(*weight.shape)
    }
    if small:
        sizes = _listed([f"{name} ({weight.shape[0]} x {weight.shape[1]})" for name, weight in small.items()])
        yield (
            f"So do matrices with less than {sc.min_compression_ratio:g} times the elements of their two factors: "
            f"{sizes}" + (f". These are shares of {tp} tensor-parallel ranks; whole ones gain more." if tp > 1 else ".")
        )


def _kind(weight: Weight) -> str:
    """A weight's name without its layer."""
    return ".".join(weight.name.removesuffix(".weight").split(".")[-2:])


def _limits(config: RunConfig) -> Iterator[str]:
    """What would help in this layout and what can't, whether or not it is switched on."""
    parallel, model = config.parallel, config.model
    tp = parallel.tensor_parallel_size
    if parallel.pipeline_parallel_size > 1 and parallel.split_over_tensor_parallel:
        yield (
            f"Each of {tp} tensor-parallel ranks sends its share of a message: 1/{tp} of the bytes, without loss. "
            "Gathering them counts as tensor_parallel."
        )
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
    else:
        yield from _too_small(config)
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
        # With the distributed optimizer the first step is a reduce-scatter, and the second needs the shard only.
        scattered = parallel.distributed_optimizer
        two_steps = ((2 if scattered else 3) * replicas - (1 if scattered else 2)) / replicas
        fused = 1.0 if scattered else (2 * replicas - 1) / replicas
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


def _too_small(config: RunConfig) -> Iterator[str]:
    """Whether selective stage compression, at the model's rank, would find anything to compress in a layer."""
    sc = config.technique.sc
    rank = sc.default_rank
    if sc.enabled or rank is None:
        return
    ratios = {
        weight: weight.numel / low_rank_elements(weight.shape, rank)
        for weight in parameters_of(config, 0).weights
        if len(weight.shape) == 2 and weight.name.startswith("decoder.layers")
    }
    best = max(ratios, key=ratios.__getitem__)
    if ratios[best] < sc.min_compression_ratio:
        yield (
            f"Selective stage compression can't help at rank {rank}: no matrix of a layer has "
            f"{sc.min_compression_ratio:g} times the elements of its two factors; {_kind(best)} "
            f"({best.shape[0]} x {best.shape[1]}), the best of them, has {ratios[best]:.2g} times."
        )


def _totals(config: RunConfig, classes: dict[str, dict[str, float]]) -> Iterator[str]:
    between = {name: count["logical_bytes"] for name, count in _between_groups(classes).items()}
    everything = sum(between.values())
    if everything:
        yield (
            f"Of what leaves a tensor-parallel group, uncompressed, backward messages are "
            f"{_share(between['pipeline_backward'], everything)}, gradients "
            f"{_share(between['data_parallel'], everything)}, the shared embedding "
            f"{_share(between['embedding'], everything)}."
        )
    if classes["tensor_parallel"]["logical_bytes"]:
        yield (
            "tensor_parallel is what Megatron-core's own layers send"
            + (", and other their LayerNorms' gradients" if classes["other"]["logical_bytes"] else "")
            + ". No technique here compresses it; keep these groups inside a node."
        )
    yield "Norms and control messages, a few bytes a step each, are not listed."


def _between_groups(classes: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {name: count for name, count in classes.items() if name not in _INSIDE_GROUP}


def report(config: RunConfig) -> dict[str, Any]:
    """Print the report of ``config``, and return its numbers."""
    every, classes, said = stages(config), traffic(config), list(remarks(config))
    vocabulary = vocabulary_size(config)
    parallel = config.parallel
    print(
        f"{config.model.name} in layout {parallel.label} ({_count(parallel.world_size, 'rank')}), "
        f"{config.technique.label}: "
        f"{config.num_microbatches} micro-batches of {'x'.join(map(str, config.message_shape))}, "
        f"{config.training.precision}, vocabulary {vocabulary:,} padded to {padded_vocabulary_size(vocabulary):,}"
    )
    print("\nBytes sent per step; MB = 10^6 bytes. wire: as sent; before it, what would be sent uncompressed")
    if parallel.pipeline_parallel_size > 1:
        print("\nEach rank of a stage: messages to its neighbours")
        print(_table(*_message_rows(every)))
    print("\nEach rank of a stage: gradients, the backward steps left to hide them behind, the matrices compressed")
    print(_table(*_group_rows(every)))
    header, rows = _class_rows(classes)
    if rows:
        print("\nAll ranks")
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


def _message_rows(every: Sequence[StageTraffic]) -> tuple[list[str], list[list[str]]]:
    header = ["stage", "rank", "sent back", "epilogue", "compressed", "forward MB", "wire MB", "backward MB", "wire MB"]
    rows = []
    for stage in every:
        counts = (stage.backward_messages, stage.epilogue_messages, stage.compressed_messages)
        forward = (stage.forward_logical_bytes, stage.forward_wire_bytes)
        backward = (stage.backward_logical_bytes, stage.backward_wire_bytes)
        sizes = map(_mb, (*forward, *backward, stage.message_memory_bytes))
        rows.append([*_place(stage), *(f"{count:,}" for count in counts), *sizes])
    return [*header, "memory MB"], rows


def _group_rows(every: Sequence[StageTraffic]) -> tuple[list[str], list[list[str]]]:
    columns: dict[str, list[float]] = {
        "gradients MB": [stage.data_parallel_logical_bytes for stage in every],
        "wire MB": [stage.data_parallel_wire_bytes for stage in every],
        "embedding MB": [stage.embedding_bytes for stage in every],
        "gather MB": [stage.parameter_gather_bytes for stage in every],
        "tensor MB": [stage.tensor_parallel_bytes for stage in every],
        "norms MB": [stage.norm_gradient_bytes for stage in every],
        "memory MB": [stage.gradient_memory_bytes for stage in every],
    }
    rare = ("gather MB", "tensor MB", "norms MB")
    shown = {name: values for name, values in columns.items() if name not in rare or any(values)}
    rows = []
    for index, stage in enumerate(every):
        counts = (stage.parameters, stage.backward_steps_left, stage.compressed_matrices)
        sizes = (_mb(values[index]) for values in shown.values())
        rows.append([*_place(stage), *(f"{count:,}" for count in counts), *sizes])
    return ["stage", "rank", "parameters", "steps left", "compressed", *shown], rows


def _class_rows(classes: dict[str, dict[str, float]]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for name, count in classes.items():
        logical, wire = count["logical_bytes"], count["wire_bytes"]
        if logical:
            rows.append([name, _mb(logical), _mb(wire), _mb(logical - wire), _share(logical - wire, logical)])
    return ["class", "logical MB", "wire MB", "saved MB", "saved"], rows


def _place(stage: StageTraffic) -> list[str]:
    return [str(stage.virtual_stage), str(stage.pipeline_rank)]


def _table(header: list[str], rows: list[list[str]]) -> str:
    """Text columns: the first one to the left, numbers to the right."""
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]
    lines = [
        "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(cells))
        for cells in (list(zip(line, widths, strict=True)) for line in (header, *rows))
    ]
    return "\n".join(lines)


def _mb(count: float) -> str:
    return f"{count / 1e6:,.1f}" if abs(count) >= 1e8 or not count else f"{count / 1e6:,.3f}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "0.0%"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + " and " * (len(names) > 1) + names[-1]
