"""What a configuration computes and sends in one step, without a word of what that takes.

A plan is made once and can be priced with any hardware, which is what calibration does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from optimus_cc import stage_traffic
from optimus_cc.config.errors import ConfigError
from optimus_cc.config.model import padded_vocabulary_size
from optimus_cc.config.run import RunConfig
from optimus_cc.gradient_buckets import gradient_buckets
from optimus_cc.simulation.collectives import Group
from optimus_cc.simulation.cost import LayerShape
from optimus_cc.simulation.pipeline import Compression, Graph, graph
from optimus_cc.stage_parameters import StageParameters, Weight
from optimus_cc.stage_traffic import StageTraffic


@dataclass(frozen=True)
class TensorParallel:
    """All-gathers and reduce-scatters of one micro-batch in one virtual stage; an all-reduce counts as two."""

    forward: int
    backward: int
    passes_bytes: float
    """What a rank sends in each of them."""
    loss_bytes: float
    """What a rank sends, in the forward pass of the last stage, to make the loss."""


@dataclass(frozen=True)
class StagePlan:
    """One virtual stage."""

    traffic: StageTraffic
    parameters: StageParameters
    first: bool
    last: bool
    layers: int
    tensor_parallel: TensorParallel
    compressed: tuple[Weight, ...]
    """Whose gradients travel as factors."""
    buckets: tuple[int, ...]
    """Elements of each bucket of gradients, in the order in which a backward pass fills them."""


@dataclass(frozen=True)
class StepPlan:
    config: RunConfig
    stages: tuple[StagePlan, ...]
    graph: Graph
    layer: LayerShape
    vocabulary: int
    """Rows of the word embedding on one rank."""
    gradient_itemsize: int

    @property
    def tensor_group(self) -> Group:
        parallel = self.config.parallel
        size = parallel.tensor_parallel_size
        return Group(size, 1, parallel.world_size // size)

    @property
    def data_group(self) -> Group:
        parallel = self.config.parallel
        return Group(parallel.data_parallel_size, parallel.tensor_parallel_size, parallel.pipeline_parallel_size)

    def of_rank(self, rank: int) -> list[StagePlan]:
        """The virtual stages of a pipeline rank."""
        return [stage for stage in self.stages if stage.traffic.pipeline_rank == rank]


def plan(config: RunConfig, gradient_itemsize: int = 4, *, padded: bool = True) -> StepPlan:
    """What one step of ``config`` is made of.

    Args:
        gradient_itemsize: bytes in which gradients are kept and reduced; 4 is what training does here.
        padded: the output layer has as many rows as training here gives it; false: one for each token.

    Raises:
        ConfigError: no step of it could run.
    """
    if problems := list(config.step_problems()):
        raise ConfigError(problems)
    model, parallel, technique = config.model, config.parallel, config.technique
    tp, stages = parallel.tensor_parallel_size, parallel.num_virtual_stages
    tokens = model.sequence_length * config.training.micro_batch_size
    vocabulary = stage_traffic.vocabulary_size(config)
    if padded:
        vocabulary = padded_vocabulary_size(vocabulary)
    cb = technique.cb
    compression = Compression(
        forward=cb.enabled and cb.compress_forward,
        backward=cb.enabled,
        epilogue_only=cb.epilogue_only,
        flush=cb.flushes,
    )
    layers = model.num_layers // stages
    every = []
    for traffic in stage_traffic.stages(config):
        stage = traffic.virtual_stage
        parameters = stage_traffic.parameters_of(config, stage)
        chosen = technique.sc.enabled and traffic.pipeline_rank in stage_traffic.compressing_ranks(config)
        buckets = gradient_buckets(parameters.weights, parallel, stage, tied_embeddings=model.tied_embeddings)
        every.append(
            StagePlan(
                traffic=traffic,
                parameters=parameters,
                first=stage == 0,
                last=stage == stages - 1,
                layers=layers,
                tensor_parallel=_tensor_parallel(config, stage, layers, tokens),
                compressed=tuple(stage_traffic.compressible(config, technique.sc, parameters.weights))
                if chosen
                else (),
                buckets=tuple(bucket.numel for bucket in buckets),
            )
        )
    shape = LayerShape(
        sequence=model.sequence_length,
        micro_batch=config.training.micro_batch_size,
        hidden=model.hidden_size,
        ffn=model.ffn_width // tp,
        heads=model.num_attention_heads // tp,
        head_width=model.hidden_size // model.num_attention_heads,
        norm_tokens=tokens // tp if parallel.sequence_parallel else tokens,
        itemsize=config.message_itemsize,
        gradient_itemsize=gradient_itemsize,
        dropout=model.dropout > 0,
        parameters=_layer_parameters(every[0].parameters, layers),
    )
    schedule_graph = graph(config.schedule, compression, overlap=parallel.overlap_p2p)
    return StepPlan(config, tuple(every), schedule_graph, shape, vocabulary // tp, gradient_itemsize)


def _tensor_parallel(config: RunConfig, stage: int, layers: int, tokens: int) -> TensorParallel:
    parallel, model = config.parallel, config.model
    size, shared_out = parallel.tensor_parallel_size, parallel.sequence_parallel
    forward, backward = 4 * layers, (6 if shared_out else 4) * layers
    if config.training.recompute == "full":
        backward += 4 * layers
    if stage == 0:
        forward += 1 if shared_out and model.position_embedding != "learned" else 2
        backward += shared_out
    last = stage == parallel.num_virtual_stages - 1
    forward += shared_out and last
    backward += 2 * last
    share = (size - 1) / size
    passes_bytes = share * tokens * model.hidden_size * config.message_itemsize
    return TensorParallel(forward, backward, passes_bytes, share * 3 * 2 * tokens * 4 * last)


@lru_cache(maxsize=64)
def _layer_parameters(parameters: StageParameters, layers: int) -> int:
    return sum(weight.numel for weight in parameters.weights if weight.name.startswith("decoder.layers.")) // layers
