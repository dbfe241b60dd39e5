"""``technique``: what Optimus-CC does to the traffic. Every node is always there, with ``enabled``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from optimus_cc.config.codec import CodecConfig, IdentityConfig, LowRankConfig, TopKConfig
from optimus_cc.config.schema import Name, NonNegativeInt, PositiveFloat, PositiveInt, strict


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


@strict
class FusedEmbeddingConfig:
    """FE: the tied embedding's two all-reduces become one (Optimus-CC)."""

    enabled: bool = False


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


@strict
class TechniqueConfig:
    """One composition of techniques."""

    name: Name = "baseline"
    cb: CompressedBackpropagationConfig = CompressedBackpropagationConfig()
    fe: FusedEmbeddingConfig = FusedEmbeddingConfig()
    sc: SelectiveStageCompressionConfig = SelectiveStageCompressionConfig()

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
