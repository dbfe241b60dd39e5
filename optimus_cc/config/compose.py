"""Hydra's compositions as checked run configurations. Whatever is wrong with the input becomes one ConfigError."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from optimus_cc import tasks
from optimus_cc.config import of_run, sweeps
from optimus_cc.config.errors import NOT_SET, ConfigError, Problem, closest, suggest
from optimus_cc.config.hydra_part import hydra_problems, missing_variable, plugin_problems
from optimus_cc.config.quoting import with_quotes
from optimus_cc.config.type_problems import not_in_utf8
from optimus_cc.paths import at_home, in_utf8

if TYPE_CHECKING:
    from optimus_cc.config.run import RunConfig

# ${times:NUMBER,FACTOR}: an ablation's rank in relation to the model's, at least 1. Hydra needs it to show one, too.
OmegaConf.register_new_resolver("times", lambda number, factor: max(1, round(number * factor)), replace=True)

SCRATCH = Path(tempfile.gettempdir()) / f"optimus_cc_hydra_{os.getpid()}"
"""Where Hydra's sweeper writes what nobody asked for, unless ``hydra.sweep.dir`` is set; whoever runs Hydra removes it.
"""
OmegaConf.register_new_resolver("scratch", lambda: str(SCRATCH), replace=True)

CONF = Path(__file__).parents[2] / "conf"
PRIMARY = "config"
HYDRA_VERSION = "1.3"
"""Whose behaviour we want."""
MISTAKES = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError)
"""What Hydra raises, while it composes, at something that the user wrote."""


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    """Hydra's flags, and the overrides wherever they stand between them."""
    if unreadable := [text for text in (*argv, f"current folder={os.getcwd()}") if not in_utf8(text)]:
        raise ConfigError([not_in_utf8(*text.split("=", 1)) for text in unreadable])
    parser = get_args_parser()
    parser.exit_on_error = False
    try:
        arguments, unknown = parser.parse_known_intermixed_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(
            Problem("command line", " ".join(argv), str(error), "see python run.py --hydra-help for the flags")
        ) from None
    if unknown:
        flag = unknown[0]
        guess = flag.lstrip("-") if "=" in flag else f"{flag.lstrip('-')}=VALUE"
        raise ConfigError(
            Problem("command line", flag, "GROUP=OPTION, KEY=VALUE, +ablation=NAME or one of Hydra's flags", guess)
        )
    for name in ("config_path", "experimental_rerun"):
        if getattr(arguments, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                Problem(flag, getattr(arguments, name), "not used here", "--config-dir FOLDER adds options of your own")
            )
    if arguments.config_name == "":
        raise ConfigError(Problem("--config-name", "", "the name of a file in --config-dir FOLDER", "leave it out"))
    if arguments.package is not None and not arguments.cfg:
        raise ConfigError(Problem("--package", arguments.package, "only with --cfg", "--cfg job, or leave it out"))
    asked = [override for override in arguments.overrides if override.startswith("query=")]
    if arguments.shell_completion and asked and not {"COMP_LINE", "COMP_POINT"} <= os.environ.keys():
        fix = f'eval "$(python run.py -sc install={asked[0].partition("=")[2]})", then the Tab key'
        raise ConfigError(Problem("--shell-completion", asked[0], "install=SHELL; only a shell itself asks this", fix))
    return arguments, parser


Tell = Callable[[int, int], None]
"""Takes how many runs of a sweep are composed, and how many there are: each takes a while."""


def _silent(done: int, count: int) -> None:
    pass


def asks_for_information(arguments: argparse.Namespace) -> bool:
    """Hydra answers and nothing is run."""
    return bool(
        arguments.hydra_help or arguments.cfg or arguments.info or arguments.shell_completion or arguments.resolve
    )


def compose(arguments: argparse.Namespace, tell: Tell = _silent) -> list[RunConfig]:
    """The configuration of every run that the command line asks for: one, or those of a sweep.

    None for a sweep of another sweeper than Hydra's own, whose runs aren't known in advance (:func:`compose_jobs`).

    Raises:
        ConfigError: with everything wrong with the first run that is wrong.
    """
    composer = _Composer.of(arguments)
    runs = composer.runs(arguments.multirun)
    configs = []
    for done, overrides in enumerate(runs):
        tell(done, len(runs))
        try:
            configs.append(composer.run(overrides))
        except ConfigError as error:
            said = [override for override in overrides if not override.startswith("hydra.")]
            raise ConfigError(error.problems, " ".join(said) if len(runs) > 1 else "") from None
    return configs


def compose_jobs(
    loader: ConfigLoader, master: DictConfig, batch: Sequence[Sequence[str]], tell: Tell = _silent
) -> list[tuple[DictConfig, RunConfig]]:
    """A batch of a sweep's jobs, as Hydra composes them and checked; ``master``: the sweep's own configuration.

    Raises:
        ConfigError: with everything wrong with the first job that is wrong.
    """
    composer = _Composer(loader, master.hydra.job.config_name, _written(master.hydra.overrides.hydra))
    jobs = []
    for done, overrides in enumerate(batch):
        tell(done, len(batch))
        try:
            try:
                job = loader.load_sweep_config(master, list(overrides))
            except MISTAKES as error:
                raise ConfigError(composer.mistakes(overrides, error)) from None
            jobs.append((job, composer.checked(job, [*composer.overrides, *overrides])))
        except ConfigError as error:
            raise ConfigError(error.problems, " ".join(overrides) if len(batch) > 1 else "") from None
    return jobs


def uses_basic_sweeper(master: DictConfig) -> bool:
    """Whether the runs of a sweep are known before any of them has run."""
    name = f"{BasicSweeper.__module__}.{BasicSweeper.__qualname__}"
    return bool(master.hydra.sweeper.get("_target_") == name)


def explain(arguments: argparse.Namespace, error: Exception) -> ConfigError:
    """What an exception of Hydra's, raised while it answered ``arguments``, says about them."""
    return ConfigError(_Composer.of(arguments).mistakes(arguments.overrides, error))


@dataclass
class _Composer:
    loader: ConfigLoader
    primary: str
    overrides: list[str]
    loaded: dict[tuple[str, ...], DictConfig] = field(default_factory=dict)
    options: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> _Composer:
        version.setbase(HYDRA_VERSION)
        setup_globals()  # Hydra's resolvers
        search_path = create_config_search_path(str(CONF))
        if arguments.config_dir is not None:
            folder = Path(at_home(arguments.config_dir)).resolve()
            if not folder.is_dir():
                raise ConfigError(
                    Problem("--config-dir", arguments.config_dir, "a folder with options of your own", "check the path")
                )
            search_path.prepend("command-line", f"file://{folder}", anchor=SearchPathQuery(provider="schema"))
        return cls(ConfigLoaderImpl(search_path), arguments.config_name or PRIMARY, list(arguments.overrides))

    def load(self, overrides: Sequence[str], mode: RunMode = RunMode.RUN) -> DictConfig:
        try:
            return self._load(overrides, mode)
        except MISTAKES as error:
            raise ConfigError(self.mistakes(overrides, error, mode is RunMode.MULTIRUN)) from None

    def _load(self, overrides: Sequence[str], mode: RunMode = RunMode.RUN) -> DictConfig:
        key = (mode.name, *overrides)
        if key not in self.loaded:
            try:
                self.loaded[key] = self.loader.load_configuration(self.primary, list(overrides), mode)
            except (AttributeError, TypeError) as error:  # what it says of some values of its own keys
                raise ValueError(str(error)) from error
            except KeyError as error:
                raise ValueError(missing_variable(error)) from error
        return self.loaded[key]

    def runs(self, multirun: bool) -> list[list[str]]:
        """The overrides of each run."""
        if not multirun and not self._says_multirun():
            return [self.overrides]
        master = self.load(self.overrides, RunMode.MULTIRUN)
        arguments, basic = _written(master.hydra.overrides.task), uses_basic_sweeper(master)
        if basic:
            params = master.hydra.sweeper.get("params") or {}
            arguments = [*(f"{key}={value}" for key, value in params.items()), *arguments]  # as Hydra does
        try:
            parsed = OverridesParser.create(config_loader=self.loader).parse_overrides(arguments)
            self._refuse_sweeps_of_groups(parsed)
            wrong = [*hydra_problems(master), *plugin_problems(master), *sweeps.size_problems(parsed)]
            if wrong:
                raise ConfigError(wrong)
            if not basic:
                if wrong := [*self._wrong_groups(parsed), *self._wrong_keys(parsed)]:
                    raise ConfigError(wrong)
                return []
            (sweep,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
        except ConfigError:
            raise
        except MISTAKES as error:
            raise ConfigError(self.mistakes(arguments, error, multirun=True)) from None
        hydra = _written(master.hydra.overrides.hydra)
        return [[*hydra, *run] for run in sweep]

    def _refuse_sweeps_of_groups(self, overrides: Sequence[Override]) -> None:
        """Launchers and recipes say what the sweep is, so they are no part of one."""
        for override in overrides:
            group = override.key_or_group
            if group in ("launcher", "experiment") and override.is_sweep_override():
                value = str(override.input_line).partition("=")[2]
                raise ConfigError(
                    Problem(group, value, f"one {group} for all runs of a sweep", f"a command for each {group}")
                )

    def _says_multirun(self) -> bool:
        """A configuration may ask for a sweep itself: ``hydra.mode: MULTIRUN``."""
        for mode in (RunMode.RUN, RunMode.MULTIRUN):
            with suppress(*MISTAKES):
                return bool(self._load(self.overrides, mode).hydra.mode == RunMode.MULTIRUN)
        return False

    def run(self, overrides: Sequence[str]) -> RunConfig:
        return self.checked(self.load(overrides), overrides)

    def checked(self, composed: DictConfig, overrides: Sequence[str]) -> RunConfig:
        """What ``overrides`` were composed to, as a run.

        Raises:
            ConfigError: with everything that is wrong with it.
        """
        from optimus_cc.config.run import load  # pydantic takes its time; --help and --cfg need none of it

        problems = [
            *hydra_problems(composed),
            *self._misplaced(composed, overrides),
            *self._contradictions(composed),
        ]
        if problems:
            raise ConfigError(problems)
        try:
            config = load(with_run(composed, overrides))
        except ConfigError as error:
            raise ConfigError(with_quotes(error.problems, [*overrides, *self.overrides])) from None
        tasks.check(config.task.name)
        return config

    def _misplaced(self, composed: DictConfig, overrides: Sequence[str]) -> Iterator[Problem]:
        """Options of a group that were given to a key: ``model.name=gpt_mini`` renames the model and no more."""
        nodes = {choice.partition("@")[2] or choice: choice for choice in composed.hydra.runtime.choices}
        for override in OverridesParser.create().parse_overrides(list(overrides)):
            key, value = override.key_or_group, override.value()
            if override.is_delete() and self._options(key):
                yield _deletion(override.input_line or key)
            choice = nodes.get(key.removesuffix(".name"))
            if choice is None or choice == key:
                continue
            options = self._options(choice)
            renamed = key.endswith(".name")
            if value in options and not (renamed and composed.hydra.runtime.choices[choice] == value):
                yield Problem(key, value, f"{choice}=OPTION: options are chosen by group", f"{choice}={value}")
            elif not renamed and not isinstance(value, dict):
                allowed = f"{choice}=OPTION with one of {', '.join(options)}"
                yield Problem(key, value, allowed, f"{choice}={options[0]}, for example")

    def _contradictions(self, composed: DictConfig) -> Iterator[Problem]:
        """Where the technique is not the one that the ablation is about."""
        name = composed.get("ablation")
        if name not in self._options("ablation") or "technique" not in composed.hydra.runtime.choices:
            return  # a configuration that was composed elsewhere
        meant = self.load([*_written(composed.hydra.overrides.hydra), f"+ablation={name}"])
        keys = _laid_down(name)
        groups = ["technique"]
        groups += [choice for choice in meant.hydra.runtime.choices if _is_in(choice.partition("@")[2], keys)]
        for group in groups:
            want, got = meant.hydra.runtime.choices[group], composed.hydra.runtime.choices.get(group)
            if want != got:
                fix = f"leave {group}={got} out, or leave +ablation={name} out"
                yield Problem(group, got, f"{want}, which ablation={name} is about", fix)
                return
        here = OmegaConf.merge(_without_hydra(composed), {"technique": meant.technique})  # what it means for this model
        for key in sorted(keys):
            want, got = OmegaConf.select(here, key), OmegaConf.select(composed, key)
            if want != got:
                fix = f"leave {key} out, or say technique={composed.technique.name} in place of +ablation={name}"
                yield Problem(key, got, f"{str(want).lower()}, which ablation={name} is about", fix)

    def _options(self, group: str) -> list[str]:
        group = group.partition("@")[0]
        if group not in self.options:
            inner = self.loader.get_group_options(group, ObjectType.GROUP) if group == "experiment" else []
            self.options[group] = [
                *self.loader.get_group_options(group),
                *(f"{name}/{option}" for name in inner for option in self._options(f"{group}/{name}")),
            ]
        return self.options[group]

    def mistakes(self, overrides: Sequence[str], error: Exception, multirun: bool = False) -> list[Problem]:
        """What is wrong with ``overrides``, at which Hydra raised ``error``."""
        parsed: list[Override] = []
        problems: list[Problem] = []
        parser = OverridesParser.create(config_loader=self.loader)
        for override in overrides:
            try:
                parsed += parser.parse_overrides([override])
            except HydraException:
                problems.append(_bad_syntax(override))
        problems += [_bad_syntax(str(override.input_line)) for override in parsed if not override.key_or_group]
        for find in (partial(self._wrong_sweeps, multirun=multirun), self._wrong_groups, self._wrong_keys):
            try:
                problems = problems or list(find(parsed))
            except MISTAKES:
                break  # it isn't the overrides: there is no configuration without them either
        if problems:
            return problems
        key = str(getattr(error, "full_key", None) or "command line")
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        if isinstance(error, yaml.YAMLError):  # what, and in which line of which file
            lines = [" ".join(lines)]
        elif lines[0].endswith(":"):
            lines = [" ".join(lines[:2])]
        said = " ".join(overrides) or "(no overrides)"
        return [Problem(key, said, f"Hydra says: {lines[0]}", "see python run.py --help")]

    def _wrong_sweeps(self, overrides: Sequence[Override], multirun: bool) -> Iterator[Problem]:
        for override in overrides:
            key, _, value = str(override.input_line).partition("=")
            if not override.is_sweep_override():
                continue
            if multirun and not override.is_discrete_sweep():
                yield Problem(key, value, "values that can be counted", f"{key}=A,B or {key}=range(1,4)")
            elif not multirun:
                fix = f"python run.py -m {key}={value} for a sweep"
                if not self._options(override.key_or_group):
                    fix += f", or '{key}=[{value}]' for a list"
                yield Problem(key, value, "one value", fix)

    def _wrong_groups(self, overrides: Sequence[Override]) -> Iterator[Problem]:
        for override in overrides:
            group, options = override.key_or_group, self._options(override.key_or_group)
            if not options or override.is_sweep_override():
                continue
            choices = self._load([]).hydra.runtime.choices
            target = f"{group}@{override.package}" if override.package else group
            value = override.value()
            said = override.input_line or ""
            placed = sorted(choice for choice in choices if choice.partition("@")[0] == group)
            placed = [choice for choice in placed if choice.startswith(f"{target}.")] or placed
            if target not in choices and placed:
                yield Problem(target, value, f"{' or '.join(placed)}, where this group stands", f"{placed[0]}={value}")
            elif override.is_delete():
                yield _deletion(said)
            elif unknown := [name for name in (value if isinstance(value, list) else [value]) if name not in options]:
                said = target if target in choices else f"+{target}"
                close = closest(str(unknown[0]), options)
                fix = f"did you mean {said}={close[0]}?" if close else f"{said}=OPTION with one of these"
                yield Problem(target, unknown[0], f"one of {', '.join(options)}", fix)
            elif target in choices and said.startswith("+"):
                allowed = f"{target}=OPTION: one option, in place of the default"
                yield Problem(said.partition("=")[0], value, allowed, f"{target}={value}")
            elif target not in choices and not override.is_add():
                allowed = f"+{target}=OPTION, with a plus: it is laid on top of the rest"
                yield Problem(target, value, allowed, f"+{target}={value}")

    def _wrong_keys(self, overrides: Sequence[Override]) -> Iterator[Problem]:
        groups = [str(o.input_line) for o in overrides if self._options(o.key_or_group) and not o.is_sweep_override()]
        composed = self._load(groups)
        choices = {str(choice): str(option) for choice, option in composed.hydra.runtime.choices.items()}
        leaves = [key for key, _ in _leaves(OmegaConf.to_container(_without_hydra(composed), resolve=False))]
        known = {".".join(key.split(".")[: depth + 1]) for key in leaves for depth in range(key.count(".") + 1)}
        for override in overrides:
            key, said = override.key_or_group, override.input_line or ""
            if self._options(key) or override.is_hydra_override():
                continue
            value = override.value()
            if override.package or (key not in known and not override.is_add()):
                target = f"{key}@{override.package}" if override.package else key
                fix = _option_that_has(target, choices) or suggest(target, known | choices.keys())
                yield Problem(target, value, "an existing key", fix)
            elif key in known and override.is_add():
                yield Problem(said.partition("=")[0], value, f"{key}=VALUE: the key is there already", said.lstrip("+"))


def with_run(composed: DictConfig, overrides: Sequence[str]) -> dict[str, Any]:
    """What ``overrides`` were composed to, with the configuration of the run that they name, if they name one.

    Raises:
        ConfigError: as :func:`plain`, and if there is no such run or it can't be asked for this.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    return of_run.applied(plain(composed), [(one.key_or_group, one.value()) for one in parsed])


def plain(composed: DictConfig) -> dict[str, Any]:
    """A composed configuration as nested dicts, without Hydra's own part and with every value filled in.

    Raises:
        ConfigError: a value is missing, or refers to something that is not there.
    """
    ours = _without_hydra(composed)
    written = dict(_leaves(OmegaConf.to_container(ours, resolve=False)))
    missing = [key for key, value in written.items() if value == NOT_SET]
    if missing:
        raise ConfigError([Problem(key, NOT_SET, "a value; it has no default", f"{key}=VALUE") for key in missing])
    try:
        container = OmegaConf.to_container(ours, resolve=True)
    except OmegaConfBaseException as error:
        key = str(error.full_key)
        reason = str(error).partition("\n")[0]
        raise ConfigError(Problem(key, written.get(key, ""), f"a value ({reason})", f"{key}=VALUE")) from None
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def _written(overrides: ListConfig) -> list[str]:
    """Overrides as they were given: what they refer to may not be there yet."""
    written = OmegaConf.to_container(overrides, resolve=False)
    assert isinstance(written, list)
    return [str(override) for override in written]


def _without_hydra(composed: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of each leaf."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _laid_down(ablation: str) -> set[str]:
    """The technique's keys that an ablation, or one that it is made of, is about; read from their files."""
    content = _read(CONF / "ablation" / f"{ablation}.yaml")
    bases = [entry for entry in content.pop("defaults", []) if isinstance(entry, str) and entry != "_self_"]
    keys = {key for key, _ in _leaves(content) if key.startswith("technique.")}
    return keys.union(*map(_laid_down, bases))


def _is_in(node: str, keys: set[str]) -> bool:
    """Whether any of ``keys`` lies in the configuration node ``node``."""
    return bool(node) and any(key.startswith(f"{node}.") for key in keys)


def _read(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def _option_that_has(key: str, choices: dict[str, str]) -> str | None:
    """Which option of a group would have to be chosen for ``key`` to exist."""
    for choice in choices:
        group, _, package = choice.partition("@")
        node = package or group
        if not key.startswith(f"{node}."):
            continue
        for file in sorted((CONF / group).glob("*.yaml")):
            if key.removeprefix(f"{node}.") in dict(_leaves(_read(file))):
                return f"it is a key of {choice}={file.stem}; here {choice}={choices[choice]}"
    return None


def _deletion(override: str) -> Problem:
    return Problem("command line", override, "GROUP=OPTION: groups are chosen, not deleted", f"leave {override} out")


def _bad_syntax(override: str) -> Problem:
    if "=" not in override:
        fix = f"{override}=VALUE"
    else:
        key, _, value = override.partition("=")
        fix = f"one =, closed brackets, and quotes around special characters: '{key}=\"{value}\"'"
    return Problem("command line", override, "GROUP=OPTION, KEY=VALUE, +ablation=NAME", fix)
