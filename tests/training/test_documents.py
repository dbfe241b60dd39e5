from __future__ import annotations

import bz2
import gzip
import importlib.util
import json
import lzma
import random
import re
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import zstandard

from optimus_cc.training.documents import clean_wikitext, read_json_lines, wikipedia_dump
from optimus_cc.training.errors import DataError

GOOD = b'{"text": "one", "id": 1}\n{"text": "two"}\n'


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"{text: 1}", "not JSON"),
        (b'{"text": "cut', "not JSON"),
        (b'{"text": "a"} {"text": "b"}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'["text"]', "a JSON array instead of an object"),
        (b'"text"', "a JSON string instead of an object"),
        (b"null", "a JSON null instead of an object"),
        (b'{"content": "x", "id": 3}', "no key 'text' (keys of this line: content, id)"),
        (b"{}", "no key 'text' (keys of this line: none)"),
        (b'{"text": 5}', "holds a JSON number instead of a string"),
        (b'{"text": null}', "holds a JSON null instead of a string"),
        (b'{"text": ["a"]}', "holds a JSON array instead of a string"),
        (b'{"text": "caf\xe9"}', "not UTF-8 (byte 14 of the line)"),
        (b'{"text": "\\ud83d"}', "surrogate"),
    ],
)
@pytest.mark.parametrize("position", ["middle", "last"])
def test_broken_line_is_named(tmp_path: Path, line: bytes, expected: str, position: str) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_bytes(GOOD + line + (b"\n" + GOOD if position == "middle" else b""))
    documents = read_json_lines(path, "text")
    assert [next(documents), next(documents)] == ["one", "two"]
    with pytest.raises(DataError) as failure:
        next(documents)
    message = str(failure.value)
    assert f"{path}, line 3: " in message
    assert expected in message
    assert "Expected one JSON object a line, in UTF-8, with the document's text as a string under 'text'" in message


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "garbled"])
def test_damaged_compression_is_named(tmp_path: Path, suffix: str, damage: str) -> None:
    source = random.Random(0)
    plain = b"".join(b'{"text": "%d"}\n' % source.getrandbits(200) for _ in range(2000))
    packed = gzip.compress(plain) if suffix == ".gz" else zstandard.ZstdCompressor(write_checksum=True).compress(plain)
    middle = len(packed) // 2
    broken = {
        "cut": packed[:middle],
        "garbled": packed[:middle] + bytes(64) + packed[middle + 64 :],
    }[damage]
    path = tmp_path / f"damaged.jsonl{suffix}"
    path.write_bytes(broken)
    with pytest.raises(DataError, match=rf"{re.escape(str(path))}, line [0-9]+: "):
        list(read_json_lines(path, "text"))


def test_compressed_files_read_like_plain_ones(tmp_path: Path) -> None:
    texts = ["plain", "ünïcode 🙂\u2028same line", "a\nb\r\nc", "x" * 3_000_000, "\x00"]
    lines = [json.dumps({"body": text}, ensure_ascii=number % 2 == 0).encode() for number, text in enumerate(texts)]
    content = b"\r\n".join(lines)  # without an end of line at the end
    frames = zstandard.ZstdCompressor().compress(content[:1000]) + zstandard.ZstdCompressor().compress(content[1000:])
    files = {
        "a.jsonl": content,
        "a.jsonl.gz": gzip.compress(content),
        "a.jsonl.zst": frames,
        "byte_order_mark.txt": b"\xef\xbb\xbf" + content,
    }
    for name, packed in files.items():
        (tmp_path / name).write_bytes(packed)
        assert list(read_json_lines(tmp_path / name, "body")) == texts, name


def test_blank_documents_are_marked(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": ""}\n\n{"text": " \\n"}\n{"text": " x "}\n   \n')
    assert list(read_json_lines(path, "text")) == ["", "", "", " x ", ""]
    path.write_bytes(b"")
    assert list(read_json_lines(path, "text")) == []


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="can't be read"):
        list(read_json_lines(tmp_path / "missing.jsonl", "text"))


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("'''Bold''' and ''italic'' [[target|shown]], [[plain]]s.", "Bold and italic shown, plains."),
        ("A<ref name=x>{{cite book|title=T}}</ref> fact<ref name=x/>.", "A fact."),
        ("[[File:a.jpg|thumb|left|A [[linked]] caption]]Text.\n[[Category:Things]]", "Text."),
        ("{| class=wikitable\n|-\n! Head\n| cell\n|}\nAfter.", "After."),
        ("Name ({{IPAc-en|n|eɪ}}; {{lang|grc|Ὄνομα}}) is.", "Name (Ὄνομα) is."),
        ("Empty ({{IPAc-en|n}}) brackets.", "Empty brackets."),
        ("It is {{convert|5|to|7|km|mi|abbr=on}} long.", "It is 5 to 7 km long."),
        ("{{convert|238|km2|sqmi}}", "238 km2"),
        (
            "Intro.\n\n==History==\nOld.\n\n==See also==\n* [[A]]\n===Deeper===\n* [[B]]\n==Later==\nNew.",
            "Intro.\n\nHistory\n\nOld.\n\nLater\n\nNew.",
        ),
        ("Open {{template\nnext line", "next line"),
        ("Caf&eacute; &amp; [http://x.org site] [http://y.org]<!-- no -->.", "Café & site."),
        ("Mass <math>E=mc^{{2}}</math> here<br/>there", "Mass here\nthere"),
        ("", ""),
    ],
)
def test_wikitext_becomes_plain_text(markup: str, text: str) -> None:
    assert clean_wikitext(markup) == text


def test_missing_gensim_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install 'gensim"):
        wikipedia_dump()


def test_gensim_without_the_dump_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = ModuleSpec("gensim", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(DataError, match=r"lacks .*pip install 'gensim"):
        wikipedia_dump()


def _packed(kind: str, plain: bytes) -> bytes:
    if kind == "zstd":
        options = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=False)
        packer = zstandard.ZstdCompressor(compression_params=options).compressobj()  # as from a pipe: of unknown size
        return bytes(packer.compress(plain) + packer.flush())
    pack: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}
    return pack[kind](plain)


@pytest.mark.parametrize("kind", ["gzip", "bzip2", "xz", "zstd"])
def test_compression_is_known_by_the_first_bytes(tmp_path: Path, kind: str) -> None:
    plain = b'{"text": "one"}\n{"text": "two"}\n' * 300
    packed = _packed(kind, plain)
    for name in ("a.jsonl", "a.jsonl.GZ", "a.zst"):
        path = tmp_path / name
        path.write_bytes(packed + packed)
        assert list(read_json_lines(path, "text")) == ["one", "two"] * 600
        path.write_bytes(packed[: len(packed) * 2 // 3])
        with pytest.raises(DataError, match="damaged or cut off"):
            list(read_json_lines(path, "text"))
    (tmp_path / "a.zip").write_bytes(b"PK\x03\x04....")
    with pytest.raises(DataError, match="zip archive"):
        list(read_json_lines(tmp_path / "a.zip", "text"))
