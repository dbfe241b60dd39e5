"""``python -m tests.soak``: random trials until the time is over; prints the seed of each that fails.

Two kinds. A *chain* is a random training whose processes are killed, whose files are damaged and whose disk fills up,
held bit for bit to the same training undisturbed. A *line* is a random command line, which is refused in one clear
error or trained for a step.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from launchers.processes.preloaded import Parents
from tests.soak.chains import run_chain
from tests.soak.damage import small_disk
from tests.soak.lines import run_line

DISK_MB = 48


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: 10)")
    parser.add_argument("--seed", type=int, default=1, help="of the first trial; the next ones count on (default: 1)")
    parser.add_argument("--trials", type=int, help="at most so many of each kind")
    parser.add_argument("--only", choices=["chains", "lines"], help="one kind alone")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="optimus_cc_soak_") as place:
        workplace = Path(place)
        with small_disk(DISK_MB, workplace / "disk") as disk, Parents() as parents:
            if disk is None:
                print("no file system can be mounted here: a full disk is not among the faults")
            kinds: dict[str, Callable[[int], str]] = {
                "chains": lambda seed: str(run_chain(seed, parents, workplace, disk)),
                "lines": lambda seed: run_line(seed, parents, workplace),
            }
            chosen = [arguments.only] if arguments.only else list(kinds)
            return _run({name: kinds[name] for name in chosen}, arguments)


def _run(kinds: dict[str, Callable[[int], str]], arguments: argparse.Namespace) -> int:
    deadline = time.monotonic() + 60 * arguments.minutes
    counts = dict.fromkeys(kinds, 0)
    failed: list[str] = []
    seed = arguments.seed
    while time.monotonic() < deadline and (arguments.trials is None or seed - arguments.seed < arguments.trials):
        for name, trial in kinds.items():
            began = time.monotonic()
            counts[name] += 1
            try:
                outcome = trial(seed)
            except Exception as error:
                trouble = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
                failed.append(f"make soak SEED={seed} TRIALS=1 ONLY={name}")
                print(f"FAILED {name} seed {seed}: {trouble}", flush=True)
                continue
            print(f"ok {name} seed {seed}, {time.monotonic() - began:.1f} s: {outcome}", flush=True)
        seed += 1
    print(", ".join(f"{count} {name}" for name, count in counts.items()), f"{len(failed)} failed", sep="; ")
    for line in failed:
        print(f"  {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
