"""A whole run: all groups together, their cross-checks, and what of it makes the run's identity."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from optimus_cc.config import of_run
from optimus_cc.config.benchmark import BenchmarkConfig, NoBenchmarkConfig, benchmark_notices, benchmark_problems
from optimus_cc.config.cluster import ClusterConfig
from optimus_cc.config.codec import CodecConfig, LowRankConfig, TopKConfig
from optimus_cc.config.data import DataConfig, JsonLinesConfig
from optimus_cc.config.errors import ConfigError, Problem
from optimus_cc.config.evaluation import EvaluationConfig
from optimus_cc.config.export import ExportConfig
from optimus_cc.config.fingerprint import fingerprint
from optimus_cc.config.identity import without_dead_keys
from optimus_cc.config.launcher import AnyLauncherConfig, LauncherConfig
from optimus_cc.config.model import VOCABULARY_MULTIPLE, ModelConfig
from optimus_cc.config.optimizer import OptimizerConfig
from optimus_cc.config.parallel import ParallelConfig
from optimus_cc.config.resume import resume_problems, resumed_from
from optimus_cc.config.schema import Name, NonNegativeInt, PathText, changed, strict
from optimus_cc.config.simulation import SimulationConfig
from optimus_cc.config.technique import TechniqueConfig
from optimus_cc.config.tokenizer import TokenizerConfig
from optimus_cc.config.tracking import TrackingConfig
from optimus_cc.config.training import TrainingConfig
from optimus_cc.config.type_problems import encoding_problems, type_problems
from optimus_cc.exposure import Schedule
from optimus_cc.stage_parameters import layer_matrices
from optimus_cc.wire_size import wire_nbytes

MAX_SAMPLES = 2**31 - 1
"""Of a training and of a validation pass: Megatron-core keeps an index of all of them in memory, 12 bytes for each."""
MAX_MESSAGES = 1_000_000
"""Of a step, in one direction: their order is laid out in full, here and by every rank."""

_UNSCIENTIFIC = {
    "technique": {"name"},
    "data": {"cache_dir", "path", "weights"},
    "tokenizer": {"path", "vocab_file", "merges_file"},
    "training": {"log_interval", "device", "timeout_s", "on_nonfinite_loss", "data_workers", "checkpoint", "probes"},
}
"""Keys of the scientific groups that do not change what a run computes, or that are replaced by a fingerprint."""


@strict
class TaskConfig:
    name: Name


@strict
class RunConfig:
    """One composed configuration."""

    task: TaskConfig
    model: ModelConfig
    parallel: ParallelConfig
    technique: TechniqueConfig
    ablation: Name | None = None
    """The ablation laid on top, if any; what it changed already stands in the other groups."""
    data: DataConfig
    tokenizer: TokenizerConfig
    optimizer: OptimizerConfig
    training: TrainingConfig
    cluster: ClusterConfig
    benchmark: BenchmarkConfig = NoBenchmarkConfig()
    simulation: SimulationConfig = SimulationConfig()
    launcher: AnyLauncherConfig = LauncherConfig()
    tracking: TrackingConfig = TrackingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    export: ExportConfig = ExportConfig()
    run: PathText | None = None
    """Folder of the run that the task works on, of which the groups above it are then a copy."""
    checkpoint: NonNegativeInt | None = None
    """Step of the checkpoint of ``run``; null: the newest complete one."""
    runs_dir: PathText = "runs"
    """Folder that holds the run folders."""
    force: bool = False
    """Run again though a finished run of the same identity is there."""

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of one step on one data-parallel rank."""
        return self.training.global_batch_size // (self.training.micro_batch_size * self.parallel.data_parallel_size)

    @property
    def schedule(self) -> Schedule:
        return Schedule(
            pipeline_parallel_size=self.parallel.pipeline_parallel_size,
            num_chunks=self.parallel.num_chunks,
            num_microbatches=self.num_microbatches,
        )

    @property
    def message_shape(self) -> tuple[int, int, int]:
        """(sequence, micro-batch, hidden) of one stage-to-stage message of one rank, as it is encoded."""
        shared = self.parallel.sequence_parallel or self.parallel.split_over_tensor_parallel
        shares = self.parallel.tensor_parallel_size if shared else 1
        return self.model.sequence_length // shares, self.training.micro_batch_size, self.model.hidden_size

    @property
    def message_itemsize(self) -> int:
        """Bytes of an element of a stage-to-stage message."""
        return 2 if self.training.precision == "bf16" else 4

    @property
    def message_nbytes(self) -> int:
        """Bytes of an uncompressed stage-to-stage message."""
        return math.prod(self.message_shape) * self.message_itemsize

    @property
    def compressed_message_nbytes(self) -> int:
        """Bytes of a stage-to-stage message that compressed backpropagation's codec has encoded."""
        return wire_nbytes(self.technique.cb.codec, self.message_shape, self.message_itemsize)

    def with_technique(self, technique: TechniqueConfig) -> RunConfig:
        """The same with another technique, and nothing to measure."""
        return changed(self, technique=technique, benchmark=NoBenchmarkConfig())

    def to_mapping(self) -> dict[str, Any]:
        """Plain nested dict, JSON-compatible; :func:`load` reads it back."""
        mapping: dict[str, Any] = _ADAPTER.dump_python(self, mode="json")
        return mapping

    def scientific(self) -> dict[str, Any]:
        """What this run computes: the part of the configuration that its identity is made of.

        Files are represented by what they hold, not by where they lie; keys that compute nothing beside the others by
        their default.
        """
        return without_dead_keys(self._said())

    def _said(self) -> dict[str, Any]:
        """The same with what was said of keys that compute nothing: once ids were made of this."""
        mapping = self.to_mapping()
        science = {
            group: {key: value for key, value in mapping[group].items() if key not in _UNSCIENTIFIC.get(group, ())}
            for group in ("model", "parallel", "technique", "data", "tokenizer", "optimizer", "training")
        }
        technique = science["technique"]
        for key in ("cb_rank", "sc_rank", "sc_warmup_steps"):
            science["model"].pop(key)
        for name in ("cb", "sc"):
            technique[name].pop("default_rank")
        # A node that is off computes nothing, whatever else it says. Those that came later leave no trace when they are
        # off, so that runs from before they existed keep their ids.
        if not self.technique.cb.enabled:
            technique["cb"] = {"enabled": False}
        elif not self.technique.cb.lazy_error_propagation:
            technique["cb"].pop("residual")  # there is none
        for name in ("fe", "sc"):
            if not technique[name]["enabled"]:
                del technique[name]
        source = science["training"].pop("resume_from")
        if source is not None:
            science["training"]["resume_from"] = resumed_from(source)
        if isinstance(self.data, JsonLinesConfig):
            science["data"]["files"] = [fingerprint(path) for path in self.data.paths]
            science["data"]["weights"] = self.data.weights
        if self.tokenizer.files:
            science["tokenizer"]["files"] = [fingerprint(path) for path in self.tokenizer.files]
        return science

    @property
    def run_id(self) -> str:
        """Readable slug and a hash over :meth:`scientific`; under 100 bytes, safe as a folder's name."""
        return self.run_ids[0]

    @property
    def run_ids(self) -> tuple[str, ...]:
        """:attr:`run_id`, and what a run with this configuration may be called from before, if that is another id."""
        said = self._said()
        return tuple(dict.fromkeys(map(self._id_of, (without_dead_keys(said), said))))

    def _id_of(self, science: Mapping[str, Any]) -> str:
        canonical = json.dumps(science, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(canonical.encode()).hexdigest()[:8]
        slug = "-".join((self.model.name, self.parallel.label, self.technique.label, f"s{self.training.seed}"))
        return f"{slug[:88]}-{digest}"

    def notices(self) -> list[str]:
        """Things that are allowed but that the person who composed this should know before it starts."""
        return [*self._cb_notices(), *self._fe_notices(), *self._sc_notices(), *benchmark_notices(self)]

    def _fe_notices(self) -> Iterator[str]:
        if self.technique.fe.enabled and self.parallel.data_parallel_size == 1:
            yield (
                "technique.fe.enabled: with one data-parallel rank the embedding has a single all-reduce already, so "
                "nothing is saved."
            )

    def _sc_notices(self) -> Iterator[str]:
        if self.technique.sc.enabled and self.technique.sc.fraction == 0:
            yield "technique.sc.fraction=0: no stage compresses its gradients, so nothing is saved."

    def _cb_notices(self) -> list[str]:
        cb = self.technique.cb
        lines: list[str] = []
        if not cb.enabled:
            return lines
        if cb.compress_forward:
            lines.append(
                "technique.cb.compress_forward: activations are compressed too. The paper saw every such run "
                "diverge (Optimus-CC, section 5); expect a worse perplexity."
            )
        if self.compressed_message_nbytes >= self.message_nbytes:
            lines.append(
                f"technique.cb.codec.{_size_key(cb.codec)}: compressed, a message of {self.message_nbytes:,} bytes "
                f"takes {self.compressed_message_nbytes:,}, so nothing is saved."
            )
        counts = cb.compressed_counts(self.schedule).values()
        if cb.lazy_error_propagation and cb.residual == "reset" and max(counts, default=0) == 1:
            lines.append(
                "technique.cb.lazy_error_propagation: every boundary compresses one message per mini-batch, so no "
                "residual reaches another message under technique.cb.residual=reset."
            )
        return lines

    def problems(self) -> Iterator[Problem]:
        """Everything wrong with this configuration, group by group and then across groups."""
        for group in (self.model, self.parallel, self.data, self.tokenizer, self.optimizer, self.launcher):
            yield from group.problems()
        yield from self._layout_problems()
        yield from self._starting_problems()
        yield from of_run.problems(self.run, self.checkpoint)
        if self.task.name == "evaluate" or self.evaluation.after_training:
            yield from self.evaluation.problems()
        if self.run is not None:
            if self.task.name == "export":
                yield from self.export.problems()
            return  # nothing is trained
        batches = list(self._batch_problems())
        yield from batches
        yield from self._optimizer_problems()
        yield from self.technique.problems(self.parallel)
        yield from self._technique_problems()
        if not batches:
            yield from self._schedule_problems()
        if (source := self.training.resume_from) is not None:
            yield from resume_problems(source, json.loads(json.dumps(self.scientific())), self.training.steps)
        yield from benchmark_problems(self)
        yield from self.simulation.problems(self.task.name, self.parallel, self.cluster)

    def step_problems(self) -> Iterator[Problem]:
        """Why no step of this configuration could run, wherever and whatever for: for those who make a configuration
        with ``dataclasses.replace``. All of these are among :meth:`problems`."""
        for group in (self.model, self.parallel):
            yield from group.problems()
        yield from self._layout_problems()
        yield from self._batch_problems()
        yield from self.technique.problems(self.parallel)
        yield from self._technique_problems()

    def _layout_problems(self) -> Iterator[Problem]:
        parallel, model = self.parallel, self.model
        tp, virtual_stages = parallel.tensor_parallel_size, parallel.num_virtual_stages
        if model.num_layers % virtual_stages:
            yield Problem(
                "model.num_layers",
                model.num_layers,
                f"a multiple of parallel.pipeline_parallel_size x parallel.num_chunks = {virtual_stages}",
                f"model.num_layers={-(-model.num_layers // virtual_stages) * virtual_stages}, or fewer stages",
            )
        for key, size in (
            ("model.num_attention_heads", model.num_attention_heads),
            ("model.ffn_hidden_size", model.ffn_width),
        ):
            if size % tp:
                yield Problem(
                    key,
                    size,
                    f"a multiple of parallel.tensor_parallel_size = {tp}",
                    "choose a tensor_parallel_size that divides it",
                )
        if VOCABULARY_MULTIPLE % tp:
            yield Problem(
                "parallel.tensor_parallel_size",
                tp,
                f"a divisor of {VOCABULARY_MULTIPLE}, to which the vocabulary is padded",
                "use a power of two",
            )
        if (parallel.sequence_parallel or parallel.split_over_tensor_parallel) and model.sequence_length % tp:
            yield Problem(
                "model.sequence_length",
                model.sequence_length,
                f"a multiple of parallel.tensor_parallel_size = {tp}, over whose ranks the sequence is shared out",
                f"model.sequence_length={-(-model.sequence_length // tp) * tp}",
            )
        if parallel.world_size > self.cluster.num_ranks:
            yield Problem(
                "parallel",
                f"{parallel.label} ({parallel.world_size} ranks)",
                f"at most {self.cluster.num_ranks} ranks: cluster={self.cluster.name} has "
                f"{self.cluster.num_nodes} x {self.cluster.ranks_per_node}",
                f"cluster.num_nodes={-(-parallel.world_size // self.cluster.ranks_per_node)}, or a smaller layout"
                if self.task.name == "simulate"
                else "choose a smaller layout, or raise cluster.ranks_per_node",
            )

    def _starting_problems(self) -> Iterator[Problem]:
        """Who would start the ranks, and where."""
        starts_ranks = self.task.name in ("train", "evaluate", "benchmark", "selfcheck")
        if self.launcher.dry_run and self.task.name != "train":
            yield Problem("launcher.dry_run", True, "false with another task than train", "launcher.dry_run=false")
        elif starts_ranks and self.launcher.name != "local" and self.task.name not in ("train", "evaluate"):
            fix = "launcher=local, on a node of the cluster"
            yield Problem("task.name", self.task.name, "task=train with launcher=slurm", fix)
        elif (
            starts_ranks and self.launcher.name == "local" and self.cluster.num_nodes > 1 and not self.launcher.dry_run
        ):
            yield Problem(
                "cluster.num_nodes",
                self.cluster.num_nodes,
                "1 with launcher=local, which starts ranks on this machine only",
                "cluster=local",
            )

    def _batch_problems(self) -> Iterator[Problem]:
        training, parallel = self.training, self.parallel
        per_step = training.micro_batch_size * parallel.data_parallel_size
        if training.global_batch_size % per_step:
            yield Problem(
                "training.global_batch_size",
                training.global_batch_size,
                f"a multiple of training.micro_batch_size x parallel.data_parallel_size = {per_step}",
                f"training.global_batch_size={-(-training.global_batch_size // per_step) * per_step}",
            )
            return  # the checks below need a whole number of micro-batches
        stages = parallel.pipeline_parallel_size
        if parallel.num_chunks > 1 and stages > 1 and self.num_microbatches % stages:
            yield Problem(
                "training.global_batch_size",
                training.global_batch_size,
                f"micro-batches per step ({self.num_microbatches}) in multiples of parallel.pipeline_parallel_size = "
                f"{stages} for the interleaved schedule",
                f"training.global_batch_size={-(-self.num_microbatches // stages) * stages * per_step}",
            )
        for key, count in (("steps", training.steps), ("validation_batches", training.validation_batches)):
            if count * training.global_batch_size > MAX_SAMPLES:
                yield Problem(
                    f"training.{key}",
                    count,
                    f"at most {MAX_SAMPLES:,} samples: training.{key} x training.global_batch_size = "
                    f"{count * training.global_batch_size:,}",
                    f"training.{key}={max(1, MAX_SAMPLES // training.global_batch_size)}",
                )
        messages = self.num_microbatches * parallel.num_virtual_stages
        if messages > MAX_MESSAGES:
            yield Problem(
                "training.micro_batch_size",
                training.micro_batch_size,
                f"at most {MAX_MESSAGES:,} forward passes in a step: {self.num_microbatches:,} micro-batches x "
                f"{parallel.num_virtual_stages} stages = {messages:,}",
                "a larger micro_batch_size, or a smaller global_batch_size",
            )

    def _optimizer_problems(self) -> Iterator[Problem]:
        if self.optimizer.name != "adam" and self.parallel.distributed_optimizer:
            yield Problem(
                "parallel.distributed_optimizer",
                True,
                f"false with optimizer.name = {self.optimizer.name}: Megatron-core shards the state of adam only",
                "parallel.distributed_optimizer=false, or optimizer.name=adam",
            )

    def _schedule_problems(self) -> Iterator[Problem]:
        """What only shows in the order of a step's messages."""
        yield from self.technique.cb.schedule_problems(self.schedule)
        yield from self._probes_problems()

    def _technique_problems(self) -> Iterator[Problem]:
        """What the model and the length of training have to say about the technique."""
        fe, sc = self.technique.fe, self.technique.sc
        if fe.enabled and not self.model.tied_embeddings:
            yield Problem(
                "technique.fe.enabled",
                True,
                "model.tied_embeddings = true: untied, the first and the last stage share no gradient",
                "model.tied_embeddings=true, or technique.fe.enabled=false",
            )
        if not sc.enabled or not isinstance(sc.codec, LowRankConfig):
            return
        if sc.warmup_steps >= self.training.steps:
            yield Problem(
                "technique.sc.warmup_steps",
                sc.warmup_steps,
                f"below training.steps = {self.training.steps}: compression would never start",
                f"technique.sc.warmup_steps={self.training.steps // 10}",
            )
        if not any(sc.compresses(*shape) for shape in layer_matrices(self.model, self.parallel)):
            yield Problem(
                "technique.sc.codec.rank",
                sc.codec.rank,
                f"a rank at which two factors have at most 1/{sc.min_compression_ratio:g} of the elements of some "
                f"matrix of a layer (technique.sc.min_compression_ratio)",
                f"technique.sc.codec.rank={max(1, self.model.hidden_size // 16)}",
            )

    def _probes_problems(self) -> Iterator[Problem]:
        probes, cb = self.training.probes, self.technique.cb
        yield from probes.problems(self.training.steps)
        if not probes.error_independence:
            return
        if not cb.enabled:
            yield Problem(
                "training.probes.error_independence",
                True,
                "false while technique.cb.enabled is false: nothing is left out of a message",
                "technique=cb, or training.probes.error_independence=false",
            )
        elif not any(
            message.is_compressed(epilogue_only=cb.epilogue_only, flush=cb.flushes) and not message.last
            for rank in range(self.parallel.pipeline_parallel_size)
            for message in self.schedule.sent_backward(rank)
        ):
            yield Problem(
                "training.probes.error_independence",
                True,
                "a layout in which some boundary compresses a message that another one follows in the mini-batch",
                "technique.cb.epilogue_only=false, or more stages and micro-batches",
            )


def _size_key(codec: CodecConfig) -> str:
    """The key, with its value, that decides how much a codec sends."""
    if isinstance(codec, LowRankConfig):
        return f"rank={codec.rank}"
    if isinstance(codec, TopKConfig):
        return f"match_rank={codec.match_rank}" if codec.density is None else f"density={codec.density:g}"
    return f"name={codec.name}"


_ADAPTER: TypeAdapter[RunConfig] = TypeAdapter(RunConfig)


def load(mapping: Mapping[str, Any]) -> RunConfig:
    """Check a composed configuration and make it typed.

    Raises:
        ConfigError: with every problem found; types first, then combinations.
    """
    if wrong := list(encoding_problems(mapping)):
        raise ConfigError(wrong)
    try:
        config = _ADAPTER.validate_json(json.dumps(mapping))
    except ValidationError as error:
        raise ConfigError(type_problems(mapping, error.errors(include_url=False))) from None
    problems = list(config.problems())
    if problems:
        raise ConfigError(problems)
    return config
