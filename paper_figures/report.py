"""The report: one page that needs nothing beside it, with links to the files that lie there."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from optimus_cc.records import read_regular
from paper_figures.build import Made, cell, markdown, printed
from paper_figures.data import Data
from paper_figures.verdicts import WORDS, Verdict

_HERE = Path(__file__).parent
_RUN_COLUMNS = {
    "run": "run",
    "technique": "technique",
    "seed": "seed",
    "total_steps": "steps",
    "validation_token_perplexity": "perplexity (per token)",
    "step_time_median_s": "step (s)",
    "commit": "commit",
}


def write(made: Sequence[Made], verdicts: Sequence[Verdict], data: Data, remarks: Sequence[str], output: Path) -> Path:
    """``index.html`` in ``output``, and the claims as CSV and Markdown beside it."""
    output.mkdir(parents=True, exist_ok=True)
    claims = pd.DataFrame([{**vars(verdict), "runs": " ".join(verdict.runs)} for verdict in verdicts])
    claims = claims[["claim", "says", "word", "why", "evidence", "scale", "runs"]].rename(columns={"word": "verdict"})
    claims.to_csv(output / "claims.csv", index=False)
    heads = ["claim", "verdict", "why", "evidence", "scale"]
    body = [[v.says, v.word, v.why, v.evidence or "-", v.scale or "-"] for v in verdicts]
    (output / "claims.md").write_text(markdown(heads, body), encoding="utf-8")

    used = {run for one in made for run in one.runs} | {run for verdict in verdicts for run in verdict.runs}
    runs = data.tables["runs"]
    runs = runs[runs["run"].isin(used)]
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=select_autoescape(["j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.j2").render(
        source=data.paper["source"],
        verdicts=verdicts,
        words=[(word, Counter(verdict.word for verdict in verdicts)[word]) for word in WORDS],
        items=[_shown(one, output) for one in made],
        runs=[
            {
                "cells": [cell(name, row[name]) for name in _RUN_COLUMNS],
                "numbers": [_number(row[name]) for name in _RUN_COLUMNS],
                "id": row["run"],
                "config": _config(Path(row["folder"])),
                "command": row["command"],
            }
            for _, row in runs.assign(command=_commands(runs)).iterrows()
        ],
        run_heads=list(_RUN_COLUMNS.values()),
        known=set(runs["run"]),
        remarks=remarks,
    )
    path = output / "index.html"
    path.write_text(page, encoding="utf-8")
    return path


def _shown(made: Made, output: Path) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "name": made.item.name,
        "item": made.item,
        "missing": made.missing,
        "command": made.command,
        "notes": made.notes,
        "runs": made.runs,
        "files": [(path.suffix[1:].upper(), path.relative_to(output).as_posix()) for path in made.files],
        "kinds": [] if made.frame is None else sorted(set(made.frame["kind"])),
        "needs": [need.command for need in made.item.needs],
        "configurations": [line for need in made.item.needs for line in getattr(need, "overrides", ())],
        "image": f"data:image/svg+xml;base64,{base64.b64encode(made.svg).decode()}" if made.svg else None,
    }
    if made.frame is not None and not made.item.is_figure:
        shown["heads"], shown["body"] = printed(made.item, made.frame)
    return shown


def _number(value: Any) -> str:
    """What a cell is sorted by, if not its text."""
    return repr(float(value)) if isinstance(value, (int, float)) and value == value else ""


def _config(folder: Path) -> str:
    try:
        return read_regular(folder / "config.yaml").decode("utf-8")
    except (OSError, ValueError):
        return ""


def _commands(runs: pd.DataFrame) -> list[str]:
    from analysis.collect import provenance

    return [str(provenance(Path(folder)).get("command", "")) for folder in runs["folder"]]
