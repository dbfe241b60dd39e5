"""What a task works on that says ``run=RUN``: a checkpoint, and the corpus that the run's vocabulary was made from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from optimus_cc import checkpoints
from optimus_cc.checkpoints import Checkpoint
from optimus_cc.config import RunConfig
from optimus_cc.config.identity import without_dead_keys
from optimus_cc.records import from_json, to_json
from optimus_cc.runs import RunFailed, RunFolder


def run_folder(config: RunConfig) -> RunFolder:
    assert config.run is not None, "of a configuration that has none, no task asks"
    return RunFolder(Path(config.run))


def chosen(config: RunConfig) -> Checkpoint:
    """The checkpoint that ``config.checkpoint`` names, or the newest complete one.

    Raises:
        RunFailed: it is gone or damaged, or was made with other text than lies where the run's configuration says.
    """
    folder = run_folder(config).checkpoints
    if config.checkpoint is None:
        found = checkpoints.newest(folder)
    else:
        found = checkpoints.at(checkpoints.path_of(folder, config.checkpoint))
    manifest = None if found is None else found.manifest()
    if found is None or manifest is None:
        raise RunFailed(f"{folder} holds no such checkpoint any more", "")
    science = from_json(to_json(config.scientific()))
    theirs = without_dead_keys(manifest.get("scientific", {}))
    for group in ("data", "tokenizer"):
        if theirs.get(group) != science[group]:
            raise RunFailed(f"{group} is not what {found.path.name} was trained with: its files have changed since", "")
    return found


def corpus_folder(config: RunConfig, report: Callable[[str], None] = print) -> Path:
    """The run's tokenised corpus with its ``tokenizer.json``; made again if it was removed.

    Raises:
        RunFailed: it isn't there, and can't be made.
    """
    from optimus_cc.training.corpus import DataError, cache_folder, is_prepared, prepare

    try:
        return cache_folder(config) if is_prepared(config) else prepare(config, report=report)
    except DataError as error:
        raise RunFailed(f"the corpus can't be prepared: {error}", "") from None
