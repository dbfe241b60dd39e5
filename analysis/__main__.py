"""``python -m analysis table [RUNS_DIR] [FILTER ...]``"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from analysis.table import collect, render, to_frame
from optimus_cc import command
from optimus_cc.records import to_json


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis", description="Tables from run folders.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    table = commands.add_parser("table", help="what each run reached, how fast, and what it sent")
    table.add_argument("runs_dir", nargs="?", default="runs", type=Path, metavar="RUNS_DIR", help="default: runs")
    table.add_argument("filters", nargs="*", metavar="FILTER", help="part of a run's id, or a pattern with * and ?")
    table.add_argument("--width", type=int, default=120, help="columns of the screen (default: %(default)s)")
    form = table.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one object per run")
    form.add_argument("--csv", action="store_true", help="one line per run")
    options = parser.parse_args(arguments)

    rows, remarks = collect(options.runs_dir, options.filters)
    if options.json:
        print(to_json(rows, indent=2))
    elif options.csv:
        print(to_frame(rows).to_csv(index=False), end="")
    else:
        print(render(rows, options.width))
    for remark in remarks:
        print(remark, file=sys.stderr)
    return 0 if rows else 1


if __name__ == "__main__":
    raise SystemExit(command.run(main))
