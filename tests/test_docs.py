"""The pages against what they describe: keys and their defaults, links, options, and every command line."""

from __future__ import annotations

import dataclasses
import re
import shlex
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from optimus_cc.config import compose
from optimus_cc.config.codec import IdentityConfig, LowRankConfig, TopKConfig
from optimus_cc.config.compose import CONF
from optimus_cc.config.technique import TechniqueConfig
from tests.config.command_line import composed, one

ROOT = CONF.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TECHNIQUE_PAGES = {
    "cb": "compressed_backpropagation.md",
    "fe": "fused_embedding.md",
    "sc": "selective_stage_compression.md",
}
CODECS: dict[str, Any] = {"identity": IdentityConfig, "low_rank": LowRankConfig, "top_k": TopKConfig}


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def rows(text: str) -> dict[str, str]:
    """First and second cell of each table row whose first cell is one key."""
    return dict(re.findall(r"^\| `([\w.]+)` \| ([^|]*?) \|", text, re.MULTILINE))


# -- keys and defaults -------------------------------------------------------------------------------------------------


@cache
def technique(name: str) -> dict[str, Any]:
    """What ``technique=NAME`` composes to, with numbers of the model that nothing else has."""
    model = "model.cb_rank=3 model.sc_rank=5 model.sc_warmup_steps=7"
    return one(f"technique={name} parallel=pp4_dp2 {model}").to_mapping()


def look_up(config: dict[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value[part]
    return value


def stated(cell: str, option: str, config: dict[str, Any]) -> Any:
    """What a cell ``DEFAULT`` or ``DEFAULT; VALUE in `OPTION`, `OPTION``` says of a key under ``technique=option``."""
    default, *exceptions = [part.strip() for part in cell.split(";")]
    said = default
    for exception in exceptions:
        value, _, names = exception.partition(" in ")
        listed = re.findall(r"`(\w+)`", names)
        assert names == ", ".join(f"`{name}`" for name in listed), cell
        assert set(listed) <= set(options("technique")), cell
        said = value if option in listed else said
    if of_the_model := re.fullmatch(r"the model's `(\w+)`", said):
        return config["model"][of_the_model[1]]
    if other := re.fullmatch(r"`([\w.]+)`", said):
        return look_up(config, other[1])
    return yaml.safe_load(said)


def options(group: str) -> list[str]:
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


def fields(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


@pytest.mark.parametrize("node", TECHNIQUE_PAGES)
def test_every_key_of_a_technique_has_its_default_in_its_page(node: str) -> None:
    cls = typing.get_type_hints(TechniqueConfig)[node]
    table = {key: cell for key, cell in rows(page(TECHNIQUE_PAGES[node])).items() if key.startswith("technique.")}
    expected = {f"technique.{node}.{name}" for name in fields(cls)}
    if "codec" in fields(cls):
        expected.remove(f"technique.{node}.codec")
        expected |= {f"technique.{node}.codec.{name}" for name in fields(LowRankConfig) if name != "name"}
    assert set(table) == expected
    for key in sorted(expected):
        for option in options("technique"):
            config = technique(option)
            if ".codec." in key and look_up(config, f"technique.{node}.codec.name") != "low_rank":
                continue
            assert stated(table[key], option, config) == look_up(config, key), (key, option)


def test_every_technique_has_a_page() -> None:
    assert set(TECHNIQUE_PAGES) == set(fields(TechniqueConfig)) - {"name"}
    assert options("codec") == sorted(CODECS)


@pytest.mark.parametrize("name", CODECS)
def test_every_key_of_a_codec_has_its_default_in_the_page(name: str) -> None:
    (section,) = re.findall(rf"^## {name}\n(.*?)(?=^## |\Z)", page("codecs.md"), re.MULTILINE | re.DOTALL)
    table = rows(section)
    assert set(table) == set(fields(CODECS[name])) - {"name"}
    off = " technique.cb.enabled=false" if name == "identity" else ""
    config = one(f"codec@technique.cb.codec={name} model.cb_rank=3{off}").to_mapping()
    cb = config["technique"]["cb"]
    for key, cell in table.items():
        assert stated(cell, "cb", {**config, **cb}) == cb["codec"][key], key


@pytest.mark.parametrize("name", [*TECHNIQUE_PAGES.values(), "codecs.md"])
def test_a_page_says_what_when_and_where_from(name: str) -> None:
    text = page(name)
    assert "https://arxiv.org/abs/2301.09830" in text
    headings = re.findall(r"^## (.*)", text, re.MULTILINE)
    assert any(re.search(r"[Ww]hen.*helps, and when not", heading) for heading in headings)
    if name != "codecs.md":
        assert {"What it does", "Keys"} <= set(headings)


# -- what pages name ---------------------------------------------------------------------------------------------------


def anchors(file: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_links_lead_somewhere(file: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", file.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = (file.parent / path).resolve() if path else file
        assert linked.exists(), target
        assert linked.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(linked), target


def test_every_page_is_linked_from_the_readme() -> None:
    linked = set(re.findall(r"\]\(docs/(\w+\.md)\)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert linked == {file.name for file in PAGES[1:]}


def command_lines(text: str) -> Iterator[str]:
    """Lines of code blocks, and code inside sentences, that start with ``python run.py``; templates left out."""
    text = text.replace("\\\n", " ")  # a line that goes on
    blocks = re.findall(r"^(?:```.*?^```$|    .*?$)", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    for line in lines:
        words = shlex.split(line, comments=True) if line.startswith("python run.py") else []
        if words and not re.search(r"\.\.\.|[<|]|\[[A-Z]|\b(?:NAME|HOST|RUN)\b", " ".join(words)):
            yield shlex.join(words[2:])


COMMANDS = sorted({line for file in PAGES for line in command_lines(file.read_text(encoding="utf-8"))})


def test_command_lines_are_found() -> None:
    assert {"", "--help", "+ablation=cb_no_lazy_error"} <= set(COMMANDS)
    assert any("task=exposure" in line for line in COMMANDS)
    assert any(line.startswith("-m ") for line in COMMANDS)


@pytest.mark.parametrize("line", COMMANDS)
def test_command_lines_compose(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in re.findall(r"data\.path=(\S+)", line):
        Path(name).write_text('{"text": "a"}\n')
    arguments, _ = compose.parse(shlex.split(line))
    if compose.asks_for_information(arguments):  # shown as it is, unchecked
        assert compose._Composer.of(arguments).load(arguments.overrides)
    elif not arguments.help:
        assert composed(line)


GROUPS_OF_KEYS = "technique|parallel|training|model|data|tokenizer|optimizer|cluster|evaluation"
DOTTED = re.compile(rf"((?:{GROUPS_OF_KEYS})(?:\.\w+)+)(?:=.*)?")


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_options_and_keys_exist(file: Path) -> None:
    """``GROUP=OPTION`` and ``GROUP.KEY`` in code inside sentences."""
    prose = re.sub(r"^```.*?^```$", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    groups = {path.name for path in CONF.iterdir() if path.is_dir()}
    for code in re.findall(r"`([^`]+)`", prose):
        for word in code.split():
            group, _, option = word.lstrip("+").partition("=")
            if group in groups and re.fullmatch(r"[\w,]+", option) and not option.isupper():
                assert set(option.split(",")) <= set(options(group)), word
            if (key := DOTTED.fullmatch(word)) and not word.endswith(".json"):
                assert key[1] in known_keys(), word


@cache
def known_keys() -> frozenset[str]:
    """Every key that some option of a group writes."""

    def walk(node: Any, prefix: str) -> Iterator[str]:
        yield prefix
        for name, child in node.items() if isinstance(node, dict) else ():
            yield from walk(child, f"{prefix}.{name}")

    keys: set[str] = set()
    for file in CONF.glob("*/*.yaml"):
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        content = content.get(file.parent.name, content)  # of a file for several groups
        if file.parent.name == "codec":
            for node in ("cb", "sc"):
                keys |= set(walk(content, f"technique.{node}.codec"))
        elif file.parent.name != "ablation":
            keys |= set(walk({key: value for key, value in content.items() if key != "defaults"}, file.parent.name))
    return frozenset(keys)


def test_every_key_of_an_evaluation_has_its_default_in_the_page() -> None:
    config = one("").to_mapping()
    table = {key: cell for key, cell in rows(page("evaluation.md")).items() if key.startswith("evaluation.")}
    assert set(table) == {f"evaluation.{key}" for key in config["evaluation"]}
    for key, cell in table.items():
        assert stated(cell, "cb", config) == look_up(config, key), key


@pytest.mark.parametrize(("name", "file"), [("local", "sweeps.md"), ("slurm", "slurm.md")])
def test_every_key_of_a_launcher_has_its_default_in_its_page(name: str, file: str) -> None:
    config = one(f"launcher={name}").to_mapping()
    table = {key: cell for key, cell in rows(page(file)).items() if key.startswith("launcher.")}
    keys = {f"launcher.{key}" for key, value in config["launcher"].items() if not isinstance(value, dict)}
    keys |= {f"launcher.container.{key}" for key in config["launcher"].get("container", ())}
    assert set(table) == keys - {"launcher.name"}
    for key, cell in table.items():
        assert stated(cell, "cb", config) == look_up(config, key), key
