"""``python -m paper_figures [NAME ...] [--runs DIR] [-o FOLDER]``"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from analysis.collect import SUFFIXES, collect, load, save
from optimus_cc.command import run as run_program
from optimus_cc.command import to_path
from optimus_cc.config.errors import closest
from paper_figures.data import Data
from paper_figures.item import discover


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m paper_figures", description="The paper's tables and figures, and a report."
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="tables and figures to make; none: all, and the report"
    )
    parser.add_argument(
        "--runs",
        action="append",
        type=to_path,
        metavar="DIR",
        help="folder of run folders; may be given several times (default: runs)",
    )
    parser.add_argument("-o", "--output", type=to_path, default=Path("report"), metavar="FOLDER", help="(report)")
    parser.add_argument("--list", action="store_true", help="say what there is and what it needs, make nothing")
    options = parser.parse_args(arguments)
    items = discover()
    if options.list:
        for item in items.values():
            print(f"{item.name:<22} {item.title}")
            print("".join(f"{'':<22}   needs {need.command}\n" for need in item.needs), end="")
        return 0
    if unknown := [name for name in options.names if name not in items]:
        near = closest(unknown[0], items)
        parser.error(f"there is no {unknown[0]}; {f'did you mean {near[0]}' if near else 'see --list'}?")
    began = time.perf_counter()
    tables = options.output / f"results{SUFFIXES[0]}"
    collected = collect(options.runs or [Path("runs")], load(tables))
    save(collected.tables, tables)
    for remark in collected.remarks:
        print(remark, file=sys.stderr)
    finished = int((collected.tables["runs"]["state"] == "finished").sum())
    print(f"{finished} finished runs; {collected.read} folders read, {collected.unchanged} unchanged")
    from paper_figures import build, report, verdicts

    data = Data(collected.tables)
    chosen = {name: item for name, item in items.items() if name in options.names} if options.names else items
    made = build.make_all(chosen, data, options.output)
    for one in made:
        outcome = ", ".join(path.name for path in one.files)
        print(f"{one.item.name:<22} {f'missing: {one.missing}; {one.command}' if one.missing else outcome}")
    if not options.names:
        judged = verdicts.verdicts(data)
        for verdict in judged:
            print(f"{verdict.word:<16} {verdict.claim}")
        page = report.write(made, judged, data, collected.remarks, options.output)
        print(f"report     {page}")
    print(f"took       {time.perf_counter() - began:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_program(main))
