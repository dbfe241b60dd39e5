"""What is wrong with overrides at which Hydra has raised an error, and what to type in their place.

A fix that can be typed has been tried: it is shown only if it composes.
"""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from optimus_cc.config.errors import Problem, closest, suggest
from optimus_cc.config.help import GROUPS

MISTAKES = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError)
"""What Hydra raises, while it composes, at something that the user wrote."""

ONE_FOR_ALL = ("launcher", "experiment")
"""Groups that say what a sweep is, so they are no part of one."""
_COMMAND_LINE = "command line"
_FORMS = "GROUP=OPTION, KEY=VALUE, +ablation=NAME"
_SEE_HELP = "see python run.py --help"


@dataclass(frozen=True)
class Finder:
    """Looks for mistakes in overrides."""

    conf: Path
    loader: ConfigLoader
    load: Callable[[Sequence[str]], DictConfig]
    """Composes overrides; raises :data:`MISTAKES`."""
    options: Callable[[str], list[str]]
    """Of a group; none if there is no such group."""
    problems: Callable[[Sequence[str], bool], Sequence[Problem]]
    """What is wrong with overrides, as a single run's or a sweep's."""
    overrides: Sequence[str]
    multirun: bool = False

    def find(self, error: Exception) -> list[Problem]:
        """What is wrong, if it is the overrides at all, or else what ``error`` says."""
        parsed, problems = self._syntax()
        looks = (self._wrong_groups, self._wrong_keys, self._wrong_sweeps, self._wrong_deletions, self._wrong_kinds)
        for look in looks:
            try:
                problems = problems or list(look(parsed))
            except MISTAKES:
                break  # it isn't the overrides: there is no configuration without them either
        return problems or [self._as_hydra_says(parsed, error)]

    def instead_of(self, text: str, count: int = 0, at: int | None = None) -> str | None:
        """An override to type for ``text``, which is none, that composes with the others.

        Args:
            count: how many of the overrides it stands for, from the one ``at`` on.
        """
        rest = list(self.overrides)
        at = len(rest) if at is None else at
        for guess in dict.fromkeys(filter(None, (self._respelled(one) for one in _respellings(text)))):
            if not self.problems([*rest[:at], guess, *rest[at + count :]], self.multirun):
                return guess
        return None

    def wrong_names(self, overrides: Sequence[Override]) -> list[Problem]:
        """What is wrong with the groups, options and keys that overrides name."""
        return [*self._wrong_groups(overrides), *self._wrong_keys(overrides)]

    def _syntax(self) -> tuple[list[Override], list[Problem]]:
        """The overrides that can be read, and what is wrong with the others."""
        parsed: list[Override] = []
        problems: list[Problem] = []
        position = 0
        while position < len(self.overrides):
            override = self.overrides[position]
            read = self._read(override)
            bad_next = position + 1 < len(self.overrides) and self._read(self.overrides[position + 1]) is None
            joined = self._joined(position) if read is None or (override.endswith("=") and bad_next) else None
            if read is not None and joined is None:
                parsed.append(read)
            elif joined is not None:
                count, text = joined
                fix = self.instead_of(text, count, position)
                said = " ".join(self.overrides[position : position + count])
                fix = shlex.quote(fix) if fix else "KEY=VALUE in one piece"
                problems.append(Problem(_COMMAND_LINE, said, "KEY=VALUE, without spaces around the =", fix))
                position += count - 1
            else:
                problems.append(self._unreadable(override, position))
            position += 1
        return parsed, problems

    def _read(self, override: str) -> Override | None:
        try:
            (parsed,) = OverridesParser.create(config_loader=self.loader).parse_overrides([override])
        except HydraException:
            return None
        return parsed if parsed.key_or_group else None

    def _joined(self, start: int) -> tuple[int, str] | None:
        """How many overrides from ``start`` on are one with spaces in it, and that one."""
        first, second, third = [*self.overrides[start : start + 3], "", ""][:3]
        if "=" in first:
            return (2, first + second) if first.count("=") == 1 and second and "=" not in second else None
        if second == "=" and third and "=" not in third:
            return 3, f"{first}={third}"
        if len(second) > 1 and second.startswith("="):
            return 2, first + second
        if second and "=" not in second and self._is_known(first):
            return 2, f"{first}={second}"
        return None

    def _unreadable(self, override: str, position: int) -> Problem:
        fix = self.instead_of(override, 1, position)
        if fix is not None:
            fix = shlex.quote(fix)
        elif "=" not in override and (places := self._groups_with(override.strip())):
            fix = " or ".join(places)
        else:
            fix = self.form_of(override)
        return Problem(_COMMAND_LINE, override, _FORMS, fix)

    def form_of(self, text: str) -> str:
        """In which form the key that ``text`` begins with is said."""
        key, equals, _ = text.lstrip("-+~").partition("=")
        key = key.strip()
        if not self._is_known(key):
            return _SEE_HELP
        if options := self.options(key):
            return f"{'' if key in self._choices else '+'}{key}=OPTION with one of {', '.join(options)}"
        if equals:
            return "one =, closed brackets, and quotes around special characters: " + shlex.quote('KEY="VALUE"')
        return f"{key}=VALUE"

    def _groups_with(self, word: str) -> list[str]:
        """What would have to be typed for the option ``word``."""
        places = [group for group in GROUPS if word in self.options(group)]
        return [f"{'' if group in self._choices else '+'}{group}={word}" for group in places if group != "codec"]

    @cached_property
    def _base(self) -> DictConfig:
        return self.load([])

    @cached_property
    def _choices(self) -> dict[str, str]:
        return {str(choice): str(option) for choice, option in self._base.hydra.runtime.choices.items()}

    @cached_property
    def _composed(self) -> DictConfig:
        """The keys that there are: with the options that were chosen, or without if they can't be."""
        groups = []
        for override in self.overrides:
            read = self._read(override)
            if read is not None and self.options(read.key_or_group) and not read.is_sweep_override():
                groups.append(override)
        try:
            return self.load(groups)
        except MISTAKES:
            return self._base

    @cached_property
    def _leaves(self) -> dict[str, Any]:
        return dict(leaves(OmegaConf.to_container(without_hydra(self._composed), resolve=False)))

    @cached_property
    def _known(self) -> set[str]:
        """Keys, also those of whole nodes."""
        return {".".join(key.split(".")[: depth + 1]) for key in self._leaves for depth in range(key.count(".") + 1)}

    def _is_known(self, key: str) -> bool:
        key = key.lstrip("+~")
        return bool(key) and (bool(self.options(key)) or key in self._known)

    def _respelled(self, text: str) -> str | None:
        """The override that exists and that ``text`` is likely to be a slip of."""
        match = re.fullmatch(r"([+~]*)([^=]*)(?:=(.*))?", text, re.DOTALL)
        if match is None:
            return None
        prefix, key, value = match[1], match[2].strip(), match[3]
        if not self._is_known(key):
            dotted = _dotted(key)
            close = [dotted] if self._is_known(dotted) else closest(key.replace("-", "_"), self._known)
            if not close:
                return None
            key = close[0]
        if options := self.options(key):
            close = [value] if value in options else closest(value or "", options)
            return f"{'' if key in self._choices else '+'}{key}={close[0]}" if close else None
        if value is None:
            return f"{key}=true" if isinstance(self._leaves.get(key), bool) else None
        said = f"{'~' if prefix.startswith('~') and key != match[2] else ''}{key}={value}"
        return said if self._read(said) is not None else None

    def _wrong_groups(self, overrides: Sequence[Override]) -> Iterator[Problem]:
        added: dict[str, list[Any]] = {}
        for override in overrides:
            group, options = override.key_or_group, self.options(override.key_or_group)
            if not options or override.is_sweep_override() or group == "hydra":
                continue
            choices = self._choices
            target = f"{group}@{override.package}" if override.package else group
            value = override.value()
            said = override.input_line or ""
            placed = sorted(choice for choice in choices if choice.partition("@")[0] == group)
            placed = [choice for choice in placed if choice.startswith(f"{target}.")] or placed
            plus = "" if target in choices else "+"
            if target not in choices and placed:
                yield Problem(target, value, f"{' or '.join(placed)}, where this group stands", f"{placed[0]}={value}")
            elif override.is_delete():
                yield deletion(said)
            elif unknown := [name for name in (value if isinstance(value, list) else [value]) if name not in options]:
                close = closest(str(unknown[0]), options)
                said_so = f"{plus}{target}"
                fix = f"did you mean {said_so}={close[0]}?" if close else f"{said_so}=OPTION with one of these"
                if value is None and plus:
                    fix = f"leave {said} out"
                yield Problem(target, unknown[0], f"one of {', '.join(options)}", fix)
            elif isinstance(value, list):
                yield several(f"{plus}{target}", value)
            elif not plus and said.startswith("+"):
                allowed = f"{target}=OPTION: one option, in place of the default"
                yield Problem(said.partition("=")[0], value, allowed, f"{target}={value}")
            elif plus and not override.is_add():
                allowed = f"+{target}=OPTION, with a plus: it is laid on top of the rest"
                yield Problem(target, value, allowed, f"+{target}={value}")
            elif plus:
                added.setdefault(target, []).append(value)
        for target, values in added.items():
            if len(values) > 1:
                yield several(f"+{target}", values)

    def _wrong_keys(self, overrides: Sequence[Override]) -> Iterator[Problem]:
        for override in overrides:
            key, said = override.key_or_group, override.input_line or ""
            if self.options(key) or override.is_hydra_override():
                continue
            value = said.partition("=")[2] if override.is_sweep_override() else override.value()
            if override.package or (key not in self._known and not override.is_add()):
                target = f"{key}@{override.package}" if override.package else key
                yield Problem(target, value, "an existing key", self._other_key(target))
            elif key in self._known and override.is_add():
                yield Problem(said.partition("=")[0], value, f"{key}=VALUE: the key is there already", said.lstrip("+"))

    def _other_key(self, key: str) -> str:
        choices = {str(choice): str(option) for choice, option in self._composed.hydra.runtime.choices.items()}
        parent, dotted = key.rpartition(".")[0], _dotted(key)
        if (option := self._option_that_has(key, choices)) is not None:
            return option
        if dotted != key and dotted in self._known:
            return f"did you mean {dotted}?"
        if parent in self._leaves:
            return f"did you mean {parent}?"
        return suggest(key, self._known | choices.keys())

    def _option_that_has(self, key: str, choices: dict[str, str]) -> str | None:
        """Which option of a group would have to be chosen for ``key`` to exist."""
        for choice in choices:
            group, _, package = choice.partition("@")
            node = package or group
            if not key.startswith(f"{node}."):
                continue
            for file in sorted((self.conf / group).glob("*.yaml")):
                content = dict(leaves(read_yaml(file)))  # from the node on, or from the top
                if file.stem != choices[choice] and (key.removeprefix(f"{node}.") in content or key in content):
                    return f"{choice}={file.stem}, which has it; {choices[choice]} is chosen here"
        return None

    def _wrong_sweeps(self, overrides: Sequence[Override]) -> Iterator[Problem]:
        for override in overrides:
            key, _, value = str(override.input_line).partition("=")
            if not override.is_sweep_override() or (self.multirun and override.is_discrete_sweep()):
                continue
            sweep = override.value()
            if isinstance(sweep, IntervalSweep):
                listed = [f"{key}={sweep.start:g},{sweep.end:g}"]
                allowed = "values that can be counted" if self.multirun else "one value"
            else:
                plain = key.lstrip("+")
                listed, allowed = [f"{key}={value}", f"+{plain}={value}", f"{plain}={value}"], "one value"
            rest = [one for one in self.overrides if one != override.input_line]
            fixes = [one for one in listed if not self.problems([*rest, one], True)][:1]
            fixes = [one if self.multirun else f"python run.py -m {shlex.quote(one)} for a sweep" for one in fixes]
            if not self.multirun and not self.options(override.key_or_group) and not isinstance(sweep, IntervalSweep):
                texts = [f"{key}=[{value}]"]
                if re.fullmatch(r"\d{1,3}(,\d{3})+", value):
                    texts.append(f"{key}={value.replace(',', '')}")  # thousands
                working = [one for one in texts if self._read(one) and not self.problems([*rest, one], False)]
                fixes += [shlex.quote(one) for one in working[:1]]
            if not fixes and (found := self._in_first_value(override, rest)):
                yield from found
                continue
            yield Problem(key, value, allowed, " or ".join(fixes) or f"{key}=VALUE, or -m and {key}=A,B for a sweep")

    def _in_first_value(self, override: Override, rest: Sequence[str]) -> list[Problem]:
        """What is wrong with the first value of a sweep already."""
        if not override.is_discrete_sweep():
            return []
        first = next(iter(override.sweep_string_iterator()))
        said = f"{str(override.input_line).partition('=')[0]}={first}"
        return [one for one in self.problems([*rest, said], False) if one.key.lstrip("+") == override.key_or_group]

    def _wrong_deletions(self, overrides: Sequence[Override]) -> Iterator[Problem]:
        """Hydra deletes no key whose value is null, and none with a value that it doesn't have."""
        for override in overrides:
            if override.is_delete() and override.key_or_group in self._leaves:
                key, said = override.key_or_group, str(override.input_line)
                here, value = self._leaves[key], override.value()
                if here is None or (value is not None and value != here):
                    yield Problem(
                        f"~{key}", value, f"{key}=VALUE: keys are given a value, not deleted", f"leave {said} out"
                    )

    def _wrong_kinds(self, overrides: Sequence[Override]) -> Iterator[Problem]:
        """A list where there are keys, and keys where there is a list."""
        for override in overrides:
            key = override.key_or_group
            if self.options(key) or override.is_hydra_override() or override.is_delete():
                continue
            value = override.value()
            if key in self._known - self._leaves.keys() and isinstance(value, list):
                placed = [choice for choice in self._choices if choice.partition("@")[2] == key]
                if placed:
                    chosen = self._composed.hydra.runtime.choices[placed[0]]
                    yield misplaced(placed[0], self.options(placed[0]), key, value, chosen)
                else:
                    yield not_a_node(key, value)
            elif isinstance(self._leaves.get(key), list) and isinstance(value, dict):
                yield Problem(key, value, "a list", f"{key}=[VALUE,VALUE]")

    def _as_hydra_says(self, parsed: Sequence[Override], error: Exception) -> Problem:
        said = " ".join(self.overrides) or "(no overrides)"
        key = str(getattr(error, "full_key", None) or _COMMAND_LINE)
        text = str(error)
        named = [one for one in parsed if one.key_or_group in text]
        if len(named) == 1 and named[0].is_hydra_override():
            key, said = named[0].key_or_group, str(named[0].input_line).partition("=")[2]
            text = str(error.__cause__ or error)
        lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
        if isinstance(error, yaml.YAMLError):  # what, and in which line of which file
            lines = [" ".join(lines)]
        elif lines[0].endswith(":"):
            lines = [" ".join(lines[:2])]
        return Problem(key, said, f"Hydra says: {lines[0]}", _SEE_HELP)


def deletion(override: str) -> Problem:
    return Problem(_COMMAND_LINE, override, "GROUP=OPTION: groups are chosen, not deleted", f"leave {override} out")


def several(target: str, values: Sequence[Any]) -> Problem:
    """More than one option of a group, laid over each other."""
    options = list(dict.fromkeys(map(str, values)))
    fix = f"{target}={options[0]}"
    if len(options) > 1 and target not in ONE_FOR_ALL:
        fix += f", or python run.py -m {target}={','.join(options)} for a run with each"
    return Problem(target, list(values), "one option: what several of them would do together is not said", fix)


def misplaced(choice: str, options: Sequence[str], key: str, value: Any, chosen: str) -> Problem:
    """Something other than its keys for a node that an option of a group fills."""
    allowed = f"{choice}=OPTION with one of {', '.join(options)}"
    return Problem(key, value, allowed, f"{choice}={chosen}, for example")


def not_a_node(key: str, value: Any) -> Problem:
    """One value, or a list, for something that has keys."""
    return Problem(key, value, f"the keys {key}.KEY=VALUE, not one value", "see python run.py --cfg job for them")


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of each leaf."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def without_hydra(composed: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])


def read_yaml(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def _dotted(key: str) -> str:
    """A key as it would be written: in small letters, with dots between its parts."""
    return re.sub(r"[^a-z0-9_@]+", ".", key.lower()).strip(".")


def _respellings(text: str) -> Iterator[str]:
    """What somebody may have wanted to type for ``text``, which Hydra doesn't read."""
    plain = unicodedata.normalize("NFKC", text).translate({0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"'}).strip()
    plain = re.sub(r"^[-\u2010-\u2015]+|^~+(?=~)|^\++(?=\+)", "", plain)
    if "=" not in plain:
        yield from (plain.replace(":", "=", 1), plain)
        return
    key, _, value = (part.strip() for part in plain.partition("="))
    key = key.lstrip("+~") if key.startswith(("+", "~")) else key
    value = value.lstrip("=").strip()
    yield f"{key}={value}"
    if value[:1] == "(" and value[-1:] == ")":
        yield f"{key}=[{value[1:-1]}]"
    if len(value) > 2 and value[0] == "[" and value[-1] == "]":
        yield f"{key}=[{','.join(_quoted(item.strip()) for item in value[1:-1].split(','))}]"
    bare = value.strip("\"'()<>{}[],;:!% ")
    if value.strip(",;:!% ") != value or value[:1] in "\"'<({[":
        yield f"{key}={bare}"
    yield f"{key}={_quoted(value)}"


def _quoted(value: str) -> str:
    return value if value[:1] in ("'", '"') else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
