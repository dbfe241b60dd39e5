"""What a step keeps in a device's memory, on the rank that needs most."""

from __future__ import annotations

from dataclasses import dataclass

from optimus_cc.config.errors import Problem
from optimus_cc.exposure import Schedule
from optimus_cc.simulation.plan import StepPlan

GIB = 2**30
_RUNTIME_BYTES = 2.0 * GIB
"""CUDA, its libraries, NCCL's buffers and what the allocator can't use."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    pipeline_rank: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    compression: float
    """Error memories and queries."""
    runtime: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.compression + self.runtime


def memory(plan: StepPlan) -> Memory:
    """Of the pipeline rank that needs most."""
    ranks = range(plan.config.parallel.pipeline_parallel_size)
    return max((_of_rank(plan, rank) for rank in ranks), key=lambda needed: needed.total)


def problem(plan: StepPlan, needed: Memory) -> Problem | None:
    """Why ``plan`` can't run on its cluster's devices; None if it can or nobody knows their size."""
    config = plan.config
    available = config.cluster.device.memory_gib
    if available is None or needed.total <= available * GIB:
        return None
    excess = needed.total / GIB - available
    return Problem(
        "parallel",
        f"{config.parallel.label} with {config.model.name}",
        f"at most {available:g} GiB a device (cluster.device.memory_gib): pipeline rank {needed.pipeline_rank} needs "
        f"{needed.total / GIB:.1f} GiB, {excess:.1f} too many (weights, gradients and optimizer "
        f"{(needed.weights + needed.gradients + needed.optimizer) / GIB:.1f}, activations "
        f"{needed.activations / GIB:.1f})",
        "more tensor-parallel ranks or stages, parallel.distributed_optimizer=true, training.recompute=full, or "
        "simulation.ignore_memory=true to predict it all the same",
    )


def _of_rank(plan: StepPlan, rank: int) -> Memory:
    config = plan.config
    parallel = config.parallel
    stages = plan.of_rank(rank)
    parameters = sum(stage.traffic.parameters for stage in stages)
    owners = parallel.data_parallel_size if parallel.distributed_optimizer else 1
    shards = parallel.data_parallel_size if config.simulation.fully_sharded else 1
    half = config.message_itemsize < 4
    return Memory(
        pipeline_rank=rank,
        weights=parameters * config.message_itemsize / shards,
        gradients=parameters * plan.gradient_itemsize / shards,
        optimizer=parameters * (12 if half else 8) / owners,  # two moments; a master copy of half-precision weights
        activations=_activations(plan, rank),
        compression=sum(s.traffic.message_memory_bytes + s.traffic.gradient_memory_bytes for s in stages),
        runtime=_RUNTIME_BYTES,
    )


def _activations(plan: StepPlan, rank: int) -> float:
    """What forward passes leave for backward passes: Korthikanti et al., 2205.05198, section 4, by element size."""
    config, shape = plan.config, plan.layer
    stages = plan.of_rank(rank)
    layers = stages[0].layers
    whole = _layer_bytes(plan, attention=True)
    # A layer's input; sequence parallelism shares it out as it does the norms.
    boundary = shape.norm_tokens * shape.hidden * shape.itemsize
    kept: float
    if config.training.recompute == "full":
        kept, working = layers * boundary, whole
    elif config.training.recompute == "selective":
        kept, working = layers * _layer_bytes(plan, attention=False), whole
    else:
        kept, working = layers * whole, 0.0
    logits = shape.tokens * plan.vocabulary * (shape.itemsize + 4) if stages[-1].last else 0.0
    return passes_in_flight(config.schedule, rank) * kept + working + logits


def passes_in_flight(schedule: Schedule, rank: int) -> int:
    """Forward passes whose backward pass is still to come, at most: those of the warm-up, and one."""
    return min(schedule.warmup_steps(rank) + 1, schedule.num_steps)


def _layer_bytes(plan: StepPlan, *, attention: bool) -> float:
    """All activations of one layer and micro-batch; ``attention``: scores, softmax and its dropout too."""
    shape, tokens = plan.layer, plan.layer.tokens
    mask = 1 if shape.dropout else 0
    # Inputs of the norms, of attention, of the MLP, and masks of dropout; sequence parallelism shares them out.
    shared = shape.norm_tokens * shape.hidden * (4 * shape.itemsize + 2 * mask)
    inside = tokens * shape.heads * shape.head_width * 4 * shape.itemsize + tokens * shape.ffn * 2 * shape.itemsize
    scores = shape.micro_batch * shape.heads * shape.sequence**2 * (2 * shape.itemsize + mask) if attention else 0
    return shared + inside + scores
