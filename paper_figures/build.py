"""Makes tables, figures and verdicts from data, and writes them as files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from paper_figures import style
from paper_figures.data import Data
from paper_figures.item import Item, Missing, checked
from paper_figures.style import shown


@dataclass(frozen=True)
class Made:
    """An item with all that became of it."""

    item: Item
    frame: pd.DataFrame | None
    """None: nothing to show."""
    files: tuple[Path, ...]
    missing: str | None = None
    command: str | None = None
    """Makes what is missing."""
    notes: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    svg: bytes = field(default=b"", repr=False)


def make(item: Item, data: Data, folder: Path) -> Made:
    """One item's files in ``folder``; what is missing is said in them."""
    data.item = item.name
    frame, missing = None, None
    try:
        frame = checked(item.name, item.values(data).reset_index(drop=True))
    except Missing as error:
        missing = error
    data.item = ""
    notes, runs = tuple(data.notes.get(item.name, ())), tuple(sorted(data.used.get(item.name, ())))
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / item.name
    files: list[Path] = []
    svg = b""
    if item.draw is not None:
        if frame is not None:
            drawn, draw = frame, item.draw
            pictures = style.render(lambda figure: draw(drawn, figure), item.size)
        else:
            assert missing is not None
            pictures = style.render(style.placeholder(str(missing), missing.command), (item.size[0], 1.3))
        files += style.write(pictures, stem)
        svg = pictures[".svg"]
    if frame is not None:
        files.append(_write(stem, ".csv", frame.to_csv(index=False)))
    if item.draw is None:
        heads, body = (
            printed(item, frame)
            if frame is not None
            else (["missing", "to make it"], [[str(missing), missing.command if missing else ""]])
        )
        files.append(_write(stem, ".md", markdown(heads, body)))
        files.append(_write(stem, ".tex", latex(heads, body)))
    return Made(
        item,
        frame,
        tuple(files),
        str(missing) if missing else None,
        missing.command if missing else None,
        notes,
        runs,
        svg,
    )


def printed(item: Item, frame: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of a table for a reader."""
    columns = [(name, heading) for name, heading in item.columns if name in frame] or [(name, name) for name in frame]
    body = [[cell(name, row[name]) for name, _ in columns] for _, row in frame.iterrows()]
    return [heading for _, heading in columns], body


def cell(column: str, value: Any) -> str:
    """A value as text: four digits of a number, a dash for none."""
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if column == "technique":
        return shown(str(value))
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() and abs(value) >= 100 else f"{value:.4g}"
    return str(value)


def markdown(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *body]
    return "".join(f"| {' | '.join(text.replace('|', '/') for text in line)} |\n" for line in lines)


_TEX = {
    "&": r"\&",
    "%": r"\%",
    "_": r"\_",
    "#": r"\#",
    "$": r"\$",
    "±": r"$\pm$",
    "~": r"\textasciitilde{}",
    "^": r"\^{}",
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
}


def latex(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A tabular with the rules of the package booktabs."""

    def line(cells: Sequence[str]) -> str:
        return " & ".join("".join(_TEX.get(letter, letter) for letter in text) for text in cells) + r" \\"

    rows = [line(cells) for cells in body]
    top = [
        "% \\usepackage{booktabs}",
        f"\\begin{{tabular}}{{{'l' * len(heads)}}}",
        r"\toprule",
        line(heads),
        r"\midrule",
    ]
    return "\n".join([*top, *rows, r"\bottomrule", r"\end{tabular}", ""])


def make_all(items: Mapping[str, Item], data: Data, output: Path) -> list[Made]:
    """Tables in ``output/tables``, figures in ``output/figures``."""
    return [make(item, data, output / ("figures" if item.is_figure else "tables")) for item in items.values()]


def _write(stem: Path, suffix: str, text: str) -> Path:
    path = stem.with_name(stem.name + suffix)
    path.write_text(text, encoding="utf-8")
    return path
