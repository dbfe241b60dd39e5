"""``technique``: what Optimus-CC does to the traffic. Every node is always there, with ``enabled``."""

from __future__ import annotations

from typing import Literal

from optimus_cc.config.codec import CodecConfig, IdentityConfig, LowRankConfig, TopKConfig
from optimus_cc.config.schema import Name, PositiveInt, strict


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
class TechniqueConfig:
    """One composition of techniques."""

    name: Name = "baseline"
    cb: CompressedBackpropagationConfig = CompressedBackpropagationConfig()

    @property
    def label(self) -> str:
        """Readable name of what is switched on and how it differs from the paper's choice."""
        if not self.cb.enabled:
            return "baseline"
        cb = self.cb
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
        return "_".join(parts)


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
