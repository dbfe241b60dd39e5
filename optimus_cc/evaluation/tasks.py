"""lm-eval's tasks: by name from the hub, or with their items from local files; their prompts and metrics always."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optimus_cc.config.evaluation import EvaluationConfig
from optimus_cc.config.fingerprint import fingerprint
from optimus_cc.evaluation import items

_FILES = {
    "lambada_openai": "lambada/lambada_openai.yaml",
    "piqa": "piqa/piqa.yaml",
    "mathqa": "mathqa/mathqa.yaml",
    "winogrande": "winogrande/default.yaml",
    "race": "race/race.yaml",
}
"""Where lm-eval describes the paper's tasks, in its folder of tasks: finding one among all takes seconds."""
_BOOTSTRAP_ITERATIONS = 1000
"""For standard errors that have no formula."""
_FEWSHOT_SEED = 1234
"""lm-eval's own default."""
_SPLIT = "test"


class UnknownTask(ValueError):
    """lm-eval has no task of this name; ``name`` and what there is, ``known``."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(name)
        self.name = name
        self.known = list(known)


def version() -> str:
    """Of lm-eval."""
    return importlib.metadata.version("lm_eval")


def quiet() -> None:
    """lm-eval reports much that nobody asked for, and would start processes of its own for standard errors."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    os.environ["DISABLE_MULTIPROC"] = "1"
    os.environ.setdefault("TQDM_DISABLE", "1")


def load(settings: EvaluationConfig) -> dict[str, Any]:
    """The tasks with their items, as lm-eval's evaluator takes them.

    Raises:
        UnknownTask: of the first name that lm-eval doesn't know.
        ValueError: the items in a local file are wrong.
    """
    quiet()
    from lm_eval.tasks import TaskManager

    if settings.data_dir is None:
        manager = _all_tasks()
        _check_names(settings.tasks, manager.all_tasks)
        loaded: dict[str, Any] = manager.load(list(settings.tasks))
        return loaded
    found = [_local(task, settings.data_dir, settings.num_fewshot) for task in settings.tasks]
    loaded = TaskManager(include_defaults=False).load(found)
    return loaded


@functools.cache
def _all_tasks() -> Any:
    """lm-eval's index of its tasks, which takes seconds to make."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _check_names(names: Sequence[str], known: Sequence[str]) -> None:
    there = set(known)
    for name in names:
        if name not in there:
            raise UnknownTask(name, known)


def _local(task: str, data_dir: str, num_fewshot: int) -> dict[str, Any]:
    """lm-eval's own description of a task, with items from a file and nothing else changed.

    Examples for few-shot prompts come from the same items; lm-eval leaves out the one that is asked about, given that
    both are of one split.
    """
    from lm_eval.tasks._yaml_loader import load_yaml

    rows = items.read(items.path_of(data_dir, task), task, num_fewshot)

    def dataset(**_: Any) -> dict[str, Any]:
        import datasets

        return {_SPLIT: datasets.Dataset.from_list(rows)}

    description: dict[str, Any] = load_yaml(_description(task))
    splits = {f"{split}_split": None for split in ("training", "validation")}
    redirected = {"test_split": _SPLIT, "fewshot_split": _SPLIT, "dataset_path": None, "dataset_name": None}
    return {**description, **splits, **redirected, "dataset_kwargs": None, "custom_dataset": dataset}


def _description(task: str) -> Path:
    if task in _FILES:
        package = importlib.util.find_spec("lm_eval")
        assert package is not None
        assert package.origin is not None
        return Path(package.origin).parent / "tasks" / _FILES[task]
    index = _all_tasks().task_index
    _check_names([task], list(index))
    path = index[task].yaml_path
    if path is None or "task" not in (index[task].cfg or {}) or not isinstance((index[task].cfg or {})["task"], str):
        raise ValueError(f"{task} is a group of tasks: name those of it that there are files of")
    return Path(path)


def generating(loaded: dict[str, Any]) -> list[str]:
    """Names of the tasks for which a model would have to generate text."""
    return [name for name, task in loaded["tasks"].items() if task.OUTPUT_TYPE == "generate_until"]


def evaluate(loaded: dict[str, Any], model: Any, settings: EvaluationConfig) -> dict[str, Any]:
    """Scores of a model on tasks.

    Args:
        model: an ``LM`` of lm-eval.

    Returns:
        for each task, and each group of tasks: ``metrics`` (each with ``value``, ``standard_error``, None where there
        is none, and ``higher_is_better``), ``items`` (``evaluated`` of ``available``), ``version``, ``num_fewshot``.
    """
    from lm_eval.evaluator import evaluate as lm_evaluate

    for task in loaded["tasks"].values():
        if task.get_config("num_fewshot") != 0:  # a task that says so itself is never asked with examples
            task.set_config(key="num_fewshot", value=settings.num_fewshot)
        task.set_fewshot_seed(seed=_FEWSHOT_SEED)
    random.seed(0)
    found = lm_evaluate(model, loaded, limit=settings.limit, bootstrap_iters=_BOOTSTRAP_ITERATIONS, log_samples=False)
    assert found is not None
    return {name: _result(name, dict(values), found) for name, values in found["results"].items()}


def _result(name: str, values: dict[str, Any], found: Any) -> dict[str, Any]:
    higher = found["higher_is_better"].get(name, {})
    metrics = {}
    for key, value in values.items():
        metric, _, kind = key.partition(",")
        if not kind or metric.endswith("_stderr") or not isinstance(value, (int, float)):
            continue
        error = values.get(f"{metric}_stderr,{kind}")
        metrics[metric if kind == "none" else key] = {
            "value": float(value),
            "standard_error": float(error) if isinstance(error, (int, float)) else None,
            "higher_is_better": higher.get(metric),
        }
    counts = found["n-samples"].get(name)
    evaluated = {"evaluated": counts["effective"], "available": counts["original"]} if counts else None
    return {
        "metrics": metrics,
        "items": evaluated,
        "version": found["versions"].get(name),
        "num_fewshot": found["n-shot"].get(name),
    }


def source(settings: EvaluationConfig, loaded: dict[str, Any]) -> dict[str, Any]:
    """Where the items of each task came from, and what they were."""
    if settings.data_dir is not None:
        paths = {task: items.path_of(settings.data_dir, task) for task in settings.tasks}
        return {task: {"file": str(path), **fingerprint(path)} for task, path in paths.items()}
    return {name: _hub(task) for name, task in loaded["tasks"].items()}


def _hub(task: Any) -> dict[str, Any]:
    docs = task.eval_docs
    return {
        "dataset": getattr(task, "DATASET_PATH", None),
        "configuration": getattr(task, "DATASET_NAME", None),
        "fingerprint": getattr(docs, "_fingerprint", None),
    }
