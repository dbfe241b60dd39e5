"""A plan priced with hardware: when each pass, message and reduction of a step begins and ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from optimus_cc.config.codec import LowRankConfig
from optimus_cc.simulation import cost
from optimus_cc.simulation.collectives import message_s, ring_s
from optimus_cc.simulation.hardware import Hardware
from optimus_cc.simulation.pipeline import Work
from optimus_cc.simulation.plan import StagePlan, StepPlan
from optimus_cc.simulation.reduction import Event, at_the_end, embedding_s, reduction
from optimus_cc.wire_size import message_matrix


@dataclass(frozen=True)
class StepTime:
    """The priced step."""

    total_s: float
    parts_s: dict[str, float]
    """Seconds of the critical path by what they are spent on; they add up to ``total_s``."""
    tensor_parallel_s: float
    """How much of forward and backward parts is communication inside tensor-parallel groups, on the critical rank."""
    plan: StepPlan
    works_s: list[float]
    ends_s: list[float]
    path: list[int]
    after: list[Event]
    """What follows the passes: reductions, optimizer, and so on."""

    def events(self) -> Iterator[Event]:
        """All that all pipeline ranks do; a message stands on its sender's row."""
        graph, on_path = self.plan.graph, set(self.path)
        for index, node in enumerate(graph.nodes):
            work, end = graph.works[node.work], self.ends_s[index]
            begin = end - self.works_s[node.work]
            yield Event(node.rank, work.kind, begin, end, work.place, node.microbatch, index in on_path)
        yield from self.after


@dataclass(frozen=True)
class _Pass:
    forward: float
    backward: float
    tensor_parallel: float
    """Of both."""


def price(plan: StepPlan, hardware: Hardware) -> StepTime:
    """What ``plan`` takes on ``hardware``."""
    passes = _passes(plan, hardware)
    works = [_work_s(plan, hardware, passes, work) for work in plan.graph.works]
    ends = plan.graph.ends(works)
    size = plan.config.parallel.pipeline_parallel_size
    last_nodes = [max(nodes, key=ends.__getitem__) for nodes in plan.graph.last]
    backward_s = [pass_.backward for pass_ in passes]
    reductions = [reduction(plan, hardware, rank, ends, backward_s, ends[last_nodes[rank]]) for rank in range(size)]
    ready = [one.end for one in reductions]
    critical = max(range(size), key=ready.__getitem__)
    end = ready[critical]
    after: list[Event] = []
    if embedding := embedding_s(plan, hardware):
        later = max((0, size - 1), key=ready.__getitem__)
        together = ready[later] + embedding
        exposed = together >= end
        after += [Event(rank, "embedding", ready[later], together, exposed=exposed) for rank in (0, size - 1)]
        if exposed:
            critical, end = later, together
        else:
            embedding = 0.0
    for rank in range(size):
        after += reductions[rank].events(rank, critical=rank == critical)
    path = plan.graph.critical_path(ends, last_nodes[critical])
    own = [pass_ for stage, pass_ in zip(plan.stages, passes, strict=True) if stage.traffic.pipeline_rank == critical]
    microbatches = plan.config.num_microbatches
    parts = {
        "forward": microbatches * sum(pass_.forward for pass_ in own),
        "backward": microbatches * sum(pass_.backward for pass_ in own),
        "bubble": 0.0,
        "inter_stage": 0.0,
        "codec": reductions[critical].codec_s,
        "data_parallel": reductions[critical].end - ends[last_nodes[critical]] - reductions[critical].codec_s,
        "embedding": embedding,
    }
    for index in path:
        work = plan.graph.works[plan.graph.nodes[index].work]
        kind = {"encode": "codec", "decode": "codec", "forward": "bubble", "backward": "bubble"}.get(work.kind)
        parts[kind or "inter_stage"] += works[plan.graph.nodes[index].work]
    # Passes of other stages on the critical path are what this rank waits for.
    parts["bubble"] -= parts["forward"] + parts["backward"]
    if parts["bubble"] < 0:
        parts["inter_stage"] = max(0.0, parts["inter_stage"] + parts["bubble"])
        parts["bubble"] = 0.0
    for kind, seconds in at_the_end(plan, hardware):
        parts[kind] = seconds
        after += [Event(rank, kind, end, end + seconds, exposed=True) for rank in range(size) if seconds]
        end += seconds
    return StepTime(
        total_s=end,
        parts_s=parts,
        tensor_parallel_s=microbatches * sum(pass_.tensor_parallel for pass_ in own),
        plan=plan,
        works_s=works,
        ends_s=ends,
        path=path,
        after=after,
    )


def _passes(plan: StepPlan, hardware: Hardware) -> list[_Pass]:
    """Forward and backward pass of one micro-batch in each virtual stage."""
    spread = plan.config.parallel.world_size > hardware.ranks_per_node
    slower = 1 / hardware.several_nodes if spread else 1.0
    known: dict[tuple[bool, bool], _Pass] = {}
    result = []
    for stage in plan.stages:
        key = (stage.first, stage.last)
        if key not in known:
            one = _pass(plan, hardware, stage)
            known[key] = _Pass(slower * one.forward, slower * one.backward, slower * one.tensor_parallel)
        result.append(known[key])
    return result


def _pass(plan: StepPlan, hardware: Hardware, stage: StagePlan) -> _Pass:
    shape, config = plan.layer, plan.config
    layer_forward, layer_backward = cost.layer_s(hardware, shape)
    forward, backward = layer_forward * stage.layers, layer_backward * stage.layers
    if config.training.recompute == "full":
        backward += forward
    elif config.training.recompute == "selective":
        backward += cost.attention_s(hardware, shape) * stage.layers
    if stage.first:
        lookup = cost.embedding_s(hardware, shape.tokens, shape.hidden, shape.itemsize)
        forward, backward = forward + lookup, backward + lookup
    if stage.last:
        logits = cost.logits_s(hardware, shape.tokens, shape.hidden, plan.vocabulary, shape.itemsize)
        forward, backward = forward + logits[0], backward + logits[1]
    tensor = stage.tensor_parallel
    group = plan.tensor_group
    once = group.size - 1
    # Pairs of passes are one all-reduce, or an all-gather and a reduce-scatter of the same bytes.
    one = ring_s(hardware, group, 2 * tensor.passes_bytes, 2 * once)
    loss = 3 * ring_s(hardware, group, tensor.loss_bytes / 3, 2 * once) if tensor.loss_bytes else 0.0
    forward_s, backward_s = tensor.forward / 2 * one + loss, tensor.backward / 2 * one
    if config.simulation.fully_sharded:
        forward, backward = _behind(plan, hardware, stage, forward, 1), _behind(plan, hardware, stage, backward, 2)
    return _Pass(
        (forward + cost.PassTime(forward_s, tensor.forward / 2 * once * hardware.wait_s)).seconds,
        (backward + cost.PassTime(backward_s, tensor.backward / 2 * once * hardware.wait_s)).seconds,
        forward_s + backward_s,
    )


def _behind(
    plan: StepPlan, hardware: Hardware, stage: StagePlan, computed: cost.PassTime, collectives: int
) -> cost.PassTime:
    """A pass of a fully sharded stage, of which each layer's weights take ``collectives`` gathers or scatters behind
    computation; nothing hides the first layer's."""
    group = plan.data_group
    sent = plan.layer.parameters * plan.layer.itemsize * (group.size - 1) / group.size
    one = collectives * ring_s(hardware, group, sent, group.size - 1)
    device = max(computed.device, stage.layers * one) + min(one, computed.device / stage.layers)
    return cost.PassTime(device, computed.host)


def _work_s(plan: StepPlan, hardware: Hardware, passes: list[_Pass], work: Work) -> float:
    config = plan.config
    if work.kind == "forward":
        return passes[work.place].forward
    if work.kind == "backward":
        return passes[work.place].backward
    cb = config.technique.cb
    if work.kind in ("encode", "decode"):
        return codec_s(plan, hardware, encode=work.kind == "encode", memory=cb.lazy_error_propagation)
    parallel = config.parallel
    size, stride = parallel.pipeline_parallel_size, parallel.tensor_parallel_size * parallel.data_parallel_size
    nbytes = config.compressed_message_nbytes if work.compressed else config.message_nbytes
    lower, upper = work.place % size, (work.place + 1) % size
    sender, receiver = (upper, lower) if work.kind == "send_backward" else (lower, upper)
    seconds = message_s(hardware, stride, sender, receiver, nbytes)
    if parallel.split_over_tensor_parallel:
        group, whole = plan.tensor_group, config.message_nbytes * parallel.tensor_parallel_size
        sent = whole * (group.size - 1) / group.size
        seconds += ring_s(hardware, group, sent, group.size - 1)
    return seconds


def codec_s(plan: StepPlan, hardware: Hardware, *, encode: bool, memory: bool) -> float:
    """Encoding or decoding one stage-to-stage message."""
    config = plan.config
    nbytes = config.message_nbytes
    codec = config.technique.cb.codec
    rows, columns = message_matrix(config.message_shape)
    if isinstance(codec, LowRankConfig):
        if hardware.codec is not None:  # encoding is two products of three
            return (2 if encode else 1) / 3 * nbytes / hardware.codec
        both = cost.low_rank_s(hardware, rows, columns, codec.rank, config.message_itemsize, memory=memory)
        return (0.7 if encode else 0.3) * both
    # Top-k: a few passes to find the largest, one to put them back.
    return (12 if encode else 2) * nbytes / hardware.memory + (20 if encode else 4) * hardware.kernel_s
