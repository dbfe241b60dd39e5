"""The report as files: the same bytes each time, nothing from elsewhere, every link leads somewhere."""

from __future__ import annotations

import csv
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from paper_figures.__main__ import main
from paper_figures.build import cell
from paper_figures.data import read_claims
from paper_figures.verdicts import WORDS


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.unlabelled = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.ids += [one] if (one := found.get("id")) else []
        if tag == "a":
            self.links.append(found.get("href") or "")
        if tag in ("img", "script", "iframe", "source"):
            self.loaded.append(found.get("src") or "data:")
        if tag == "link":
            self.loaded.append(found.get("href") or "")
        self.unlabelled += tag == "img" and not found.get("alt")


@pytest.fixture(scope="module")
def page(report: Path) -> Page:
    return Page((report / "index.html").read_text(encoding="utf-8"))


def test_the_page_needs_nothing_but_itself(page: Page, report: Path) -> None:
    assert len(page.loaded) >= 11
    assert all(one.startswith("data:") for one in page.loaded)
    text = re.sub(r"data:[^\"]*", "", (report / "index.html").read_text(encoding="utf-8"))
    assert not re.findall(r"https?://|@import|url\(", text)
    assert not page.unlabelled


def test_links_lead_somewhere(page: Page, report: Path) -> None:
    assert len(page.ids) == len(set(page.ids))
    for link in page.links:
        if link.startswith("#"):
            assert link[1:] in page.ids
        else:
            assert (report / link).is_file(), link
    assert {Path(link).suffix for link in page.links if not link.startswith("#")} == {
        *(".csv", ".md", ".tex", ".pdf", ".svg", ".png")
    }


def test_the_claims_come_first_and_all_have_a_verdict(page: Page, report: Path) -> None:
    text = (report / "index.html").read_text(encoding="utf-8")
    ids = [claim["id"] for claim in read_claims()["claims"]]
    assert [one.removeprefix("claim-") for one in page.ids if one.startswith("claim-")] == ids
    assert text.index('id="claims"') < min(text.index(f'id="{name}"') for name in ("pretraining", "motivation"))
    with (report / "claims.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["claim"] for row in rows] == ids
    for row in rows:
        assert row["verdict"] in WORDS
        assert row["why"]
        assert row["evidence"] or row["verdict"] == "not tested here"


def test_no_traces_of_when_or_where(report: Path) -> None:
    for path in report.rglob("*"):
        if path.suffix in (".svg", ".pdf"):
            content = path.read_bytes()
            assert not re.search(rb"CreationDate|<dc:date>|Matplotlib v", content), path
        if path.suffix == ".pdf":
            assert b"/FontFile2" in content, "fonts are TrueType, and embedded"
            assert b"/Type3" not in content


def test_the_same_runs_give_the_same_bytes(report: Path, runs: Path, tmp_path: Path) -> None:
    assert main(["--runs", str(runs), "--output", str(tmp_path / "again")]) == 0
    files = sorted(path.relative_to(report) for path in report.rglob("*") if path.is_file())
    again = tmp_path / "again"
    assert files == sorted(path.relative_to(again) for path in again.rglob("*") if path.is_file())
    assert len(files) > 60
    for file in files:
        assert (report / file).read_bytes() == (tmp_path / "again" / file).read_bytes(), file


def test_tables_come_in_three_forms(report: Path) -> None:
    for name in ("pretraining", "ablation", "fe_volume"):
        with (report / "tables" / f"{name}.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        lines = (report / "tables" / f"{name}.md").read_text(encoding="utf-8").splitlines()
        assert len(lines) == len(rows) + 2
        assert {line.count("|") for line in lines} == {lines[0].count("|")}
        tex = (report / "tables" / f"{name}.tex").read_text(encoding="utf-8")
        assert len(re.findall(r"\\\\$", tex, re.MULTILINE)) == len(rows) + 1
        assert not re.search(r"(?<!\\)[_#$]", tex.replace("$\\pm$", "").split("midrule")[1])


@pytest.mark.parametrize(
    ("value", "text"),
    [(math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "-"), (None, "-"), (250.0, "250"), (0.12345, "0.1235")],
)
def test_a_cell_shows_any_number(value: float | None, text: str) -> None:
    assert cell("perplexity", value) == text


def test_the_command_line(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert "python run.py experiment=laptop/figure_motivation" in capsys.readouterr().out
    assert main(["fe_volume", "--runs", str(runs), "-o", str(tmp_path)]) == 0
    made = {path.name for path in (tmp_path / "tables").iterdir()}
    assert made == {"fe_volume.csv", "fe_volume.md", "fe_volume.tex"}
    assert not (tmp_path / "index.html").exists()
    with pytest.raises(SystemExit):
        main(["fe_volum"])
    assert "did you mean fe_volume" in capsys.readouterr().err
