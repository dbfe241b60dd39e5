"""``benchmark``: what ``task=benchmark`` measures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from optimus_cc.config.errors import Problem, closest
from optimus_cc.config.schema import Name, NonNegativeInt, PathText, PositiveInt, strict
from optimus_cc.config.technique import TechniqueConfig

if TYPE_CHECKING:
    from optimus_cc.config.run import RunConfig

TASK = "benchmark"
_NAME: TypeAdapter[str] = TypeAdapter(Name)


@strict
class NoBenchmarkConfig:
    """Nothing is measured."""

    name: Literal["none"] = "none"


@strict
class CostConfig:
    """Ratios of step times: plain Megatron-core against each technique. ``technique`` itself plays no part."""

    name: Literal["cost"] = "cost"
    pairs: PositiveInt
    """Pairs of timed steps for each technique."""
    warmup_steps: NonNegativeInt
    """Steps of each technique, and as many plain ones, before its first pair."""
    measure: tuple[Name, ...] | None = None
    """Which of ``techniques``; null: all that the layout allows."""
    techniques: dict[Name, TechniqueConfig]


@strict
class LinksConfig:
    """Times of all-reduces and of messages, by size, for each group of the layout."""

    name: Literal["links"] = "links"
    min_bytes: Annotated[int, Field(ge=4)]
    max_bytes: PositiveInt
    """Message sizes go from ``min_bytes`` in steps of four times up to this."""
    repetitions: PositiveInt
    """Timed samples for each size; their median counts."""
    cluster_file: PathText | None = None
    """Where the file for the ``cluster`` group goes, besides the benchmark's folder. Must not exist."""

    @property
    def sizes_bytes(self) -> tuple[int, ...]:
        """Message sizes, whole fp32 elements."""
        sizes, size = [], self.min_bytes
        while size <= self.max_bytes:
            sizes.append(size // 4 * 4)
            size *= 4
        return tuple(sizes)


@strict
class CodecsConfig:
    """Throughput of encoding and decoding, by codec, rank and shape, and what error memories add. One process."""

    name: Literal["codecs"] = "codecs"
    shapes: Annotated[tuple[tuple[PositiveInt, PositiveInt], ...], Field(min_length=1)] | None = None
    """(rows, columns) of the tensors; null: the one stage-to-stage message of the run."""
    ranks: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    """Of the low-rank codec, and those whose volume top-k is given."""
    repetitions: PositiveInt


BenchmarkConfig = Annotated[NoBenchmarkConfig | CostConfig | LinksConfig | CodecsConfig, Field(discriminator="name")]


def measured_techniques(config: RunConfig) -> tuple[dict[str, TechniqueConfig], dict[str, Problem]]:
    """The techniques that ``benchmark=cost`` measures, and what is wrong with those that can't be, by name."""
    benchmark = config.benchmark
    assert isinstance(benchmark, CostConfig)
    wanted = benchmark.techniques if benchmark.measure is None else benchmark.measure
    possible, impossible = {}, {}
    for name in wanted:
        technique = benchmark.techniques[name]
        problems = config.with_technique(technique).problems()
        problem = next((found for found in problems if found.key.startswith("technique.")), None)
        if problem is None:
            possible[name] = technique
        else:
            impossible[name] = problem
    return possible, impossible


def benchmark_problems(config: RunConfig) -> Iterator[Problem]:
    """What is wrong with the benchmark that was asked for, or with asking for one."""
    benchmark = config.benchmark
    if (config.task.name == TASK) == isinstance(benchmark, NoBenchmarkConfig):
        if config.task.name == TASK:
            yield Problem("benchmark", "none", "one of codecs, cost, links with task=benchmark", "benchmark=cost")
        else:
            yield Problem("benchmark", benchmark.name, f"none with task={config.task.name}", f"task={TASK}")
    elif isinstance(benchmark, CostConfig):
        yield from _cost_problems(config, benchmark)
    elif isinstance(benchmark, LinksConfig):
        yield from _links_problems(config, benchmark)


def benchmark_notices(config: RunConfig) -> Iterator[str]:
    """What will not be measured, and why."""
    if isinstance(config.benchmark, CostConfig):
        for name, problem in measured_techniques(config)[1].items():
            yield f"benchmark.techniques.{name} is left out: {problem.key} must be {problem.allowed}."


def _cost_problems(config: RunConfig, benchmark: CostConfig) -> Iterator[Problem]:
    names = benchmark.measure or ()
    unknown = [name for name in names if name not in benchmark.techniques]
    for name in unknown:
        known = ", ".join(benchmark.techniques)
        others = [other for other in names if other != name]
        measure = ",".join([*others, *closest(name, benchmark.techniques)[:1]])
        yield Problem("benchmark.measure", name, f"names from {known}", f"benchmark.measure=[{measure}]")
    if unknown or benchmark.measure is None:
        return
    for name, problem in measured_techniques(config)[1].items():
        yield Problem("benchmark.measure", name, f"techniques with {problem.key} = {problem.allowed}", problem.fix)


def _links_problems(config: RunConfig, benchmark: LinksConfig) -> Iterator[Problem]:
    if len(benchmark.sizes_bytes) < 2:
        yield Problem(
            "benchmark.max_bytes",
            benchmark.max_bytes,
            f"at least 4 x benchmark.min_bytes = {4 * benchmark.min_bytes}: one size tells nothing of a line",
            f"benchmark.max_bytes={64 * benchmark.min_bytes}",
        )
    if config.parallel.world_size == 1:
        yield Problem("parallel", config.parallel.label, "a layout of more than one rank", "parallel=pp2")
    if benchmark.cluster_file is not None:
        yield from _file_problems(Path(benchmark.cluster_file))


def _file_problems(file: Path) -> Iterator[Problem]:
    key = "benchmark.cluster_file"
    try:
        _NAME.validate_python(file.stem)
        named = file.suffix == ".yaml"
    except ValidationError:
        named = False
    if not named:
        yield Problem(key, str(file), "NAME.yaml, with letters, digits, _ and . in NAME", "conf/cluster/mine.yaml")
    elif file.exists():
        yield Problem(key, str(file), "a new file: none is overwritten", "another name, or move that file away")
    elif not file.absolute().parent.is_dir():
        yield Problem(key, str(file), "a file in a folder that exists", f"mkdir -p {file.parent}")
