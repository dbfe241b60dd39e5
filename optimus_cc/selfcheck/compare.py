"""Compares values and keeps the first difference, with its name and both values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

Tensors = Mapping[str, torch.Tensor]


class Comparison:
    """What one rank has compared in one check."""

    def __init__(self) -> None:
        self.difference: str | None = None
        """The first one found, in words."""
        self.values = 0
        """Numbers compared."""
        self.largest = 0.0
        """Largest relative difference that was within its tolerance."""
        self.tolerance = 0.0
        """The widest that was allowed; 0: only bits were compared."""
        self._about = ""

    @contextmanager
    def about(self, what: str) -> Iterator[None]:
        """What is compared inside, for the names of differences."""
        self._about = f"{what}: "
        try:
            yield
        finally:
            self._about = ""

    def holds(self, claim: str, true: bool) -> None:
        """A claim in words."""
        self.values += 1
        if not true:
            self._note(f"this does not hold: {claim}")

    def equal(self, name: str, found: Any, wanted: Any) -> None:
        """Equal plain values; NaN equals nothing."""
        self.values += 1
        if found != wanted:
            self._note(f"{name} is {found!r} in place of {wanted!r}")

    def same_bits(self, name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
        """Equal tensors of one shape and type; NaN equals nothing."""
        self.values += found.numel()
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            self._note(f"{name} is {_kind(found)} in place of {_kind(wanted)}")
        elif not torch.equal(found, wanted):
            self._note(_at(name, found, wanted, found != wanted))

    def close(self, name: str, found: torch.Tensor, wanted: torch.Tensor, tolerance: float, scale: float = 0.0) -> None:
        """Each element within ``tolerance x (|wanted| + scale)``."""
        self.values += found.numel()
        self.tolerance = max(self.tolerance, tolerance)
        there, here = wanted.double(), found.double()
        allowed = tolerance * (there.abs() + scale)
        far = ~((here - there).abs() <= allowed)
        if bool(far.any()):
            self._note(_at(name, found, wanted, far) + f" (tolerance {tolerance:.1e})")
        elif found.numel():
            relative = (here - there).abs() / (there.abs() + scale)
            self.largest = max(self.largest, float(relative.nan_to_num().max()))

    def close_number(self, name: str, found: float, wanted: float, tolerance: float) -> None:
        """The same for one number."""
        self.close(name, torch.tensor(found, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64), tolerance)

    def all_same_bits(self, name: str, found: Tensors, wanted: Tensors) -> None:
        """:meth:`same_bits` for everything that has a name."""
        for key in self._common(name, found, wanted):
            self.same_bits(f"{name} {key}", found[key], wanted[key])

    def all_close(self, name: str, found: Tensors, wanted: Tensors, tolerance: float, scale: float) -> None:
        """:meth:`close` for everything that has a name."""
        for key in self._common(name, found, wanted):
            self.close(f"{name} {key}", found[key], wanted[key], tolerance, scale)

    def _common(self, name: str, found: Tensors, wanted: Tensors) -> list[str]:
        for key in sorted(wanted.keys() ^ found.keys()):
            self._note(f"{name} {key} is {'there, and should not be' if key in found else 'missing'}")
        return [key for key in wanted if key in found]

    def _note(self, text: str) -> None:
        if self.difference is None:
            self.difference = self._about + text


def _at(name: str, found: torch.Tensor, wanted: torch.Tensor, where: torch.Tensor) -> str:
    """The first element of ``where``, with both values, and how many there are."""
    index = tuple(int(i) for i in where.nonzero()[0])
    place = f"[{', '.join(map(str, index))}]" if index else ""
    a, b = float(found[index]), float(wanted[index])
    several = f"; {int(where.sum())} of {where.numel()} elements differ" if where.numel() > 1 else ""
    digits = 9 if math.isfinite(a) and math.isfinite(b) else 3
    return f"{name}{place} is {a:.{digits}g} in place of {b:.{digits}g}{several}"


def _kind(tensor: torch.Tensor) -> str:
    return f"{'x'.join(map(str, tensor.shape)) or 'one'} {str(tensor.dtype).removeprefix('torch.')}"
