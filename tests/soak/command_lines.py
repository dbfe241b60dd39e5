"""Random command lines of ``run.py``, and what becomes of them: one clear error, or runs that are fit to train.

``python -m tests.soak.command_lines FIRST LAST`` goes through the seeds from FIRST on, up to LAST.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shlex
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import run
from launchers import start, sweep
from launchers.plan import plan
from launchers.sweep import Outcome
from optimus_cc import tasks
from optimus_cc.config import RunConfig
from optimus_cc.config.compose import CONF
from optimus_cc.config.mistakes import leaves
from tests.config.command_line import composed_once, one

SCREEN_LINES = 24


class Unclear(AssertionError):
    """A command line that was neither refused in one clear error nor accepted."""


@dataclass(frozen=True)
class Refused:
    message: str


@dataclass(frozen=True)
class Accepted:
    configs: tuple[RunConfig, ...]
    """Of the runs that would have been started; none if Hydra was asked for information."""


def classify(argv: Sequence[str]) -> Refused | Accepted:
    """What ``python run.py ARGV`` comes to, in this process and the current folder, as far as the start of ranks.

    Raises:
        Unclear: it is neither refused clearly nor accepted.
    """
    started: list[RunConfig] = []
    out, err = io.StringIO(), io.StringIO()
    with _no_ranks(started), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            with mock.patch.object(sys, "argv", ["run.py", *argv]):
                code: Any = run.main()
        except SystemExit as end:
            code = end.code
        except BaseException:
            raise Unclear(f"{shlex.join(argv)}\n{traceback.format_exc()}") from None
    said = err.getvalue()
    if "Traceback" in said or len(said.splitlines()) > SCREEN_LINES:
        raise Unclear(f"{shlex.join(argv)}\nmore than an error:\n{said}")
    if code == 0:
        informed = any(flag in argv for flag in ("--cfg", "--info", "--help", "--hydra-help", "--version", "-sc"))
        if said or not (started or informed):
            raise Unclear(f"{shlex.join(argv)}\nno error, and no runs: {said or out.getvalue()}")
        return Accepted(tuple(started))
    wanted = ("ConfigError", "  ", "    allowed: ", "    fix: ")
    missing = [text for text in wanted if not any(line.startswith(text) for line in said.splitlines())]
    if code != 2 or missing or started:
        raise Unclear(f"{shlex.join(argv)}\ncode {code}, {len(started)} started, without {missing}:\n{said}")
    return Refused(said)


@contextlib.contextmanager
def _no_ranks(started: list[RunConfig]) -> Iterator[None]:
    """Nothing is done by tasks, and nothing by the engine once it has checked its runs."""

    def task(config: RunConfig) -> dict[str, Any]:
        started.append(config)
        return {}

    def resolve(name: str) -> Callable[[RunConfig], dict[str, Any]]:
        tasks.check(name)
        return task

    def run_all(configs: Sequence[RunConfig]) -> list[Outcome]:
        sweep.check_together(configs, ("max_parallel", "dry_run"))
        sweep._Machine.of(configs)
        started.extend(configs)
        return [Outcome(planned) for planned in plan(configs)]

    def simulate_all(configs: Sequence[RunConfig]) -> list[Any]:
        started.extend(configs)
        return [mock.Mock(chosen=mock.Mock(step_time_s=1.0)) for _ in configs]

    with (
        mock.patch.object(tasks, "resolve", resolve),
        mock.patch.object(start, "run_all", run_all),
        mock.patch("optimus_cc.simulation.report.simulate_all", simulate_all),
        mock.patch.dict(os.environ),
    ):
        yield


def is_small(config: RunConfig) -> bool:
    """Whether it can be trained for a step here, on a CPU, in seconds."""
    batch = config.training.global_batch_size * config.model.sequence_length
    width = config.model.num_layers * config.model.hidden_size**2
    return (
        config.task.name == "train"
        and config.launcher.name == "local"
        and config.parallel.world_size <= 8
        and batch <= 2**13
        and width <= 2**20
    )


def generate(seed: int) -> list[str]:
    """A command line; the same for the same seed and configuration."""
    random_ = random.Random(seed)
    words = [_word(random_) for _ in range(random_.choice((0, 1, 1, 2, 2, 3, 4)))]
    if random_.random() < 0.15:
        words = ["-m", *words, _sweep(random_)]
    for _ in range(random_.choice((0, 0, 0, 1, 1, 2))):
        words = random_.choice(_MUTATIONS)(random_, words)
    return words


@cache
def _options() -> dict[str, list[str]]:
    groups = sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "codec")
    return {
        group: sorted(str(file.relative_to(CONF / group).with_suffix("")) for file in (CONF / group).rglob("*.yaml"))
        for group in groups
    }


@cache
def _keys() -> dict[str, Any]:
    """Every key of the default configuration, with its value."""
    return {key: value for key, value in leaves(one().to_mapping()) if not key.startswith("benchmark.")}


_SMALL = ("model=gpt_tiny", "model=gpt_mini", "parallel=pp2", "parallel=pp2_v2", "parallel=dp2", "parallel=single")
_CODECS = ("identity", "low_rank", "top_k")


def _word(random_: random.Random) -> str:
    """An override that may well be right."""
    kind = random_.random()
    if kind < 0.2:
        return random_.choice(_SMALL)
    if kind < 0.4:
        group = random_.choice([group for group in _options() if group not in ("ablation", "experiment")])
        return f"{group}={random_.choice(_options()[group])}"
    if kind < 0.5:
        return f"+ablation={random_.choice(_options()['ablation'])}"
    if kind < 0.55:
        return f"codec@technique.{random_.choice(('cb', 'sc'))}.codec={random_.choice(_CODECS)}"
    key = random_.choice(list(_keys()))
    value = _as_it_is(_keys()[key]) if random_.random() < 0.4 else _value(random_, _keys()[key])
    return f"{key}={value}"


def _as_it_is(value: Any) -> str:
    return "null" if value is None else json.dumps(value) if not isinstance(value, str) else value


def _value(random_: random.Random, like: Any) -> str:
    """A value of the type of another one, mostly within reason."""
    if random_.random() < 0.1:
        like = random_.choice((None, True, 1, 0.5, "text", [1]))
    if isinstance(like, bool):
        return random_.choice(("true", "false", "true", "false", "True", "yes", "1"))
    if isinstance(like, int):
        return str(random_.choice((0, 1, 2, 3, 4, 6, 8, 16, 64, -1, 10**9, 10**20, like, 2 * like, "1e3", "007")))
    if isinstance(like, float):
        return random_.choice(("0", "0.0", "0.5", "1", "1e-4", "1e-300", "1e300", "inf", "nan", "-1", str(like), ".1"))
    if isinstance(like, list):
        return random_.choice(("[]", "[1]", "[0.9,0.05,0.05]", "[a,b]", "[[1]]", "null", "x", "[null]"))
    texts = ("", "x", "a b", "null", "1e3", "1:2", "/nowhere", "~/x", "é", "x" * 300, "a%b", "${runs_dir}", "a\tb")
    return random_.choice((*texts, str(like), str(like).replace("_", "")))


def _sweep(random_: random.Random) -> str:
    key = random_.choice(list(_keys()))
    lists = ("{a},{b}", "range(1,3)", "range({a},{b})", "[{a}],[{b}]", "{a},,")
    forms = (*lists, "interval({a},{b})", "choice({a},{b})")
    values = {name: _value(random_, _keys()[key]) for name in "ab"}
    return f"{key}={random_.choice(forms).format(**values)}"


def _in_one(change: Callable[[random.Random, str], str]) -> Callable[[random.Random, list[str]], list[str]]:
    """A mutation of one word of a command line."""

    def mutate(random_: random.Random, words: list[str]) -> list[str]:
        words = words or [_word(random_)]
        at = random_.randrange(len(words))
        return [*words[:at], change(random_, words[at]), *words[at + 1 :]]

    return mutate


def _typo(random_: random.Random, word: str) -> str:
    at = random_.randrange(len(word) + 1)
    added = random_.choice("xé_.,=@ '\"\\[{(:$~-\n")
    return random_.choice((word[:at] + word[at + 1 :], word[:at] + added + word[at:]))


def _prefixed(random_: random.Random, word: str) -> str:
    return random_.choice(("+", "++", "~", "~~", "-", "--", "=", "@", "hydra.")) + word.lstrip("+")


def _around_equals(random_: random.Random, word: str) -> str:
    return word.replace("=", random_.choice((" = ", "= ", " =", "==", ":", "", ",")), 1)


def _other_value(random_: random.Random, word: str) -> str:
    values = ("", "null", "[]", "{}", "[[1]]", "{a:1}", "'3'", '"true"', "a,b", "${nope}", "${hydra:runtime.cwd}/x")
    return f"{word.partition('=')[0]}={random_.choice((*values, '${now:%Y}', '${times:a,b}', '(1,2)', '%', '-', '🙂'))}"


def _split(random_: random.Random, words: list[str]) -> list[str]:
    """Spaces where there should be none."""
    return [part for word in words for part in (word.partition("=") if random_.random() < 0.5 else (word,)) if part]


def _twice(random_: random.Random, words: list[str]) -> list[str]:
    words = words or [_word(random_)]
    return [*words, random_.choice(words), f"+ablation={random_.choice(_options()['ablation'])}"]


def _flagged(random_: random.Random, words: list[str]) -> list[str]:
    flags = ("-m", "--multirun", "-cn nope", "--cfg job", "--nope", "-x", "--resolve", "hydra.mode=x", "--seed 3")
    return [*words, *random_.choice(flags).split()]


def _swept(random_: random.Random, words: list[str]) -> list[str]:
    return [*words, _sweep(random_)]


_MUTATIONS: tuple[Callable[[random.Random, list[str]], list[str]], ...] = (
    _in_one(_typo),
    _in_one(_typo),
    _in_one(_prefixed),
    _in_one(_around_equals),
    _in_one(_other_value),
    _in_one(_other_value),
    _split,
    _twice,
    _flagged,
    _swept,
)


def main(first: int, last: int) -> int:
    """The seeds that fail are named; the exit code is 1 if there are any."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), composed_once():
        for seed in range(first, last + 1):
            try:
                counts[type(classify(generate(seed))).__name__] += 1
            except Unclear as problem:
                counts["Unclear"] += 1
                print(f"seed {seed}: {problem}", flush=True)
    print(f"command lines {first} to {last}: " + ", ".join(f"{count} {name.lower()}" for name, count in counts.items()))
    return int(counts["Unclear"] > 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3])))
