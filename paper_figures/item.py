"""What a table or figure is: a module in ``tables/`` or ``figures/`` that holds an :class:`Item` called ``ITEM``."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from paper_figures.data import Data

Kind = Literal["measured", "predicted", "paper"]
KINDS: tuple[Kind, ...] = ("measured", "predicted", "paper")
"""Where a value is from. Every row that is drawn or printed says it in its column ``kind``."""


@dataclass(frozen=True)
class Query:
    """Runs that an item needs.

    Of the settings (model, layout, length, data) that were run the one with most of these techniques is taken, then
    that with most seeds, then the longest.
    """

    recipe: str
    """``experiment=`` option that makes these runs."""
    techniques: tuple[str, ...]
    extra: tuple[str, ...] = ()
    """Ablations that the recipe leaves out and that are shown where they were run."""
    probe: str | None = None
    """A probe that they must have measured."""
    baseline: str = "baseline"

    @property
    def command(self) -> str:
        return f"python run.py experiment={self.recipe}"

    @property
    def extra_command(self) -> str:
        return f"{self.command} +ablation={','.join(self.extra)}"


@dataclass(frozen=True)
class Configurations:
    """What the simulator is asked."""

    overrides: tuple[str, ...]
    """A command line for each configuration, without ``python run.py``."""

    @property
    def command(self) -> str:
        return f"python run.py {self.overrides[0]}"


@dataclass(frozen=True)
class Benchmark:
    """Measurements of ``task=benchmark``."""

    recipe: str

    @property
    def command(self) -> str:
        return f"python run.py experiment={self.recipe}"


Need = Query | Configurations | Benchmark


class Missing(Exception):
    """Data that is not there; ``str()`` says what, ``command`` produces it."""

    def __init__(self, what: str, command: str) -> None:
        super().__init__(what)
        self.command = command


@dataclass(frozen=True)
class Item:
    """A table or figure."""

    title: str
    paper: str
    """What the paper says there, in one or two sentences."""
    caption: str
    """How to read it: axes, units, error bars."""
    needs: tuple[Need, ...]
    values: Callable[[Data], pd.DataFrame]
    """All that is drawn or printed, a row each, with the column ``kind``; Missing if there is nothing to show."""
    draw: Callable[[pd.DataFrame, Figure], None] | None = None
    """Draws those rows, and nothing else; None for a table."""
    columns: Sequence[tuple[str, str]] = ()
    """Of a table: column and heading with its unit, in order; empty: all."""
    size: tuple[float, float] = (7.0, 2.6)
    """Inches. A column of two is 3.33 wide, both with the gap 7.0."""
    name: str = ""
    """The module's; filled in when it is found."""

    @property
    def is_figure(self) -> bool:
        return self.draw is not None


def discover() -> dict[str, Item]:
    """All items by name, tables first.

    Raises:
        TypeError: a module has no ``ITEM``.
    """
    found: dict[str, Item] = {}
    for package in ("paper_figures.tables", "paper_figures.figures"):
        folder = importlib.import_module(package)
        for module in sorted(pkgutil.iter_modules(folder.__path__), key=lambda module: module.name):
            item: Any = getattr(importlib.import_module(f"{package}.{module.name}"), "ITEM", None)
            if not isinstance(item, Item):
                raise TypeError(f"{package}.{module.name} has no ITEM that is a paper_figures.item.Item")
            object.__setattr__(item, "name", module.name)
            found[module.name] = item
    return found


def rows(kind: Kind, values: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Rows that are all of one kind."""
    return pd.DataFrame([{"kind": kind, **row} for row in values])


def checked(name: str, frame: pd.DataFrame) -> pd.DataFrame:
    """The same frame; where values may have intervals, with the columns ``low`` and ``high`` as numbers.

    Raises:
        ValueError: it is empty, or some row does not say where its values are from.
    """
    if frame.empty:
        raise ValueError(f"{name}: no rows")
    wrong = set(frame.get("kind", pd.Series([None]))) - set(KINDS)
    if wrong:
        raise ValueError(f"{name}: the column kind must be one of {', '.join(KINDS)}, not {wrong}")
    if "value" in frame:
        for bound in ("low", "high"):
            frame[bound] = pd.to_numeric(frame[bound]) if bound in frame else float("nan")
    return frame
