"""``python -m analysis COMMAND``: table, collect, show, compare, push."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from analysis.table import collect, render, to_frame
from optimus_cc.command import run as run_program
from optimus_cc.command import to_path
from optimus_cc.records import to_json


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    commands = {"table": _table, "collect": _collect, "show": _show, "compare": _compare, "push": _push}
    return commands[options.command](parser, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m analysis", description="Tables from run folders.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    table = commands.add_parser("table", help="what each run reached, how fast, and what it sent")
    table.add_argument("runs_dir", nargs="?", default="runs", type=to_path, metavar="RUNS_DIR", help="default: runs")
    table.add_argument("filters", nargs="*", metavar="FILTER", help="part of a run's id, or a pattern with * and ?")
    table.add_argument("--width", type=int, default=120, help="columns of the screen (default: %(default)s)")
    form = table.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one object per run")
    form.add_argument("--csv", action="store_true", help="one line per run")

    gather = commands.add_parser("collect", help="run folders to typed tables: docs/analysis.md")
    gather.add_argument("runs_dirs", nargs="*", type=to_path, metavar="RUNS_DIR", help="default: runs")
    gather.add_argument("-o", "--output", type=to_path, default=Path("results.parquet"), metavar="FILE")

    show = commands.add_parser("show", help="rows of a table, of some runs")
    show.add_argument("filters", nargs="*", metavar="FILTER", help="a technique, part of a run's id, or a pattern")
    show.add_argument("--table", default="runs", help="runs, metrics, traffic, evaluation, probes or codecs")
    show.add_argument("--columns", default="", metavar="A,B,...", help="which; without it the ones that matter most")
    show.add_argument("--csv", action="store_true", help="comma-separated, every row")

    compare = commands.add_parser("compare", help="two techniques, seed by seed, with significance")
    compare.add_argument("a", metavar="A", help="a technique, part of a run's id, or a pattern: the baseline")
    compare.add_argument("b", metavar="B", help="the same: what is held against it")
    compare.add_argument("--margin", type=float, default=0.01, help="change that counts as none, as a fraction of A")
    compare.add_argument("--confidence", type=float, default=0.95, help="default: %(default)s")

    push = commands.add_parser("push", help="finished runs and figures to a wandb project")
    push.add_argument("filters", nargs="*", metavar="FILTER", help="a technique, part of a run's id, or a pattern")
    push.add_argument("--project", default="optimus-cc", help="default: %(default)s")
    push.add_argument("--mode", choices=("offline", "online"), default="offline", help="default: %(default)s")
    push.add_argument("--report", type=to_path, metavar="FOLDER", help="a folder that make figures has written")
    push.add_argument("--dir", type=to_path, default=Path("."), help="where wandb writes its own files (default: here)")

    for one in (show, compare, push):
        one.add_argument("--runs", type=to_path, action="append", metavar="DIR", help="run folders (default: runs)")
        one.add_argument("--from", dest="source", type=to_path, metavar="FILE", help="what collect wrote, instead")
    return parser


def _table(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
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


def _collect(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from analysis import collect as collecting

    if options.output.suffix not in collecting.SUFFIXES:
        parser.error(f"-o {options.output}: a name that ends with {' or '.join(collecting.SUFFIXES)}")
    began = time.perf_counter()
    result = collecting.collect(options.runs_dirs or [Path("runs")], collecting.load(options.output))
    for remark in result.remarks:
        print(remark, file=sys.stderr)
    try:
        paths = collecting.save(result.tables, options.output)
    except OSError as error:
        print(f"{options.output} can't be written: {error.strerror}", file=sys.stderr)
        return 1
    for path, frame in zip(paths, collecting.in_writing_order(result.tables), strict=True):
        print(f"{len(frame):>9,} rows  {path}")
    states = result.tables["runs"]["state"].value_counts().sort_index()
    print(", ".join(f"{count} {state}" for state, count in states.items()) or "no runs", end="; ")
    print(f"{result.read} folders read, {result.unchanged} unchanged, {time.perf_counter() - began:.1f} s")
    return 0 if len(result.tables["runs"]) else 1


def _tables(options: argparse.Namespace) -> dict[str, object]:
    from analysis import collect as collecting

    if options.source is not None:
        if not collecting.is_readable(options.source):
            raise SystemExit(f"{options.source}: no tables that can be read; python -m analysis collect writes them")
        return dict(collecting.load(options.source))
    result = collecting.collect(options.runs or [Path("runs")])
    for remark in result.remarks:
        print(remark, file=sys.stderr)
    return dict(result.tables)


def _show(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from analysis import compare
    from analysis.columns import TABLES

    if options.table not in TABLES:
        parser.error(f"--table {options.table}: one of {', '.join(TABLES)}")
    columns = [name for name in options.columns.split(",") if name]
    try:
        rows = compare.show(_tables(options), options.filters, options.table, columns)
    except compare.Nothing as error:
        print(error, file=sys.stderr)
        return 1
    print(rows.to_csv(index=False).rstrip() if options.csv else rows.to_string(index=False, max_rows=200, na_rep="-"))
    return 0


def _compare(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from analysis import compare

    if not 0 < options.margin < 1 or not 0 < options.confidence < 1:
        parser.error("--margin and --confidence are between 0 and 1")
    try:
        pairs = compare.compare(
            _tables(options), options.a, options.b, margin=options.margin, confidence=options.confidence
        )
    except compare.Nothing as error:
        print(error, file=sys.stderr)
        return 1
    print(compare.render(pairs, options.a, options.b))
    return 0


def _push(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from analysis import push

    try:
        return push.push(_tables(options), options.filters, options.project, options.mode, options.report, options.dir)
    except push.NotPushed as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(run_program(main))
