"""Results of evaluations as files: ``evaluation/step_N-KIND-SETTINGS.json`` in a run folder. Without torch.

What was measured, and on what, is part of the name, so one setting never overwrites what another one has found. Layout,
batch size and device are not: scores don't depend on them.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optimus_cc.checkpoints import MANIFEST, Checkpoint
from optimus_cc.config import RunConfig
from optimus_cc.config.fingerprint import fingerprint
from optimus_cc.evaluation import items
from optimus_cc.records import read_json_object, replace_file, to_json
from optimus_cc.runs import RunFolder
from optimus_cc.training.corpus import cache_folder

KINDS = ("zero_shot", "perplexity")


def kinds(config: RunConfig) -> list[str]:
    """What an evaluation with this configuration measures."""
    wanted = {"zero_shot": bool(config.evaluation.tasks), "perplexity": config.evaluation.perplexity}
    return [kind for kind in KINDS if wanted[kind]]


def settings(config: RunConfig, kind: str) -> dict[str, Any]:
    """What the results of one kind depend on, besides the checkpoint: files count by what they hold.

    Raises:
        OSError: a file can't be read.
        DataError: a file of the run's corpus is not there.
    """
    chosen = config.evaluation
    common = {"limit": chosen.limit, "precision": config.training.precision}
    if kind == "zero_shot":
        local = chosen.data_dir
        data = "hub" if local is None else {task: fingerprint(items.path_of(local, task)) for task in chosen.tasks}
        tasks = list(chosen.tasks)
        return {**common, "tasks": tasks, "num_fewshot": chosen.num_fewshot, "data": data, "lm_eval": _harness()}
    own = chosen.documents is None
    documents: Any = cache_folder(config).name if own else fingerprint(str(chosen.documents))
    return {**common, "documents": documents, "text_key": None if own else chosen.text_key}


def _harness() -> str | None:
    """The version of lm-eval, whose prompts and metrics may change with it; None if it isn't there."""
    try:
        return importlib.metadata.version("lm_eval")
    except importlib.metadata.PackageNotFoundError:
        return None


def path_of(folder: RunFolder, step: int, kind: str, chosen: Mapping[str, Any]) -> Path:
    """Where the results of one kind at one checkpoint are, or would be."""
    said = json.dumps(chosen, sort_keys=True, separators=(",", ":"))
    return folder.evaluation / f"step_{step:08d}-{kind}-{hashlib.sha256(said.encode()).hexdigest()[:8]}.json"


def missing(folder: RunFolder, checkpoint: Mapping[str, Any], config: RunConfig) -> list[str]:
    """The kinds that ``config`` wants to be measured at a checkpoint (:func:`describe`) and that have not been."""
    return [kind for kind in kinds(config) if _there(folder, checkpoint, kind, settings(config, kind)) is None]


def there(folder: RunFolder, checkpoint: Mapping[str, Any], config: RunConfig) -> list[dict[str, Any]]:
    """The results that ``config`` wants of a checkpoint, as far as they are there."""
    wanted = [_there(folder, checkpoint, kind, settings(config, kind)) for kind in kinds(config)]
    return [result for result in wanted if result is not None]


def _there(
    folder: RunFolder, checkpoint: Mapping[str, Any], kind: str, chosen: Mapping[str, Any]
) -> dict[str, Any] | None:
    result = read_json_object(path_of(folder, checkpoint["step"], kind, chosen))
    # A checkpoint of the same step may have been made anew since.
    return result if result is not None and result.get("checkpoint") == checkpoint else None


def describe(found: Checkpoint) -> dict[str, Any]:
    """A checkpoint as results name it; its manifest holds checksums of all its files.

    Raises:
        OSError: it is gone.
    """
    return {"step": found.step, "manifest": fingerprint(found.path / MANIFEST)["sha256"]}


def write(folder: RunFolder, result: Mapping[str, Any]) -> Path:
    """Write a result that names its ``checkpoint``, ``kind`` and ``settings`` where it belongs."""
    path = path_of(folder, result["checkpoint"]["step"], result["kind"], result["settings"])
    path.parent.mkdir(exist_ok=True)
    replace_file(path, to_json(result, indent=2) + "\n")
    return path


def read_all(folder: RunFolder) -> list[dict[str, Any]]:
    """All results of a run, by checkpoint and kind; files that hold none are left out."""
    found = [read_json_object(path) for path in sorted(folder.evaluation.glob("step_*.json"))]
    return [result for result in found if result is not None and result.get("kind") in KINDS]
