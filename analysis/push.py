"""Finished runs, and figures, to a wandb project. Run folders stay the record; what is sent is a copy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from analysis.collect import Tables
from analysis.compare import select
from optimus_cc.records import flat
from optimus_cc.runs import RunFolder

FIGURES = "figures"


class NotPushed(Exception):
    """``str()`` says why, in one line."""


def push(
    tables: Tables,
    filters: Sequence[str],
    project: str,
    mode: Literal["offline", "online"],
    report: Path | None,
    directory: Path,
) -> int:
    """Send runs under their ids, so that sending them again replaces them, and a report's figures as a run of its own.

    Raises:
        NotPushed: there is nothing to send, wandb is not installed, or it refuses.
    """
    try:
        import wandb
    except ImportError:
        raise NotPushed("wandb is not installed; pip install 'optimus-cc[tracking]'") from None
    runs = select(tables["runs"], filters)
    folders = [RunFolder(folder) for folder in runs.loc[runs["state"] == "finished", "folder"]]
    pictures = sorted((report / FIGURES).glob("*.png")) if report else []
    if report and not pictures:
        raise NotPushed(f"{report} holds no figures; make figures writes them")
    if not folders and not pictures:
        raise NotPushed("no finished run to send")

    def start(name: str, config: dict[str, Any], kind: str) -> Any:
        directory.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(silent=True, console="off")
        return wandb.init(
            project=project, name=name, id=name, resume="allow", mode=mode, dir=str(directory), config=config,
            job_type=kind, settings=settings,
        )  # fmt: skip

    try:
        for folder in folders:
            run = start(folder.run_id, folder.config() or {}, "train")
            _send_records(run, folder)
            run.summary.update(flat(folder.summary() or {}))
            run.finish()
            print(f"sent       {folder.run_id}")
        if pictures:
            run = start(FIGURES, {}, FIGURES)
            run.log({path.stem: wandb.Image(str(path)) for path in pictures})
            run.finish()
            print(f"sent       {len(pictures)} figures")
    except Exception as error:  # whatever wandb or the network have to say
        raise NotPushed(f"wandb: {type(error).__name__}: {error}") from None
    if mode == "offline":
        print(f"to upload  wandb sync {directory / 'wandb'}/offline-run-*")
    return 0


def _send_records(run: Any, folder: RunFolder) -> None:
    """The records of each step together, for a step can be sent once only."""
    steps: dict[int, dict[str, Any]] = {}
    for record in folder.metrics():
        kind, step = record.get("kind"), record.get("step")
        if kind in ("train", "validation") and isinstance(step, int):
            values = {f"{kind}/{key}": value for key, value in flat(record).items() if key not in ("kind", "step")}
            steps.setdefault(step, {}).update(values)
    for step in sorted(steps):
        run.log(steps[step], step=step)
