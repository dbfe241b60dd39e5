"""Is what the codec leaves out independent of how activations change from one micro-batch to the next?

With lazy error propagation micro-batch i's gradient at a boundary travels as g_i + e_(i-1) - e_i, e_i being the
residual: what was left out of that message and is added to the next. The error that this makes in a weight gradient
is then a sum of e_i times the change of the activation, a_(i+1) - a_i, and averages out as far as the two are
independent (Optimus-CC, the figure on error independence). This measures both, at the boundary: their cosine
similarity, their means and their sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from optimus_cc.communication.probe import Probe
from optimus_cc.exposure import Message
from optimus_cc.training.probes.place import Place

Sums = dict[tuple[int, int], list[float]]
"""By (boundary, micro-batch): see :meth:`ErrorIndependence._pair`."""


class ErrorIndependence:
    """The pairs (e_i, a_(i+1) - a_i) of one mini-batch that this rank sees; a :class:`~.MessageListener`.

    Both are with the rank that sends the gradient, which is the one that received the activation. The last micro-batch
    has none after it, so its residual is in no pair.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._activations: dict[tuple[int, int], torch.Tensor] = {}
        self._residuals: dict[int, torch.Tensor] = {}
        self._sums: dict[tuple[int, int], torch.Tensor] = {}

    def forward_arrived(self, message: Message, activation: torch.Tensor) -> None:
        self._activations[message.boundary, message.microbatch] = activation

    def backward_sent(self, message: Message, residual: torch.Tensor | None) -> None:
        # By now both activations of the pair before are complete: this micro-batch's backward pass is over.
        boundary, microbatch = message.boundary, message.microbatch
        before = self._activations.pop((boundary, microbatch - 1), None)
        earlier = self._residuals.pop(boundary, None)
        if before is not None and earlier is not None:
            with self._probe.span("probes", "error independence", message):
                pair = self._pair(earlier, before, self._activations[boundary, microbatch])
            self._sums[boundary, microbatch - 1] = pair
        if residual is not None and not message.last:
            self._residuals[boundary] = residual

    def sums(self) -> Sums:
        """What was found; waits for the device."""
        return {key: value.tolist() for key, value in self._sums.items()}

    @staticmethod
    def _pair(residual: torch.Tensor, activation: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Sums over the elements, in double precision: e d, e e, d d, e, d, 1, with d the activation difference."""
        e = residual.double().flatten()
        d = (following.double() - activation.double()).flatten()
        count = torch.full((), e.numel(), dtype=torch.float64, device=e.device)
        return torch.stack([e @ d, e @ e, d @ d, e.sum(), d.sum(), count])


def records(step: int, everyone: Iterable[tuple[Place, Sums]], shared_out: bool) -> list[dict[str, Any]]:
    """A record for each pair of a step.

    Args:
        everyone: what each rank found.
        shared_out: the tensor-parallel ranks hold a part of a message each; else all hold the same.
    """
    totals: dict[tuple[int, int, int], Sequence[float]] = {}
    for place, sums in everyone:
        if not shared_out and place.tensor_parallel_rank > 0:
            continue
        for (boundary, microbatch), values in sums.items():
            key = boundary, microbatch, place.data_parallel_rank
            before = totals.get(key, [0.0] * len(values))
            totals[key] = [a + b for a, b in zip(before, values, strict=True)]
    return [
        {
            "kind": "probe",
            "probe": "error_independence",
            "step": step,
            "boundary": boundary,
            "microbatch": microbatch,
            "data_parallel_rank": replica,
            **_statistics(*totals[boundary, microbatch, replica]),
        }
        for boundary, microbatch, replica in sorted(totals)
    ]


def _statistics(ed: float, ee: float, dd: float, e: float, d: float, count: float) -> dict[str, float]:
    norms = math.sqrt(ee) * math.sqrt(dd)
    return {
        "cosine_similarity": ed / norms if norms else math.nan,  # also if one of them is not finite
        "residual_mean": e / count,
        "residual_rms": math.sqrt(ee / count),
        "activation_difference_mean": d / count,
        "activation_difference_rms": math.sqrt(dd / count),
    }
