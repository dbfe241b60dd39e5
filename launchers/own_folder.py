"""What tasks share that start ranks but are no runs: each time a new folder beside the run folders, and its records."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from launchers.local import RunRanks, relative, run_ranks
from launchers.progress import Progress
from launchers.start import check_can_be_written
from launchers.supervise import Stop
from optimus_cc import provenance
from optimus_cc.claims import write_origin
from optimus_cc.config import RunConfig
from optimus_cc.records import JsonLinesTail
from optimus_cc.runs import RunFailed, RunFolder


def make_folder(config: RunConfig, parent: str, stem: str) -> RunFolder:
    """``runs_dir/PARENT/STEM-TIME``, with the configuration and where it came from; never one that is there."""
    base = Path(config.runs_dir).absolute() / parent
    check_can_be_written(config.runs_dir)
    base.mkdir(parents=True, exist_ok=True)
    name = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while True:
        path = base / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
            break
        except FileExistsError:
            number += 1
    folder = RunFolder(path)
    folder.logs.mkdir()
    write_origin(folder, config, provenance.code_version())
    return folder


def show_heading(
    progress: Progress, what: str, text: str, ranks: int, device: str, folder: RunFolder, notices: Iterable[str]
) -> None:
    """What begins where, and what the person should know before."""
    progress.print(f"{what:<11}{text}: {ranks} rank{'s' * (ranks != 1)} on {device}")
    progress.print(f"{'folder':<11}{relative(folder.path)}")
    for notice in notices:
        progress.print(textwrap.fill(f"{'notice':<11}{notice}", 118, subsequent_indent=" " * 11))


def run(
    command: list[str],
    ranks: int,
    config: RunConfig,
    device: str,
    folder: RunFolder,
    stop: Stop,
    progress: Progress,
    on_records: Callable[[list[dict[str, Any]]], None],
    start: RunRanks = run_ranks,
) -> None:
    """Run ``command`` once per rank.

    Args:
        on_records: takes the new records of the folder, if there are any; the last ones also after a failure.

    Raises:
        RunFailed: a rank failed, or somebody asked for an end; names the folder.
    """
    tail = JsonLinesTail(folder.metrics_path)

    def on_poll() -> None:
        if records := tail.new_records():
            on_records(records)
        progress.update(())

    progress.phase(f"starting {ranks} rank{'s' * (ranks != 1)} ...")
    try:
        start(command, ranks, config, device, folder, stop, on_poll)
    except RunFailed as error:
        details = "\n".join(filter(None, [error.details, f"  Folder: {relative(folder.path)}."]))
        raise type(error)(error.cause, details) from None
    finally:
        on_poll()
        progress.close()
