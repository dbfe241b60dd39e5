"""matplotlib as it comes: no caller's backend and no matplotlibrc has a say in what a figure looks like."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def own_style(settings: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Draw and save in here. Afterwards the caller's settings are what they were.

    Args:
        settings: on top of matplotlib's own defaults.

    Raises:
        ImportError: matplotlib is not installed.
    """
    said = os.environ.get("MPLBACKEND")
    os.environ["MPLBACKEND"] = "agg"  # importing it fails with another one that isn't there
    try:
        import matplotlib
    finally:
        del os.environ["MPLBACKEND"]
        if said is not None:
            os.environ["MPLBACKEND"] = said
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(dict[Any, Any](settings or {}))
        yield
