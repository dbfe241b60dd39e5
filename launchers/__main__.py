"""``python -m launchers``: what is done about runs from the outside."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable

from launchers import status
from launchers.status import STATES, NothingFound
from optimus_cc.command import run as run_program
from optimus_cc.command import to_path

FILTER = "part of a run's id, or a pattern with * and ?"


def main(arguments: list[str] | None = None) -> int:
    """Run one command; its module is imported then."""
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except NothingFound as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m launchers", description="Look after runs.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], help: str, about: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=help, description=about)
        one.set_defaults(run=run)
        one.add_argument("--runs-dir", default="runs", type=to_path, metavar="FOLDER", help="default: runs")
        return one

    one = command("status", _status, "how runs stand", "Shows how runs stand, read from their folders.")
    _add_choice(one)
    one.add_argument("--json", action="store_true", help="for programs; null: not known")

    one = command("watch", _watch, "the same, as it changes", "Shows how runs stand until none of them is live.")
    _add_choice(one)

    one = command("logs", _logs, "what a run printed", "Shows the last lines of a run's logs.")
    one.add_argument("name", metavar="RUN", help="any part of an id that one run alone has")
    one.add_argument("--follow", action="store_true", help="go on until the run ends")
    one.add_argument("--rank", type=_whole, metavar="N", help="of this rank only")
    one.add_argument("--lines", type=_whole, default=20, metavar="N", help="of each log (default: %(default)s)")

    one = command(
        "cancel",
        _cancel,
        "end runs",
        "Ends runs at once: those that run on this machine, and those that are queued. Says of others where they run.",
    )
    one.add_argument("filter", type=_filter, metavar="FILTER", help=FILTER)
    one.add_argument("--save", action="store_true", help="save at the next step, and stop then")

    one = command(
        "resubmit",
        _resubmit,
        "start runs again that did not finish",
        "Starts runs again, from the configuration in their folders and from their newest checkpoints.",
    )
    one.add_argument("filter", nargs="?", type=_filter, metavar="FILTER", help=f"{FILTER}; default: all")
    which = one.add_argument_group("which ones, at least one of")
    which.add_argument("--failed", action="store_true", help="those that failed, or whose supervisor is gone")
    which.add_argument("--preempted", action="store_true", help="those that were asked to save and stop")
    which.add_argument("--cancelled", action="store_true", help="those that were cancelled")
    which.add_argument("--all", action="store_true", help="all that is not finished")
    one.set_defaults(parser=one)

    one = command(
        "clean",
        _clean,
        "remove checkpoints of finished runs",
        "Lists the checkpoints of finished runs that would go, and removes them when told to with --yes. "
        "The newest one of each run stays unless --all is given; runs that are not finished are left alone.",
    )
    one.add_argument("filter", nargs="?", type=_filter, metavar="FILTER", help=f"{FILTER}; default: all")
    one.add_argument("--all", action="store_true", help="the newest checkpoint too: it can't be evaluated any more")
    one.add_argument("--yes", action="store_true", help="remove what is listed")
    return parser


def _add_choice(one: argparse.ArgumentParser) -> None:
    one.add_argument("filter", nargs="?", type=_filter, metavar="FILTER", help=f"{FILTER}; default: all")
    one.add_argument("--state", type=_states, default=[], metavar="STATE,...", help=f"one of {', '.join(STATES)}")


def _status(options: argparse.Namespace) -> int:
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return status.status(options.runs_dir, options.filter, options.state, as_json=options.json, width=width)


def _watch(options: argparse.Namespace) -> int:
    from launchers import watch

    return watch.watch(options.runs_dir, options.filter, options.state)


def _logs(options: argparse.Namespace) -> int:
    from launchers import logs

    return logs.logs(options.runs_dir, options.name, rank=options.rank, lines=options.lines, follow=options.follow)


def _cancel(options: argparse.Namespace) -> int:
    from launchers import cancel

    return cancel.cancel(options.runs_dir, options.filter, save=options.save)


def _resubmit(options: argparse.Namespace) -> int:
    from launchers import resubmit

    states = [*(resubmit.FAILED if options.failed else ())]
    states += [state for state in ("preempted", "cancelled") if getattr(options, state)]
    if not states and not options.all:
        options.parser.error("one of --failed, --preempted, --cancelled, --all is needed")
    return resubmit.resubmit(options.runs_dir, options.filter, None if options.all else states)


def _clean(options: argparse.Namespace) -> int:
    from launchers import clean

    return clean.clean(options.runs_dir, options.filter, everything=options.all, remove=options.yes)


def _filter(text: str) -> str:
    """Not an empty one, which every id contains: it comes from a variable that isn't set."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty; '*' matches all")
    return text


def _states(text: str) -> list[str]:
    states = text.split(",")
    if unknown := [state for state in states if state not in STATES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(STATES)}")
    return states


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 0 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(run_program(main))
