"""Pydantic's findings in terms of command-line keys."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from optimus_cc.config.errors import NOT_SET, Problem, suggest
from optimus_cc.paths import in_utf8, spelled

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_ALLOWED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
    "literal_error": "{expected}",
    "union_tag_invalid": "{expected_tags}",
    "union_tag_not_found": "the name of one of the group's options",
    "string_pattern_mismatch": "letters, digits, _ and .; a letter or a digit first",
    "string_too_long": "text of at most {max_length} characters",
    "string_too_short": "text of at least {min_length} characters",
    "too_long": "a list of at most {max_length} values",
    "too_short": "a list of at least {min_length} values",
}
"""What each kind of error means to somebody who types overrides."""


def encoding_problems(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[Problem]:
    """Texts of a configuration that can't be written down."""
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            yield from encoding_problems(value, f"{prefix}{key}.")
        else:
            texts = [text for text in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(text, str)]
            yield from (not_in_utf8(f"{prefix}{key}", text) for text in texts if not in_utf8(text))


def not_in_utf8(key: str, value: str = "") -> Problem:
    """The problem of a text, a file's name for example, that a configuration can't hold."""
    return Problem(spelled(key), spelled(value), "text in UTF-8, which records can hold", "rename the file or folder")


def type_problems(mapping: Mapping[str, Any], errors: Sequence[ErrorDetails]) -> list[Problem]:
    """One problem for each key of ``mapping`` that ``errors`` complain about."""
    found: dict[str, list[Problem]] = {}
    for details in errors:
        problem = _type_problem(mapping, details)
        found.setdefault(problem.key, []).append(problem)
    return [
        # The branches of a union each have a say about the same key.
        replace(problems[0], allowed=" or ".join(dict.fromkeys(problem.allowed for problem in problems)))
        for problems in found.values()
    ]


def _type_problem(mapping: Mapping[str, Any], details: ErrorDetails) -> Problem:
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    of_keys = kind.startswith("missing") or kind == "unexpected_keyword_argument"
    key, holder = _command_line_key(mapping, details["loc"], of_keys)
    if kind == "unexpected_keyword_argument":
        group = key.rpartition(".")[0]
        return Problem(key, value, "an existing key", suggest(key, [f"{group}.{name}".lstrip(".") for name in holder]))
    if kind == "missing" and isinstance(item := details["loc"][-1], int):
        return Problem(key, value, f"a list of at least {item + 1} values", f"give {key} more values")
    if kind in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return Problem(key, NOT_SET, "a value; it has no default", f"{key}=VALUE")
    if kind in ("dataclass_type", "model_attributes_type", "dict_type"):
        return Problem(key, value, f"the keys {key}.KEY=VALUE, not one value", "see python run.py --cfg job for them")
    if kind in ("union_tag_not_found", "union_tag_invalid") and isinstance(value, Mapping):
        key, value = f"{key}.name", value.get("name", NOT_SET)
    if (meant := _meant(kind, value)) is not None:
        fix = shlex.quote(f"{key}={meant}")
        return Problem(
            key,
            value,
            _ALLOWED[kind],
            f"{fix}, without inner quotes" if isinstance(value, str) and kind in _FORMS else fix,
        )
    allowed = _ALLOWED.get(kind, details["msg"].replace("Input should be ", "")).format(**context).replace("'", "")
    close = difflib.get_close_matches(str(value), re.split(r", | or ", allowed), n=1)
    return Problem(key, value, allowed, f"did you mean {key}={close[0]}?" if close else f"give {key} {allowed}")


def _meant(kind: str, value: Any) -> str | None:
    """How to type a value of another type, if it is one in the wrong form; for example a number as text."""
    if kind in ("int_type", "int_from_float") and isinstance(value, float) and value.is_integer():
        return str(int(value))
    if kind == "bool_type" and str(value).lower() in _TRUTHS:
        return _TRUTHS[str(value).lower()]
    form = _FORMS.get(kind)
    return value.strip() if form is not None and isinstance(value, str) and form.fullmatch(value.strip()) else None


_TRUTHS = {"1": "true", "yes": "true", "on": "true", "true": "true"}
_TRUTHS |= {"0": "false", "no": "false", "off": "false", "false": "false"}
_FORMS = {
    "int_type": re.compile(r"[+-]?\d+"),
    "float_type": re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE),
    "tuple_type": re.compile(r"\[.*\]"),
}
"""Texts that are a value of another type without their quotes, by what was asked for."""


def _command_line_key(
    mapping: Mapping[str, Any], location: Sequence[int | str], of_keys: bool
) -> tuple[str, Mapping[str, Any]]:
    """Dotted key of an error's location, and the node that holds it, or should.

    Args:
        of_keys: the error is about which keys there are: the last of the location may be one that isn't there.
    """
    node: Any = mapping
    holder = mapping
    path: list[str] = []
    for index, part in enumerate(location):
        if not isinstance(node, Mapping):
            break  # an item of a list, or a branch of a union of plain types
        if part not in node and (index < len(location) - 1 or not of_keys):
            continue  # the tag of a union (a codec's name) or one of its types, not a key
        holder, node = node, node.get(str(part))
        path.append(str(part))
    return ".".join(path), holder
