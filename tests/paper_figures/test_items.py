"""Every table and figure: what it declares, what it draws, what it says when nothing is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

import paper_figures
from analysis.collect import Tables
from analysis.columns import TABLES, empty
from optimus_cc.config.compose import CONF
from paper_figures import style
from paper_figures.build import make
from paper_figures.data import Data, read_claims
from paper_figures.item import KINDS, Benchmark, Item, Query, checked, discover
from tests.config.command_line import composed

ITEMS = discover()
FIGURES = [name for name, item in ITEMS.items() if item.is_figure]
FOLDER = Path(paper_figures.__file__).parent
UNITLESS = {"training step", "stage", "layout"}


def numbers(node: Any) -> set[float]:
    """All numbers in nested values."""
    if isinstance(node, dict):
        return {number for child in node.values() for number in numbers(child)}
    if isinstance(node, list):
        return {number for child in node for number in numbers(child)}
    return {float(node)} if isinstance(node, (int, float)) else set()


@cache
def made_by(recipe: str) -> set[str]:
    return {config.technique.label for config in composed(f"experiment={recipe} launcher.dry_run=true training.seed=1")}


def has_unit(label: str) -> bool:
    return label in UNITLESS or re.search(r"\(.+\)", label) is not None


def test_all_that_the_paper_shows_is_there() -> None:
    assert set(ITEMS) == {
        *("pretraining", "zero_shot", "ablation", "fe_volume"),
        *("motivation", "perplexity", "breakdown", "error_independence", "memory", "layouts", "codec_throughput"),
        *("stage_fraction_rank", "scaling", "network", "timeline"),
    }


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*/[a-z]*.py")), ids=lambda file: file.stem)
def test_a_module_is_short_and_imports_no_torch(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    imported = {name.split(".")[0] for node in ast.walk(ast.parse(text)) for name in _imports(node)}
    assert not imported & {"torch", "megatron"}


def _imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


@pytest.mark.parametrize("name", ITEMS)
def test_an_item_says_what_it_needs_and_what_the_paper_says(name: str) -> None:
    item = ITEMS[name]
    assert item.name == name
    assert all(text.endswith(".") for text in (item.paper, item.caption))
    assert item.needs
    for need in item.needs:
        if isinstance(need, Query):
            assert made_by(need.recipe) & set(need.techniques)
        elif isinstance(need, Benchmark):
            assert composed(f"experiment={need.recipe}")
        else:
            assert len(set(need.overrides)) == len(need.overrides)
            for line in (need.overrides[0], need.overrides[-1]):
                (config,) = composed(line)
                assert config.task.name == "simulate"


@pytest.mark.parametrize("name", ITEMS)
def test_rows_say_where_they_are_from_and_the_papers_are_the_claims(name: str, tables: Tables) -> None:
    data = Data(tables)
    data.item = name
    try:
        frame = checked(name, ITEMS[name].values(data))
    except paper_figures.item.Missing:  # zero-shot: the study has no evaluation
        assert name == "zero_shot"
        return
    assert set(frame["kind"]) <= set(KINDS)
    known = numbers(dict(read_claims()))
    stated = frame[frame["kind"] == "paper"]
    for column in stated.select_dtypes("number"):
        for value in stated[column].dropna():
            halves = {(a + b) / 2 for a in known for b in known} if column == "value" and name == "memory" else set()
            assert float(value) in known | halves, (column, value)
    assert data.notes.get(name) or set(frame["kind"]) <= {"predicted", "paper"}


@pytest.mark.parametrize("name", FIGURES)
def test_every_axis_has_a_unit_and_every_panel_says_where_its_values_are_from(name: str, tables: Tables) -> None:
    data = Data(tables)
    data.item = name
    frame = checked(name, ITEMS[name].values(data))
    figure = Figure(figsize=ITEMS[name].size)
    draw = ITEMS[name].draw
    assert draw is not None
    draw(frame, figure)
    texts = " ".join(text.get_text() for text in figure.findobj(Text) if isinstance(text, Text))
    for kind in set(frame["kind"]):
        assert kind in texts, f"nothing says {kind}"
    for axes in figure.axes:
        assert has_unit(axes.get_ylabel()), axes.get_ylabel()
        words = [tick.get_text() for tick in axes.get_xticklabels() if re.search("[a-zA-Z]", tick.get_text())]
        shares = axes.get_shared_x_axes().get_siblings(axes)
        assert words or any(has_unit(one.get_xlabel()) for one in shares), axes.get_xlabel()
    assert figure.get_figwidth() in (style.COLUMN, style.PAGE)


@pytest.mark.parametrize("name", ITEMS)
def test_without_data_it_says_what_is_missing_and_how_to_make_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(*args: Any, **options: Any) -> Any:
        raise paper_figures.item.Missing("predictions", "python run.py task=simulate")

    monkeypatch.setattr(Data, "predict", nothing)
    made = make(ITEMS[name], Data({table: empty(table) for table in TABLES}), tmp_path)
    said = " ".join((str(made.missing), str(made.command), *made.notes))
    assert "python run.py" in said
    if made.missing is None:  # the paper's own values, and arithmetic, are always there
        assert made.frame is not None
        assert set(made.frame["kind"]) <= {"paper", "predicted"}
        assert any(note.startswith("Missing: ") for note in made.notes)
    forms = {".pdf", ".svg", ".png"} if made.item.is_figure else {".md", ".tex"}
    assert {path.suffix for path in made.files} >= forms


def test_a_new_file_is_all_that_a_new_figure_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tables: Tables
) -> None:
    """The one that the page shows."""
    from paper_figures import figures

    text = (CONF.parent / "docs" / "figures.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "training_loss.py").write_text(example)
    monkeypatch.setattr(figures, "__path__", [*figures.__path__, str(tmp_path)])
    found = discover()
    assert set(found) - set(ITEMS) == {"training_loss"}
    made = make(found["training_loss"], Data(tables), tmp_path / "out")
    assert sorted(path.suffix for path in made.files) == [".csv", ".pdf", ".png", ".svg"]
    assert made.frame is not None
    assert set(made.frame["technique"]) == {"baseline", "cb"}


@pytest.mark.parametrize("frame", [pd.DataFrame(), pd.DataFrame({"value": [1]}), pd.DataFrame({"kind": ["guessed"]})])
def test_rows_that_do_not_say_where_they_are_from_are_refused(frame: pd.DataFrame) -> None:
    with pytest.raises(ValueError, match=r"no rows|kind must be"):
        checked("mine", frame)


@pytest.mark.parametrize(
    "matrix",
    [  # What protanopes and deuteranopes see (Machado et al. 2009), in linear RGB.
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    ],
    ids=["protanopia", "deuteranopia"],
)
def test_colours_can_be_told_apart_without_seeing_red_or_green(matrix: list[list[float]]) -> None:
    rgb = np.array([to_rgb(one) for one in style.OKABE_ITO])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.cbrt(np.clip(linear @ np.array(matrix).T, 0, 1))  # about even steps of lightness
    distances = [np.linalg.norm(a - b) for index, a in enumerate(seen) for b in seen[:index]]
    assert min(distances) > 0.1
    assert len(set(style.OKABE_ITO)) == len(style.MARKERS) == 9


def test_the_page_lists_every_item() -> None:
    text = (CONF.parent / "docs" / "figures.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == set(ITEMS)


def test_an_item_is_typed() -> None:
    assert all(isinstance(item, Item) for item in ITEMS.values())
