"""What follows the passes of a step: gradients are averaged, embeddings made equal, weights updated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from optimus_cc.config.codec import LowRankConfig
from optimus_cc.simulation import cost
from optimus_cc.simulation.collectives import Group, ring_s
from optimus_cc.simulation.hardware import Hardware
from optimus_cc.simulation.plan import StagePlan, StepPlan
from optimus_cc.wire_size import weight_matrix


@dataclass(frozen=True)
class Event:
    """Something that a rank does in one stretch; times in seconds from the step's begin."""

    rank: int
    kind: str
    """A :attr:`Work.kind`, or data_parallel, embedding, codec, optimizer, parameter_gather, overhead."""
    begin_s: float
    end_s: float
    place: int | None = None
    microbatch: int | None = None
    exposed: bool = False
    """On the critical path."""


@dataclass(frozen=True)
class Reduction:
    """What a pipeline rank does to average its gradients."""

    spans: tuple[tuple[str, float, float], ...]
    begin: float
    end: float
    codec_s: float
    """Of the time between ``begin``, when its passes have ended, and ``end``."""

    def events(self, rank: int, *, critical: bool) -> Iterator[Event]:
        for kind, begin, end in self.spans:
            yield Event(rank, kind, begin, end, exposed=critical and end > self.begin)


def reduction(
    plan: StepPlan, hardware: Hardware, rank: int, ends: list[float], backward_s: list[float], done: float
) -> Reduction:
    """The reduction of pipeline rank ``rank``'s gradients.

    Args:
        ends: when each node of the plan's graph ends.
        backward_s: one backward pass of each virtual stage.
        done: when the rank has nothing left to pass on.
    """
    group = plan.data_group
    if group.size == 1 or plan.config.simulation.fully_sharded:  # that has reduced them by then
        return Reduction((), done, done, 0.0)
    parallel = plan.config.parallel
    messages = (1 if parallel.distributed_optimizer else 2) * (group.size - 1)
    scale = plan.gradient_itemsize / 4
    spans: list[tuple[str, float, float]] = []
    codec_total = 0.0
    free = 0.0 if parallel.overlap_grad_reduce else done
    for stage in reversed(plan.of_rank(rank)):  # the last chunk's gradients are complete first
        one_pass = backward_s[stage.traffic.virtual_stage]
        last_pass = ends[plan.graph.last_backward[stage.traffic.virtual_stage]]
        wire = stage.traffic.data_parallel_wire_bytes * scale
        codec = _gradient_codec_s(plan, hardware, stage)
        whole, seen = sum(stage.buckets), 0
        for numel in stage.buckets:
            seen += numel
            ready = last_pass - one_pass * (1 - seen / whole) if parallel.overlap_grad_reduce else done
            begin = max(ready, free)
            if codec:
                share = codec * numel / whole
                spans.append(("codec", begin, begin + share))
                codec_total += share
                begin += share
            extra = 2 * messages if stage.compressed else 0  # one more ring for each factor
            seconds = ring_s(hardware, group, wire * numel / whole, messages + extra)
            spans.append(("data_parallel", begin, begin + seconds))
            free = begin + seconds
    end = max(free, done)
    exposed = end - done
    return Reduction(tuple(spans), done, end, min(codec_total, exposed))


def _gradient_codec_s(plan: StepPlan, hardware: Hardware, stage: StagePlan) -> float:
    sc = plan.config.technique.sc
    if not stage.compressed or not isinstance(sc.codec, LowRankConfig):
        return 0.0
    shapes = Counter(weight_matrix(weight.shape) for weight in stage.compressed)
    seconds = 0.0
    for (rows, columns), count in shapes.items():
        size, memory = plan.gradient_itemsize, sc.error_feedback
        seconds += count * cost.low_rank_s(hardware, rows, columns, sc.codec.rank, size, memory=memory)
    return seconds


def embedding_s(plan: StepPlan, hardware: Hardware) -> float:
    """The sum over the first and the last stage's copies of the word embedding; fused, over all their replicas."""
    parallel = plan.config.parallel
    nbytes = plan.stages[0].traffic.embedding_bytes * plan.gradient_itemsize / 4
    if not nbytes:
        return 0.0
    tp, replicas = parallel.tensor_parallel_size, parallel.data_parallel_size
    apart = parallel.world_size > hardware.ranks_per_node  # the first and the last stage
    if plan.config.technique.fe.enabled and not parallel.distributed_optimizer:
        group = Group(2 * replicas, tp, together=replicas if apart else None)
        return ring_s(hardware, group, nbytes, 2 * (2 * replicas - 1))
    # Side by side go as many pairs as a stage has ranks.
    return ring_s(hardware, Group(2, tp * replicas, together=1 if apart else None), nbytes, 2)


def at_the_end(plan: StepPlan, hardware: Hardware) -> Iterator[tuple[str, float]]:
    """What all ranks do together once gradients are there."""
    parallel = plan.config.parallel
    replicas = parallel.data_parallel_size
    size = parallel.pipeline_parallel_size
    owned: float = max(sum(s.traffic.parameters for s in plan.of_rank(rank)) for rank in range(size))
    owned /= replicas if parallel.distributed_optimizer else 1
    yield "optimizer", cost.optimizer_s(hardware, owned, plan.layer.itemsize, plan.gradient_itemsize)
    gathered = max(sum(s.traffic.parameter_gather_bytes for s in plan.of_rank(rank)) for rank in range(size))
    if plan.config.simulation.fully_sharded or not gathered:
        yield "parameter_gather", 0.0
    else:
        yield "parameter_gather", ring_s(hardware, plan.data_group, gathered, replicas - 1)
    yield "overhead", hardware.step_s
