"""JSON values to typed columns: what has another type than its column is missing, never an error."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis.columns import TABLES

Rows = Mapping[str, list[Any]]
"""Column by column."""


def number(value: Any) -> float | None:
    """A JSON number, also one of the strings that stand for a non-finite one; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:
            return None
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else None


def to_frame(table: str, parts: Sequence[Rows]) -> pd.DataFrame:
    """The rows of several folders as one typed frame."""
    columns = {}
    for name, column in TABLES[table].items():
        values: list[Any] = []
        for part in parts:
            values += part[name]
        columns[name] = convert(values, column.dtype)
    return pd.DataFrame(columns)


def convert(values: Sequence[Any], dtype: str) -> Any:
    """A column of :mod:`analysis.columns` from JSON values; what has another type is missing."""
    types = set(map(type, values)) - {type(None)}  # one look at all of them is faster than one at each
    if dtype == "float64":
        if types <= {float}:
            return np.array(values, dtype=np.float64)  # None becomes NaN
        return np.array([math.nan if (one := number(value)) is None else one for value in values], dtype=np.float64)
    expected, keep = _KINDS[dtype]
    fits = types <= {expected} and expected is not int
    return pd.array(values if fits else [value if keep(value) else None for value in values], dtype=dtype)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


_KINDS: dict[str, tuple[type, Callable[[Any], bool]]] = {
    "string": (str, lambda value: isinstance(value, str)),
    "boolean": (bool, lambda value: isinstance(value, bool)),
    "Int64": (int, _is_whole),
}
"""A column's type, and whether a value has it."""
