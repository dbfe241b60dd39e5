"""``python -m launchers.job RUN_FOLDER``: trains one queued run, from what was frozen in its folder and nothing else.

Exit code: 0 finished, 1 failed, 2 the configuration is wrong, 75 preempted, 130 cancelled, :data:`EXIT_BUSY` another
process runs it. Once the run is claimed everything that is printed goes to ``logs/launcher.log`` in its folder.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from launchers import local
from optimus_cc import command, process
from optimus_cc.claims import Claim, claim_queued, withdraw
from optimus_cc.config import ConfigError, RunConfig
from optimus_cc.runs import RunBusy, RunFailed, RunFolder

EXIT_BUSY = 69
"""EX_UNAVAILABLE."""


def run(folder: RunFolder, train: Callable[..., object] = local.train, begun: Callable[[], None] = lambda: None) -> int:
    """Train the run that is queued in ``folder``, to its end; the exit code says how it ended.

    Args:
        train: as :func:`launchers.local.train`.
        begun: called when the run has been claimed.
    """

    def take(config: RunConfig) -> Claim:
        claimed = claim_queued(folder, config)
        if not claimed.finished:
            _print_to(log_path(folder))
        return claimed

    try:
        try:
            config = folder.run_config()
        except RuntimeError as error:  # there is nothing that could be run
            withdraw(folder, "failed", str(error))
            raise RunFailed(str(error)) from None
        train(config, take)
    except RunBusy as busy:
        print(busy, file=sys.stderr)
        return EXIT_BUSY
    except RunFailed as failure:
        print(failure, file=sys.stderr)
        return failure.exit_code
    except ConfigError as error:
        print(error, file=sys.stderr)
        withdraw(folder, "failed", f"ConfigError: {error.problems[0].sentence}")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def go_where_it_was_composed(folder: RunFolder) -> None:
    """Change to the folder that relative paths in a run's configuration start from, if it is there."""
    place = (folder.provenance() or {}).get("working_directory")
    if isinstance(place, str) and os.path.isdir(place):
        os.chdir(place)


def log_path(folder: RunFolder) -> Path:
    """What a queued run's supervisor prints."""
    return folder.logs / "launcher.log"


def _print_to(log: Path) -> None:
    """Everything that this process and its children print from now on goes to the end of ``log``."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m launchers.job", description="Train one queued run.")
    parser.add_argument("folder", type=Path, metavar="RUN_FOLDER")
    folder = RunFolder(parser.parse_args(arguments).folder.absolute())
    if process.SUPERVISOR_PID in os.environ:
        process.die_with_parent()
    if not folder.exists():
        print(f"error: there is no run in {folder.path}", file=sys.stderr)
        return 2
    go_where_it_was_composed(folder)
    return run(folder)


if __name__ == "__main__":
    sys.exit(command.run(main))
