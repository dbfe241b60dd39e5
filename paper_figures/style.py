"""How figures look: sizes and fonts of a two-column paper, colours that colour-blind readers can tell apart."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimus_cc.figures import own_style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".pdf", ".svg", ".png")
OKABE_ITO = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#f0e442", "#5a5a5a", "#000000")
"""The palette of Okabe and Ito (2008), and a grey."""
HATCHES = {"measured": "", "predicted": "////", "paper": "...."}
"""How bars tell where a value is from, beside the legend."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
LINES = ("-", "--", "-.", ":")
COLUMN, PAGE = 3.33, 7.0
"""Widths in inches."""
RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 7,
    "axes.titlesize": 7.5,
    "axes.labelsize": 7,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 6,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.linewidth": 0.4,
    "grid.alpha": 0.5,
    "hatch.linewidth": 0.5,
    "lines.linewidth": 1.1,
    "lines.markersize": 3,
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "paper_figures",
    "figure.constrained_layout.use": True,
    "savefig.dpi": 200,
    "path.simplify": True,
}
_METADATA: dict[str, dict[str, Any]] = {
    ".pdf": {"CreationDate": None, "ModDate": None, "Producer": None, "Creator": None},
    ".svg": {"Date": None, "Creator": None},
    ".png": {"Software": None},
}

NAMES = {
    "baseline": "baseline",
    "cb": "CB",
    "fe": "FE",
    "sc": "SC",
    "cb_fe": "CB+FE",
    "cb_fe_sc": "CB+FE+SC",
    "cb_no_lazy_error": "CB without LEP",
    "cb_no_epilogue": "CB on all sends",
    "cb_naive": "CB naive",
    "cb_topk": "CB, top-k",
    "cb_forward": "CB, forward too",
    "naive_dp": "all DP traffic",
}


def shown(technique: str) -> str:
    """A technique's name for a reader."""
    return NAMES.get(technique, technique.replace("_", " "))


def color(index: int) -> str:
    return OKABE_ITO[index % len(OKABE_ITO)]


def render(draw: Callable[[Figure], None], size: tuple[float, float]) -> dict[str, bytes]:
    """A figure in every format, by suffix; the same bytes for the same drawing."""
    files = {}
    with own_style(RC):
        from matplotlib.figure import Figure

        figure = Figure(figsize=size)
        draw(figure)
        for suffix in SUFFIXES:
            buffer = io.BytesIO()
            figure.savefig(buffer, format=suffix[1:], metadata=_METADATA[suffix])
            files[suffix] = buffer.getvalue()
    return files


def write(files: dict[str, bytes], stem: Path) -> list[Path]:
    paths = []
    for suffix, content in files.items():
        path = stem.with_name(stem.name + suffix)
        path.write_bytes(content)
        paths.append(path)
    return paths


def placeholder(what: str, command: str) -> Callable[[Figure], None]:
    """A figure that says what is missing, and how to make it."""

    def draw(figure: Figure) -> None:
        width = int(14 * figure.get_figwidth())
        text = textwrap.fill(f"Missing: {what}.", width)
        figure.text(0.5, 0.7, text, ha="center", va="center", fontsize=7.5)
        text = "To make it:\n" + textwrap.fill(command, width, break_on_hyphens=False)
        figure.text(0.5, 0.3, text, ha="center", va="center", family="DejaVu Sans Mono", fontsize=6)

    return draw


def error_bars(line: pd.DataFrame) -> list[pd.Series]:
    """How far intervals reach below and above their values; 0 where there is none."""
    return [(line["value"] - line["low"]).fillna(0), (line["high"] - line["value"]).fillna(0)]


def grouped_bars(
    axes: Axes, groups: Sequence[str], series: Sequence[str], cells: dict[tuple[str, str], dict[str, Any]]
) -> None:
    """Bars side by side. A cell is ``value``, ``kind``, and ``low`` and ``high`` if there is an interval."""
    width = 0.8 / max(1, len(series))
    for number, name in enumerate(series):
        for place, group in enumerate(groups):
            cell = cells.get((group, name))
            if cell is None:
                continue
            x = place + (number - (len(series) - 1) / 2) * width
            axes.bar(
                x,
                cell["value"],
                width * 0.92,
                color=color(number),
                hatch=HATCHES[cell["kind"]],
                edgecolor="white",
                lw=0,
            )
            if (low := cell.get("low")) is not None and low == low:
                errors = [[cell["value"] - low], [cell["high"] - cell["value"]]]
                axes.errorbar(x, cell["value"], errors, color="black", lw=0.7, capsize=1.5)
    axes.set_xticks(range(len(groups)), groups)


def legend(axes: Axes, series: Sequence[str], kinds: Sequence[str] = (), **options: Any) -> None:
    """Colours by series, hatches by kind."""
    from matplotlib.patches import Patch

    handles = [Patch(color=color(number), label=name) for number, name in enumerate(series)]
    handles += [
        Patch(facecolor="#dddddd", edgecolor="#555555", hatch=HATCHES[kind], label=kind, lw=0.3) for kind in kinds
    ]
    axes.legend(handles=handles, **options)
