"""Typed configuration: one dataclass per Hydra group, checked before anything starts. Never imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optimus_cc.config.errors import ConfigError, Problem

if TYPE_CHECKING:
    from optimus_cc.config.run import RunConfig, load

__all__ = ["ConfigError", "Problem", "RunConfig", "load"]


def __getattr__(name: str) -> Any:
    # Lazy, so that --help and --cfg need not wait for the dataclasses.
    if name in ("RunConfig", "load"):
        from optimus_cc.config import run

        return getattr(run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
