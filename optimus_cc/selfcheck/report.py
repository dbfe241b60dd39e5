"""Verdicts as lines to read, and what to report when something failed. No torch."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from optimus_cc.config import RunConfig

WIDTH = 118
_INDENT = 19
_VERSIONS = ("optimus-cc", "torch", "megatron-core", "transformer-engine", "triton", "numpy")


def line(verdict: Mapping[str, Any]) -> str:
    """One check: its name, ``ok``, ``FAILED`` or ``does not apply: why``, and what was compared how exactly."""
    name, outcome = str(verdict.get("check")), str(verdict.get("verdict"))
    text = str(verdict.get("said"))
    if outcome == "ok":
        tolerance, largest = verdict.get("tolerance", 0.0), verdict.get("largest", 0.0)
        text += f" ({verdict.get('values', 0):,} values"
        text += f", largest difference {largest:.0e}, tolerance {tolerance:.0e})" if tolerance else ", no tolerance)"
    label = f"{name:<{_INDENT - 2}}  {outcome}{'  ' if outcome == 'ok' else ': '}"
    return textwrap.fill(
        f"{label}{text}", WIDTH, subsequent_indent=" " * (_INDENT + 4), break_on_hyphens=False, break_long_words=False
    )


def problem_report(
    failed: Sequence[Mapping[str, Any]],
    config: RunConfig,
    origin: Mapping[str, Any],
    device: str,
    backend: str,
    folder: str,
) -> str:
    """All that somebody needs who is to find out why a check failed."""
    git = origin.get("git") or {}
    versions = origin.get("versions") or {}
    commit = f"{git.get('commit')}{' with uncommitted changes' if git.get('dirty') else ''}"
    known = [f"{name} {versions[name]}" for name in _VERSIONS if name in versions]
    parallel = config.parallel
    settings = [
        f"{name}={str(value).lower()}"
        for name in (
            "overlap_p2p",
            "batch_p2p",
            "sequence_parallel",
            "split_over_tensor_parallel",
            "overlap_grad_reduce",
            "distributed_optimizer",
        )
        if (value := getattr(parallel, name)) is not None
    ]
    rows = {
        **{f"{verdict.get('check')}": f"{verdict.get('verdict')}: {verdict.get('said')}" for verdict in failed},
        "layout": f"{parallel.label}, {', '.join(settings)}",
        "training": f"{config.training.precision}, {config.optimizer.name}, recompute {config.training.recompute}",
        "backend": f"{backend} on {device}",
        "versions": f"Python {origin.get('python')}, {', '.join(known)}",
        "code": commit,
        "platform": str(origin.get("platform")),
        "command": str(origin.get("command")),
        "logs": f"{folder}, all of it",
    }
    return "\n".join(
        ["Please report this:"]
        + [
            textwrap.fill(
                f"  {name:<17}  {text}",
                WIDTH,
                subsequent_indent=" " * (_INDENT + 2),
                break_on_hyphens=False,
                break_long_words=False,
            )
            for name, text in rows.items()
        ]
    )


def _wrapped(text: str, indent: int) -> str:
    """Lines of a screen's width; paths stay in one piece."""
    indentation = " " * indent
    return textwrap.fill(text, WIDTH, subsequent_indent=indentation, break_on_hyphens=False, break_long_words=False)
