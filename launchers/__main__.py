"""``python -m launchers``: what is done about runs from the outside."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from launchers import clean


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m launchers", description="Look after runs.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    one = commands.add_parser(
        "clean",
        help="remove checkpoints of finished runs",
        description="Lists the checkpoints of finished runs that would go, and removes them when told to with --yes. "
        "The newest one of each run stays unless --all is given; runs that are not finished are left alone.",
    )
    one.add_argument("filter", nargs="?", default="*", metavar="FILTER", help="run ids, * and ? match; default: all")
    one.add_argument("--all", action="store_true", help="the newest checkpoint too: it can't be evaluated any more")
    one.add_argument("--yes", action="store_true", help="remove what is listed")
    one.add_argument("--runs-dir", default="runs", type=Path, metavar="FOLDER")
    options = parser.parse_args(arguments)
    return clean.clean(options.runs_dir, options.filter, everything=options.all, remove=options.yes)


if __name__ == "__main__":
    sys.exit(main())
