"""``codec``: what turns a tensor into the bytes that travel."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from optimus_cc.config.schema import PositiveInt, strict


@strict
class IdentityConfig:
    """No compression: the tensor travels as it is."""

    name: Literal["identity"] = "identity"


@strict
class LowRankConfig:
    """One step of power iteration: a matrix travels as two factors (Optimus-CC, 4; PowerSGD, 1905.13727)."""

    name: Literal["low_rank"] = "low_rank"
    rank: PositiveInt
    """Columns of each factor. Lower: fewer bytes, larger residual. Above min(rows, columns) it is exact."""
    warm_start: bool = True
    """Start each power iteration from the factor of the message before; false: from a new random one."""
    wire_dtype: Literal["input", "fp32", "bf16", "fp16"] = "input"
    """Type in which the factors travel; ``input``: the message's own."""


@strict
class TopKConfig:
    """The entries of largest magnitude travel, with their places. Of density and match_rank exactly one is set."""

    name: Literal["top_k"] = "top_k"
    density: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the entries that is kept, rounded up."""
    match_rank: PositiveInt | None = None
    """Keep as many as fit into what the low-rank codec would send at this rank."""
    wire_dtype: Literal["input", "fp32", "bf16", "fp16"] = "input"
    """Type in which the values travel; ``input``: the message's own."""


CodecConfig = Annotated[IdentityConfig | LowRankConfig | TopKConfig, Field(discriminator="name")]
