"""Puts runs into SLURM's queue and follows them: what ``launcher=slurm`` does with a sweep, of one run or of many."""

from __future__ import annotations

import hashlib
import os
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launchers import evaluate
from launchers.forecast import dry_run
from launchers.local import relative
from launchers.plan import Planned, count, plan
from launchers.slurm import after, commands, follow, record, view
from launchers.slurm.commands import SlurmError
from launchers.slurm.record import Record
from launchers.slurm.resources import Part, Resources, parts
from launchers.slurm.script import Place, array_script
from launchers.sweep import Outcome, check_together
from optimus_cc import provenance
from optimus_cc.claims import queue, withdraw
from optimus_cc.config import ConfigError, Problem, RunConfig
from optimus_cc.config.launcher import SlurmConfig
from optimus_cc.config.schema import changed
from optimus_cc.records import replace_file
from optimus_cc.runs import RunBusy, RunFailed

_TOGETHER = ("max_parallel", "dry_run", "wait", "after", "copy_code")
"""Keys that are about a whole submission."""
CODE = ("optimus_cc", "launchers", "analysis", "hydra_plugins", "conf", "run.py")


@dataclass(frozen=True)
class Array:
    """An array of jobs that ask for the same."""

    resources: Resources
    part: Part
    planned: tuple[Planned, ...]
    runs: Path
    """The list of its runs; its script is beside it."""
    text: str

    @property
    def script(self) -> Path:
        return self.runs.with_suffix(".sh")

    def __str__(self) -> str:
        throttle = f", {self.part.throttle} at a time" if self.part.throttle else ""
        return f"{self.part.size} job{'s' * (self.part.size != 1)} of {self.resources}{throttle}"


def run_all(configs: Sequence[RunConfig]) -> list[Outcome]:
    """Submit all of ``configs`` but those that are finished or in SLURM's queue already, and follow them to the end.

    Jobs don't need this process: Ctrl-C, or its death, ends no run.

    Returns:
        an outcome for each of ``configs``, in their order.

    Raises:
        ConfigError: SLURM refuses one of the arrays; nothing was submitted.
    """
    launcher = _launcher(configs)
    planned = plan([_with_device(config) for config in configs])
    if launcher.dry_run:
        print(_dry_run(planned, launcher))
        return [Outcome(one) for one in planned]
    if not commands.is_installed():
        fix = "submit from a machine of the cluster, or launcher=local; launcher.dry_run=true works without"
        raise ConfigError(Problem("launcher", "slurm", "SLURM's commands (sbatch) on this machine", fix))
    in_queue = _in_queue(planned)
    view.let_go(one.folder for one in planned)
    todo = [one for one in planned if one.runs and one.folder.path not in in_queue]
    evaluate.check_before_training([one.config for one in todo])
    folder, arrays = _arrays(todo, launcher, commands.max_array_size(), _code_place(planned, launcher))
    print(f"sweep   {len(planned)} run{'s' * (len(planned) != 1)} on SLURM: {count(planned)}")
    for one in planned:
        there = f"  (in SLURM already, as job {in_queue[one.folder.path]})" if one.folder.path in in_queue else ""
        print(f"  {one}{there}")
    waiting = _check_that_slurm_takes(arrays)
    for notice in dict.fromkeys(
        [*(text for one in todo for text in one.config.notices()), *_unused(launcher), *waiting]
    ):
        print(textwrap.fill(f"notice  {notice}", 118, subsequent_indent=" " * 8, break_on_hyphens=False))
    outcomes = _submit(folder, arrays, launcher) if arrays else {}
    for one in planned:
        if one.action == "finished":
            outcomes[one.folder.path] = Outcome(one, skipped=True)
        elif one.action in ("elsewhere", "refused") and one.folder.path not in in_queue:
            outcomes[one.folder.path] = Outcome(one, RunBusy(one.remark))
    rest = [one for one in planned if one.action != "twice" and one.folder.path not in outcomes]
    if launcher.wait:
        outcomes |= follow.follow(rest)
    else:
        outcomes |= {one.folder.path: Outcome(one) for one in rest}
        print(follow.how_to(planned))
    return [outcomes[one.folder.path] for one in planned]


def _launcher(configs: Sequence[RunConfig]) -> SlurmConfig:
    launchers = [config.launcher for config in configs if isinstance(config.launcher, SlurmConfig)]
    check_together(configs, _TOGETHER)
    return launchers[0]


def _with_device(config: RunConfig) -> RunConfig:
    """The machine that submits says nothing about the nodes: they have GPUs unless they are said not to."""
    if config.training.device != "auto":
        return config
    return changed(config, training=changed(config.training, device="cuda"))


def _in_queue(planned: Sequence[Planned]) -> dict[Path, str]:
    """The jobs of those that SLURM has, by folder."""
    ids = {}
    for one in planned:
        found = record.read(one.folder) if one.action != "finished" else None
        if found is not None and found.id is not None:
            ids[one.folder.path] = found.id
    try:
        jobs = commands.jobs(ids.values())
    except SlurmError as error:
        raise ConfigError(_no_answer(error)) from None
    return {path: job for path, job in ids.items() if job in jobs and jobs[job].live}


def _no_answer(error: SlurmError) -> Problem:
    fix = "the same command once scontrol ping says that it is up; SLURM_CONF=FILE chooses another cluster"
    return Problem("launcher", "slurm", f"a controller of SLURM's that answers; it says: {error}", fix)


def _unused(launcher: SlurmConfig) -> Iterator[str]:
    """What this shell says to sbatch, which jobs don't follow: a job asks for what its configuration says."""
    for name, key in commands.unused_defaults().items():
        option = key.removeprefix("launcher.")
        if getattr(launcher, option) is None and not any(one.startswith(f"--{option}=") for one in launcher.sbatch):
            yield f"{name} of this shell is not passed on to sbatch; {key}={os.environ[name]} does what it would"


def _check_that_slurm_takes(arrays: Sequence[Array]) -> list[str]:
    """Why arrays that it takes can't begin now.

    Raises:
        ConfigError: it doesn't take one of them, or doesn't answer.
    """
    notices = []
    for array in arrays:
        try:
            why = commands.test(array.text)
        except SlurmError as error:
            if not commands.is_up():
                raise ConfigError(_no_answer(error)) from None
            fix = "launcher.partition=NAME and the like; sinfo tells what there is"
            if array.resources.gpus:
                fix += "; training.device=cpu for nodes without GPUs"
            raise ConfigError(Problem("launcher", str(array), f"what SLURM accepts; it says: {error}", fix)) from None
        if why is not None:
            notices.append(
                f"{array} can't begin now, while nodes are down, drained or not registered ({why}); SLURM keeps it in "
                "its queue. Its reason is in python -m launchers status"
            )
    return notices


def _arrays(todo: Sequence[Planned], launcher: SlurmConfig, largest: int, place: Place) -> tuple[Path, list[Array]]:
    """The arrays that train ``todo``, and the folder that their files belong into, named after what they are."""
    groups: dict[Resources, list[Planned]] = {}
    for one in todo:
        groups.setdefault(Resources.of(one.config), []).append(one)
    said = repr([(resources, [one.folder.path for one in members]) for resources, members in groups.items()])
    base = todo[0].folder.path.parent if todo else Path()
    folder = base / record.FOLDER / hashlib.sha256(f"{said} {place}".encode()).hexdigest()[:8]
    arrays: list[Array] = []
    cut = parts([len(members) for members in groups.values()], largest, launcher.max_parallel)
    for (resources, members), pieces in zip(groups.items(), cut, strict=True):
        start = 0
        for part in pieces:
            runs = folder / f"array_{len(arrays) + 1}.runs"
            text = array_script(resources, part, runs, place)
            arrays.append(Array(resources, part, tuple(members[start : start + part.size]), runs, text))
            start += part.size
    return folder, arrays


def _code_place(planned: Sequence[Planned], launcher: SlurmConfig) -> Place:
    here = Path(__file__).parents[2]
    if not launcher.copy_code:
        return Place(here, Path.cwd())
    version = provenance.code_version()
    changes = hashlib.sha256(f"{version.diff} {version.untracked}".encode()).hexdigest()[:8]
    target = planned[0].folder.path.parent / record.FOLDER / f"code_{(version.commit or 'unknown')[:10]}_{changes}"
    if not launcher.dry_run and not target.exists():
        half = target.with_name(f"{target.name}.part")
        shutil.rmtree(half, ignore_errors=True)
        for name in CODE:
            if (here / name).is_dir():
                shutil.copytree(here / name, half / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif (here / name).exists():
                shutil.copy2(here / name, half / name)
        provenance.mark_copy(half, version)
        half.rename(target)
    return Place(target, Path.cwd())


def _dry_run(planned: Sequence[Planned], launcher: SlurmConfig) -> str:
    todo = [one for one in planned if one.runs]
    place = _code_place(planned, launcher)
    folder, arrays = _arrays(todo, launcher, commands.max_array_size(), place)
    lines = [dry_run([one.config for one in planned]), ""]
    for index, array in enumerate(arrays):
        waits = "" if array.part.after is None else f", after array {array.part.after + 1}"
        lines += [f"array {index + 1}: {array}{waits}"]
        lines += [f"  {number:>3}  {one.folder.run_id}" for number, one in enumerate(array.planned)]
        lines += ["", f"{relative(array.script)}:", textwrap.indent(array.text, "  ")]
    if launcher.after and arrays:
        script, text = after.script(folder, planned, launcher, arrays[0].resources, place)
        lines += ["then, when all have ended:", f"{relative(script)}:", textwrap.indent(text, "  ")]
    return "\n".join(lines)


def _submit(folder: Path, arrays: Sequence[Array], launcher: SlurmConfig) -> dict[Path, Outcome]:
    """Submit the arrays; outcomes of runs that could not be."""
    folder.mkdir(parents=True, exist_ok=True)
    outcomes: dict[Path, Outcome] = {}
    code = provenance.code_version()
    for array in arrays:
        replace_file(array.script, array.text)
        record.write_runs(array.runs, [one.folder for one in array.planned])
        record.id_path(array.runs).unlink(missing_ok=True)
        for index, one in enumerate(array.planned):
            try:
                claimed = queue(one.config, code, anew=True)
                record.write(one.folder, Record(str(array.runs), index, claimed.status.restarts))
            except RunFailed as failure:
                outcomes[one.folder.path] = Outcome(one, failure)
    ids: list[str] = []
    for number, array in enumerate(arrays):
        options = [] if array.part.after is None else [f"--dependency=afterany:{ids[array.part.after]}"]
        try:
            ids.append(commands.sbatch(array.script, *options))
        except SlurmError as error:
            for late in arrays[number:]:
                for one in late.planned:
                    withdraw(one.folder, "failed", f"SLURM refused it: {error}")
                    record.remove(one.folder)
                    outcomes.setdefault(one.folder.path, Outcome(one, RunFailed(f"SLURM refused it: {error}")))
                for path in (late.script, late.runs):
                    path.unlink(missing_ok=True)
            break
        replace_file(record.id_path(array.runs), ids[-1] + "\n")
        print(f"submitted  job {ids[-1]}: {array}")
    if launcher.after and ids:
        planned = [one for array in arrays for one in array.planned]
        place = Place(Path(__file__).parents[2], Path.cwd())
        script, text = after.script(folder, planned, launcher, arrays[0].resources, place)
        replace_file(script, text)
        done = ", ".join(launcher.after)
        try:
            last = commands.sbatch(script, f"--dependency=afterany:{':'.join(ids)}")
        except SlurmError as error:
            print(f"launcher.after={launcher.after}: SLURM refused that job: {error}")
            return outcomes
        replace_file(record.id_path(script), last + "\n")
        print(f"submitted  job {last}: {done} when all have ended")
    return outcomes
