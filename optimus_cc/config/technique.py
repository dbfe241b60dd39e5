"""``technique``: what Optimus-CC does to the traffic. Every node is always there, with ``enabled``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from optimus_cc.config.codec import CodecConfig, IdentityConfig, LowRankConfig, TopKConfig
from optimus_cc.config.errors import Problem
from optimus_cc.config.parallel import ParallelConfig
from optimus_cc.config.schema import Name, NonNegativeInt, PositiveFloat, PositiveInt, strict
from optimus_cc.exposure import Schedule, stages_to_compress


@strict
class CompressedBackpropagationConfig:
    """CB: stage-to-stage activation gradients go through a codec (Optimus-CC, section 5)."""

    enabled: bool = False
    codec: CodecConfig = IdentityConfig()
    default_rank: PositiveInt | None = None
    """What the codec's rank, or the rank whose size it matches, is when nothing else is said; from the model."""
    lazy_error_propagation: bool = True
    """The residual of one message is added to the next one of the same boundary before that is encoded."""
    epilogue_only: bool = True
    """Only messages that their receiver consumes in its cool-down are compressed."""
    residual: Literal["carry", "reset", "flush"] = "reset"
    """What happens to the residual at the end of a mini-batch: kept for the next one (carry, as the authors'
    release does), dropped (reset, as the paper's text argues), or sent: the last message of each boundary
    travels uncompressed with all that was left (flush)."""
    compress_forward: bool = False
    """Activations go through the codec too, without error feedback. The paper saw every such run diverge."""

    @property
    def flushes(self) -> bool:
        """The last message of each boundary and mini-batch carries all that was left out, uncompressed."""
        return self.lazy_error_propagation and self.residual == "flush"

    def compressed_counts(self, schedule: Schedule) -> dict[int, int]:
        """Backward messages that one mini-batch of ``schedule`` compresses, by virtual boundary."""
        return schedule.compressed_counts(epilogue_only=self.epilogue_only, flush=self.flushes)

    def problems(self, parallel: ParallelConfig) -> Iterator[Problem]:
        """Why this can't work in a layout, or would compress nothing."""
        if not self.enabled:
            return
        if parallel.pipeline_parallel_size == 1:
            yield Problem(
                "technique.cb.enabled",
                True,
                "more than one pipeline stage (parallel.pipeline_parallel_size): with one there are no messages",
                "parallel=pp4, or technique=baseline",
            )
        if isinstance(self.codec, IdentityConfig):
            yield Problem(
                "technique.cb.codec",
                self.codec.name,
                "a codec that compresses, while technique.cb.enabled is true",
                "codec@technique.cb.codec=low_rank, or technique=baseline",
            )
        if isinstance(self.codec, TopKConfig) and (self.codec.density is None) == (self.codec.match_rank is None):
            given = self.codec.density is not None
            yield Problem(
                "technique.cb.codec.density",
                self.codec.density,
                "null while technique.cb.codec.match_rank is set" if given else "a share, or set match_rank",
                "technique.cb.codec.match_rank=null" if given else "technique.cb.codec.density=0.01",
            )

    def schedule_problems(self, schedule: Schedule) -> Iterator[Problem]:
        """Why mini-batches of ``schedule`` would compress nothing."""
        if not self.enabled or not self.flushes or self.compress_forward or schedule.pipeline_parallel_size == 1:
            return
        if not any(self.compressed_counts(schedule).values()):
            yield Problem(
                "technique.cb.residual",
                self.residual,
                "carry or reset: every boundary compresses one message per mini-batch here, and flush sends that "
                "one uncompressed, so nothing would be compressed",
                "technique.cb.residual=reset, technique.cb.epilogue_only=false, or more stages and micro-batches",
            )


@strict
class FusedEmbeddingConfig:
    """FE: the tied embedding's two all-reduces become one (Optimus-CC)."""

    enabled: bool = False

    def problems(self, parallel: ParallelConfig) -> Iterator[Problem]:
        """Why there is nothing to fuse in a layout."""
        if self.enabled and parallel.pipeline_parallel_size == 1:
            yield Problem(
                "technique.fe.enabled",
                True,
                "more than one pipeline stage (parallel.pipeline_parallel_size): one holds one copy of the embedding, "
                "so there is nothing to fuse",
                "parallel=pp4_dp2, or technique.fe.enabled=false",
            )


@strict
class SelectiveStageCompressionConfig:
    """SC: data-parallel gradients travel as low-rank factors on the stages that finish last (Optimus-CC)."""

    enabled: bool = False
    fraction: Annotated[float, Field(ge=0, le=1)] = 0.75
    """Share of the pipeline stages, earliest first, rounded half up: 0.75 of 4 is 3, of 2 is 2."""
    codec: CodecConfig = IdentityConfig()
    default_rank: PositiveInt | None = None
    """What ``codec.rank`` is when nothing else is said; filled in from the model."""
    min_compression_ratio: PositiveFloat = 2.0
    """A matrix is compressed only if it has at least this many times the elements of its two factors."""
    error_feedback: bool = True
    """What compression leaves out of one step's gradient is added to the next one's."""
    warmup_steps: NonNegativeInt = 0
    """Steps at the start in which nothing is compressed."""

    def compresses(self, rows: int, columns: int) -> bool:
        """Whether the gradient of a matrix is large enough beside its two factors. A vector's never is."""
        if not isinstance(self.codec, LowRankConfig) or min(rows, columns) < 2:
            return False
        rank = min(self.codec.rank, rows, columns)
        return rows * columns >= self.min_compression_ratio * rank * (rows + columns)

    def problems(self, parallel: ParallelConfig) -> Iterator[Problem]:
        """Why this can't work in a layout, or would compress nothing."""
        if not self.enabled:
            return
        if not isinstance(self.codec, LowRankConfig):
            yield Problem(
                "technique.sc.codec",
                self.codec.name,
                "low_rank, while technique.sc.enabled is true",
                "codec@technique.sc.codec=low_rank, or technique.sc.enabled=false",
            )
        if parallel.data_parallel_size == 1:
            yield Problem(
                "technique.sc.enabled",
                True,
                "more than one data-parallel rank (parallel.data_parallel_size): with one no gradient is reduced",
                "parallel=pp4_dp2, or technique.sc.enabled=false",
            )
        stages = parallel.pipeline_parallel_size
        if self.fraction > 0 and stages_to_compress(stages, self.fraction) == 0:
            yield Problem(
                "technique.sc.fraction",
                self.fraction,
                f"at least {0.5 / stages:.4g}, half of one of the {stages} stages (or 0, to compress on none)",
                f"technique.sc.fraction={1 / stages:.4g}",
            )


@strict
class TechniqueConfig:
    """One composition of techniques."""

    name: Name = "baseline"
    cb: CompressedBackpropagationConfig = CompressedBackpropagationConfig()
    fe: FusedEmbeddingConfig = FusedEmbeddingConfig()
    sc: SelectiveStageCompressionConfig = SelectiveStageCompressionConfig()

    def problems(self, parallel: ParallelConfig) -> Iterator[Problem]:
        """Why a technique can't work in a layout, or would compress nothing: all that both alone decide."""
        yield from self.cb.problems(parallel)
        yield from self.fe.problems(parallel)
        yield from self.sc.problems(parallel)

    @property
    def label(self) -> str:
        """Readable name of what is switched on and how it differs from the paper's choice."""
        parts = [*self._cb_label, *(["fe"] if self.fe.enabled else []), *self._sc_label]
        return "_".join(parts) or "baseline"

    @property
    def _cb_label(self) -> list[str]:
        cb = self.cb
        if not cb.enabled:
            return []
        parts = ["cb", *_codec_label(cb.codec)]
        if not cb.epilogue_only and not cb.lazy_error_propagation:
            parts.append("naive")
        elif not cb.epilogue_only:
            parts.append("no_epilogue")
        elif not cb.lazy_error_propagation:
            parts.append("no_lazy_error")
        if cb.compress_forward:
            parts.append("forward")
        if cb.lazy_error_propagation and cb.residual != "reset":
            parts.append(cb.residual)
        return parts

    @property
    def _sc_label(self) -> list[str]:
        sc = self.sc
        if not sc.enabled:
            return []
        if sc.fraction == 1 and not (self.cb.enabled or self.fe.enabled or sc.warmup_steps):
            parts = ["naive_dp"]
        else:
            parts = ["sc"] if sc.fraction == 0.75 else ["sc", f"{sc.fraction:.4g}"]
        if not sc.error_feedback:
            parts.append("no_error_feedback")
        return parts


def _codec_label(codec: CodecConfig) -> list[str]:
    """How a codec differs from the paper's low-rank one with warm start. The rank is left to the run id's hash."""
    parts = []
    if isinstance(codec, TopKConfig):
        parts.append("topk" if codec.density is None else f"topk_{codec.density:g}")
    elif isinstance(codec, LowRankConfig) and not codec.warm_start:
        parts.append("cold_start")
    if not isinstance(codec, IdentityConfig) and codec.wire_dtype != "input":
        parts.append(f"{codec.wire_dtype}_wire")
    return parts
