"""``run=RUN``: the configuration of a task that works on a run that is there, such as evaluate and export."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from optimus_cc.config.errors import ConfigError, Problem, closest
from optimus_cc.paths import at_home
from optimus_cc.yaml_files import read_yaml

TASKS = ("evaluate", "export")
"""Those that work on a run."""
CONFIG_FILE = "config.yaml"
_OF_THE_RUN = ("model", "technique", "ablation", "data", "tokenizer", "optimizer", "training", "parallel")
"""Groups that the run's own configuration fills; all others are of the task."""
_MAY_DIFFER = {
    "parallel": None,  # any key: a checkpoint is loaded into any layout
    "data": ("cache_dir", "path"),  # where the same files lie now
    "tokenizer": ("path", "vocab_file", "merges_file"),
    "training": ("device", "timeout_s", "precision"),
}


def find(said: str, runs_dir: str) -> Path:
    """The folder of a run.

    Args:
        said: a run folder, a run id in ``runs_dir``, or a part of one id only.

    Raises:
        ConfigError: there is none, or several.
    """
    try:
        said, base = at_home(said), Path(at_home(runs_dir))
    except ValueError as error:
        raise ConfigError(Problem("run", said, str(error), "check the path")) from None
    for folder in (base / said, Path(said)):
        if (folder / CONFIG_FILE).is_file():
            return folder.absolute()
    names = sorted(path.parent.name for path in base.glob(f"*/{CONFIG_FILE}"))
    matching = [name for name in names if said in name]
    if len(matching) == 1:
        return (base / matching[0]).absolute()
    if matching:
        shown = ", ".join(matching[:4]) + (", ..." if len(matching) > 4 else "")
        raise ConfigError(Problem("run", said, f"one run; {len(matching)} have this in their id: {shown}", "say more"))
    close = closest(said, names)
    fix = f"did you mean {close[0]}?" if close else "python -m launchers status shows the runs"
    raise ConfigError(Problem("run", said, f"a run folder, or the id of a run in {runs_dir}", fix))


def applied(composed: Mapping[str, Any], overrides: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """What was composed, with the run's own configuration where that counts; unchanged if ``run`` isn't set.

    Args:
        composed: the whole composed configuration.
        overrides: key or group, and value, of what the command line says.

    Raises:
        ConfigError: there is no such run, its configuration can't be read, or the command line would change what it is.
    """
    result, task = dict(composed), _task(composed)
    said = result.get("run")
    if said is None:
        if task in TASKS:
            raise ConfigError(Problem("run", None, f"the run that task={task} works on", "run=ID, or its folder"))
        return result
    if task not in TASKS:
        raise ConfigError(Problem("run", said, f"null with task={task}", "leave it out, or task=export"))
    folder = find(str(said), str(result["runs_dir"]))
    of_run = _read(folder / CONFIG_FILE)
    wrong = []
    for key, value in overrides:
        group, _, rest = key.partition(".")
        if group not in _OF_THE_RUN:
            continue
        keys = _MAY_DIFFER.get(group, ())
        if keys is not None and rest not in keys:
            wrong.append(_not_for_you_to_say(key, value, keys))
        elif rest:
            _set(of_run, key, _get(composed, key))
        else:
            of_run[group] = copy.deepcopy(composed[group])
    if wrong:
        raise ConfigError(wrong)
    result.update({group: of_run.get(group) for group in _OF_THE_RUN})
    result["run"], result["runs_dir"] = str(folder), str(folder.parent)
    return result


def _task(composed: Mapping[str, Any]) -> Any:
    task = composed.get("task")
    return task.get("name") if isinstance(task, Mapping) else None


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_yaml(path)
    except (OSError, ValueError) as error:
        raise ConfigError(Problem("run", str(path), f"a run's configuration ({error})", "check the folder")) from None
    if any(not isinstance(content.get(key), dict) for key in ("model", "parallel")):
        raise ConfigError(Problem("run", str(path), "a run's configuration", "check the folder"))
    return content


def _not_for_you_to_say(key: str, value: Any, keys: Iterable[str]) -> Problem:
    group = key.partition(".")[0]
    allowed = f"what the run was trained with; of {group}, only {', '.join(keys)} can be said anew"
    return Problem(key, value, allowed if keys else "what the run was trained with", f"leave {key} out")


def _get(mapping: Mapping[str, Any], key: str) -> Any:
    value: Any = mapping
    for part in key.split("."):
        value = value[part]
    return value


def _set(mapping: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for part in parents:
        mapping = mapping.setdefault(part, {})
    mapping[last] = value


def problems(run: str | None, checkpoint: int | None) -> Iterator[Problem]:
    """What is wrong with the checkpoint that is to be taken of a run's folder."""
    if run is None:
        if checkpoint is not None:
            yield Problem("checkpoint", checkpoint, "null without run=RUN", "leave it out")
        return
    from optimus_cc import checkpoints

    folder = Path(run) / "checkpoints"
    there = [found for found in checkpoints.all_in(folder) if found.problem() is None]
    steps = ", ".join(str(found.step) for found in there)
    if not there:
        yield Problem("run", run, "a run with a complete checkpoint", "let it train until it has saved one")
    elif checkpoint is not None and checkpoint not in [found.step for found in there]:
        yield Problem(
            "checkpoint", checkpoint, f"the step of a complete checkpoint: {steps}", "leave it out: the newest"
        )
