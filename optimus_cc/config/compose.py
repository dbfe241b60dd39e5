"""Hydra's compositions as checked run configurations. Whatever is wrong with the input becomes one ConfigError."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from optimus_cc import tasks
from optimus_cc.config import of_run, sweeps
from optimus_cc.config.errors import NOT_SET, ConfigError, Problem, closest
from optimus_cc.config.hydra_part import hydra_problems, missing_variable, plugin_problems
from optimus_cc.config.mistakes import (
    MISTAKES,
    ONE_FOR_ALL,
    Finder,
    deletion,
    leaves,
    misplaced,
    read_yaml,
    several,
    without_hydra,
)
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
        raise ConfigError(_unknown_flag(unknown[0], arguments, argv))
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


def _unknown_flag(flag: str, arguments: argparse.Namespace, argv: Sequence[str]) -> Problem:
    """An override that was typed as a flag, perhaps with its value behind it: ``--seed 3``."""
    following = argv[argv.index(flag) + 1 :][:1] if "=" not in flag else []
    value = following[0] if following and following[0] in arguments.overrides else None
    others = [one for one in arguments.overrides if one is not value]
    finder = _Composer.of(arguments).finder(others, arguments.multirun)
    fix = finder.instead_of(flag if value is None else f"{flag}={value}")
    said = flag if value is None or fix is None else f"{flag} {value}"
    allowed = "GROUP=OPTION, KEY=VALUE, +ablation=NAME or one of Hydra's flags"
    return Problem("command line", said, allowed, shlex.quote(fix) if fix else finder.form_of(flag))


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
    for number, overrides in enumerate(runs):
        tell(number, len(runs))
        try:
            configs.append(composer.run(overrides, number if len(runs) > 1 or arguments.multirun else None))
        except ConfigError as error:
            said = [override for override in overrides if not override.startswith("hydra.")]
            raise ConfigError(error.problems, " ".join(said) if len(runs) > 1 else "") from None
    return configs


def compose_jobs(
    loader: ConfigLoader,
    master: DictConfig,
    batch: Sequence[Sequence[str]],
    first: int = 0,
    tell: Tell = _silent,
) -> list[tuple[DictConfig, RunConfig]]:
    """A batch of a sweep's jobs, as Hydra composes them and checked.

    Args:
        master: the sweep's own configuration.
        first: number of the batch's first job in the sweep.

    Raises:
        ConfigError: with everything wrong with the first job that is wrong.
    """
    composer = _Composer(loader, master.hydra.job.config_name, _written(master.hydra.overrides.hydra))
    jobs = []
    for number, overrides in enumerate(batch, start=first):
        tell(number - first, len(batch))
        try:
            try:
                job = loader.load_sweep_config(master, list(overrides))
            except MISTAKES as error:
                raise ConfigError(composer.mistakes(overrides, error)) from None
            _number(job, number)
            jobs.append((job, composer.checked(job, [*composer.overrides, *overrides])))
        except ConfigError as error:
            raise ConfigError(error.problems, " ".join(overrides) if len(batch) > 1 else "") from None
    return jobs


def is_ours(master: DictConfig) -> bool:
    """Whether it was composed for ``run.py``, and not for another program of Hydra's."""
    return any(source.provider == "main" and source.path == str(CONF) for source in master.hydra.runtime.config_sources)


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
    loaded: dict[tuple[str, ...], DictConfig | Exception] = field(default_factory=dict)
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
        loader, name = ConfigLoaderImpl(search_path), arguments.config_name
        if name is not None and not (name and loader.repository.config_exists(name)):
            there = [one for one in loader.get_group_options("") if not one.startswith("_")]  # but Hydra's own
            close = [one for one in closest(name, there) if one != PRIMARY]
            fix = f"--config-name={close[0]}" if close else "leave it out"
            raise ConfigError(Problem("--config-name", name, f"one of {', '.join(there)}", fix))
        return cls(loader, name or PRIMARY, list(arguments.overrides))

    def load(self, overrides: Sequence[str], mode: RunMode = RunMode.RUN) -> DictConfig:
        try:
            return self._load(overrides, mode)
        except MISTAKES as error:
            raise ConfigError(self.mistakes(overrides, error, mode is RunMode.MULTIRUN)) from None

    def _load(self, overrides: Sequence[str], mode: RunMode = RunMode.RUN) -> DictConfig:
        key = (mode.name, *overrides)
        if key not in self.loaded:
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("error", "provider=hydra.searchpath")  # a folder that is not there
                    self.loaded[key] = self.loader.load_configuration(self.primary, list(overrides), mode)
            except KeyError as error:
                self.loaded[key] = ValueError(missing_variable(error))
            except MISTAKES as error:
                self.loaded[key] = error
            except (AttributeError, TypeError, UserWarning) as error:  # what it says of some values of its own keys
                self.loaded[key] = ValueError(str(error))
        found = self.loaded[key]
        if isinstance(found, Exception):
            raise found
        return found

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
                if wrong := self.finder(arguments, multirun=True).wrong_names(parsed):
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
        """What says what the sweep is can't be swept over."""
        for override in overrides:
            group = override.key_or_group
            if group in ONE_FOR_ALL and override.is_sweep_override():
                value = str(override.input_line).partition("=")[2]
                raise ConfigError(
                    Problem(group, value, f"one {group} for all runs of a sweep", f"a command for each {group}")
                )

    def _says_multirun(self) -> bool:
        """A configuration may ask for a sweep itself: ``hydra.mode: MULTIRUN``."""
        with suppress(*MISTAKES):
            return bool(self._load(self.overrides).hydra.mode == RunMode.MULTIRUN)
        with suppress(*MISTAKES):  # one run can't have several values
            parsed = OverridesParser.create(config_loader=self.loader).parse_overrides(self.overrides)
            if any(override.is_sweep_override() for override in parsed):
                return bool(self._load(self.overrides, RunMode.MULTIRUN).hydra.mode == RunMode.MULTIRUN)
        return False

    def run(self, overrides: Sequence[str], number: int | None) -> RunConfig:
        """A run, or the one of that number in a sweep."""
        composed = self.load(overrides)
        if number is not None:
            _number(composed, number)
        return self.checked(composed, overrides)

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
            quoted = with_quotes(error.problems, [*overrides, *self.overrides])
            raise ConfigError([self._by_group(problem, composed, overrides) for problem in quoted]) from None
        tasks.check(config.task.name)
        return config

    def _misplaced(self, composed: DictConfig, overrides: Sequence[str]) -> Iterator[Problem]:
        """Options of a group that were given to a key: ``model.name=gpt_mini`` renames the model and no more."""
        nodes = _nodes(composed)
        for override in OverridesParser.create().parse_overrides(list(overrides)):
            key, value = override.key_or_group, override.value()
            if override.is_delete() and self._options(key):
                yield deletion(override.input_line or key)
            elif isinstance(value, list) and self._options(key):
                said = str(override.input_line).partition("=")[0]
                yield several(said, value)
            choice = nodes.get(key.removesuffix(".name"))
            if choice is None or choice == key:
                continue
            options = self._options(choice)
            renamed = key.endswith(".name")
            if value in options and not (renamed and composed.hydra.runtime.choices[choice] == value):
                yield Problem(key, value, f"{choice}=OPTION: options are chosen by group", f"{choice}={value}")
            elif not renamed and not isinstance(value, dict):
                yield misplaced(choice, options, key, value, composed.hydra.runtime.choices[choice])

    def _by_group(self, problem: Problem, composed: DictConfig, overrides: Sequence[str]) -> Problem:
        """The same; where the name of an option was given to its key, the fix gives it to the group."""
        choice = _nodes(composed).get(problem.key.removesuffix(".name"))
        typed = any(override.lstrip("+").startswith(f"{problem.key}=") for override in overrides)
        options = self._options(str(choice)) if choice else []
        if not typed or not set(problem.allowed.split(", ")) <= set(options):
            return problem
        close = closest(str(problem.value), options)
        fix = f"{choice}={close[0]}" if close else f"{choice}=OPTION with one of {', '.join(options)}"
        return replace(problem, fix=fix)

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
        here = OmegaConf.merge(without_hydra(composed), {"technique": meant.technique})  # what it means for this model
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
        return self.finder(overrides, multirun).find(error)

    def finder(self, overrides: Sequence[str], multirun: bool = False) -> Finder:
        return Finder(CONF, self.loader, self._load, self._options, self._problems, overrides, multirun)

    def _problems(self, overrides: Sequence[str], multirun: bool) -> Sequence[Problem]:
        """What is wrong with overrides that nobody has typed; of a sweep's runs, with the first few."""
        try:
            runs = [list(overrides)]
            if multirun:
                parsed = OverridesParser.create(config_loader=self.loader).parse_overrides(list(overrides))
                (runs,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
            for run in runs[:3]:
                self.checked(self._load(run), run)
        except ConfigError as error:
            return error.problems
        except MISTAKES as error:
            return [Problem("command line", " ".join(overrides), str(error), "")]
        return []


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
    with _said_by_hydra(composed):
        return _filled_in(without_hydra(composed))


def _filled_in(ours: DictConfig) -> dict[str, Any]:
    written = dict(leaves(OmegaConf.to_container(ours, resolve=False)))
    missing = [key for key, value in written.items() if value == NOT_SET]
    if missing:
        raise ConfigError([Problem(key, NOT_SET, "a value; it has no default", f"{key}=VALUE") for key in missing])
    try:
        container = OmegaConf.to_container(ours, resolve=True)
    except OmegaConfBaseException as error:
        key = str(error.full_key)
        reason = str(error).partition("\n")[0]
        value = str(written.get(key, ""))
        raise ConfigError(Problem(key, value, f"a value ({reason})", _other_reference(key, value))) from None
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def _other_reference(key: str, value: str) -> str:
    """What to type for a value that refers to something that isn't there."""
    close = re.sub(r"\$\{hydra\.", "${hydra:", value)  # Hydra hides its own part from the run
    for name in re.findall(r"\$\{(\w+)\}", close):
        if name in os.environ:
            close = close.replace(f"${{{name}}}", f"${{oc.env:{name}}}")
    return shlex.quote(f"{key}={close}") if close != value else f"{key}=VALUE"


@contextmanager
def _said_by_hydra(composed: DictConfig) -> Iterator[None]:
    """``${hydra:...}`` says what it will say in the run, unless it is there already."""
    singleton: Any = HydraConfig.instance()
    before = singleton.cfg
    if "hydra" in composed:
        singleton.cfg = OmegaConf.masked_copy(composed, ["hydra"])
    try:
        yield
    finally:
        singleton.cfg = before


def _number(composed: DictConfig, number: int) -> None:
    """Of a run in a sweep, as launchers say it."""
    with open_dict(composed):
        composed.hydra.job.num = composed.hydra.job.id = number


def _nodes(composed: DictConfig) -> dict[str, str]:
    """The configuration's nodes that options of groups fill, with the group and where it stands."""
    return {choice.partition("@")[2] or choice: choice for choice in composed.hydra.runtime.choices}


def _written(overrides: ListConfig) -> list[str]:
    """Overrides as they were given: what they refer to may not be there yet."""
    written = OmegaConf.to_container(overrides, resolve=False)
    assert isinstance(written, list)
    return [str(override) for override in written]


def _laid_down(ablation: str) -> set[str]:
    """The technique's keys that an ablation, or one that it is made of, is about; read from their files."""
    content = read_yaml(CONF / "ablation" / f"{ablation}.yaml")
    bases = [entry for entry in content.pop("defaults", []) if isinstance(entry, str) and entry != "_self_"]
    keys = {key for key, _ in leaves(content) if key.startswith("technique.")}
    return keys.union(*map(_laid_down, bases))


def _is_in(node: str, keys: set[str]) -> bool:
    """Whether any of ``keys`` lies in the configuration node ``node``."""
    return bool(node) and any(key.startswith(f"{node}.") for key in keys)
