"""Documents, one by one, from a Wikipedia dump or from JSON-lines files. Never imports torch."""

from __future__ import annotations

import bz2
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from optimus_cc.training import compressed
from optimus_cc.training.errors import DataError

if TYPE_CHECKING:
    from mwparserfromhell.nodes import Template
    from mwparserfromhell.wikicode import Wikicode

# --- JSON lines ------------------------------------------------------------------------------------------------------


def read_json_lines(path: Path, text_key: str, *, said_by: str = "data.text_key") -> Iterator[str]:
    """The text of each line of a JSON-lines file; ``""`` where a line or its text is blank.

    Compressed files are decompressed on the way: :mod:`optimus_cc.training.compressed`. Memory: one line, and what the
    compressor asks for.

    Args:
        said_by: the key of the configuration that ``text_key`` comes from.

    Raises:
        DataError: at the first line that is not a JSON object with a string under ``text_key``, not UTF-8, or cut off.
            Names the file and the line, counted from 1.
    """
    number = 0

    def broken(found: str) -> DataError:
        return DataError(
            f"{path}, line {number}: {found}. Expected one JSON object a line, in UTF-8, "
            f"with the document's text as a string under {text_key!r} ({said_by})."
        )

    lines = compressed.lines(path)
    while True:
        number += 1
        try:
            line = next(lines, None)
        except compressed.Damaged as error:
            raise broken(str(error)) from None
        except OSError as error:
            raise DataError(f"{path}: can't be read: {error.strerror or error}") from None
        if line is None:
            return
        try:
            content = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise broken(f"not UTF-8 (byte {error.start + 1} of the line)") from None
        if not content.strip():
            yield ""
            continue
        try:
            record = json.loads(content)
        except json.JSONDecodeError as error:
            raise broken(f"not JSON ({error.msg}, column {error.colno})") from None
        except (ValueError, RecursionError) as error:
            raise broken(f"not JSON that can be read ({error})") from None
        if not isinstance(record, dict):
            raise broken(f"a JSON {_json_type(record)} instead of an object")
        if text_key not in record:
            keys = ", ".join(sorted(record)[:8]) or "none"
            raise broken(f"no key {text_key!r} (keys of this line: {keys})")
        text = record[text_key]
        if not isinstance(text, str):
            raise broken(f"{text_key!r} holds a JSON {_json_type(text)} instead of a string")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise broken(f"{text_key!r} holds half of a surrogate pair, which is not a character") from None
        yield text if text.strip() else ""


def _json_type(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


# --- Wikipedia -------------------------------------------------------------------------------------------------------

_WIKIPEDIA_DUMP = "test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"


def wikipedia_dump() -> Path:
    """The Wikipedia dump that the gensim package carries. Does not import gensim.

    Raises:
        DataError: if gensim is not installed, or installed without that file.
    """
    remedy = "pip install 'gensim>=4.3', or use your own text: data=jsonl data.path=FILE"
    spec = importlib.util.find_spec("gensim")
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"data=wikipedia_sample is text inside the gensim package, which is not installed: {remedy}.")
    path = Path(spec.submodule_search_locations[0]) / _WIKIPEDIA_DUMP
    if not path.is_file():
        raise DataError(f"data=wikipedia_sample: this installation of gensim lacks {path}: {remedy}.")
    return path


def read_wikipedia(path: Path) -> Iterator[str]:
    """Title and clean text of each article of a bzip2 Wikipedia dump; redirects and other namespaces are left out.

    Raises:
        DataError: if the dump is damaged, or mwparserfromhell is not installed.
    """
    if importlib.util.find_spec("mwparserfromhell") is None:
        raise DataError("data=wikipedia_sample needs the mwparserfromhell package: pip install mwparserfromhell.")
    try:
        with bz2.open(path, "rb") as file:
            for page in _pages(file):
                if page.findtext("{*}ns") == "0" and page.find("{*}redirect") is None:
                    title, markup = page.findtext("{*}title"), page.findtext("{*}revision/{*}text")
                    text = clean_wikitext(markup or "")
                    yield f"{title}\n\n{text}" if text else ""
    except (OSError, EOFError, ElementTree.ParseError) as error:
        raise DataError(f"{path}: not a readable Wikipedia dump: {error}") from None


def _pages(file: Any) -> Iterator[ElementTree.Element]:
    """Each ``<page>`` element, freed once the next one is asked for."""
    events = ElementTree.iterparse(file, events=("start", "end"))
    _, root = next(events)
    for event, element in events:
        if event == "end" and element.tag.endswith("}page"):
            yield element
            root.clear()


def clean_wikitext(markup: str) -> str:
    """Readable paragraphs of an article: no tables, references, files, categories, formulas or lists of links."""
    import mwparserfromhell

    # Bold and italic quotes are often unbalanced, which derails the parser; a regular expression removes them below.
    text = _render(mwparserfromhell.parse(markup, skip_style_tags=True))
    text = _QUOTES.sub("", text)
    lines = []
    for line in text.split("\n"):
        if _LEFTOVER.search(line):  # markup that was unbalanced in the source
            continue
        line = _SPACE.sub(" ", line)
        for pattern, replacement in _HOLES:
            line = pattern.sub(replacement, line)
        line = line.strip()
        lines.append(line if any(map(str.isalnum, line)) else "")
    return _BLANK_LINES.sub("\n\n", "\n".join(lines)).strip()


_LINK_LISTS = frozenset(
    (
        "see also", "references", "external links", "further reading", "notes", "notes and references", "bibliography",
        "footnotes", "sources", "citations", "works cited", "general references",
    )
)  # fmt: skip
"""Sections that hold links or references and no prose."""
_DROPPED_TAGS = frozenset(
    (
        "ref", "references", "table", "gallery", "math", "chem", "source", "syntaxhighlight", "timeline", "imagemap",
        "score",
    )
)  # fmt: skip
_DROPPED_LINK = re.compile(r"\s*(file|image|category|media)\s*:", re.IGNORECASE)
_INTERWIKI = re.compile(r"\s*:?[a-z-]{1,12}:")
_FIRST_ARGUMENT = frozenset(
    ("angbr", "angle bracket", "blockquote", "ipa", "nihongo", "nowrap", "quote", "small", "smaller", "vanchor")
)  # fmt: skip
_LAST_ARGUMENT = frozenset(("lang", "transl"))
_RANGE_WORDS = frozenset(("to", "and", "by", "or", "x", "-", "–", "+/-", "±"))
_NUMBER = re.compile(r"[-+−]?\d")
_QUOTES = re.compile(r"'{2,}")
_SPACE = re.compile(r"[^\S\n]+")
_HOLES = (
    (re.compile(r"\(\s*[,;:]?(\s*[,;:])*\s*"), "("),
    (re.compile(r"\s*[,;:]*\s*\)"), ")"),
    (re.compile(r"\(\)"), ""),
    (re.compile(r" +"), " "),
    (re.compile(r" ([,.;:])(?=\s|$)"), r"\1"),
)
"""What a removed template leaves behind: empty brackets, spaces before punctuation."""
_LEFTOVER = re.compile(
    r"\{\{|\}\}|\[\[|\]\]|\{\||\|\}|</?[a-z]+[^>]*>|<ref|^\s*[|!]|__[A-Z]+__|\b(thumb|upright)\|", re.IGNORECASE
)
_BLANK_LINES = re.compile(r"\n{3,}")


def _render(code: Wikicode) -> str:
    """What a reader of the page would see, roughly."""
    from mwparserfromhell import nodes

    pieces: list[str] = []
    skipped_level: int | None = None
    for node in code.nodes:
        if isinstance(node, nodes.Heading):
            title = _render(node.title).strip()
            if skipped_level is None or node.level <= skipped_level:
                skipped_level = node.level if _QUOTES.sub("", title).lower() in _LINK_LISTS else None
            if skipped_level is None:
                pieces.append(f"\n\n{title}\n\n")
        elif skipped_level is not None:
            continue
        elif isinstance(node, nodes.Text):
            pieces.append(node.value)
        elif isinstance(node, nodes.HTMLEntity):
            pieces.append(node.normalize())
        elif isinstance(node, nodes.Wikilink):
            title = str(node.title)
            if node.text is not None and not _DROPPED_LINK.match(title):
                pieces.append(_render(node.text))
            elif node.text is None and not _DROPPED_LINK.match(title) and not _INTERWIKI.match(title):
                pieces.append(_render(node.title))
        elif isinstance(node, nodes.ExternalLink):
            if node.title is not None:
                pieces.append(_render(node.title))
        elif isinstance(node, nodes.Template):
            pieces.append(_render_template(node))
        elif isinstance(node, nodes.Tag):
            tag = str(node.tag).strip().lower()
            if tag == "br":
                pieces.append("\n")
            elif tag not in _DROPPED_TAGS and node.contents is not None:
                pieces.append(_render(node.contents))
    return "".join(pieces)


def _render_template(template: Template) -> str:
    """Text of the few templates that stand in for words of a sentence; nothing for the others."""
    name = str(template.name).strip().lower()
    arguments = [_render(parameter.value).strip() for parameter in template.params if not parameter.showkey]
    if not arguments:
        return ""
    if name in ("convert", "cvt"):
        words: list[str] = []
        for argument in arguments:  # value, perhaps more values with words between them, then the unit
            words.append(argument)
            if argument not in _RANGE_WORDS and not _NUMBER.match(argument):
                break
        return " ".join(words)
    if name == "as of":
        return f"as of {arguments[0]}" if "lc" in str(template) else f"As of {arguments[0]}"
    if name in _LAST_ARGUMENT:
        return arguments[-1]
    if name in _FIRST_ARGUMENT or name.startswith("lang-"):
        return arguments[0]
    return ""
