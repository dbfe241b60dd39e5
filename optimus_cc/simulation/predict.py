"""What a step of a configuration takes on a cluster. The public interface, and frozen: figures and launchers call it.

>>> prediction = predict(config)                           # a RunConfig, composed or made with dataclasses.replace
>>> prediction.step_time_s, prediction.days, prediction.breakdown.data_parallel_s
>>> speedup_percent(predict(baseline_of(config)), prediction)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from optimus_cc import stage_traffic
from optimus_cc.config.errors import ConfigError
from optimus_cc.config.run import RunConfig
from optimus_cc.config.schema import changed
from optimus_cc.config.technique import SelectiveStageCompressionConfig, TechniqueConfig
from optimus_cc.simulation.hardware import hardware
from optimus_cc.simulation.memory import Memory, memory, problem
from optimus_cc.simulation.plan import StepPlan, plan
from optimus_cc.simulation.step import StepTime, price


@dataclass(frozen=True)
class Breakdown:
    """Seconds of a step's critical path, by what they are spent on; they add up to the step's time."""

    forward_s: float
    """Forward passes of the rank that ends last, tensor-parallel communication in them included."""
    backward_s: float
    """Its backward passes, with recomputation."""
    bubble_s: float
    """Passes of other stages that it waits for."""
    inter_stage_s: float
    """Exposed stage-to-stage messages."""
    data_parallel_s: float
    """Exposed reduction of gradients."""
    embedding_s: float
    """Exposed synchronisation of the word embedding's copies."""
    codec_s: float
    """Encoding and decoding."""
    optimizer_s: float
    parameter_gather_s: float
    """With the distributed optimizer."""
    overhead_s: float
    """Of a step, whatever it computes."""

    @property
    def exposed_s(self) -> float:
        """Communication between nodes, or between stages and replicas inside one, that nothing hides."""
        return self.inter_stage_s + self.data_parallel_s + self.embedding_s + self.parameter_gather_s


@dataclass(frozen=True)
class Prediction:
    """Of one step, after selective stage compression's warm-up."""

    step_time_s: float
    days: float
    """All of ``training.steps``, those of selective stage compression's warm-up without it; validation and checkpoints
    are not counted."""
    breakdown: Breakdown
    tensor_parallel_s: float
    """Communication inside tensor-parallel groups; part of ``forward_s`` and ``backward_s``."""
    traffic: dict[str, dict[str, float]]
    """Bytes that all ranks send in a step, as :func:`optimus_cc.stage_traffic.traffic` counts them."""
    memory: Memory
    """Of the rank that needs most."""
    tokens_per_s: float
    tflops_per_rank: float
    """Model FLOPs, recomputation left out."""
    bandwidth: str
    """effective or line_rate."""

    def to_mapping(self) -> dict[str, Any]:
        return {**asdict(self), "memory": {**asdict(self.memory), "total": self.memory.total}}


def predict(config: RunConfig, *, bandwidth: str | None = None) -> Prediction:
    """What a step of ``config`` takes on ``config.cluster``.

    Args:
        bandwidth: ``effective`` or ``line_rate``; None: what ``config.simulation.bandwidth`` says.

    Raises:
        ConfigError: no step of ``config`` could run, by the same check that a command line goes through; the cluster's
            devices are not known; or the layout doesn't fit into their memory (``simulation.ignore_memory`` predicts
            it all the same).
    """
    return predict_plan(plan(config), bandwidth=bandwidth)[0]


def predict_plan(step_plan: StepPlan, *, bandwidth: str | None = None) -> tuple[Prediction, StepTime]:
    """The same of a plan that is there already, and when everything in the step happens."""
    config = step_plan.config
    bandwidth = bandwidth or config.simulation.bandwidth
    needed = memory(step_plan)
    if not config.simulation.ignore_memory and (found := problem(step_plan, needed)) is not None:
        raise ConfigError(found)
    time = price(step_plan, hardware(config.cluster, config.training.precision, bandwidth))
    training, model, sc = config.training, config.model, config.technique.sc
    warmup_s = time.total_s
    if sc.enabled and sc.warmup_steps:
        dense = config.with_technique(changed(config.technique, sc=SelectiveStageCompressionConfig()))
        warmup_s = price(plan(dense), hardware(config.cluster, training.precision, bandwidth)).total_s
    in_warmup = min(sc.warmup_steps, training.steps) if sc.enabled else 0
    tokens = training.global_batch_size * model.sequence_length
    vocabulary = step_plan.vocabulary * config.parallel.tensor_parallel_size
    flops = model.flops_per_token(vocabulary) * tokens
    prediction = Prediction(
        step_time_s=time.total_s,
        days=(warmup_s * in_warmup + time.total_s * (training.steps - in_warmup)) / 86400,
        breakdown=Breakdown(**{f"{kind}_s": seconds for kind, seconds in time.parts_s.items()}),
        tensor_parallel_s=time.tensor_parallel_s,
        traffic=stage_traffic.traffic(config, [stage.traffic for stage in step_plan.stages]),
        memory=needed,
        tokens_per_s=tokens / time.total_s,
        tflops_per_rank=flops / time.total_s / config.parallel.world_size / 1e12,
        bandwidth=bandwidth,
    )
    return prediction, time


def baseline_of(config: RunConfig) -> RunConfig:
    """The same run with nothing compressed or fused."""
    return changed(config, technique=TechniqueConfig(), ablation=None)


def speedup_percent(baseline: Prediction, other: Prediction) -> float:
    """By how much ``other`` is faster, as the paper counts it: 44.9 % is a step in 1 / 1.449 of the time."""
    return 100 * (baseline.step_time_s / other.step_time_s - 1)
