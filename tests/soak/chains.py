"""One chain: a random training that is disturbed again and again, held to one that nothing disturbs.

The training goes the whole way that a user's does: :func:`launchers.local.train` in a process of its own, with its
guard and its ranks. What is random comes from the seed alone, except the moment at which a fault meets the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launchers.processes.preloaded import LENT, Parents
from optimus_cc import checkpoints
from optimus_cc.config import RunConfig, load
from optimus_cc.runs import RunFailed, RunFolder
from tests.configurations import LAYOUTS, NEED_REPLICAS, PRESETS, tiny
from tests.soak.damage import Damage, random_damage
from tests.soak.kills import Kill, processes_of, random_kill

PATIENCE_S = 180.0
"""After which an attempt counts as hanging."""
TRAINED = (
    *("pp2", "pp4", "dp2", "single", "tp2", "tp2_pp2", "pp2_v2_overlap", "pp2_dp2_v2_overlap"),
    *("pp4_dp2", "tp2_pp2_dp2"),
)
TIMINGS = {"step_time_s", "tokens_per_s", "tflop_per_s_per_rank", "wall_s"}


class Broken(AssertionError):
    """Something that must not happen has happened to a chain."""


@dataclass
class Chain:
    """What was done to one training, for the person who reads of a chain that broke."""

    seed: int
    config: RunConfig
    parents: Parents
    log: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        config, training = self.config, self.config.training
        optimizer = "distributed" if config.parallel.distributed_optimizer else "plain"
        return (
            f"{config.technique.name}, {config.parallel.label}, {training.precision}, {optimizer} optimizer, "
            f"{training.steps} steps, a checkpoint every {training.checkpoint.interval_steps}, "
            f"keep_last={training.checkpoint.keep_last}: {'; '.join(self.log) or 'undisturbed'}"
        )


def random_config(chance: random.Random, workplace: Path, layouts: tuple[str, ...] = TRAINED) -> RunConfig:
    """A small training on the corpus in ``workplace``."""
    layout = chance.choice(layouts)
    ranks = LAYOUTS[layout]
    presets = [name for name in PRESETS if "dp2" in layout or name not in NEED_REPLICAS]
    if ranks.get("pipeline_parallel_size", 1) == 1:
        presets = ["naive_dp", "baseline"] if "dp2" in layout else ["baseline"]
    interval = chance.choice([1, 2, 3])
    config = tiny(
        layout,
        PRESETS[chance.choice(presets)],
        steps=interval * chance.randint(2, 4),
        num_microbatches=4 if "dp2" in layout else None,
        model={"dropout": chance.choice([0.0, 0.1])},
        parallel={"distributed_optimizer": chance.random() < 0.3},
        precision=chance.choice(["fp32", "bf16"]),
        seed=chance.randrange(1000),
        log_interval=chance.choice([1, 1, 2]),
        checkpoint={
            "interval_steps": interval,
            "interval_minutes": None,
            "keep_last": chance.choice([1, 2, 3]),
        },
        timeout_s=60.0,
        device="cpu",
    )
    return with_corpus(config, workplace)


def with_corpus(config: RunConfig, workplace: Path) -> RunConfig:
    """``config`` on the small corpus in ``workplace``, which is made if it isn't there."""
    source = workplace / "corpus.jsonl"
    if not source.exists():
        words = random.Random(5)
        lines = [
            json.dumps({"text": " ".join(words.choices(["one", "or", "other", "of", "some", "words"], k=300))})
        ] * 40
        source.write_text("\n".join(lines) + "\n")
    mapping = config.to_mapping()
    mapping["data"] = {
        "name": "jsonl",
        "path": str(source),
        "label": "soak",
        "cache_dir": str(workplace / "cache"),
        "split": [0.8, 0.1, 0.1],
    }
    mapping["tokenizer"] = {"name": "bpe", "vocabulary_size": 300}
    # With one number of threads one parent forks the ranks of all layouts.
    mapping["launcher"] = {**mapping["launcher"], "stop_grace_s": 2.0, "threads_per_rank": 1}
    return load(mapping)


def run_chain(seed: int, parents: Parents, workplace: Path, disk: Path | None = None) -> Chain:
    """Disturb one training, a few times, until it is through.

    Args:
        parents: fork the ranks.
        workplace: holds the corpus, and the folder in which this chain's runs are made and removed.
        disk: a small file system of its own, if there is one: it is filled up as one of the faults.

    Raises:
        Broken: it did not end as the undisturbed one; the message holds what was done.
    """
    chance = random.Random(seed)
    chain = Chain(seed, random_config(chance, workplace), parents)
    with tempfile.TemporaryDirectory(prefix=f"chain_{seed}_", dir=disk or workplace) as place:
        whole = _undisturbed(chain, chain.config, Path(place) / "whole")
        folder = _disturbed(chain, chain.config, Path(place) / "parts", chance, disk)
        hold(chain, whole, folder)
        if chance.random() < 0.25:  # and goes on in another layout
            chain.config = _in_another_layout(chain.config, whole, chance)
            chain.log.append(f"then on in {chain.config.parallel.label}")
            other = _undisturbed(chain, chain.config, Path(place) / "other")
            hold(chain, other, _disturbed(chain, chain.config, Path(place) / "others", chance, disk))
    return chain


def _undisturbed(chain: Chain, config: RunConfig, runs_dir: Path) -> RunFolder:
    attempt = Attempt(dataclasses.replace(config, runs_dir=str(runs_dir)), chain.parents)
    attempt.wait()
    if attempt.code != 0:
        raise Broken(f"{chain}: undisturbed, it ended with {attempt.code}:\n{attempt.output}")
    return attempt.folder


def _in_another_layout(config: RunConfig, whole: RunFolder, chance: random.Random) -> RunConfig:
    """The same training for some steps more, from a checkpoint of ``whole``."""
    mapping = config.to_mapping()
    source = chance.choice(checkpoints.all_in(whole.checkpoints))
    size = mapping["training"]["global_batch_size"] // mapping["training"]["micro_batch_size"]
    fitting = [
        name
        for name in ("single", "pp2", "pp4", "tp2", "tp2_pp2")
        if mapping["model"]["num_layers"] % LAYOUTS[name].get("pipeline_parallel_size", 1) == 0 and size >= 4
    ]
    layout = LAYOUTS[chance.choice(fitting)]
    distributed = mapping["parallel"]["distributed_optimizer"]
    mapping["parallel"] = {**layout, "distributed_optimizer": distributed}
    mapping["technique"] = PRESETS["baseline"]
    mapping["training"]["resume_from"] = str(source.path)
    mapping["training"]["steps"] = source.step + 3 * mapping["training"]["checkpoint"]["interval_steps"]
    return load(mapping)


def _disturbed(chain: Chain, config: RunConfig, runs_dir: Path, chance: random.Random, disk: Path | None) -> RunFolder:
    """Attempts with faults in them and between them, then one without, which must come to the end."""
    config = dataclasses.replace(config, runs_dir=str(runs_dir))
    for _ in range(chance.randint(1, 3)):
        kill = random_kill(chance)
        attempt = Attempt(config, chain.parents)
        chain.log.append(kill.meet(attempt))
        attempt.wait()
        _nothing_left(chain, attempt)
        _ended_for_a_reason(chain, attempt, kill, None)
        if attempt.code == 0:
            break
        damage = random_damage(chance, attempt.folder, disk)
        if damage is None:
            continue
        chain.log.append(str(damage))
        with damage:
            if damage.lasts:
                meanwhile = Attempt(config, chain.parents)
                meanwhile.wait()
                _nothing_left(chain, meanwhile)
                _ended_for_a_reason(chain, meanwhile, None, damage)
    last = Attempt(config, chain.parents)
    last.wait()
    if last.code != 0:
        raise Broken(f"{chain}: the last attempt, undisturbed, ended with {last.code}:\n{last.output}")
    _nothing_left(chain, last)
    return last.folder


def _ended_for_a_reason(chain: Chain, attempt: Attempt, kill: Kill | None, damage: Damage | None) -> None:
    """An attempt that did not come to its end was made to, and says by what."""
    if attempt.code == 0:
        return
    if "Traceback" in attempt.output:
        raise Broken(f"{chain}: a traceback where a sentence was due:\n{attempt.output}")
    if kill is not None and attempt.code is not None and kill.explains(attempt.code, attempt.output):
        return
    if damage is not None and damage.explains(attempt.output):
        return
    raise Broken(f"{chain}: ended with {attempt.code} for no reason that was given:\n{attempt.output}")


def _nothing_left(chain: Chain, attempt: Attempt) -> None:
    """Whatever happened, no process of the run is left after some seconds."""
    deadline = time.monotonic() + 15.0
    while left := processes_of(attempt.folder, attempt.pid):
        if time.monotonic() > deadline:
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            raise Broken(f"{chain}: still there 15 s after the end: {', '.join(map(str, left))}")
        time.sleep(0.02)


def hold(chain: Chain, whole: RunFolder, parts: RunFolder) -> None:
    """The disturbed training is, bit for bit, the undisturbed one.

    Raises:
        Broken: they differ; says where.
    """
    for step, files in _contents(whole).items():
        if step == chain.config.training.steps and (theirs := _contents(parts).get(step)) != files:
            differing = sorted(name for name in files if (theirs or {}).get(name) != files[name])
            raise Broken(f"{chain}: the checkpoints of step {step} differ in {', '.join(differing)}")
    expected, got = list(_records(whole)), list(_records(parts))
    lost = [record for record in expected if record not in got]
    if got != expected and not _only_lost(chain, expected, got):
        raise Broken(f"{chain}: the records differ: {len(lost)} of {len(expected)} are missing; first {lost[:1]}")
    ends = [folder.summary() for folder in (whole, parts)]
    for key in ("steps", "train", "validation", "traffic"):
        mine, other = ({**(end or {})}.get(key) for end in ends)
        if _without_timings(mine) != _without_timings(other):
            raise Broken(f"{chain}: the summaries differ in {key}: {mine}, {other}")


def _only_lost(chain: Chain, expected: list[Any], got: list[Any]) -> bool:
    """Records that a damage has taken can't come back; what is there must be right, and in its order."""
    if not any("metrics.jsonl" in line for line in chain.log):
        return False
    rest = iter(expected)
    return all(record in rest for record in got)


def _contents(folder: RunFolder) -> dict[int, dict[str, Any]]:
    """By step: what a checkpoint's files hold of tensors, as sizes and checksums."""
    return {found.step: dict(_tensors(found)) for found in checkpoints.all_in(folder.checkpoints)}


def _tensors(found: checkpoints.Checkpoint) -> Iterator[tuple[str, Any]]:
    """Without the index, which is not written in one order, and the steps' times, which a rank's file holds last."""
    for path in sorted(found.path.iterdir()):
        if path.suffix == ".distcp":
            yield path.name, checkpoints.file_record(path)
        elif path.suffix == ".pt" and path.name.startswith("rank_"):
            with zipfile.ZipFile(path) as archive:
                stored = [entry for entry in archive.infolist() if "/data/" in entry.filename]
                times = stored.pop()
                assert times.file_size <= 8 * found.step, f"{times} of {path} is not its steps' times"
                yield path.name, [(entry.filename, entry.file_size, entry.CRC) for entry in stored]


def _records(folder: RunFolder) -> Iterator[Any]:
    for kind in ("train", "validation"):
        for record in folder.metrics(kind):
            yield _without_timings(record)


def _without_timings(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_timings(item) for key, item in value.items() if key not in TIMINGS}
    return value


class Attempt:
    """One try at a run, in a process of its own that is the run's supervisor; ended by :meth:`wait`."""

    def __init__(self, config: RunConfig, parents: Parents) -> None:
        self.config = config
        self._parents = parents
        self.folder = RunFolder(Path(config.runs_dir).absolute() / config.run_id)
        self.code: int | None = None
        """Exit code, negative for a signal, once it has ended."""
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with this object
        self._began = time.monotonic()
        sys.stdout.flush()
        with parents.lend() as lent:
            self.pid = os.fork()
            if self.pid == 0:
                os.environ[LENT] = str(lent.detach())
                self._supervise()

    @property
    def output(self) -> str:
        """What a user would have seen."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    def step(self) -> int:
        """The last step of this run that is on the record."""
        with contextlib.suppress(OSError):
            return self.folder.metrics_path.read_bytes().count(b'"kind": "train"')
        return 0

    def running(self) -> bool:
        """Whether it still does; to be asked again and again, because its ranks are forked meanwhile."""
        self._parents.serve()
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is None

    def wait(self) -> None:
        """Until it has ended.

        Raises:
            Broken: it does not.
        """
        while self.running():
            if self.overdue():
                self.end()
                raise Broken(f"{self.folder.run_id} still ran after {PATIENCE_S:.0f} s:\n{self.output}")
            time.sleep(0.005)

    def overdue(self) -> bool:
        return time.monotonic() - self._began > PATIENCE_S

    def end(self) -> None:
        """Kill what there still is of it."""
        for process in processes_of(self.folder, self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        if self.running():
            os.kill(self.pid, signal.SIGKILL)
            _, status = os.waitpid(self.pid, 0)
            self.code = os.waitstatus_to_exitcode(status)

    def _supervise(self) -> None:
        """The child: trains, and never returns."""
        from launchers import local

        code = 1
        try:
            os.setsid()
            for stream in (sys.stdout, sys.stderr):
                os.dup2(self._log.fileno(), stream.fileno())
            signal.signal(signal.SIGINT, signal.default_int_handler)
            local.train(self.config)
            code = 0
        except RunFailed as failure:
            print(failure, file=sys.stderr)
            code = failure.exit_code
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
