"""YAML of run folders and of options: one writer, and one reader for all who read what a run says of itself.

There are many YAMLs: ``695e0514`` is a text to PyYAML and a number to Hydra and to YAML 1.2, and Hydra takes ``${x}``
for a reference. The writer quotes what any of them would take for something else; the reader fills nothing in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from optimus_cc.files import open_regular

_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast
_MOST_BYTES, _MOST_VALUES = 2**24, 10**6
"""A run's configuration has a few kilobytes and a few hundred values, and a name for each of a corpus' files."""


class _Loader(_BASE):
    def flatten_mapping(self, node: Any) -> None:
        """No ``<<``: nobody here writes it, and a few of them take for ever."""


class _Dumper(yaml.SafeDumper):
    """Quotes a text that YAML 1.2 or Hydra would read as a number, and escapes what doesn't print."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, data: str) -> yaml.ScalarNode:
        style = None if data.isprintable() else '"'  # readers disagree on what ends a line
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)

_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^(?:[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?\.?(?:inf|nan)|0o[0-7]+)$",
        re.IGNORECASE,
    ),
    list("-+.0123456789iInN"),
)


def to_yaml(mapping: Mapping[str, Any], *, width: int = 80) -> str:
    """Text from which every reader, here or elsewhere, gets the same values."""
    text: str = yaml.dump(dict(mapping), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width)
    return text


def unreferring(value: Any) -> Any:
    """The same for a file that Hydra reads: no text in it refers to anything."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, Mapping):
        return {key: unreferring(one) for key, one in value.items()}
    return [unreferring(one) for one in value] if isinstance(value, (list, tuple)) else value


def from_yaml(text: str) -> dict[str, Any]:
    """The mapping that a text holds, with every text in it as it stands.

    Raises:
        ValueError: it holds something else, or values without end; says what in one line.
    """
    try:
        value = yaml.load(text, _Loader)  # a safe one
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split()) or "nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError("not keys and values")
    _check_size(value)
    return value


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a file holds.

    Raises:
        OSError: it can't be read, or is no file.
        ValueError: as :func:`from_yaml`; or it isn't UTF-8, or too large.
    """
    with open_regular(path) as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"more than {_MOST_BYTES:,} bytes")
    return from_yaml(content.decode("utf-8"))


def _check_size(value: Any) -> None:
    """Refuse what a few aliases blow up, or what holds itself: nobody could write it down again."""
    left, rest = _MOST_VALUES, [value]
    while rest:
        one = rest.pop()
        left -= 1
        if left < 0:
            raise ValueError(f"more than {_MOST_VALUES:,} values")
        if isinstance(one, dict):
            rest.extend(one.values())
        elif isinstance(one, list):
            rest.extend(one)
